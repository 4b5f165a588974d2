"""Tables as plain text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(lines)


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; cells are written as they are."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (header, *rows)]
    lines.insert(1, f"{'|---' * len(header)}|")
    return "\n".join(lines)
