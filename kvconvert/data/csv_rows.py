"""Rows of .csv files, read one at a time.

`datasets` reads CSV through pandas: 20,000 columns of 200 KB take minutes, and a cell's type, and so its text, depends
on all others of its column. Here a cell is its text.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kvconvert.errors import DataError, first_line

MOST_AT_ONCE = (
    2**29
)  # bytes of a text, a line, a cell, or a JSON document: a sparse file without any may have terabytes


@dataclass(frozen=True)
class CsvRows:
    """Rows of files whose first line names the columns; a cell without text has no value.

    Iterating raises DataError, naming the file and the line.

    Attributes:
        files: paths.
    """

    files: Sequence[Path]

    def __iter__(self) -> Iterator[dict[str, str | None]]:
        for file in self.files:
            try:
                with file.open(encoding="utf-8-sig", newline="") as stream:
                    yield from _rows(file, csv.reader(_lines(stream), strict=True))
            except OSError as error:
                raise DataError(f"Data file {file} cannot be read ({error.strerror}); check the file.") from error


def _lines(stream: TextIO) -> Iterator[str]:
    while line := stream.readline(MOST_AT_ONCE + 1):
        if len(line) > MOST_AT_ONCE:
            raise csv.Error(f"a line has more than {MOST_AT_ONCE} characters")
        yield line


def _rows(file: Path, lines: Iterator[list[str]]) -> Iterator[dict[str, str | None]]:
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
