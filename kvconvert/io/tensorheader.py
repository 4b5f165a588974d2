"""Headers of safetensors files, checked byte by byte; no torch.

Format: 8 bytes little-endian length of the header, a JSON header of that length (padded with spaces), then the
tensors' bytes without gaps. `{"name": {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}`, offsets
relative to the end of the header.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvconvert.errors import BundleError, KvconvertError, printable
from kvconvert.io.json_text import parse_json
from kvconvert.io.records import MAX_DTYPE, TensorInfo
from kvconvert.io.regular import open_regular

# A header larger than this is refused before it is read: the limit that the format's own reader has.
MAX_HEADER = 100_000_000
MAX_DIMENSIONS = 16
# Characters of a bundle's own text in a message.
MAX_QUOTED = 400
# Bytes of a number of each type that bundles hold.
ITEM_BYTES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8},
}

# Makes the error for a file that is not what it has to be, from the file's name, the field, what it should be and is.
Refusal = Callable[[str, str, object, object], KvconvertError]


def mismatch(file: str, field: str, expected: object, found: object) -> BundleError:
    """The error for a file that is not what it has to be, in one sentence."""
    file, field, expected, found = (printable(str(part))[:MAX_QUOTED] for part in (file, field, expected, found))
    return BundleError(
        f"{file} does not fit the bundle: {field} should be {expected}, found {found}; the file is damaged or was "
        "changed, so fetch or export the bundle again."
    )


def nbytes(info: TensorInfo) -> int:
    """Bytes that a tensor takes in a file; BundleError for a type that bundles do not hold."""
    if info.dtype not in ITEM_BYTES:
        raise BundleError(f"A tensor of type {info.dtype} cannot be stored in a bundle.")
    return math.prod(info.shape) * ITEM_BYTES[info.dtype]


def read_header(path: Path, refuse: Refusal = mismatch, any_dtype: bool = False) -> dict[str, TensorInfo]:
    """Tensors of a safetensors file, after checking every rule of the format; no tensor data is read.

    Args:
        path: of the file.
        refuse: makes the error; the one for a bundle's file by default.
        any_dtype: also accept types that bundles do not hold, whose bytes are not compared with their shape.

    Raises:
        BundleError: the file is truncated or longer than its header says, the header is no valid JSON, or an entry has
            an unknown type, an impossible shape, or offsets that overlap, leave a gap or do not match its shape. With
            `refuse`, whatever it makes.
    """
    file = path.name
    if path.exists() and not path.is_file():  # a pipe has no end, and may never begin
        raise refuse(file, "the file", "a regular file", "something else")
    size = path.stat().st_size
    with open_regular(path) as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise refuse(file, "its length", "at least 8 bytes", f"{size:,} bytes")
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
        raise refuse(file, "its length", f"{8 + length + position:,} bytes", f"{size:,} bytes")
    return infos


def _parse(file: str, text: bytes, refuse: Refusal) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise refuse(file, "its header", "JSON that starts with {", repr(text[:1]))
    try:
        header = parse_json(text, unique=True, bounded=True)
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
    known = isinstance(dtype, str) and (len(dtype) <= MAX_DTYPE if any_dtype else dtype in ITEM_BYTES)
    if not known:
        raise refuse(file, f"the dtype of tensor {name}", f"one of {', '.join(ITEM_BYTES)}", repr(dtype)[:80])
    if not _is_counts(shape):
        raise refuse(file, f"the shape of tensor {name}", "a list of sizes", repr(shape)[:80])
    if not _is_counts(offsets) or len(offsets) != 2:
        raise refuse(file, f"the data_offsets of tensor {name}", "begin and end", repr(offsets)[:80])
    # A size of 0 hides the others from the comparison with the bytes, and torch takes no more than 63 bits of them.
    if len(shape) > MAX_DIMENSIONS or math.prod(size or 1 for size in shape) >= 2**56:
        raise refuse(file, f"the shape of tensor {name}", "sizes that a tensor can have", repr(shape)[:80])
    info = TensorInfo(dtype=dtype, shape=shape)
    begin, end = offsets
    size = nbytes(info) if dtype in ITEM_BYTES else None
    if end < begin or size not in (None, end - begin):
        raise refuse(file, f"the bytes of tensor {name}", "0 or more" if size is None else size, end - begin)
    return info, begin, end


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
