"""Text of a request while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens of the prompt that are decoded along with the first generated ones, so that spaces between words are right.
CONTEXT_TOKENS = 5
INCOMPLETE = "\ufffd"  # what a decoder shows for bytes of a character whose rest has not come yet


class TextStream:
    """Decodes tokens one at a time and ends the text before a stop string.

    Text that may be the beginning of a stop string, and bytes of an incomplete character, are held back until the next
    token decides.

    Args:
        tokenizer: special tokens leave no text.
        prompt: the prompt's token ids.
        stop: strings that end the text; the earliest one found counts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._begin, self._read = 0, len(self._ids)  # decoded again for context, and already shown
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token; the text that is certain now, and whether a stop string was found."""
        self._ids.append(token)
        piece = self._undecoded()
        if piece.endswith(INCOMPLETE) or not piece:
            return "", False
        self._begin, self._read = self._read, len(self._ids)
        return self._certain(piece)

    def finish(self) -> str:
        """What was held back, when no token follows."""
        piece, stopped = self._certain(self._undecoded())
        self._begin = self._read = len(self._ids)
        rest, self._held = self._held, ""
        return piece if stopped else piece + rest

    def _undecoded(self) -> str:
        """Text of the tokens that were not shown yet."""
        shown = self._decode(self._ids[self._begin : self._read])
        return self._decode(self._ids[self._begin :])[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _certain(self, piece: str) -> tuple[str, bool]:
        """Split what is held and `piece` into text to show and text that may still become a stop string."""
        text = self._held + piece
        found = min((place for stop in self._stop if (place := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self._held = ""
            return text[:found], True
        longest = max(map(len, self._stop), default=1) - 1
        hold = next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False
