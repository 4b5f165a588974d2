"""Whether files are still the ones that were opened: size and time of the last change, compared before they count."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvconvert.errors import CheckpointError

Stamp = tuple[int, int]


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

    def _stamp(self, file: str) -> Stamp:
        status = (self._directory / file).stat()
        return status.st_size, status.st_mtime_ns
