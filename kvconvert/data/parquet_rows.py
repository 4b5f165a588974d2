"""Rows of .parquet files, a few decoded at a time.

`datasets` decodes a whole group of rows: a file of 266 bytes that repeats one text takes gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconvert.errors import DataError, first_line

ROWS = 16  # decoded at a time


@dataclass(frozen=True)
class ParquetRows:
    """Rows of files of the same columns.

    Iterating raises DataError, naming the file.

    Attributes:
        files: paths.
        columns: that are read; None reads all.
    """

    files: Sequence[Path]
    columns: Sequence[str] | None = None

    def names(self) -> list[str]:
        """All columns of the first file (DataError where it cannot be read)."""
        import pyarrow.parquet

        try:
            return list(pyarrow.parquet.read_schema(self.files[0]).names)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _unreadable(self.files[0], error) from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import pyarrow.parquet

        for file in self.files:
            try:
                with pyarrow.parquet.ParquetFile(file) as opened:
                    for batch in opened.iter_batches(ROWS, columns=self.columns):
                        yield from batch.to_pylist()
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"Data file {file} cannot be read ({first_line(error)}); check the file.")
