"""Rows of .jsonl and .json files, read one at a time.

`datasets` reads JSON through a table with every name that occurs in any row: 0.7 MB with 20,000 names become 3 GB, and
values nested by the thousand end the process. Here a row costs what its own text does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from kvconvert.errors import DataError
from kvconvert.io.json_text import parse_json

_MARK = b"\xef\xbb\xbf"  # with which some programs begin UTF-8


@dataclass(frozen=True)
class JsonRows:
    """Rows of files that hold an object in each line, a list of objects or of texts, or one object of columns.

    Texts become rows with the column `text`. Iterating raises DataError, naming the file, and the line where rows are
    lines.

    Attributes:
        files: paths or addresses.
        open: opens one of them.
    """

    files: Sequence[Path | str]
    open: Callable[[Any, str], Any] = open

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            try:
                with self.open(file, "rb") as stream:
                    yield from _rows(file, stream)
            except OSError as error:
                raise DataError(f"Data file {file} cannot be read ({error.strerror}); check the file.") from error


def _rows(file: Path | str, stream: BinaryIO) -> Iterator[dict[str, Any]]:
    lines = enumerate(stream, 1)
    start, first = next(((number, text) for number, line in lines if (text := _text(line))), (0, b""))
    try:
        whole = isinstance(parse_json(first), dict)
    except ValueError:
        whole = False
    if not whole:
        stream.seek(0)
        yield from _document_rows(file, stream.read().removeprefix(_MARK))
        return
    for number, line in chain([(start, first)], lines):
        if text := _text(line):
            try:
                row = parse_json(text)
            except ValueError as error:
                raise _unreadable(file, f"line {number}: {error}") from error
            if not isinstance(row, dict):
                raise _unreadable(file, f"line {number} is no object")
            yield row


def _text(line: bytes) -> bytes:
    return line.removeprefix(_MARK).strip()


def _document_rows(file: Path | str, content: bytes) -> Iterator[dict[str, Any]]:
    try:
        found = parse_json(content)
    except ValueError as error:
        raise _unreadable(file, str(error)) from error
    if isinstance(found, dict):
        columns = {name: column for name, column in found.items() if isinstance(column, list)}
        if columns.keys() != found.keys() or len({len(column) for column in columns.values()}) > 1:
            yield found
            return
        found = [dict(zip(columns, entries, strict=True)) for entries in zip(*columns.values(), strict=True)]
    for index, entry in enumerate(found if isinstance(found, list) else [found]):
        row = {"text": entry} if isinstance(entry, str) else entry
        if not isinstance(row, dict):
            raise _unreadable(file, f"entry {index} is neither an object nor text")
        yield row


def _unreadable(file: Path | str, reason: str) -> DataError:
    return DataError(f"Data file {file} cannot be read ({reason.rstrip('.')}); check the file.")
