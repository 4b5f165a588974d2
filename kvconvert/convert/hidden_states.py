"""Inputs of decoder layers: on the disk, or on a GPU that has room for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvconvert.convert.work_files import disk_errors
from kvconvert.io import disk


class HiddenStates:
    """One layer's input: float32 [samples, length, hidden], read and written a few sequences at a time.

    Of the samples from `first` on, where several processes share them; `read` counts from there.

    Plain reads of its file rather than a mapping: the process's memory stays bounded by what it holds at the moment.

    Attributes:
        held: all of it, where it is in memory, too.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int], first: int = 0, held: Tensor | None = None) -> None:
        self.path, self.shape, self.first, self.held = path, shape, first, held

    def exists(self) -> bool:
        """Whether it is in memory, or its file is there and complete."""
        if self.held is not None:
            return True
        return self.path.exists() and self.path.stat().st_size == 4 * math.prod(self.shape)

    def read(self, start: int, stop: int) -> Tensor:
        """Sequences start to stop, float32 [stop - start, length, hidden]."""
        if self.held is not None:
            return self.held[start:stop].clone()
        _, length, width = self.shape
        count = (stop - start) * length * width
        values = np.fromfile(self.path, dtype="<f4", count=count, offset=start * length * width * 4)
        return torch.from_numpy(values).view(stop - start, length, width)

    @contextmanager
    def writing(self, hold: torch.device | None = None, file: bool = True) -> Iterator[HiddenWriter]:
        """Append sequences in order; only `HiddenWriter.commit` lets the file appear.

        Args:
            hold: device on which `HiddenWriter.held` also keeps them; None keeps them in the file alone.
            file: whether to write the file.
        """
        writer = HiddenWriter(self, hold, file)
        try:
            yield writer
        finally:
            writer.close()


@dataclass(frozen=True)
class HiddenPart:
    """Some sequences of hidden states that follow one another: those of one of several models, or a part of them.

    Attributes:
        states: the hidden states of all samples.
        start, stop: the sequences.
        first: sample of the first one.
    """

    states: HiddenStates | HiddenPart
    start: int
    stop: int
    first: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Samples, tokens of a sample, and channels."""
        return self.stop - self.start, *self.states.shape[1:]

    def read(self, start: int, stop: int) -> Tensor:
        """See `HiddenStates.read`."""
        return self.states.read(self.start + start, self.start + stop)


class HiddenWriter:
    """See `HiddenStates.writing`."""

    def __init__(self, states: HiddenStates, hold: torch.device | None, file: bool) -> None:
        self._path, self._file, self._count = states.path, None, 0
        self.held = None if hold is None else torch.empty(states.shape, device=hold)
        if file:
            with disk_errors(self._path):
                self._file = disk.Replacement(self._path, 4 * math.prod(states.shape), hashed=False)

    @property
    def has_file(self) -> bool:
        """Whether a file is written."""
        return self._file is not None

    def append(self, sequences: Tensor) -> None:
        """Write float32 [n, length, hidden]."""
        if self.held is not None:
            self.held[self._count : self._count + len(sequences)] = sequences
            self._count += len(sequences)
        if self._file is not None:
            with disk_errors(self._path):
                self._file.write(sequences.detach().cpu().contiguous().numpy().astype("<f4", copy=False).data)

    def commit(self) -> None:
        """Let the file appear, complete."""
        if self._file is not None:
            with disk_errors(self._path):
                self._file.commit()

    def close(self) -> None:
        """Discard what was not committed."""
        if self._file is not None:
            self._file.discard()
