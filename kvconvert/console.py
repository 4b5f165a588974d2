"""Text generation on a console: one prompt, or a conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from kvconvert.errors import UsageError
from kvconvert.runtime import load


class Console:
    """A loaded bundle that streams what it generates to the standard output."""

    def __init__(self, bundle: Path, max_new_tokens: int) -> None:
        self.model: PreTrainedModel
        self.tokenizer: PreTrainedTokenizerBase
        self.model, self.tokenizer = load(bundle)
        self.max_new_tokens = max_new_tokens
        self.positions: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def complete(self, prompt: str) -> None:
        """Stream the continuation of a prompt, which is taken as plain text.

        Raises:
            UsageError: the prompt is empty or does not fit the model's positions.
        """
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        if ids.shape[1] == 0:
            raise UsageError("The prompt has no tokens; give some text.")
        self._generate(ids, None)

    def chat(self, lines: Iterator[str]) -> None:
        """Answer line after line until the input ends.

        With a chat template each turn renders the whole conversation, otherwise the text simply grows. The cache of the
        turn before is continued wherever it holds the beginning of the new text.
        """
        interactive = sys.stdin.isatty()
        templated = bool(self.tokenizer.chat_template)
        if not templated:
            print("This tokenizer has no chat template: the conversation is plain text.", file=sys.stderr)
        if interactive:
            print("End with Ctrl-D.", file=sys.stderr)
        messages: list[dict[str, str]] = []
        sequence = torch.empty(1, 0, dtype=torch.long)
        cache: Any = None
        while True:
            if interactive:
                print("> ", end="", file=sys.stderr, flush=True)
            line = next(lines, "")
            if not line:
                return
            line = line.strip()
            if not line:
                continue
            messages.append({"role": "user", "content": line})
            ids = self._render(messages) if templated else self._append(sequence, line)
            if cache is not None and not _continues(ids, sequence, cache.get_seq_length()):
                cache = None
            sequence, cache = self._generate(ids, cache)
            answer = self.tokenizer.decode(sequence[0, ids.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})

    def _render(self, messages: list[dict[str, str]]) -> Tensor:
        rendered = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return rendered["input_ids"]

    def _append(self, sequence: Tensor, line: str) -> Tensor:
        if sequence.shape[1] == 0:
            return self.tokenizer(line, return_tensors="pt").input_ids
        added = self.tokenizer("\n" + line, return_tensors="pt", add_special_tokens=False).input_ids
        return torch.cat([sequence, added], dim=1)

    def _generate(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Stream a continuation of ids [1, T]; returns the whole sequence and the cache, which lacks its end."""
        count = self.max_new_tokens
        if self.positions is not None:
            if ids.shape[1] >= self.positions:
                raise UsageError(
                    f"The text has {ids.shape[1]} tokens, but this model has {self.positions} positions; "
                    "give a shorter one."
                )
            count = min(count, self.positions - ids.shape[1])
        ids = ids.to(self.model.device)
        padding = self.model.generation_config.pad_token_id
        result = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            past_key_values=cache,
            pad_token_id=padding if padding is not None else self.tokenizer.eos_token_id,
            return_dict_in_generate=True,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        return result.sequences.cpu(), result.past_key_values


def _continues(ids: Tensor, sequence: Tensor, cached: int) -> bool:
    """Whether the cached beginning of `sequence` is also the beginning of `ids`, with something left to compute."""
    return ids.shape[1] > cached and torch.equal(ids[:, :cached], sequence[:, :cached])
