"""Runs that are stopped at one of their changes to files, and what the disk holds after that."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvconvert.io import disk


class Crash(BaseException):
    """The end of a process: nothing catches it, and no cleanup after it can change a file."""


def operations(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> list[tuple[str, Path]]:
    """Every change to files that an undisturbed run makes."""
    seen: list[tuple[str, Path]] = []
    with monkeypatch.context() as patch:
        patch.setattr(disk, "observe", lambda operation, path: seen.append((operation, path)))
        run()
    return seen


def crash(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any], at: int) -> None:
    """Run until just before the operation number `at`; every later one is impossible too, as after a power cut.

    A file that was written but not synced loses its second half.
    """
    count = 0
    unsynced: set[Path] = set()

    def observe(operation: str, path: Path) -> None:
        nonlocal count
        if count >= at:
            raise Crash
        count += 1
        if operation == "write":
            unsynced.add(path)
        elif operation == "sync":
            unsynced.discard(path)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "observe", observe)
        with pytest.raises(Crash):
            run()
    for path in unsynced:
        if path.exists():
            os.truncate(path, path.stat().st_size // 2)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, at: int, error: int) -> Iterator[None]:
    """Only the operation number `at` fails, with the system's error of that number."""
    count = 0

    def observe(operation: str, path: Path) -> None:
        nonlocal count
        count += 1
        if count == at + 1:
            raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "observe", observe)
        yield
