"""Progress on stderr: a bar on a terminal; in a file or pipe a line for each stage, and one now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

# Of what may have been done before: its rate would be that of looking.
WITHOUT_RATE = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}]"


# Seconds between two lines of a stage in a file or pipe.
EVERY = 30


class _Lines(tqdm):
    """A stage in a file or pipe: a line when it begins, and how far it is while it goes on."""

    _said: float | None = None  # when the last line was written

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write a line, unless the last one is new."""
        now = time.perf_counter()
        if self._said is None:
            one = self.unit if self.unit_scale else f" {self.unit}{'' if self.total == 1 else 's'}"
            self._say(f"{self._count(self.total)}{one}")
        elif now - self._said < EVERY or not self.initial < self.n < self.total:
            return False
        else:
            took = self.format_dict["elapsed"]
            left = self.format_interval(took * (self.total - self.n) / (self.n - self.initial))
            self._say(f"{self._count(self.n)} of {self._count(self.total)}, about {left} left")
        self._said = now
        return True

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Write what is being done of the first item, before which no time can be estimated."""
        if not self.disable and self.n == self.initial:
            self._say(s)

    def close(self) -> None:
        """End without a line."""
        self._said, self.leave = float("inf"), False
        super().close()

    def _count(self, number: float) -> str:
        return self.format_sizeof(number) if self.unit_scale else f"{number:,}"

    def _say(self, text: str) -> None:
        print(f"{self.desc.removesuffix(': ')}: {text}", file=sys.stderr, flush=True)

    @staticmethod
    def status_printer(file: Any) -> Any:
        """Nothing else is written."""
        return lambda text: None


def progress_bar(
    items: Sequence[Any] | None = None, *, desc: str, unit: str, shown: bool, total: int | None = None, **options: Any
) -> tqdm:
    """tqdm's bar where stderr is a terminal; elsewhere lines of the stage, its size, and how far it is.

    Args:
        items: to iterate over; or None, where `update` is called `total` times.
        desc: the stage.
        unit: one item, in the singular.
        shown: whether to print anything.
        total: how many items; None takes all of `items`.
        options: tqdm's own.
    """
    total = len(items or ()) if total is None else total
    kind = tqdm if sys.stderr.isatty() else _Lines
    if kind is _Lines:
        options |= {"miniters": 1, "mininterval": EVERY}
    return kind(items, desc=desc, unit=unit, total=total, disable=not shown, **options)


@contextmanager
def loading_bars(shown: bool) -> Iterator[None]:
    """transformers' own bars of loading, off while this lasts unless `shown` and stderr is a terminal."""
    from transformers.utils import logging

    hidden = not (shown and sys.stderr.isatty()) and logging.is_progress_bar_enabled()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()
