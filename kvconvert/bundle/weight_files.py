"""The tensors of a bundle: headers and index against the manifest, their numbers, and what layers' schemes need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from kvconvert.bundle.files import read_object
from kvconvert.bundle.locate import MANIFEST_NAME, PLAN_NAME
from kvconvert.bundle.manifest import LayerPlan, Manifest
from kvconvert.errors import BundleError
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorheader import mismatch, nbytes, read_header
from kvconvert.methods import PLAN_TENSORS
from kvconvert.methods.scheme import FORMER_PLAN_TENSORS

INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_FILE = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")


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


def read_arrays(files: dict[str, Path], names: list[str], framework: str = "numpy") -> Iterator[tuple[str, Any]]:
    """Arrays one at a time, by name, file after file; with "pt" tensors, of types that NumPy does not have, too."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, inside in by_file.items():
        with safe_open(path, framework=framework) as stream:
            for name in inside:
                yield name, stream.get_tensor(name)


def check_finite(files: dict[str, Path], names: list[str]) -> None:
    """Refuse (BundleError) floating-point tensors with NaN or infinity, with little memory beside each."""
    import torch

    for name, tensor in read_arrays(files, names, "pt"):
        for part in tensor.reshape(-1).split(2**22):
            if not bool(torch.isfinite(part if part.element_size() > 1 else part.float()).all()):
                raise mismatch(files[name].name, f"tensor {name}", "finite values", "NaN or infinity")


def check_scales(file: str, name: str, scales: np.ndarray) -> None:
    """Refuse (BundleError) a scale that is not finite and above zero, by its index."""
    for wrong, expected in ((~np.isfinite(scales), "a finite scale"), (scales <= 0, "a scale above zero")):
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise mismatch(file, f"{name}[{row}, {column}]", expected, scales[row, column].item())


def check_plan_header(directory: Path, manifest: Manifest) -> None:
    """Names, types and shapes of the plan's tensors are those in the manifest (BundleError)."""

    def refuse(_: str, field: str, expected: object, found: object) -> BundleError:
        return mismatch(PLAN_NAME, field, expected, found)

    compare(PLAN_NAME, manifest.plan, read_header(directory / PLAN_NAME, refuse))


def read_plan(directory: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """The arrays of the KV plan by name, finite, with all that the layers' schemes need.

    Raises:
        BundleError: naming the tensor.
    """
    plan: dict[str, np.ndarray] = {}
    for name, array in read_arrays(dict.fromkeys(manifest.plan, directory / PLAN_NAME), list(manifest.plan)):
        match = re.fullmatch(r"layers\.([0-9]{1,4})\.(\w+)", name)
        if match is None or int(match[1]) >= len(manifest.layers):
            raise mismatch(PLAN_NAME, f"tensor {name}", f"a name layers.0 to layers.{len(manifest.layers) - 1}", name)
        if match[2] not in (*PLAN_TENSORS, *FORMER_PLAN_TENSORS):
            raise mismatch(PLAN_NAME, f"tensor {name}", f"one of {', '.join(PLAN_TENSORS)}", match[2])
        if not np.isfinite(array).all():
            raise mismatch(PLAN_NAME, f"tensor {name}", "finite values", "NaN or infinity")
        plan[name] = array
    for layer in manifest.layers:
        _check_required(layer, manifest, plan)
    return plan


def _check_required(layer: LayerPlan, manifest: Manifest, plan: dict[str, np.ndarray]) -> None:
    """The tensors without which the layer's scheme cannot be served."""
    scheme = layer.scheme()
    wanted = {} if scheme is None else scheme.required_tensors(layer.shape())
    for what, rule in wanted.items():
        name = f"layers.{layer.index}.{what}"
        if name not in plan:
            raise mismatch(PLAN_NAME, f"tensor {name}", f"present ({rule.why})", "missing")
        info = manifest.plan[name]
        if (info.dtype, tuple(info.shape)) != (rule.dtype, rule.shape):
            raise mismatch(PLAN_NAME, f"tensor {name}", f"{rule.dtype} {[*rule.shape]}", words(info))
        values = plan[name].tolist()
        expected = None if rule.fault is None else rule.fault(values)
        if expected is not None:
            raise mismatch(PLAN_NAME, f"tensor {name}", expected, repr(values)[:80])
