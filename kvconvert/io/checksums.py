"""Whether files are what they were: their SHA-256, and, sooner told, size and time of the last change.

Checksums of large files are computed in threads beside other work: a model is hashed about as fast as it is read. One
that was begun early counts only if the file has the same size and time of change when it is asked for.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from kvconvert.errors import CheckpointError, unreadable
from kvconvert.io.regular import open_regular

_THREADS = 4  # at most: files that are read at once
_BLOCK = 2**22
_ASK_S = 0.1


class _Checksum(Future[str]):
    """Of one file: the result, and how many bytes of it have been read so far."""

    read = 0


_begun: dict[tuple[Path, int, int], _Checksum] = {}
_found: dict[tuple[Path, int, int], str] = {}


def begin(files: Iterable[Path]) -> None:
    """Compute the checksums of files from now on; one that cannot be read says so when it is asked for.

    The threads end with the process, at whatever point they are.
    """
    waiting: SimpleQueue[tuple[Path, _Checksum]] = SimpleQueue()
    for file in files:
        with suppress(OSError):
            key = _key(file)
            if key not in _begun:
                _begun[key] = _Checksum()
                waiting.put((file, _begun[key]))
    for _ in range(min(_THREADS, max(1, (os.cpu_count() or 1) // 2), waiting.qsize())):
        threading.Thread(target=_work, args=(waiting,), daemon=True).start()


def sha256(file: Path, read: Callable[[int], Any] = lambda count: None) -> str:
    """The checksum of a file, hexadecimal; waits for it.

    Args:
        file: by the path by which it was begun, if it was.
        read: called now and then with the number of bytes that were hashed since the last call.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        key = _key(file)
        begin([file])
        checksum, told = _begun.pop(key), 0
        while not checksum.done():
            with suppress(TimeoutError):
                checksum.exception(_ASK_S)
            count = checksum.read
            read(count - told)
            told = count
        read(checksum.read - told)
        _found[key] = checksum.result()
        return _found[key]
    except (OSError, KeyError) as error:  # KeyError: it changed between two looks at it
        raise CheckpointError(unreadable(file, error)) from error


def known_sha256(files: Iterable[Path]) -> dict[Path, str]:
    """`sha256` of several files; those that it gave in this process, and that seem unchanged, are not read again."""
    found: dict[Path, str | None] = dict.fromkeys(files)
    for file in found:
        with suppress(OSError):
            found[file] = _found.get(_key(file))
    begin(file for file, checksum in found.items() if checksum is None)
    return {file: checksum or sha256(file) for file, checksum in found.items()}


def remember(file: Path, checksum: str) -> None:
    """Take this as the checksum of a file that was just written, for as long as it seems unchanged."""
    with suppress(OSError):
        _found[_key(file)] = checksum


def _key(file: Path) -> tuple[Path, int, int]:
    status = file.stat()
    return file, status.st_size, status.st_mtime_ns


def _work(waiting: SimpleQueue[tuple[Path, _Checksum]]) -> None:
    with suppress(Empty):
        while True:
            file, checksum = waiting.get_nowait()
            try:
                digest = hashlib.sha256()
                with open_regular(file) as stream:
                    while block := stream.read(_BLOCK):
                        digest.update(block)
                        checksum.read += len(block)
                checksum.set_result(digest.hexdigest())
            except OSError as error:
                checksum.set_exception(error)


class FileStamps:
    """Sizes and modification times of files, taken when this is made.

    Args:
        directory: that holds them; links are followed.
        files: their names.
    """

    def __init__(self, directory: Path, files: Iterable[str]) -> None:
        self._directory = directory
        self._stamps = {file: self._stamp(file) for file in files}

    def check(self, files: Iterable[str] | None = None) -> None:
        """Refuse (CheckpointError) files that changed, disappeared or were replaced; all of them by default."""
        for file in self._stamps if files is None else files:
            try:
                same = self._stamp(file) == self._stamps[file]
            except OSError:
                same = False
            if not same:
                raise CheckpointError(
                    f"{self._directory / file} changed while it was being converted; put the original back, or "
                    "calibrate the new one with `restart=True`."
                )

    def _stamp(self, file: str) -> tuple[int, int]:
        status = (self._directory / file).stat()
        return status.st_size, status.st_mtime_ns
