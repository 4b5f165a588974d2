"""Conversations as a model's chat template writes them, with images where the model supports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from kvconvert.models.processors import ImagePrompts, tokenizer_of
from kvconvert.models.prompts import Conversations
from kvconvert.models.templates import TemplateRenderer, bounded

if TYPE_CHECKING:
    from PIL.Image import Image


class ChatPrompts:
    """Renders conversations for one model.

    Args:
        processor: the model's tokenizer or processor.
        config: the model's.
        renderer: applies the template.
        parse_special: take special tokens that are spelled in messages for the tokens themselves, not for text.

    Attributes:
        images: prompts with images, or None where the model has a tokenizer and no processor.
    """

    def __init__(
        self,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        config: PretrainedConfig,
        renderer: TemplateRenderer | None = None,
        *,
        parse_special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer = tokenizer_of(processor)
        whole = None if processor is tokenizer else processor
        if renderer is not None:
            tokenizer = bounded(tokenizer, renderer)
        self._conversations = Conversations(tokenizer, whole, parse_special, renderer)
        self.images = None if whole is None else ImagePrompts(whole, config, parse_special)

    @property
    def templated(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template) if self.images is None else self.images.templated

    def message(self, role: str, text: str, images: int = 0) -> dict[str, Any]:
        """A message with this number of images before its text."""
        if not images:
            return {"role": role, "content": text}
        return {"role": role, "content": [{"type": "image"}] * images + [{"type": "text", "text": text}]}

    @property
    def template(self) -> str:
        """The chat template's source; empty without one."""
        return self._conversations.template

    def text(
        self, messages: Sequence[dict[str, Any]], answer: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """A conversation as text for `encode_text`.

        Args:
            messages: in transformers' form.
            answer: whether the model speaks next.
            variables: further ones of the template, such as `tools`.

        Raises:
            UsageError: the template refuses the conversation.
        """
        if self.images is not None and not self.templated:
            return self.images.text(messages)
        return self._conversations.text(messages, answer, variables)

    def encode_text(self, text: str, images: Sequence[Image] = ()) -> dict[str, Tensor]:
        """The model's inputs of what `text` gave."""
        if self.images is not None:
            return self.images.encode(text, images)
        return {"input_ids": torch.tensor([self._conversations.ids(text)])}

    def encode(self, messages: Sequence[dict[str, Any]], images: Sequence[Image] = ()) -> dict[str, Tensor]:
        """The model's inputs of a conversation in which the model speaks next; `input_ids` is int64 [1, n].

        Raises:
            UsageError: the template refuses the conversation.
        """
        return self.encode_text(self.text(messages), images)
