"""Tables as plain text and as Markdown."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

LEAST = 16  # characters of a column that are worth continuing below it


def beside(left: str, text: str) -> str:
    """A text to the right of another; where a terminal is too narrow for it, it goes on below itself."""
    room = shutil.get_terminal_size().columns - len(left) if sys.stdout.isatty() else 0
    parts = textwrap.wrap(text, room, break_on_hyphens=False) if LEAST <= room < len(text) else [text]
    return ("\n" + " " * len(left)).join([left + parts[0], *parts[1:]]).rstrip()


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for *cells, last in (header, *rows):
        begun = "".join(f"{cell.ljust(width)}  " for cell, width in zip(cells, widths, strict=False))
        lines.append(beside(begun, last))
    return "\n".join(lines)


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; cells are written as they are."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (header, *rows)]
    lines.insert(1, f"{'|---' * len(header)}|")
    return "\n".join(lines)
