"""The header of a GGUF file, walked before the package `gguf` reads it: that trusts every count and every length."""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
# Texts, and numbers, of all lists together, each of which costs the reader 20 to 40 microseconds and 700 bytes: the
# largest vocabularies have 262,144 tokens and 514,906 merges, and a kind and a score of each token. Of single values
# and tensors the largest models have some dozens and thousands.
MAX_ENTRIES = 800_000
MAX_FIELDS = 2**12
MAX_TENSORS = 2**14
_MAX_DIMENSIONS = 8
# Numbers that lists have: of each token its kind and its score, and besides the table of a normalizer, 240,000 bytes.
_NUMBERS_OF_TEXT, _NUMBERS_BESIDE = 4, 400_000


def check_header(file: Path) -> None:
    """Refuse a file whose header claims what the file cannot hold.

    Raises:
        OSError: the file cannot be read.
        ValueError: with the reason in a few words.
    """
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Walk(content).check()


class _Walk:
    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at, self._order = content, 4, "<"
        self._numbers = self._texts = 0

    def check(self) -> None:
        if self._number("I") & 0xFFFF == 0:  # the version, in the other order of bytes
            self._order = ">"
        tensors, fields = self._number("Q"), self._number("Q")
        for count, most, what in ((fields, MAX_FIELDS, "fields"), (tensors, MAX_TENSORS, "tensors")):
            if count > most:
                raise ValueError(f"it claims {count} {what}, more than {most}")
        for _ in range(fields):
            self._text()
            self._value(self._number("I"))
        if self._numbers > _NUMBERS_BESIDE + _NUMBERS_OF_TEXT * self._texts:
            raise ValueError(f"its lists have {self._numbers} numbers beside {self._texts} texts")
        for _ in range(tensors):
            self._text()
            dimensions = self._number("I")
            if dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            size = math.prod(self._number("Q") for _ in range(dimensions))
            if size > 8 * len(self._content):  # no type has less than a bit
                raise ValueError(f"a tensor has {size} numbers, more than the file can hold")
            self._skip(4 + 8)

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._text()
        elif kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner not in (_STRING, *_SIZES):
                raise ValueError(f"a list has entries of type {inner}")
            have = self._texts if inner == _STRING else self._numbers
            if count > MAX_ENTRIES - have:
                what = "texts" if inner == _STRING else "numbers"
                raise ValueError(f"its lists have more than {MAX_ENTRIES:,} {what}")
            if inner == _STRING:
                self._texts += count
                for _ in range(count):
                    self._text()
            else:
                self._numbers += count
                self._skip(count * _SIZES[inner])
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"a value is of type {kind}")

    def _text(self) -> None:
        self._skip(self._number("Q"))

    def _number(self, kind: str) -> int:
        start = self._at
        self._skip(struct.calcsize(self._order + kind))
        return int(struct.unpack_from(self._order + kind, self._content, start)[0])

    def _skip(self, count: int) -> None:
        if count > len(self._content) - self._at:
            raise ValueError("it ends within its header")
        self._at += count
