"""The one family of exceptions that kvconvert raises on purpose.

Each message is one sentence for a person: what is wrong, where, and what to do. Where it names an argument of the
public functions, it does so in backquotes (`seq_len`, `restart=True`). The command line prints it with its own options
in their place and exits with `exit_code`; every other exception is a defect and keeps its traceback. This module
imports nothing of kvconvert's, so every room may import it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

_MAX_LINE = 500  # characters of another library's message
_LONG_WORD = re.compile(r"(\S{100})\S{100,}(\S{100})")  # most are paths


def printable(text: str) -> str:
    """A bundle's text for a terminal: line breaks, control characters and the like as Python's escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def did_you_mean(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """Advice for a name that does not exist: the one it resembles, also `elsewhere`, or all that are known."""
    known = list(known)
    spelled = {each.lower(): each for each in [*elsewhere, *known]}
    close = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f"did you mean {spelled[close[0]]}?" if close else f"choose one of {', '.join(known)}."


def first_line(error: BaseException | str) -> str:
    """The message of another library's error, to stand within a sentence; such errors quote what files hold."""
    text = str(error)
    if callable(found := getattr(error, "errors", None)):  # pydantic's, whose first line names no field
        first = found()[0]
        text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    line = (text.strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if isinstance(error, OSError):  # its number says nothing to a reader
        line = line.removeprefix(f"[Errno {error.errno}] ")
    return printable(line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}...")


NOTHING_DRAWN = "Nothing is drawn here, so `seed` changes nothing; give a `temperature` above 0 as well."
NO_SYSTEM = (
    "This model has no chat template, so it knows no system message; leave `system` out, and say it in the prompt."
)
NO_IMAGES = (
    "This bundle takes text alone, for it holds no processor of images; leave `images` out, or give a bundle whose "
    "model supports them."
)
NO_GPU = "There is no GPU here to compile kernels for; run this where the bundle will be served."
FROM_THE_LAST_LAYER = "from the last finished layer, if there is one"  # where the same command goes on


def counted(number: int, noun: str) -> str:
    """A number with its noun in the plural, but for one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[str], word: str = "and") -> str:
    """Names in a sentence, `word` before the last."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def unreadable(file: Path, error: Exception, otherwise: str = "correct it, or fetch it again") -> str:
    """The message for a file that the system does not let read, or, with the advice `otherwise`, of wrong content."""
    if isinstance(error, OSError):
        return f"{file} cannot be read ({error.strerror or first_line(error)}); check the file and its permissions."
    return f"{file} cannot be read ({first_line(error)}); {otherwise}."


class KvconvertError(Exception):
    """Something the user can understand and act on; also an ordinary failure of a command (exit code 1).

    Args:
        message: one sentence; control characters in what it quotes become Python's escapes, and of words of 300
            characters or more, such as long paths, the middle is left out.
    """

    exit_code = 1

    def __init__(self, message: object) -> None:
        super().__init__(_LONG_WORD.sub(r"\1...\2", printable(str(message))))


class UsageError(KvconvertError):
    """A command, an option, a recipe or an argument that cannot mean anything here (exit code 2)."""

    exit_code = 2


class MissingError(UsageError):
    """Something that is named, or needed, and is not there or cannot be read or written (exit code 1)."""

    exit_code = 1


class RecipeError(UsageError):
    """A recipe, scheme or combination of methods that is refused, with the reason."""


class FidelityError(KvconvertError):
    """A bundle that misses the limits its own recipe sets (exit code 3)."""

    exit_code = 3


class CheckpointError(KvconvertError):
    """A source model whose files are missing, damaged, or of a kind that is refused."""


class UnsupportedModelError(KvconvertError):
    """An architecture, or a part of one, that kvconvert does not support; the message lists what is missing."""


class DataError(KvconvertError):
    """Calibration or evaluation data that cannot be read or does not suffice."""


class NumericError(KvconvertError):
    """NaN, infinity or a value beyond a format's range, met in weights or activations."""


class BundleError(KvconvertError):
    """A bundle that is damaged, unsafe, of an unknown version, or does not match its manifest."""


class CacheError(KvconvertError):
    """A key-value cache used in a way that would give wrong tokens, or out of the memory it was given."""


class QueueFullError(KvconvertError):
    """A request that an Engine refuses for now because too many are waiting; the same request may succeed later."""


class HubError(BundleError):
    """A repository on the Hub that cannot be found, reached, read or written."""
