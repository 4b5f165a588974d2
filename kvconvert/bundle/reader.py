"""Reading a bundle: everything is checked before a single tensor is used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ValidationError
from safetensors import SafetensorError

from kvconvert import methods
from kvconvert.arguments import NAMED, checked
from kvconvert.bundle.files import (
    BundleFiles,
    check_finite,
    check_names,
    check_plan_header,
    check_scales,
    check_tensors,
    is_settings,
    parse_object,
    read_arrays,
    read_object,
    read_plan,
    read_settings,
    unsafe_settings,
    words,
)
from kvconvert.bundle.locate import MANIFEST_NAME, PLAN_NAME, manifest_path
from kvconvert.bundle.manifest import FORMAT_VERSION, Manifest, quantization_config, unseal
from kvconvert.bundle.statements import check_statements
from kvconvert.errors import BundleError, RecipeError, counted, listed, printable
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorheader import mismatch
from kvconvert.methods.awq import AWQ_BITS, BITS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


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
        methods.spread_ratios(schemes)
    except (RecipeError, TypeError) as error:
        raise mismatch(MANIFEST_NAME, "layers: kv", "a KV scheme", error) from error
    if reason := methods.check_layers([scheme for scheme in schemes if scheme is not None]):
        raise mismatch(MANIFEST_NAME, "layers: kv", "schemes that layers of one model have", f"one that {reason}")
    for number, (layer, scheme) in enumerate(zip(manifest.layers, schemes, strict=True)):
        if layer.index != number:
            raise mismatch(MANIFEST_NAME, "layers: index", number, layer.index)
        if scheme is None:
            continue
        if not layer.head_dim or not layer.num_key_value_heads:
            raise mismatch(MANIFEST_NAME, f"layers[{number}]", "head_dim and num_key_value_heads", "none")


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were checked.

    Attributes:
        directory: where it lies.
        manifest: what it says about itself.
        config: contents of config.json.
        arrays: those of `kvconvert/plan.safetensors`, named `layers.{i}.{what}`.
        weight_files: the file of each weight tensor.
        checks: one line per kind of check that was made, with counts.
        files: what was verified; `files.check_unchanged` says whether it is still there.
    """

    directory: Path
    manifest: Manifest
    config: dict[str, Any]
    arrays: dict[str, np.ndarray]
    weight_files: dict[str, Path]
    checks: tuple[str, ...]
    files: BundleFiles

    @cached_property
    def plan(self) -> dict[str, Tensor]:
        """The KV plan as tensors; of all that reads a bundle, only who asks for them waits for torch."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Bundle:
        return self  # nothing in it is ever changed, and configurations that refer to it are copied


@checked
def open_bundle(
    path: Annotated[str | Path, NAMED, "a bundle's directory"], verify: Literal["full", "headers", "plan"] = "full"
) -> Bundle:
    """Open a bundle after validating it.

    Checked: no link in place of a file that loaders might read; the manifest's version, schema and seal; names, sizes
    and, with "full", SHA-256 of every load-critical file; no loadable file beside them; safetensors headers; the index;
    every tensor's presence, type and shape against the manifest; coverage and packing of quantized modules; scales and
    KV-plan tensors finite, scales positive, and, with "full", all other floating-point tensors finite; agreement of
    config.json; what the manifest says that follows from tensors and schemes (`bundle/statements.py`); settings that
    would run code or fetch something absent. Whether the model that transformers builds fits the tensors is checked
    where one is built (`runtime/hf/bundle_quantizer.py`).

    Args:
        path: the bundle's directory.
        verify: "full" hashes every load-critical file and reads every tensor; "headers" skips only that; "plan" checks
            the manifest, config.json and the KV plan, and needs no other file: `weight_files` is empty then.

    Raises:
        BundleError: naming file, field, what was expected and what was found.
    """
    directory = Path(path)
    checks: list[str] = []
    try:
        manifest_path(directory)
        files = BundleFiles(directory)
        manifest = _read_manifest(files)
        checks.append(f"manifest: format {manifest.format_version}, schema and seal")
        check_names(directory, manifest)
        files.check_others(manifest)
        if verify == "plan":
            return _described(files, manifest, checks)
        files.check_listed(manifest, full=verify == "full")
        total = sum(info.size for info in manifest.files.values())
        how = "sizes and SHA-256" if verify == "full" else "sizes (not SHA-256)"
        checks.append(f"files: {how} of {len(manifest.files)} files, {total:,} bytes")
        if files.links:
            checks.append(f"links: {printable(listed(sorted(files.links)))} are not followed, read, or uploaded")
        check_plan_header(directory, manifest)
        weight_files = check_tensors(directory, manifest)
        checks.append(f"tensors: {len(manifest.tensors)} of the model, {len(manifest.plan)} of the KV plan")
        check_modules(manifest)
        config = check_config(directory, manifest, filter(is_settings, manifest.files))
        quantized = [module for module in manifest.modules if module.method != "kept"]
        checks.append(f"coverage: {len(quantized)} modules quantized, {len(manifest.modules) - len(quantized)} kept")
        check_layers(manifest, config)
        check_statements(manifest)
        checks.append(f"KV plan: {counted(len(manifest.layers), 'layer')}")
        for name, scales in read_arrays(weight_files, [f"{module.prefix}.scales" for module in quantized]):
            check_scales(weight_files[name].name, name, scales)
        checks.append(f"scales: {len(quantized)} tensors, finite and above zero")
        if verify == "full":
            kept = [name for name, info in manifest.tensors.items() if "F" in info.dtype]
            check_finite(weight_files, kept)
            checks.append(f"numbers: {len(kept)} floating-point tensors, all finite")
        plan = read_plan(directory, manifest)
        files.check_unchanged()
    except (OSError, SafetensorError) as error:
        raise BundleError(
            f"The bundle {directory} cannot be read ({error}); check the path and its permissions."
        ) from error
    return Bundle(directory, manifest, config, plan, weight_files, tuple(checks), files)


def _described(files: BundleFiles, manifest: Manifest, checks: list[str]) -> Bundle:
    """Checks of a bundle that need none of its weights."""
    directory = files.directory
    for name in ("config.json", PLAN_NAME):
        files.check_file(name, manifest.files[name], full=True)
    check_plan_header(directory, manifest)
    check_modules(manifest)
    config = check_config(directory, manifest, ["config.json"])
    check_layers(manifest, config)
    check_statements(manifest)
    checks.append(f"KV plan: {counted(len(manifest.layers), 'layer')}; weights were not looked at")
    plan = read_plan(directory, manifest)
    files.check_unchanged()
    return Bundle(directory, manifest, config, plan, {}, tuple(checks), files)


def _read_manifest(files: BundleFiles) -> Manifest:
    content = files.read(MANIFEST_NAME)
    fields = parse_object(MANIFEST_NAME, content, bounded=True)
    version = fields.get("format_version")
    if type(version) is not int or version < 0:
        raise mismatch(MANIFEST_NAME, "format_version", FORMAT_VERSION, repr(version))
    if version > FORMAT_VERSION:
        raise BundleError(
            f"{MANIFEST_NAME} has format_version {version}, but this kvconvert reads up to {FORMAT_VERSION}; install a "
            "newer kvconvert."
        )
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "its content"
        raise mismatch(MANIFEST_NAME, field, _expected(first), repr(first["input"])[:80]) from error
    seal = unseal(content, manifest.manifest_sha256)
    if seal != manifest.manifest_sha256:
        raise mismatch(MANIFEST_NAME, "manifest_sha256", seal, manifest.manifest_sha256)
    if manifest.fidelity is not None and manifest.fidelity.measured_on != manifest.files_digest():
        raise mismatch(MANIFEST_NAME, "fidelity.measured_on", manifest.files_digest(), manifest.fidelity.measured_on)
    return manifest


def _expected(found: Mapping[str, Any]) -> str:
    """Pydantic's rule for a field, to stand behind "should be"."""
    named = {"extra_forbidden": "absent", "missing": "present"}
    what, _, rest = found["msg"].partition(" should ")
    said = rest.removeprefix("be ") if rest.startswith("be ") else f"a {what.lower()} that should {rest}"
    return named.get(found["type"]) or (said if rest else found["msg"])
