"""Reading a bundle: everything is checked before a single tensor is used."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvconvert.bundle.json_files import MAX_JSON, parse_object, read_object, read_settings
from kvconvert.bundle.manifest import (
    FORMAT_VERSION,
    FORMER_PLAN_NAME,
    MANIFEST_NAME,
    PLAN_NAME,
    FileInfo,
    LayerPlan,
    Manifest,
    TensorInfo,
    quantization_config,
    unseal,
)
from kvconvert.bundle.settings import is_settings, unsafe_settings
from kvconvert.bundle.tensorfile import DTYPES, mismatch, nbytes, read_header, tensor_info
from kvconvert.errors import BundleError, RecipeError
from kvconvert.methods import PLAN_TENSORS
from kvconvert.methods.awq import AWQ_BITS, BITS

INDEX_NAME = "model.safetensors.index.json"

# Files of these kinds are read by model and tokenizer loaders when they merely lie in the directory, so an unlisted one
# could replace what was verified.
_LOADED_SUFFIXES = {
    ".json",
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".pkl",
    ".pickle",
    ".ckpt",
    ".py",
    ".jinja",
    ".model",
    ".tiktoken",
    ".gguf",
    ".h5",
    ".msgpack",
}
# Of these, the ones that run code when they are loaded; a bundle holds none, listed or not.
_CODE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".py"}
_LOADED_NAMES = {"vocab.txt", "merges.txt"}
# Files that make loaders take weights, or a whole model, from elsewhere.
_REDIRECTIONS = {"adapter_config.json", "audio_tokenizer_config.json"}
_WEIGHT_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


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
    is built (`runtime/hf/model_check.py`).

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
        _check_names(directory, manifest)
        if verify == "plan":
            return _described(directory, manifest, checks)
        _check_files(directory, manifest, full=verify == "full")
        total = sum(info.size for info in manifest.files.values())
        how = "sizes and SHA-256" if verify == "full" else "sizes (not SHA-256)"
        checks.append(f"files: {how} of {len(manifest.files)} files, {total:,} bytes")
        _check_plan_header(directory, manifest)
        weight_files = _check_tensors(directory, manifest)
        checks.append(f"tensors: {len(manifest.tensors)} of the model, {len(manifest.plan)} of the KV plan")
        _check_modules(manifest)
        config = _check_config(directory, manifest, filter(is_settings, manifest.files))
        quantized = [module for module in manifest.modules if module.method != "kept"]
        checks.append(f"coverage: {len(quantized)} modules quantized, {len(manifest.modules) - len(quantized)} kept")
        _check_layers(manifest, config)
        checks.append(f"KV plan: {len(manifest.layers)} layers")
        for name, scales in _tensors(weight_files, [f"{module.prefix}.scales" for module in quantized]):
            _check_scales(weight_files[name].name, name, scales)
        checks.append(f"scales: {len(quantized)} tensors, finite and above zero")
        if verify == "full":
            kept = [name for name, info in manifest.tensors.items() if DTYPES[info.dtype].is_floating_point]
            for name, tensor in _tensors(weight_files, kept):
                if not _is_finite(tensor):
                    raise mismatch(weight_files[name].name, f"tensor {name}", "finite values", "NaN or infinity")
            checks.append(f"numbers: {len(kept)} floating-point tensors, all finite")
        plan = _read_plan(directory, manifest)
    except (OSError, SafetensorError) as error:
        raise BundleError(
            f"The bundle {directory} cannot be read ({error}); check the path and its permissions."
        ) from error
    return Bundle(directory, manifest, config, plan, weight_files, tuple(checks))


def _described(directory: Path, manifest: Manifest, checks: list[str]) -> Bundle:
    """What can be said of a bundle without its weights."""
    for name in ("config.json", PLAN_NAME):
        _check_file(directory, name, manifest.files[name], full=True)
    _check_plan_header(directory, manifest)
    _check_modules(manifest)
    config = _check_config(directory, manifest, ["config.json"])
    _check_layers(manifest, config)
    checks.append(f"KV plan: {len(manifest.layers)} layers; weights were not looked at")
    return Bundle(directory, manifest, config, _read_plan(directory, manifest), {}, tuple(checks))


def _read_manifest(directory: Path) -> Manifest:
    if not directory.is_dir():
        raise BundleError(f"There is no bundle at {directory}: it is not a directory; check the path.")
    path = directory / MANIFEST_NAME
    if not os.path.lexists(path):
        raise BundleError(f"{directory} is not a bundle: it has no {MANIFEST_NAME}; make one with `kvconvert export`.")
    _check_regular(path, MANIFEST_NAME)
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


def _check_names(directory: Path, manifest: Manifest) -> None:
    """That of the files in the manifest, looking at none of them."""
    for name in (*manifest.files, *manifest.informative):
        _check_name(name)
        if Path(name).suffix in _CODE_SUFFIXES:
            raise BundleError(
                f"{MANIFEST_NAME} lists {name}: expected safetensors, JSON and text only, found a file that loading "
                "could execute; do not use this bundle."
            )
        if Path(name).name in _REDIRECTIONS:
            raise BundleError(
                f"{MANIFEST_NAME} lists {name}: expected a bundle's own files, found one that names a model elsewhere; "
                "do not use this bundle."
            )
    if FORMER_PLAN_NAME in manifest.files:
        raise BundleError(
            f"The bundle {directory} has its KV plan in {FORMER_PLAN_NAME}, where an earlier kvconvert wrote it and "
            "other engines take it for weights; export the bundle again."
        )
    for required in ("config.json", PLAN_NAME):
        if required not in manifest.files:
            raise mismatch(MANIFEST_NAME, "files", f"an entry for {required}", "none")


def _check_files(directory: Path, manifest: Manifest, full: bool) -> None:
    for name, info in manifest.files.items():
        _check_file(directory, name, info, full)
    for folder, folders, names in os.walk(directory):
        # Programs' own folders (.git, .cache) are no part of the bundle; links to folders are not followed.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if Path(folder) != directory and Path(name).suffix in _CODE_SUFFIXES:
                raise BundleError(
                    f"{Path(folder, name).relative_to(directory)} lies in the bundle {directory}, and loading could "
                    "execute it; remove it."
                )
    known = own_files(manifest)
    for path in sorted(
        [*directory.iterdir(), *directory.glob("additional_chat_templates/*"), *directory.glob("kvconvert/*")]
    ):
        name = path.relative_to(directory).as_posix()
        if name not in known and may_be_loaded(name):
            raise BundleError(
                f"{name} lies in the bundle {directory} but is not listed in {MANIFEST_NAME}, and loaders might read "
                "it; remove it."
            )


def own_files(manifest: Manifest) -> set[str]:
    """Names of all files of a bundle; informative ones may be absent."""
    return {*manifest.files, *manifest.informative, MANIFEST_NAME}


def may_be_loaded(name: str) -> bool:
    """Whether loaders might read a file for its name alone, so that a bundle may hold it only if it is listed."""
    return Path(name).suffix in _LOADED_SUFFIXES or name in _LOADED_NAMES


def _check_name(name: str) -> None:
    parts = name.split("/")
    unsafe = any(part in ("", ".", "..") for part in parts) or not re.fullmatch(r"[\w.+@ -]+(/[\w.+@ -]+)*", name)
    if unsafe or name == MANIFEST_NAME:
        raise BundleError(
            f"{MANIFEST_NAME} lists the file name {name!r}: expected a plain relative name inside the bundle, found "
            "one that is not; do not use this bundle."
        )


def _check_regular(path: Path, name: str) -> None:
    if not os.path.lexists(path):
        raise mismatch(name, "the file", "present", "no such file")
    mode = path.stat().st_mode if _is_hub_blob(path) else path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise BundleError(
            f"{name} does not fit the bundle: the file should be a regular file, found a symbolic link; copy the "
            "bundle with links followed (cp -rL)."
        )
    if not stat.S_ISREG(mode):
        raise mismatch(name, "the file", "a regular file", "something else")


def _is_hub_blob(path: Path) -> bool:
    """Whether a link is one of the Hub's cache: from snapshots/{commit} to blobs of the same repository."""
    if not path.is_symlink():
        return False
    # Unlike Path.resolve, realpath gives an answer for links that lead in a circle: a path that is still a link.
    target = Path(os.path.realpath(path))
    parents = Path(os.path.realpath(path.parent)).parents
    snapshots = next((parent for parent in parents if parent.name == "snapshots"), None)
    return snapshots is not None and target.parent == snapshots.parent / "blobs" and not target.is_symlink()


