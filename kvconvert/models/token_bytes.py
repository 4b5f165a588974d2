"""How many tokens a text has at least, known from its length before it is tokenized."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

# NFC and NFD leave a third of a text's bytes at least (three Hangul letters become one syllable, U+1FEF a grave
# accent); one more for what Unicode may still add.
NORMAL_FORM_SHRINKS = 4
_BYTES = 256


@dataclass(frozen=True)
class TokenBytes:
    """A bound of the UTF-8 bytes of text that become one token.

    Attributes:
        most: the bound.
        dropped: bytes that do not count, because the tokenizer leaves them out.
    """

    most: int
    dropped: bytes = b""

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least."""
        return -(-len(text.encode().translate(None, self.dropped)) // self.most)


class TokenTexts:
    """The text and the bytes of single tokens, of which a character may have several.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._letters = {letter: byte for byte, letter in enumerate(_byte_letters())}

    def text(self, id: int) -> str:
        """The text of a token alone; U+FFFD stands for bytes that are no character."""
        return self.bytes(id).decode(errors="replace")

    def bytes(self, id: int) -> bytes:
        """The bytes of a token."""
        decoded = self._tokenizer.decode([id], skip_special_tokens=False)
        piece = getattr(self._tokenizer, "convert_ids_to_tokens", lambda _: None)(id)
        if piece is None or decoded == piece:
            return decoded.encode()
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        if "\N{LOWER ONE EIGHTH BLOCK}" in piece:  # a space, which decoding leaves out at the beginning
            return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        if all(letter in self._letters for letter in piece):
            return bytes(self._letters[letter] for letter in piece)
        return decoded.encode()


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes | None:
    """The bound of a tokenizer.

    Returns:
        None where it may drop or shorten text without a limit, such as runs of spaces or characters that it does not
        know, or is not known well enough to say.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    stated = json.loads(backend.to_str())
    model, added = stated["model"], stated["added_tokens"]
    steps = [*_steps(stated["normalizer"], "normalizers"), *_steps(stated["pre_tokenizer"], "pretokenizers")]
    keeps_text = model.get("type") == "BPE" and all(map(_keeps_text, steps))
    if not keeps_text or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    vocabulary, dropped = model["vocab"], b""
    as_letters = any(step["type"] == "ByteLevel" for step in steps)
    if as_letters:
        dropped = bytes(byte for byte, letter in enumerate(_byte_letters()) if letter not in vocabulary)
    elif not model.get("byte_fallback") or any(f"<0x{byte:02X}>" not in vocabulary for byte in range(_BYTES)):
        return None
    lengths = [len(token) if as_letters else len(token.encode()) for token in vocabulary]
    most = max([*lengths, *(len(token["content"].encode()) for token in added)])
    normal = any(step["type"] in ("NFC", "NFD") for step in steps)
    return TokenBytes(most * (NORMAL_FORM_SHRINKS if normal else 1), dropped)


def _steps(step: dict[str, Any] | None, members: str) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer, or those of a sequence."""
    if step is not None and step["type"] == "Sequence":
        for member in step[members]:
            yield from _steps(member, members)
    elif step is not None:
        yield step


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a step before the model leaves as many bytes as come in, or what NFC and NFD leave of them."""
    kind = step["type"]
    if kind == "Replace":
        pattern = step["pattern"].get("String")
        return bool(pattern) and len(step["content"].encode()) >= len(pattern.encode())
    if kind in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return kind in ("ByteLevel", "Digits", "Metaspace", "NFC", "NFD", "Prepend")


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in vocabularies of bytes: itself where it is printable, else from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), _BYTES)}
    others = iter(range(_BYTES, 2 * _BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(_BYTES)]
