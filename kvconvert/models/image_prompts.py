"""Prompts with images: their text with placeholders, and the inputs that a model's processor makes of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, ProcessorMixin

from kvconvert.errors import UnsupportedModelError, UsageError
from kvconvert.models.configuration import placeholder_ids

_MARK = "kvconvert-mark"


class ImagePrompts:
    """Renders conversations with images for one model.

    Attributes:
        processor: the model's own.
        visual_ids: ids of placeholder tokens of images and videos.
        image: the placeholder of an image in plain text.
        templated: whether the processor has a chat template.
    """

    def __init__(self, processor: ProcessorMixin, config: PretrainedConfig) -> None:
        self.processor = processor
        try:
            self.visual_ids = placeholder_ids(config, "visual")
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"The config of this {config.model_type} model names no placeholder token of images, so prompts with "
                "images cannot be written for it; use its processor directly."
            ) from error
        self.templated = bool(getattr(processor, "chat_template", None))
        self.image = self._image(config)

    def text(self, messages: Sequence[dict[str, Any]], plain: bool = False, answer: bool = False) -> str:
        """Messages as one text in which each image is a placeholder.

        Args:
            messages: in transformers' form, with parts of type "text" and "image".
            plain: concatenate the contents, without the chat template.
            answer: add the generation prompt, so that the model's answer follows.
        """
        if self.templated and not plain:
            return self._render(messages, answer)
        contents = (
            "".join(self.image if part["type"] == "image" else part.get("text", "") for part in message["content"])
            for message in messages
        )
        return "\n".join(contents)

    def join(self, texts: Iterable[str]) -> str:
        """Texts separated by the end-of-sequence token, with which a rendered conversation may already end."""
        separator = self.processor.tokenizer.eos_token or "\n"
        *before, last = texts
        return "".join(text if text.endswith(separator) else text + separator for text in before) + last

    def encode(self, text: str, images: Sequence[Any]) -> dict[str, Tensor]:
        """Arguments of the model's forward for one text and its images."""
        tokenizer = self.processor.tokenizer
        begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        try:
            inputs = self.processor(
                text=[text],
                images=[list(images)] if images else None,
                return_tensors="pt",
                add_special_tokens=not begun,
            )
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UsageError(f"The model's processor refuses the text with {len(images)} images ({reason}).") from error
        # PaliGemma's processor makes labels for training as well.
        return {name: value for name, value in inputs.items() if isinstance(value, Tensor) and name != "labels"}

    def visual(self, ids: Tensor) -> Tensor:
        """Which of the ids are placeholders of images or videos, bool of the same shape."""
        return torch.isin(ids, torch.tensor(self.visual_ids))

    def _render(self, messages: Sequence[dict[str, Any]], answer: bool) -> str:
        try:
            return self.processor.apply_chat_template(copy.deepcopy(list(messages)), add_generation_prompt=answer)
        except Exception as error:  # templates raise jinja2 errors of their own making
            reason = " ".join(str(error).split()).rstrip(".")
            raise UsageError(f"The model's chat template refuses the conversation ({reason}).") from error

    def _image(self, config: PretrainedConfig) -> str:
        """The chat template's text for an image; without a template, the processor's token and those around it."""
        if self.templated:
            parts = [{"type": "text", "text": _MARK}]
            without = self._render([{"role": "user", "content": parts}], False).partition(_MARK)[0]
            with_image = self._render([{"role": "user", "content": [{"type": "image"}, *parts]}], False)
            written = with_image.partition(_MARK)[0]
            if written.startswith(without) and len(written) > len(without):
                return written[len(without) :]
        token = getattr(self.processor, "image_token", None)
        if token is None:
            token = self.processor.tokenizer.convert_ids_to_tokens(self.visual_ids[0])
        token = getattr(token, "content", token)
        enclosing = [getattr(config, f"vision_{side}_token_id", None) for side in ("start", "end")]
        if None in enclosing:
            return token
        start, end = self.processor.tokenizer.convert_ids_to_tokens(enclosing)
        return f"{start}{token}{end}"