def _check_file(directory: Path, name: str, info: FileInfo, full: bool) -> None:
    path = directory / name
    for part in [*path.relative_to(directory).parents][:-1]:
        if (directory / part).is_symlink():
            raise mismatch(name, "its directory", "a directory", "a symbolic link")
    _check_regular(path, name)
    size = path.stat().st_size
    if size != info.size:
        raise mismatch(name, "size", f"{info.size} bytes", f"{size} bytes")
    if full:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != info.sha256:
            raise mismatch(name, "sha256", info.sha256, digest)


def _check_plan_header(directory: Path, manifest: Manifest) -> None:
    def refuse(_: str, field: str, expected: object, found: object) -> BundleError:
        return mismatch(PLAN_NAME, field, expected, found)

    _compare(PLAN_NAME, manifest.plan, read_header(directory / PLAN_NAME, refuse))


def _check_tensors(directory: Path, manifest: Manifest) -> dict[str, Path]:
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
    _compare("The weights", manifest.tensors, found)
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


def _compare(file: str, expected: dict[str, TensorInfo], found: dict[str, TensorInfo]) -> None:
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise mismatch(file, f"tensor {name}", "present", "missing")
        if name not in expected:
            raise mismatch(file, f"tensor {name}", "absent", "an extra tensor")
        if expected[name] != found[name]:
            raise mismatch(file, f"tensor {name}", _words(expected[name]), _words(found[name]))


