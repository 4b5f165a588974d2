"""Generation on a console: one prompt or a conversation, with images where the model supports them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from kvconvert.data.images import read_image
from kvconvert.errors import KvconvertError, UsageError
from kvconvert.models.auto_class import supports_images
from kvconvert.models.device import choose_device
from kvconvert.models.image_prompts import ImagePrompts
from kvconvert.models.processors import tokenizer_of
from kvconvert.runtime import load

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_COMMAND = "/image"


class Console:
    """A loaded bundle that streams what it generates to the standard output."""

    def __init__(self, bundle: str | Path, max_new_tokens: int, device: str | None = None) -> None:
        place = choose_device(device)
        self.model: PreTrainedModel
        # On a GPU a model computes in its own dtype, on a CPU in what `load` finds best there.
        self.model, processor = load(bundle, dtype="auto" if place.type == "cuda" else None)
        self.model.to(place)
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_of(processor)
        self.prompts = None if processor is self.tokenizer else ImagePrompts(processor, self.model.config)
        self.max_new_tokens = max_new_tokens
        self.positions: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def complete(self, prompt: str, images: Iterable[Path] = ()) -> None:
        """Stream the continuation of a prompt.

        Without images the prompt is taken as plain text. With images it is a message, after them, in the model's chat
        template; a model without one gets its placeholder for an image before the text.

        Raises:
            UsageError: the prompt is empty or does not fit the model's positions, or the model does not support images.
            DataError: a file that is missing or no image.
        """
        opened = self._open(images)
        if opened:
            message = {"role": "user", "content": [{"type": "image"}] * len(opened) + [_text(prompt)]}
            text = self.prompts.text([message], answer=True)
            self._generate(self.prompts.encode(text, opened), None)
            return
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        if ids.shape[1] == 0:
            raise UsageError("The prompt has no tokens; give some text.")
        self._generate({"input_ids": ids}, None)

    def chat(self, lines: Iterator[str], images: Iterable[Path] = ()) -> None:
        """Answer line after line until the input ends.

        With a chat template each turn renders the whole conversation, otherwise the text simply grows. The cache of
        the previous turn is continued wherever it holds the beginning of the new text; a turn with images is processed
        from the beginning, because in some models the positions after an image depend on all images before it.

        Args:
            lines: the user's turns; for a vision-language model, `/image FILE` gives an image to the next one.
            images: given to the first line.
        """
        interactive = sys.stdin.isatty()
        templated = bool(self.tokenizer.chat_template) if self.prompts is None else self.prompts.templated
        if not templated:
            print("This tokenizer has no chat template: the conversation is plain text.", file=sys.stderr)
        if interactive:
            command = "" if self.prompts is None else f" {IMAGE_COMMAND} FILE gives an image to the next line."
            print(f"End with Ctrl-D.{command}", file=sys.stderr)
        waiting, shown = self._open(images), []
        messages: list[dict[str, Any]] = []
        sequence = torch.empty(1, 0, dtype=torch.long)
        cache: Any = None
        while True:
            if interactive:
                print("> ", end="", file=sys.stderr, flush=True)
            line = next(lines, "")
            if not line:
                return
            line = line.strip()
            if self.prompts is not None and line.split(maxsplit=1)[:1] == [IMAGE_COMMAND]:
                waiting += self._named(line, interactive)
                continue
            if not line:
                continue
            if self.prompts is None:
                messages.append({"role": "user", "content": line})
                inputs = {"input_ids": self._render(messages) if templated else self._append(sequence, line)}
            else:
                messages.append({"role": "user", "content": [{"type": "image"}] * len(waiting) + [_text(line)]})
                shown += waiting
                inputs = self.prompts.encode(self.prompts.text(messages, answer=True), shown)
            ids = inputs["input_ids"]
            if cache is not None and (waiting or not _continues(ids, sequence, cache.get_seq_length())):
                cache = None
            # The images are already in the cache that is continued.
            sequence, cache = self._generate(inputs if cache is None else {"input_ids": ids}, cache)
            waiting = []
            answer = self.tokenizer.decode(sequence[0, ids.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer if self.prompts is None else [_text(answer)]})

    def _open(self, images: Iterable[Path]) -> list[Image]:
        images = list(images)
        if images and self.prompts is None:
            reason = "has no processor" if supports_images(self.model.config) else "does not support images"
            raise UsageError(
                f"This bundle's model {reason}; leave `images` out, or give a bundle whose model supports them."
            )
        return [read_image(path, None, "`images`") for path in images]

    def _named(self, line: str, interactive: bool) -> list[Image]:
        """The image that a line names; on a terminal a mistake costs only a message."""
        try:
            if line == IMAGE_COMMAND:
                raise UsageError(f"{IMAGE_COMMAND} needs the path of an image.")
            return [read_image(line.split(maxsplit=1)[1], None, IMAGE_COMMAND)]
        except KvconvertError as error:
            if not interactive:
                raise
            print(f"Error: {error}", file=sys.stderr)
            return []

    def _render(self, messages: list[dict[str, Any]]) -> Tensor:
        rendered = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return rendered["input_ids"]

    def _append(self, sequence: Tensor, line: str) -> Tensor:
        if sequence.shape[1] == 0:
            return self.tokenizer(line, return_tensors="pt").input_ids
        added = self.tokenizer("\n" + line, return_tensors="pt", add_special_tokens=False).input_ids
        return torch.cat([sequence, added], dim=1)

    def _generate(self, inputs: dict[str, Tensor], cache: Any) -> tuple[Tensor, Any]:
        """Stream a continuation of ids [1, T]; returns the whole sequence and the cache, which lacks its end."""
        count, length = self.max_new_tokens, inputs["input_ids"].shape[1]
        if self.positions is not None:
            if length >= self.positions:
                raise UsageError(
                    f"The text has {length} tokens, but this model has {self.positions} positions; give a shorter one."
                )
            count = min(count, self.positions - length)
        device, dtype = self.model.device, self.model.dtype
        inputs = {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in inputs.items()}
        ids = inputs.pop("input_ids")
        padding = self.model.generation_config.pad_token_id
        result = self.model.generate(
            ids,
            **inputs | {"attention_mask": torch.ones_like(ids)},
            max_new_tokens=count,
            past_key_values=cache,
            pad_token_id=padding if padding is not None else self.tokenizer.eos_token_id,
            return_dict_in_generate=True,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        return result.sequences.cpu(), result.past_key_values


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _continues(ids: Tensor, sequence: Tensor, cached: int) -> bool:
    """Whether the cached beginning of `sequence` is also the beginning of `ids`, with something left to compute."""
    return ids.shape[1] > cached and torch.equal(ids[:, :cached], sequence[:, :cached])
