"""Inputs of decoder layers on the disk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvconvert.bundle import disk
from kvconvert.convert.disk_errors import disk_errors


class HiddenStates:
    """One layer's input on disk: float32 [samples, length, hidden], read and written a few sequences at a time.

    Of the samples from `first` on, where several processes share them; `read` counts from there.

    Plain reads rather than a mapping of the file: the process's memory stays bounded by what it holds at the moment.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int], first: int = 0) -> None:
        self.path, self.shape, self.first = path, shape, first

    def exists(self) -> bool:
        """Whether the file is there and complete."""
        samples, length, width = self.shape
        return self.path.exists() and self.path.stat().st_size == samples * length * width * 4

    def read(self, start: int, stop: int) -> Tensor:
        """Sequences start to stop, float32 [stop - start, length, hidden]."""
        _, length, width = self.shape
        count = (stop - start) * length * width
        values = np.fromfile(self.path, dtype="<f4", count=count, offset=start * length * width * 4)
        return torch.from_numpy(values).view(stop - start, length, width)

    @contextmanager
    def writing(self) -> Iterator[HiddenWriter]:
        """Append sequences in order; the file appears only when `HiddenWriter.commit` is called."""
        writer = HiddenWriter(self.path, 4 * math.prod(self.shape))
        try:
            yield writer
        finally:
            writer.close()

    def remove(self) -> None:
        """Delete the file, if it is there."""
        with disk_errors(self.path):
            disk.remove(self.path)


class HiddenWriter:
    """See `HiddenStates.writing`."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        with disk_errors(path):
            self._file = disk.Replacement(path, size, hashed=False)

    def append(self, sequences: Tensor) -> None:
        """Write float32 [n, length, hidden]."""
        with disk_errors(self._path):
            self._file.write(sequences.detach().cpu().contiguous().numpy().astype("<f4", copy=False).data)

    def commit(self) -> None:
        """Let the file appear, complete."""
        with disk_errors(self._path):
            self._file.commit()

    def close(self) -> None:
        """Discard what was not committed."""
        self._file.discard()
