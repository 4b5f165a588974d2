"""Export: from a finished working directory to a bundle, tensor by tensor: memory does not grow with the model."""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ValidationError
from torch import Tensor

from kvconvert.arguments import NAMED, Count, checked
from kvconvert.auto import read_allocation, read_weight_allocation
from kvconvert.bundle.card import CARD_NAME, LICENSES, model_card
from kvconvert.bundle.files import is_settings, safe_settings, unsafe_settings
from kvconvert.bundle.locate import PLAN_NAME, check_output
from kvconvert.bundle.manifest import (
    FORMAT_VERSION,
    Fidelity,
    Manifest,
    ModuleCoverage,
    conventions,
    quantization_config,
    widths,
)
from kvconvert.bundle.reader import open_bundle
from kvconvert.bundle.statements import weights_info
from kvconvert.bundle.writer import (
    MAX_SHARD_BYTES,
    copy_file,
    replacing,
    write_json,
    write_manifest,
    write_text,
    write_weights,
)
from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import (
    BundleError,
    CheckpointError,
    FidelityError,
    MissingError,
    UsageError,
    printable,
    unreadable,
)
from kvconvert.io.checksums import known_sha256
from kvconvert.io.disk import check_writable, make_directory
from kvconvert.io.hub import is_hub_id
from kvconvert.io.json_text import read_json
from kvconvert.io.progress import progress_bar
from kvconvert.io.records import FileInfo, SourceInfo, TensorInfo
from kvconvert.io.tensorfile import tensor_info, write_tensors
from kvconvert.models.configuration import context_length, sliding_windows
from kvconvert.models.devices import Device, choose_device
from kvconvert.models.source import SourceModel, open_source
from kvconvert.models.weight_files import check_links
from kvconvert.recipes.recipe import Limits, Recipe
from kvconvert.version import __version__

logger = logging.getLogger(__name__)

# The files beside the weights that tokenizers, processors and generation need.
COPIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "*processor_config.json",
)
SHARED = "shares the embedding's weight"
ELSEWHERE = "its tensors have names of their own in the checkpoint"
LICENSE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


@checked
def export(
    work: Annotated[str | Path, NAMED, "the directory that `calibrate` wrote"],
    bundle: Annotated[str | Path, NAMED, "a directory to write"],
    *,
    force: bool = False,
    device: Device | None = None,
    progress: bool = True,
    max_shard_bytes: Count = MAX_SHARD_BYTES,
    base_model: str | None = None,
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
) -> Path:
    """Write the bundle of a finished calibration; equal inputs give equal bytes.

    If the recipe sets limits, fidelity is measured on the finished bundle before it is put in place, and a warning is
    logged if it loses more than a tenth of what its source can do in a probe.

    Args:
        work: the finished working directory of `calibrate`.
        bundle: directory to write.
        force: replace an existing bundle, which is kept until the new one is complete, and accept a bundle that misses
            its recipe's limits; its card and manifest then say so.
        device: "cpu" or "cuda", where limits are measured; None takes a GPU if there is one.
        progress: show a progress bar.
        max_shard_bytes: size at which the weights are divided into several files.
        base_model: id on the Hub of the source model, where that was a local directory; for manifest and card.
        license: identifier of the bundle's license, one of the Hub's; None takes the one on the source's card.
        license_name: name of the license "other".
        license_link: its address.

    Returns:
        the path of the bundle.

    Raises:
        UsageError: the output exists, statements about the source that cannot be, or calibration is not finished.
        CheckpointError: the source model changed since it was calibrated.
        FidelityError: a limit is missed, without `force`.
        KvconvertError: the disk is full or cannot be written. Nothing is left behind after any error.
    """
    choose_device(device)
    output = Path(bundle)
    check_output(output, force)
    check_writable(output.parent, "bundle")
    with WorkDir.reading(work) as store:
        stated = described(
            store.state.source,
            base_model=base_model,
            license=license,
            license_name=license_name,
            license_link=license_link,
        )
        return _export(store, output, force, device, progress, max_shard_bytes, stated)


