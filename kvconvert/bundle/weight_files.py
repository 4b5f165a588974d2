"""The weight files of a bundle: their headers and index against the manifest, and their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from kvconvert.bundle.json_files import read_object
from kvconvert.bundle.manifest import MANIFEST_NAME, Manifest
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorfile import mismatch, nbytes, read_header

INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


def check_tensors(directory: Path, manifest: Manifest) -> dict[str, Path]:
    """The file of each weight tensor, after comparing all headers and the index with the manifest (BundleError)."""
    files = manifest.weight_files()
    for name in files:
        if "/" in name:
            raise mismatch(MANIFEST_NAME, f"files: {name}", "weights beside config.json", "a file in a folder")
        if not _WEIGHT_FILE.fullmatch(name):
            raise mismatch(MANIFEST_NAME, f"files: {name}", "model.safetensors, or shards", name)
    if INDEX_NAME not in manifest.files and files != ["model.safetensors"]:
        raise mismatch(
            MANIFEST_NAME, "files", f"model.safetensors alone, or shards with {INDEX_NAME}", ", ".join(files)
        )
    found: dict[str, TensorInfo] = {}
    where: dict[str, Path] = {}
    for file in files:
        for name, info in read_header(directory / file).items():
            if name in found:
                raise mismatch(file, f"tensor {name}", "in one file", f"also in {where[name].name}")
            found[name] = info
            where[name] = directory / file
    if INDEX_NAME in manifest.files:
        _check_index(directory, found, where)
    compare("The weights", manifest.tensors, found)
    return where


def _check_index(directory: Path, found: dict[str, TensorInfo], where: dict[str, Path]) -> None:
    index = read_object(directory / INDEX_NAME)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise mismatch(INDEX_NAME, "weight_map", "files by tensor name", repr(weight_map)[:80])
    for name in sorted(weight_map.keys() | where.keys()):
        file = where[name].name if name in where else "no such tensor"
        if weight_map.get(name) != file:
            raise mismatch(INDEX_NAME, f"weight_map of {name}", file, weight_map.get(name, "no entry"))
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total != sum(map(nbytes, found.values())):
        raise mismatch(INDEX_NAME, "metadata.total_size", sum(map(nbytes, found.values())), total)


def compare(file: str, expected: dict[str, TensorInfo], found: dict[str, TensorInfo]) -> None:
    """Refuse (BundleError) tensors of `file` that are missing, left over, or of another type or shape."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise mismatch(file, f"tensor {name}", "present", "missing")
        if name not in expected:
            raise mismatch(file, f"tensor {name}", "absent", "an extra tensor")
        if expected[name] != found[name]:
            raise mismatch(file, f"tensor {name}", words(expected[name]), words(found[name]))


def words(info: TensorInfo) -> str:
    """A tensor's type and shape as messages show them."""
    return f"{info.dtype} {info.shape}"


def read_tensors(files: dict[str, Path], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors one at a time, by name, file after file."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, inside in by_file.items():
        with safe_open(path, framework="pt") as stream:
            for name in inside:
                yield name, stream.get_tensor(name)


def is_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN or infinity, with little memory beside the tensor."""
    for part in tensor.reshape(-1).split(2**22):
        if not bool(torch.isfinite(part if part.element_size() > 1 else part.float()).all()):
            return False
    return True


def check_scales(file: str, name: str, scales: Tensor) -> None:
    """Refuse (BundleError) a scale that is not finite and above zero, by its index."""
    if not bool(torch.isfinite(scales).all()):
        row, column = (~torch.isfinite(scales)).nonzero()[0].tolist()
        raise mismatch(file, f"{name}[{row}, {column}]", "a finite scale", scales[row, column].item())
    if not bool((scales > 0).all()):
        row, column = (scales <= 0).nonzero()[0].tolist()
        raise mismatch(file, f"{name}[{row}, {column}]", "a scale above zero", scales[row, column].item())
