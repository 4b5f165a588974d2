"""safetensors files: a writer that streams one tensor at a time, and tensors in files without names.

`Mapped` keeps tensors in files without names: memory that the system can write to the disk and take back when it is
short of it. A file is there only for as long as its tensor; a process that is killed leaves none. Its size is reserved
before anything is written, so that a full disk is an error and not a signal.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvconvert.errors import BundleError, KvconvertError
from kvconvert.io import disk
from kvconvert.io.disk import OutputFile, new_file, replacement
from kvconvert.io.records import FileInfo, TensorInfo
from kvconvert.io.tensorheader import nbytes

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_info(tensor: Tensor) -> TensorInfo:
    """Type and shape of `tensor` in safetensors' words."""
    if tensor.dtype not in DTYPE_NAMES:
        raise BundleError(f"A tensor of type {tensor.dtype} cannot be stored in a bundle.")
    return TensorInfo(dtype=DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape))


def write_tensors(path: Path, infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> FileInfo:
    """Write a safetensors file, holding one tensor in memory at a time; gives its size and hash.

    Tensors are laid out by item size, then in the order of `infos`, so that each starts at a multiple of its item size.

    Args:
        path: file to write.
        infos: type and shape of each tensor by name.
        read: gives a tensor by name; its type and shape have to be those of `infos`.
    """
    header, order = _header(infos)
    with new_file(path, len(header) + sum(map(nbytes, infos.values()))) as file:
        _stream(file, header, order, infos, read)
    return FileInfo(size=file.size, sha256=file.sha256())


def replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write or replace a file of tensors in a single step, see `disk.replacement`; gives its SHA-256.

    The layout does not depend on the order of `tensors`.
    """
    rank = {name: place for place, name in enumerate(DTYPES)}
    infos = {name: tensor_info(tensor) for name, tensor in tensors.items()}
    infos = {name: infos[name] for name in sorted(infos, key=lambda name: (-rank[infos[name].dtype], name))}
    header, order = _header(infos)
    with replacement(path, len(header) + sum(map(nbytes, infos.values()))) as file:
        _stream(file, header, order, infos, tensors.__getitem__)
    return file.sha256()


def _header(infos: Mapping[str, TensorInfo]) -> tuple[bytes, list[str]]:
    """The file's bytes before the tensors, and the order of these."""
    order = sorted(infos, key=lambda name: -DTYPES[infos[name].dtype].itemsize)  # the sort is stable
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without this mark
    position = 0
    for name in order:
        end = position + nbytes(infos[name])
        header[name] = {**infos[name].model_dump(), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def _stream(
    file: OutputFile, header: bytes, order: list[str], infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor]
) -> None:
    file.write(header)
    for name in order:
        tensor = read(name)
        if tensor_info(tensor) != infos[name]:
            raise BundleError(
                f"Tensor {name} changed while it was being exported: expected {infos[name]}, found "
                f"{tensor_info(tensor)}."
            )
        if tensor.numel():
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


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