def described(
    source: SourceInfo,
    *,
    base_model: str | None,
    license: str | None,
    license_name: str | None,
    license_link: str | None,
) -> SourceInfo:
    """The source with what the user says of it in the place of what was found; see `export`."""
    changes: dict[str, Any] = {}
    if base_model is not None and base_model != source.id:
        if not is_hub_id(base_model):
            raise UsageError(f"`base_model` is {base_model!r}, which is no id on the Hub; give one like user/name.")
        if source.revision is not None:
            raise UsageError(f"`base_model` is {base_model}, but the source came from the Hub as {source.id}.")
        changes["id"] = base_model
    if license is not None:
        if license not in (*LICENSES, source.licence):
            close = difflib.get_close_matches(license.lower().replace(" ", "-"), LICENSES, n=1)
            advice = f"did you mean {close[0]}? Else give" if close else "give"
            raise UsageError(
                f"`license` is {license!r}, which is none of the Hub's identifiers (huggingface.co/docs/hub/"
                f"repositories-licenses); {advice} other with `license_name` and `license_link`."
            )
        changes |= {"licence": license, "licence_name": license_name, "licence_link": license_link}
        if license == "other" and license_name is None:
            raise UsageError("`license` is other, so `license_name` has to say which.")
    if license != "other" and (license_name is not None or license_link is not None):
        raise UsageError("`license_name` and `license_link` describe the `license` other; give that, too.")
    return source.model_copy(update=changes)


def _export(
    store: WorkDir,
    output: Path,
    force: bool,
    device: Device | None,
    progress: bool,
    max_shard_bytes: int,
    stated: SourceInfo,
) -> Path:
    # A Hub id may have moved on since; the directory that was calibrated is then still in the Hub's cache.
    location = store.state.directory if os.path.exists(store.state.directory) else store.state.model
    was_fetched = store.state.source.revision is not None
    if not was_fetched and not os.path.exists(location):
        raise MissingError(
            f"The model directory {store.state.directory}, which was calibrated in {store.path}, is gone; put it back, "
            "or calibrate again with the path that it has now, which computes nothing anew."
        )
    source = open_source(location, was_fetched=was_fetched)
    recipe = Recipe.from_dict(store.state.recipe)
    try:
        contents = _Contents.gather(store, source)
        _check_source(source, store.state.source, contents.copied)
        manifest = _manifest(store, recipe, contents, stated)
    except ValidationError as error:  # whoever wrote the directory may have written anything
        first = error.errors()[0]
        found = f"{printable('.'.join(map(str, first['loc'])))[:200]}: {first['msg']}"
        raise UsageError(
            f"{store.path} holds what no bundle can ({found}); calibrate it anew with `restart=True`."
        ) from error
    with replacing(output, force) as directory:
        files = _write_files(directory, store, source, contents, max_shard_bytes, progress)
        config = _settings(source.directory / "config.json")
        for dropped in ("quantization_config", "compression_config"):  # weights are stored in another form from here on
            config.pop(dropped, None)
        config = safe_settings(config)  # without those that point to code, which a bundle never carries or runs
        config["quantization_config"] = quantization_config(manifest.weights, manifest.modules)
        files["config.json"] = write_json(directory / "config.json", config)
        informative = [CARD_NAME, *copy_files(source.directory, directory, LICENSE_FILES)]
        manifest = manifest.model_copy(
            update={"files": dict(sorted(files.items())), "informative": sorted(informative)}
        )
        write_manifest(directory, manifest)
        open_bundle(directory, verify="headers")  # a bundle that a reader would refuse is never put in place
        limits = recipe.limits.as_set()
        if limits:
            manifest = manifest.model_copy(
                update={"fidelity": _measure(directory, location, recipe.limits, manifest, device, progress)}
            )
            if manifest.fidelity is not None and manifest.fidelity.missed and not force:
                raise FidelityError(
                    f"The bundle misses the limits of its recipe, so {output} was not written "
                    f"({'; '.join(manifest.fidelity.missed)}); choose a gentler recipe, or export it anyway with "
                    "`force=True`."
                )
            write_manifest(directory, manifest)
        card = model_card(manifest, sliding_windows(source.config), context_length(source.config))
        write_text(directory / CARD_NAME, card)
    return output