def _words(info: TensorInfo) -> str:
    return f"{info.dtype} {info.shape}"


def _check_modules(manifest: Manifest) -> None:
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
                raise mismatch("The weights", f"tensor {name}", _words(info), "missing")
            if manifest.tensors[name] != info:
                raise mismatch("The weights", f"tensor {name}", _words(info), _words(manifest.tensors[name]))
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


def _check_config(directory: Path, manifest: Manifest, settings_files: Iterable[str]) -> dict[str, Any]:
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


def _check_layers(manifest: Manifest, config: dict[str, Any]) -> None:
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


def _tensors(files: dict[str, Path], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, inside in by_file.items():
        with safe_open(path, framework="pt") as stream:
            for name in inside:
                yield name, stream.get_tensor(name)


def _is_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN or infinity, with little memory beside the tensor."""
    for part in tensor.reshape(-1).split(2**22):
        if not bool(torch.isfinite(part if part.element_size() > 1 else part.float()).all()):
            return False
    return True


def _check_scales(file: str, name: str, scales: Tensor) -> None:
    if not bool(torch.isfinite(scales).all()):
        row, column = (~torch.isfinite(scales)).nonzero()[0].tolist()
        raise mismatch(file, f"{name}[{row}, {column}]", "a finite scale", scales[row, column].item())
    if not bool((scales > 0).all()):
        row, column = (scales <= 0).nonzero()[0].tolist()
        raise mismatch(file, f"{name}[{row}, {column}]", "a scale above zero", scales[row, column].item())


def _read_plan(directory: Path, manifest: Manifest) -> dict[str, Tensor]:
    plan: dict[str, Tensor] = {}
    for name, tensor in _tensors(dict.fromkeys(manifest.plan, directory / PLAN_NAME), list(manifest.plan)):
        match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
        if match is None or int(match[1]) >= len(manifest.layers):
            raise mismatch(PLAN_NAME, f"tensor {name}", f"a name layers.0 to layers.{len(manifest.layers) - 1}", name)
        if match[2] not in PLAN_TENSORS:
            raise mismatch(PLAN_NAME, f"tensor {name}", f"one of {', '.join(PLAN_TENSORS)}", match[2])
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise mismatch(PLAN_NAME, f"tensor {name}", "finite values", "NaN or infinity")
        plan[name] = tensor
    for layer in manifest.layers:
        _check_required(layer, plan)
    return plan


def _check_required(layer: LayerPlan, plan: dict[str, Tensor]) -> None:
    """The tensors without which the layer's scheme cannot be served."""
    scheme = layer.scheme()
    wanted = {} if scheme is None else scheme.required_tensors(layer.shape())
    for what, rule in wanted.items():
        name = f"layers.{layer.index}.{what}"
        if name not in plan:
            raise mismatch(PLAN_NAME, f"tensor {name}", f"present ({rule.why})", "missing")
        info = tensor_info(plan[name])
        if (info.dtype, tuple(info.shape)) != (rule.dtype, rule.shape):
            raise mismatch(PLAN_NAME, f"tensor {name}", f"{rule.dtype} {[*rule.shape]}", _words(info))
        values = plan[name].tolist()
        expected = None if rule.fault is None else rule.fault(values)
        if expected is not None:
            raise mismatch(PLAN_NAME, f"tensor {name}", expected, repr(values)[:80])
