"""Rows of .csv and .parquet files.

Rows of .csv files are read one at a time: `datasets` reads CSV through pandas, 20,000 columns of 200 KB take minutes,
and a cell's type, and so its text, depends on all others of its column. Here a cell is its text.

Rows of .parquet files are decoded in a process that has limits of time and memory. Nothing that such a file says of
itself bounds what it unpacks into: in 1 KB, one row may hold millions of messages, or every row a text of 50 MB.
Looking at the file first does not help, because its counts of rows, values, and bytes are its own word, and decoding a
single row may already take all memory.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from kvconvert.errors import DataError, first_line
from kvconvert.models import template_process

MOST_AT_ONCE = (
    2**29
)  # bytes of a text, a line, a cell, or a JSON document: a sparse file without any may have terabytes


@dataclass(frozen=True)
class CsvRows:
    """Rows of files whose first line names the columns; a cell without text has no value.

    Iterating raises DataError, naming the file and the line.

    Attributes:
        files: paths or addresses.
        open: opens one of them.
        delimiter: between cells.
    """

    files: Sequence[Path | str]
    open: Callable[[Any, str], Any] = open
    delimiter: str = ","

    def __iter__(self) -> Iterator[dict[str, str | None]]:
        for file in self.files:
            try:
                with self.open(file, "rb") as stream, io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
                    yield from _rows(file, csv.reader(_lines(text), strict=True, delimiter=self.delimiter))
            except OSError as error:
                reason = error.strerror or first_line(error)
                raise DataError(f"Data file {file} cannot be read ({reason}); check the file.") from error


def _lines(stream: TextIO) -> Iterator[str]:
    while line := stream.readline(MOST_AT_ONCE + 1):
        if len(line) > MOST_AT_ONCE:
            raise csv.Error(f"a line has more than {MOST_AT_ONCE:,} characters")
        yield line


def _rows(file: Path | str, lines: Iterator[list[str]]) -> Iterator[dict[str, str | None]]:
    csv.field_size_limit(MOST_AT_ONCE)  # of a whole text in a cell
    names: list[str] = []
    number = 1
    try:
        for cells in lines:
            if not names:
                names = cells
            elif len(cells) > len(names):
                raise DataError(f"Data file {file}: row {number} has more cells than the first; check the file.")
            elif cells:
                row: dict[str, str | None] = {}
                for name, cell in zip(names, cells, strict=False):
                    row.setdefault(name, cell or None)
                yield row
            number += 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"Data file {file} cannot be read (row {number}: {first_line(error)}); check the file."
        ) from error


# Bytes that a row may unpack into, and a file besides a thousand times its own size: texts shrink to a fifth, tables
# that repeat a long prompt in each row to a hundredth.
MOST_OF_ROW, MOST, _RATIO = 2**26, 2**26, 1000
# What a file may take besides its own size of memory, and of a processor's time besides what each MiB may.
_MEMORY, _SECONDS, _SECONDS_OF_MIB = 2**30, 20, 5


@dataclass(frozen=True)
class ParquetRows:
    """Rows of files of the same columns.

    Iterating raises DataError, naming the file.

    Attributes:
        files: paths or addresses.
        columns: that are read; None reads all.
        open: opens one of them.
    """

    files: Sequence[Path | str]
    columns: Sequence[str] | None = None
    open: Callable[[Any, str], Any] = open

    def names(self) -> list[str]:
        """All columns of the first file (DataError where it cannot be read)."""
        with self._reading(self.files[0]) as reader:
            return reader.names

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            with self._reading(file) as reader:
                yield from reader.rows()

    @contextmanager
    def _reading(self, file: Path | str) -> Iterator[_Reader]:
        try:
            with self.open(file, "rb") as stream, closing(_Reader(file, stream, self.columns)) as reader:
                yield reader
        except OSError as error:
            raise _unreadable(file, error) from error


class _Reader:
    """A file that a worker decodes, which ends when this is closed; its bytes are read here."""

    def __init__(self, file: Path | str, stream: BinaryIO, columns: Sequence[str] | None) -> None:
        from kvconvert.models.templates import shared_renderer  # which imports transformers

        self._file, self._stream = file, stream
        size = stream.seek(0, os.SEEK_END)
        self._seconds, self._memory = _SECONDS + _SECONDS_OF_MIB * (size >> 20), _MEMORY + size
        self._connection = shared_renderer().connect(template_process.TABLES)
        self._connection.settimeout(4 * self._seconds + 60)  # a worker ends itself
        table = {"size": size, "columns": columns and list(columns), "most_of_row": MOST_OF_ROW}
        try:
            self._ask({"table": table | {"most": MOST + _RATIO * size}, "memory": self._memory})
            self.names: list[str] = self._answer()["names"]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows."""
        import pyarrow

        self._ask({"rows": True})
        while content := self._content():
            self._ask({"rows": True})
            try:
                with pyarrow.ipc.open_stream(content) as stream:
                    parts = [part.to_pylist() for part in stream]
            except (pyarrow.ArrowException, UnicodeDecodeError) as error:
                raise _unreadable(self._file, error) from error
            for part in parts:
                yield from part

    def _content(self) -> bytearray:
        self._answer()
        try:
            return template_process.receive_bytes(self._connection)
        except (OSError, EOFError) as error:
            raise self._ended() from error

    def _ask(self, asked: dict[str, Any]) -> None:
        try:
            template_process.send(self._connection, asked | {"seconds": self._seconds})
        except OSError as error:
            raise self._ended() from error

    def _answer(self) -> dict[str, Any]:
        """The worker's answer, after the parts of the file that it asks for before."""
        while True:
            try:
                answer = template_process.receive(self._connection)
            except (OSError, EOFError) as error:
                raise self._ended() from error
            if "part" not in answer:
                break
            start, size = answer["part"]
            self._stream.seek(start)
            content = self._stream.read(size)
            try:
                template_process.send_bytes(self._connection, content)
            except OSError as error:
                raise self._ended() from error
        if "error" in answer:
            raise _unreadable(self._file, answer["error"])
        return answer

    def _ended(self) -> DataError:
        limits = f"it takes more than {self._seconds} seconds or {self._memory >> 20} MiB of memory"
        return _unreadable(self._file, limits)


def _unreadable(file: Path | str, error: Exception | str) -> DataError:
    advice = "check the file, or write its rows to a .jsonl file"
    return DataError(f"Data file {file} cannot be read ({first_line(error)}); {advice}.")