@dataclass(frozen=True)
class _Contents:
    """Names and shapes of everything that goes into the weight files, gathered before anything is written.

    Attributes:
        infos: every tensor, in the order in which it is written.
        layer_of: decoder layer of each tensor that calibration made.
        copied: tensors that are taken from the source as they are.
        modules: coverage, with the shapes of Linears.
        plan: tensors of the KV plan; `plan_layer_of` gives their layers.
    """

    infos: dict[str, TensorInfo]
    layer_of: dict[str, int]
    copied: list[str]
    modules: list[ModuleCoverage]
    plan: dict[str, TensorInfo]
    plan_layer_of: dict[str, int]

    @classmethod
    def gather(cls, store: WorkDir, source: SourceModel) -> _Contents:
        infos: dict[str, TensorInfo] = {}
        layer_of: dict[str, int] = {}
        plan: dict[str, TensorInfo] = {}
        plan_layer_of: dict[str, int] = {}
        covered: list[ModuleCoverage] = []
        for layer in range(store.state.num_layers):
            tensors = store.layer_infos(layer)
            infos |= tensors
            layer_of |= dict.fromkeys(tensors, layer)
            for name, tensor in store.layer_plan(layer).items():
                plan[name] = tensor_info(tensor)
                plan_layer_of[name] = layer
            covered += store.layer_record(layer).modules
        copied = store.state.kept_tensors
        if missing := next((name for name in copied if name not in source.tensors), None):
            raise CheckpointError(
                f"{store.path} says that {missing!r:.200} is copied from {source.location}, which has no such tensor; "
                "calibrate again with `restart=True`."
            )
        infos.update({name: source.tensors[name] for name in copied})
        owners = {name.rpartition(".")[0] for name in infos}
        configs = (source.config, source.config.get_text_config())
        tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        modules = [_with_shape(module, infos, owners, tied) for module in [*covered, *store.state.kept_modules]]
        modules += _uncovered(infos, copied, {module.prefix for module in modules})
        return cls(infos, layer_of, copied, modules, plan, plan_layer_of)


def _with_shape(module: ModuleCoverage, infos: dict[str, TensorInfo], owners: set[str], tied: bool) -> ModuleCoverage:
    """Coverage of a Linear with its shape, from its own tensors; a module without any gets the reason."""
    if module.method != "kept":
        scales, codes = infos.get(f"{module.prefix}.scales"), infos.get(f"{module.prefix}.qweight")
        if scales is None or codes is None:
            raise BundleError(
                f"{module.name} is recorded as {module.method}, but has no packed weights; calibrate again with "
                "`restart=True`."
            )
        return module.model_copy(update={"in_features": codes.shape[0], "out_features": scales.shape[1]})
    if module.prefix not in owners:
        return module.model_copy(update={"reason": SHARED if module.kind == "linear" and tied else ELSEWHERE})
    weight = infos.get(f"{module.prefix}.weight")
    if module.kind == "linear" and weight is not None and len(weight.shape) == 2:
        return module.model_copy(update={"in_features": weight.shape[1], "out_features": weight.shape[0]})
    return module


