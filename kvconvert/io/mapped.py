"""Tensors in files without names: memory that the system can write to the disk and take back when it is short of it.

A file is there only for as long as its tensor; a process that is killed leaves none. Its size is reserved before
anything is written, so that a full disk is an error and not a signal.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from kvconvert.errors import KvconvertError
from kvconvert.io import disk

_SMALLEST = 2**16  # bytes; smaller tensors are not worth a file


class Mapped:
    """Makes copies of tensors in files of a folder, on the CPU.

    Args:
        folder: that exists, on a disk: a file in memory (tmpfs) frees none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def near(cls, path: Path) -> Mapped:
        """In the innermost folder around a path that exists."""
        return cls(next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir()))

    def copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The same numbers, in another dtype if wished, in the order in memory that `Tensor.to` gives.

        Raises:
            KvconvertError: there is no room for the file.
        """
        like = torch.empty_like(tensor, dtype=dtype, device="meta")
        if like.nbytes < _SMALLEST:
            return tensor.to(like.dtype)
        copy = self._empty(like.nbytes).view(like.dtype).as_strided(like.shape, like.stride())
        return copy.copy_(tensor)

    def _empty(self, size: int) -> Tensor:
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            if error.errno is None:
                raise
            what = "The disk is full" if disk.is_full(error) else "Writing failed"
            raise KvconvertError(
                f"{what}: {size:,} bytes in {self.folder} could not be reserved ({os.strerror(error.errno)}) for what "
                "is too large for memory; make room and run the same command again."
            ) from error
