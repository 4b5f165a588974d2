"""Whether what a manifest says of modules and layers fits its tensors and config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvconvert.bundle.json_files import read_object, read_settings
from kvconvert.bundle.manifest import MANIFEST_NAME, Manifest, quantization_config
from kvconvert.bundle.settings import unsafe_settings
from kvconvert.bundle.weight_files import words
from kvconvert.errors import RecipeError
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorfile import mismatch
from kvconvert.methods.awq import AWQ_BITS, BITS


def check_modules(manifest: Manifest) -> None:
    """Every module that has a weight is listed once, and a quantized one's three tensors are as it says.

    Raises:
        BundleError: naming the module or tensor; of all checks in this file.
    """
    weights = manifest.weights
    covered: dict[str, str] = {}
    stored: dict[str, str] = {}
    for module in manifest.modules:
        where = f"modules: {module.name}"
        if module.name in covered:
            raise mismatch(MANIFEST_NAME, where, "listed once", "listed twice")
        covered[module.name] = module.method
        stored[module.prefix] = module.method
        if module.method == "kept":
            if f"{module.prefix}.qweight" in manifest.tensors:
                raise mismatch(MANIFEST_NAME, where, "an unquantized module", f"{module.prefix}.qweight")
            continue
        settings = (module.method, module.group_size)
        if settings != (weights.method, weights.group_size):
            raise mismatch(MANIFEST_NAME, where, (weights.method, weights.group_size), settings)
        if module.bits not in BITS or not module.in_features or not module.out_features or not module.group_size:
            raise mismatch(
                MANIFEST_NAME, where, "2, 3, 4 or 8 bits, a group size, in_features and out_features", module
            )
        if module.in_features % module.group_size or module.out_features % 8:
            raise mismatch(
                MANIFEST_NAME, f"{where}: group_size", f"a divisor of {module.in_features}", module.group_size
            )
        groups = module.in_features // module.group_size
        dtype, columns = ("I32", module.out_features // 8)
        if module.bits not in AWQ_BITS:
            dtype, columns = ("U8", module.out_features * module.bits // 8)
        packed = {
            "qweight": TensorInfo(dtype=dtype, shape=[module.in_features, columns]),
            "qzeros": TensorInfo(dtype=dtype, shape=[groups, columns]),
            "scales": TensorInfo(dtype="F16", shape=[groups, module.out_features]),
        }
        for part, info in packed.items():
            name = f"{module.prefix}.{part}"
            if name not in manifest.tensors:
                raise mismatch("The weights", f"tensor {name}", words(info), "missing")
            if manifest.tensors[name] != info:
                raise mismatch("The weights", f"tensor {name}", words(info), words(manifest.tensors[name]))
        if f"{module.prefix}.weight" in manifest.tensors:
            raise mismatch("The weights", f"tensor {module.prefix}.weight", "absent", "beside its quantized form")
    common = manifest.widths()[0] if len(manifest.widths()) == 1 else None
    if weights.bits != common:
        raise mismatch(MANIFEST_NAME, "weights.bits", f"{common} (that of all modules)", weights.bits)
    for name, info in manifest.tensors.items():
        module_name, _, part = name.rpartition(".")
        if part in ("qweight", "qzeros", "scales") and stored.get(module_name, "kept") == "kept":
            raise mismatch("The weights", f"tensor {name}", "a module that the manifest lists as quantized", "none")
        if len(info.shape) > 1 and module_name not in stored:
            raise mismatch(MANIFEST_NAME, "modules", f"an entry for {module_name}", "none")


def check_config(directory: Path, manifest: Manifest, settings_files: Iterable[str]) -> dict[str, Any]:
    """config.json, whose quantization_config is the manifest's; no settings file runs code or fetches anything."""
    config = read_object(directory / "config.json")
    expected = quantization_config(manifest.weights, manifest.modules, manifest.format_version)
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        raise mismatch("config.json", "quantization_config", "an object", found)
    for key in (*expected, *found):
        if key not in found or key not in expected or not _equal(expected[key], found[key]):
            raise mismatch(
                "config.json", f"quantization_config.{key}", expected.get(key, "no such key"), found.get(key, "nothing")
            )
    for name in settings_files:
        settings = config | {"quantization_config": None} if name == "config.json" else read_settings(directory / name)
        for path, allowed, entry in unsafe_settings(settings):
            raise mismatch(name, path, allowed, repr(entry)[:80])
    return config


def _equal(expected: Any, found: Any) -> bool:
    """Whether two JSON values are the same, where Python says that 1, 1.0 and true are."""
    return json.dumps(expected, sort_keys=True) == json.dumps(found, sort_keys=True)


def check_layers(manifest: Manifest, config: dict[str, Any]) -> None:
    """As many layers as config.json says, in order, whose shapes fit their schemes."""
    text_config = config.get("text_config", config)
    depth = text_config.get("num_hidden_layers") if isinstance(text_config, dict) else None
    if depth is not None and depth != len(manifest.layers):
        raise mismatch(MANIFEST_NAME, "layers", f"{depth} (config.json's num_hidden_layers)", len(manifest.layers))
    try:
        schemes = manifest.schemes()
    except (RecipeError, TypeError) as error:
        raise mismatch(MANIFEST_NAME, "layers: kv", "a KV scheme", error) from error
    for number, (layer, scheme) in enumerate(zip(manifest.layers, schemes, strict=True)):
        if layer.index != number:
            raise mismatch(MANIFEST_NAME, "layers: index", number, layer.index)
        if scheme is None:
            continue
        if not layer.head_dim or not layer.num_key_value_heads:
            raise mismatch(MANIFEST_NAME, f"layers[{number}]", "head_dim and num_key_value_heads", "none")
        group = scheme.value_group_for(layer.head_dim)
        if layer.value_group_size != group:
            raise mismatch(MANIFEST_NAME, f"layers[{number}].value_group_size", group, layer.value_group_size)
