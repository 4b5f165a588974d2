"""Reading a bundle: everything is checked before a single tensor is used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from kvconvert.bundle.agreement import check_config, check_layers, check_modules
from kvconvert.bundle.files import check_file, check_files, check_names, check_regular
from kvconvert.bundle.json_files import MAX_JSON, parse_object
from kvconvert.bundle.locate import manifest_path
from kvconvert.bundle.manifest import FORMAT_VERSION, MANIFEST_NAME, PLAN_NAME, Manifest, unseal
from kvconvert.bundle.settings import is_settings
from kvconvert.bundle.weight_files import (
    check_plan_header,
    check_scales,
    check_tensors,
    is_finite,
    read_plan,
    read_tensors,
)
from kvconvert.errors import BundleError
from kvconvert.io.tensorfile import DTYPES, mismatch


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were checked.

    Attributes:
        directory: where it lies.
        manifest: what it says about itself.
        config: contents of config.json.
        plan: tensors of `kvconvert/plan.safetensors`, named `layers.{i}.{what}`.
        weight_files: the file of each weight tensor.
        checks: one line per kind of check that was made, with counts.
    """

    directory: Path
    manifest: Manifest
    config: dict[str, Any]
    plan: dict[str, Tensor]
    weight_files: dict[str, Path]
    checks: tuple[str, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Bundle:
        return self  # nothing in it is ever changed, and configurations that refer to it are copied


def open_bundle(path: str | Path, verify: Literal["full", "headers", "plan"] = "full") -> Bundle:
    """Open a bundle after validating it.

    Checked: the manifest's version, schema and seal; names, kinds, sizes and, with "full", SHA-256 of every
    load-critical file; no loadable file beside them; safetensors headers; the index; every tensor's presence, type and
    shape against the manifest; coverage and packing of quantized modules; scales and KV-plan tensors finite, scales
    positive, and, with "full", all other floating-point tensors finite; agreement of config.json; settings that would
    run code or fetch something absent. Whether the model that transformers builds fits the tensors is checked where one
    is built (`runtime/hf/bundle_quantizer.py`).

    Args:
        path: the bundle's directory.
        verify: "full" hashes every load-critical file and reads every tensor; "headers" skips only that; "plan" checks
            the manifest, config.json and the KV plan, and needs no other file: `weight_files` is empty then.

    Raises:
        BundleError: naming file, field, what was expected and what was found.
    """
    if verify not in ("full", "headers", "plan"):
        raise BundleError(f'A bundle is verified with "full", "headers" or "plan", not {verify!r}.')
    directory = Path(path)
    checks: list[str] = []
    try:
        manifest = _read_manifest(directory)
        checks.append(f"manifest: format {manifest.format_version}, schema and seal")
        check_names(directory, manifest)
        if verify == "plan":
            return _described(directory, manifest, checks)
        check_files(directory, manifest, full=verify == "full")
        total = sum(info.size for info in manifest.files.values())
        how = "sizes and SHA-256" if verify == "full" else "sizes (not SHA-256)"
        checks.append(f"files: {how} of {len(manifest.files)} files, {total:,} bytes")
        check_plan_header(directory, manifest)
        weight_files = check_tensors(directory, manifest)
        checks.append(f"tensors: {len(manifest.tensors)} of the model, {len(manifest.plan)} of the KV plan")
        check_modules(manifest)
        config = check_config(directory, manifest, filter(is_settings, manifest.files))
        quantized = [module for module in manifest.modules if module.method != "kept"]
        checks.append(f"coverage: {len(quantized)} modules quantized, {len(manifest.modules) - len(quantized)} kept")
        check_layers(manifest, config)
        checks.append(f"KV plan: {len(manifest.layers)} layers")
        for name, scales in read_tensors(weight_files, [f"{module.prefix}.scales" for module in quantized]):
            check_scales(weight_files[name].name, name, scales)
        checks.append(f"scales: {len(quantized)} tensors, finite and above zero")
        if verify == "full":
            kept = [name for name, info in manifest.tensors.items() if DTYPES[info.dtype].is_floating_point]
            for name, tensor in read_tensors(weight_files, kept):
                if not is_finite(tensor):
                    raise mismatch(weight_files[name].name, f"tensor {name}", "finite values", "NaN or infinity")
            checks.append(f"numbers: {len(kept)} floating-point tensors, all finite")
        plan = read_plan(directory, manifest)
    except (OSError, SafetensorError) as error:
        raise BundleError(
            f"The bundle {directory} cannot be read ({error}); check the path and its permissions."
        ) from error
    return Bundle(directory, manifest, config, plan, weight_files, tuple(checks))


def _described(directory: Path, manifest: Manifest, checks: list[str]) -> Bundle:
    """What can be said of a bundle without its weights."""
    for name in ("config.json", PLAN_NAME):
        check_file(directory, name, manifest.files[name], full=True)
    check_plan_header(directory, manifest)
    check_modules(manifest)
    config = check_config(directory, manifest, ["config.json"])
    check_layers(manifest, config)
    checks.append(f"KV plan: {len(manifest.layers)} layers; weights were not looked at")
    return Bundle(directory, manifest, config, read_plan(directory, manifest), {}, tuple(checks))


def _read_manifest(directory: Path) -> Manifest:
    path = manifest_path(directory)
    check_regular(path, MANIFEST_NAME)
    if path.stat().st_size > MAX_JSON:
        raise mismatch(MANIFEST_NAME, "its length", f"at most {MAX_JSON} bytes", f"{path.stat().st_size} bytes")
    content = path.read_bytes()
    fields = parse_object(MANIFEST_NAME, content, finite=True)
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
        raise mismatch(MANIFEST_NAME, field, first["msg"], repr(first["input"])[:80]) from error
    seal = unseal(content, manifest.manifest_sha256)
    if seal != manifest.manifest_sha256:
        raise mismatch(MANIFEST_NAME, "manifest_sha256", seal, manifest.manifest_sha256)
    if manifest.fidelity is not None and manifest.fidelity.measured_on != manifest.files_digest():
        raise mismatch(MANIFEST_NAME, "fidelity.measured_on", manifest.files_digest(), manifest.fidelity.measured_on)
    return manifest
