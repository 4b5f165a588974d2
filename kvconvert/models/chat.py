"""Conversations as a model's chat template writes them, with images where the model supports them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from kvconvert.errors import UsageError
from kvconvert.models.processors import ImagePrompts, tokenizer_of
from kvconvert.models.templates import TemplateLimitError, TemplateRenderer, refused

if TYPE_CHECKING:
    from PIL.Image import Image


_MARK = "kvconvert-mark"
# A part of a message where a template took a list of parts for text.
_WRITTEN_OUT = re.compile(rf"""['"]text['"]: ?['"]{_MARK}""")


class ChatPrompts:
    """Renders conversations for one model.

    Args:
        processor: the model's tokenizer or processor.
        config: the model's.
        renderer: of templates that are not trusted; without one they are rendered in this process.

    Attributes:
        images: prompts with images, or None where the model has a tokenizer and no processor.
    """

    def __init__(
        self,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        config: PretrainedConfig,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        self._tokenizer, self._renderer = tokenizer_of(processor), renderer
        self.images = None if processor is self._tokenizer else ImagePrompts(processor, config)
        self._forms: dict[str, bool] = {}  # whether a template takes contents as parts

    @property
    def templated(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template) if self.images is None else self.images.templated

    def message(self, role: str, text: str, images: int = 0) -> dict[str, Any]:
        """A message in the form that this model's template asks for, with so many images before its text."""
        if images or (self._takes_parts() if self.templated else self.images is not None):
            return {"role": role, "content": [{"type": "image"}] * images + [{"type": "text", "text": text}]}
        return {"role": role, "content": text}

    def text(self, messages: Sequence[dict[str, Any]]) -> str:
        """A conversation in which the model speaks next, as the template writes it.

        Raises:
            UsageError: the template refuses the conversation.
        """
        if self._renderer is not None:
            return self._renderer.render(self._template(), messages, self._tokenizer.special_tokens_map)
        if self.images is not None:
            return self.images.text(messages, answer=True)
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise jinja2 errors of their own making
            raise refused(" ".join(str(error).split()).rstrip(".")) from error

    def encode(self, messages: Sequence[dict[str, Any]], images: Sequence[Image] = ()) -> dict[str, Tensor]:
        """The model's inputs of a conversation in which the model speaks next; `input_ids` is int64 [1, n].

        Raises:
            UsageError: the template refuses the conversation.
        """
        return self.encode_text(self.text(messages), images)

    def encode_text(self, text: str, images: Sequence[Image] = ()) -> dict[str, Tensor]:
        """The same of what `text` gave."""
        if self.images is not None:
            return self.images.encode(text, images)
        return {"input_ids": self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids}

    def _template(self) -> str:
        """The template of conversations, where a model has several."""
        if self.images is None:
            return self._tokenizer.get_chat_template()
        template = self.images.processor.chat_template
        if isinstance(template, dict) and "default" not in template:
            raise refused("the processor has several, none of which is named default")
        return template["default"] if isinstance(template, dict) else template

    def _takes_parts(self) -> bool:
        """Whether contents are lists of parts for the template, and not text; of what it takes both as, the usual."""
        usual, template = self.images is not None, self._template()
        if template not in self._forms:
            fits = (form for form in (usual, not usual) if self._writes(form))
            self._forms[template] = next(fits, usual)
        return self._forms[template]

    def _writes(self, parts: bool) -> bool:
        """Whether the template writes the text of contents in one of the two forms."""
        content = [{"type": "text", "text": _MARK}] if parts else _MARK
        try:
            written = self.text([{"role": "user", "content": content}])
        except TemplateLimitError:
            raise
        except UsageError:
            return False
        return _MARK in written and not _WRITTEN_OUT.search(written)
