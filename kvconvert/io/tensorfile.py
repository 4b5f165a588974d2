"""safetensors files: headers checked byte by byte, and a writer that streams one tensor at a time.

Format: 8 bytes little-endian length of the header, a JSON header of that length (padded with spaces), then the
tensors' bytes without gaps. `{"name": {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}`, offsets
relative to the end of the header.

`Mapped` keeps tensors in files without names: memory that the system can write to the disk and take back when it is
short of it. A file is there only for as long as its tensor; a process that is killed leaves none. Its size is reserved
before anything is written, so that a full disk is an error and not a signal.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvconvert.errors import BundleError, KvconvertError, printable
from kvconvert.io import disk
from kvconvert.io.disk import OutputFile, new_file, replacement
from kvconvert.io.json_text import parse_json
from kvconvert.io.records import FileInfo, TensorInfo

# A header larger than this is refused before it is read: the limit that the format's own reader has.
MAX_HEADER = 100_000_000
MAX_DIMENSIONS = 16
# Characters of a bundle's own text in a message.
MAX_QUOTED = 400

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

# Makes the error for a file that is not what it has to be, from the file's name, the field, what it should be and is.
Refusal = Callable[[str, str, object, object], KvconvertError]


def mismatch(file: str, field: str, expected: object, found: object) -> BundleError:
    """The error for a file that is not what it has to be, in one sentence."""
    file, field, expected, found = (printable(str(part))[:MAX_QUOTED] for part in (file, field, expected, found))
    return BundleError(
        f"{file} does not fit the bundle: {field} should be {expected}, found {found}; the file is damaged or was "
        "changed, so fetch or export the bundle again."
    )


def tensor_info(tensor: Tensor) -> TensorInfo:
    """Type and shape of `tensor` in safetensors' words."""
    if tensor.dtype not in DTYPE_NAMES:
        raise BundleError(f"A tensor of type {tensor.dtype} cannot be stored in a bundle.")
    return TensorInfo(dtype=DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape))


def nbytes(info: TensorInfo) -> int:
    """Bytes that a tensor takes in a file; BundleError for a type that bundles do not hold."""
    if info.dtype not in DTYPES:
        raise BundleError(f"A tensor of type {info.dtype} cannot be stored in a bundle.")
    return math.prod(info.shape) * DTYPES[info.dtype].itemsize


def read_header(path: Path, refuse: Refusal = mismatch, any_dtype: bool = False) -> dict[str, TensorInfo]:
    """Tensors of a safetensors file, after checking every rule of the format; no tensor data is read.

    Args:
        path: of the file.
        refuse: makes the error; the one for a bundle's file by default.
        any_dtype: also accept types that bundles do not hold (`DTYPES`), whose bytes are not compared with their shape.

    Raises:
        BundleError: the file is truncated or longer than its header says, the header is no valid JSON, or an entry has
            an unknown type, an impossible shape, or offsets that overlap, leave a gap or do not match its shape. With
            `refuse`, whatever it makes.
    """
    file = path.name
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise refuse(file, "its length", "at least 8 bytes", f"{size} bytes")
        (length,) = struct.unpack("<Q", start)
        if length > min(MAX_HEADER, size - 8):
            raise refuse(file, "the length of its header", f"at most {min(MAX_HEADER, size - 8)} bytes", length)
        text = stream.read(length)
    header = _parse(file, text, refuse)
    infos: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        infos[name], begin, end = _entry(file, name, entry, refuse, any_dtype)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise refuse(file, f"the offset of tensor {name}", position, begin)
        position = end
    if position != size - 8 - length:
        raise refuse(file, "its length", f"{8 + length + position} bytes", f"{size} bytes")
    return infos


def _parse(file: str, text: bytes, refuse: Refusal) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise refuse(file, "its header", "JSON that starts with {", repr(text[:1]))
    try:
        header = parse_json(text, unique=True)
    except ValueError as error:
        raise refuse(file, "its header", "valid JSON", error) from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse(file, "__metadata__", "text values by name", repr(metadata)[:80])
    return header


def _entry(file: str, name: str, entry: Any, refuse: Refusal, any_dtype: bool) -> tuple[TensorInfo, int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse(file, f"the entry of tensor {name}", "dtype, shape and data_offsets", repr(entry)[:80])
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not (any_dtype or dtype in DTYPES):
        raise refuse(file, f"the dtype of tensor {name}", f"one of {', '.join(DTYPES)}", repr(dtype)[:80])
    if not _is_counts(shape):
        raise refuse(file, f"the shape of tensor {name}", "a list of sizes", repr(shape)[:80])
    if not _is_counts(offsets) or len(offsets) != 2:
        raise refuse(file, f"the data_offsets of tensor {name}", "begin and end", repr(offsets)[:80])
    # A size of 0 hides the others from the comparison with the bytes, and torch takes no more than 63 bits of them.
    if len(shape) > MAX_DIMENSIONS or math.prod(size or 1 for size in shape) >= 2**56:
        raise refuse(file, f"the shape of tensor {name}", "sizes that a tensor can have", repr(shape)[:80])
    info = TensorInfo(dtype=dtype, shape=shape)
    begin, end = offsets
    if end < begin or (dtype in DTYPES and end - begin != nbytes(info)):
        raise refuse(file, f"the bytes of tensor {name}", nbytes(info) if dtype in DTYPES else "0 or more", end - begin)
    return info, begin, end


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


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