def _uncovered(infos: dict[str, TensorInfo], copied: list[str], covered: set[str]) -> list[ModuleCoverage]:
    """Coverage of copied matrices whose names the model's own modules do not have: some checkpoints differ."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in copied if len(infos[name].shape) > 1)
    reason = "copied from the source as it is"
    # Engines that build these modules, such as layers for drafts, have to be told that they are not quantized.
    return [ModuleCoverage(name=name, method="kept", reason=reason) for name in owners if name not in covered]


def _check_source(source: SourceModel, recorded: SourceInfo, copied: list[str]) -> None:
    """Refuse a source whose config, or whose files that still have to be copied from, changed since calibration."""
    expected = {"config.json": recorded.config_sha256} | {
        file: recorded.weights_sha256.get(file, "not recorded") for file in source.files_of(copied)
    }
    checksums = known_sha256(map(source.file, sorted(expected)))
    for file, sha256 in sorted(expected.items()):
        found = checksums[source.file(file)]
        if found != sha256:
            raise CheckpointError(
                f"{source.file(file)} changed since it was calibrated (sha256 {sha256} then, {found} now); "
                "calibrate again."
            )


def _write_files(
    directory: Path, store: WorkDir, source: SourceModel, contents: _Contents, max_shard_bytes: int, progress: bool
) -> dict[str, FileInfo]:
    """Weights, KV plan, and what is copied; returns size and hash of the load-critical files."""
    loaded: tuple[int, dict[str, Tensor]] = (-1, {})
    with progress_bar(total=len(contents.infos), desc="export", unit="tensor", shown=progress) as bar:

        def read(name: str) -> Tensor:
            nonlocal loaded
            bar.update()
            layer = contents.layer_of.get(name)
            if layer is None:
                return source.read([name])[name]
            if loaded[0] != layer:
                loaded = (layer, store.layer_tensors(layer))
            return loaded[1][name]

        files = write_weights(directory, contents.infos, read, max_shard_bytes)
    make_directory((directory / PLAN_NAME).parent)
    files[PLAN_NAME] = write_tensors(
        directory / PLAN_NAME, contents.plan, lambda name: store.layer_plan(contents.plan_layer_of[name])[name]
    )
    return files | copy_files(source.directory, directory, COPIED_FILES)


def copy_files(source: Path, directory: Path, patterns: tuple[str, ...]) -> dict[str, FileInfo]:
    """Copy files; returns size and hash by their names relative to the directory.

    Raises:
        CheckpointError: one is a link to what may be none of the model's.
    """
    found = {path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
    # Some systems leave hidden files of the same names beside others.
    found = {path for path in found if not path.name.startswith(".")}
    check_links(source, found)
    names = sorted(path.relative_to(source).as_posix() for path in found)
    return {name: _copied(source / name, directory / name) for name in names}


def _copied(source: Path, target: Path) -> FileInfo:
    """Copy a file; settings lose what points to code or to other places."""
    settings = _settings(source) if is_settings(target.name) else None
    if any(unsafe_settings(settings)):
        return write_json(target, safe_settings(settings))
    return copy_file(source, target)


def _settings(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(unreadable(path, error)) from error


def _manifest(store: WorkDir, recipe: Recipe, contents: _Contents, source: SourceInfo) -> Manifest:
    """The manifest without files and fidelity."""
    state = store.state
    layers = [store.layer_record(index).plan() for index in range(state.num_layers)]
    quantizing = ["quantize_weights"] if recipe.weights.quantizes else []
    weights = weights_info(contents.modules, contents.infos)
    return Manifest(
        format_version=FORMAT_VERSION,
        kvconvert_version=__version__,
        versions=state.versions,
        source=source,
        recipe=recipe.to_dict(),
        data=state.data,
        transforms=[*state.transforms, *quantizing],
        conventions=conventions(layers, weights.method, widths(contents.modules)),
        layers=layers,
        modules=contents.modules,
        weights=weights,
        tensors=contents.infos,
        plan=contents.plan,
        allocation=None if recipe.auto is None else read_allocation(store),
        weight_allocation=None if recipe.weights.average_bits is None else read_weight_allocation(store),
        files={},
    )


def _measure(
    directory: Path, source: str, limits: Limits, manifest: Manifest, device: Device | None, progress: bool
) -> Fidelity:
    """Fidelity of the bundle in `directory`, and which limits it misses."""
    from kvconvert.fidelity.evaluate import evaluate
    from kvconvert.fidelity.report import fidelity_of

    return fidelity_of(manifest, limits, evaluate(directory, against=source, device=device, progress=progress))
