"""Conversations as a model's chat template writes them, with images where the model supports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from kvconvert.errors import UsageError
from kvconvert.models.processors import ImagePrompts, tokenizer_of

if TYPE_CHECKING:
    from PIL.Image import Image


class ChatPrompts:
    """Renders conversations for one model.

    Attributes:
        images: prompts with images, or None where the model has a tokenizer and no processor.
    """

    def __init__(self, processor: ProcessorMixin | PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
        self._tokenizer = tokenizer_of(processor)
        self.images = None if processor is self._tokenizer else ImagePrompts(processor, config)

    @property
    def templated(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template) if self.images is None else self.images.templated

    def message(self, role: str, text: str, images: int = 0) -> dict[str, Any]:
        """A message in the form of this model's template, with so many images before its text."""
        if self.images is None:
            return {"role": role, "content": text}
        return {"role": role, "content": [{"type": "image"}] * images + [{"type": "text", "text": text}]}

    def encode(self, messages: Sequence[dict[str, Any]], images: Sequence[Image] = ()) -> dict[str, Tensor]:
        """The model's inputs of a conversation in which the model speaks next; `input_ids` is int64 [1, n].

        Raises:
            UsageError: the template refuses the conversation.
        """
        if self.images is not None:
            return self.images.encode(self.images.text(messages, answer=True), images)
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # templates raise jinja2 errors of their own making
            reason = " ".join(str(error).split()).rstrip(".")
            raise UsageError(f"The model's chat template refuses the conversation ({reason}).") from error
        return {"input_ids": rendered["input_ids"]}
