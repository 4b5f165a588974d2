"""What libraries log in processes of kvconvert's own: transformers quotes names and values of files as they are."""

from __future__ import annotations

import logging
import re
import warnings

from kvconvert.errors import printable


class _TextRecord(logging.LogRecord):
    def getMessage(self) -> str:
        """The message in printable lines, without the styles that transformers gives its own words."""
        return _printable_lines(super().getMessage())


def log_as_text() -> None:
    """Have what is logged and warned of in this process, from now on, reach a terminal as text alone."""
    logging.setLogRecordFactory(_TextRecord)
    formatted = warnings.formatwarning
    warnings.formatwarning = lambda *args, **options: _printable_lines(formatted(*args, **options))


def _printable_lines(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).expandtabs()
    return "\n".join(map(printable, plain.split("\n")))
