"""`calibrate`: from a checkpoint to a working directory of converted layers, one decoder layer in memory at a time.

The model is built without weights. For each decoder layer in turn: read its weights, run the calibration sequences
through it in float32 while the passes observe, let them solve and apply, write the result, free the layer. What goes
on to the next layer is the output of the UNCHANGED layer, kept on disk. What concerns all layers at once (one pair of
taus, how budgets are spread) is decided from the stored measurements when the last layer is committed. Peak memory is
a couple of layers, the embeddings and one small batch of activations, whatever the number of layers and samples.
"""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import kvconvert
from kvconvert.adapters import Adapter, find_adapter, head_dim, key_value_heads, layer_config, require_adapter
from kvconvert.bundle.manifest import ModuleCoverage
from kvconvert.bundle.scheme import KVScheme
from kvconvert.calibration.attention_sample import AttentionSampler
from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.calibquant import CalibQuantPass
from kvconvert.calibration.kitty import KittyPass
from kvconvert.calibration.minikv import MiniKVPass
from kvconvert.calibration.oscar import OscarPass, simulate_value_cache
from kvconvert.calibration.protocol import CacheFormat, CalibrationPass, LayerStructure, LayerWork
from kvconvert.calibration.ranges import RangePass
from kvconvert.calibration.static_scales import StaticScalesPass
from kvconvert.data import TokenData
from kvconvert.errors import NumericError, RecipeError, UnsupportedModelError, UsageError
from kvconvert.experts import expert_modules
from kvconvert.kernels.awq_format import quantize_weight
from kvconvert.kernels.hadamard import hadamard_kind
from kvconvert.kernels.quantizer import GroupRangeError
from kvconvert.layers import LayerRunner
from kvconvert.prologue import CalibrationInputs
from kvconvert.recipe import KVCalibration, Recipe, WeightsRecipe
from kvconvert.resolve import resolve_layers
from kvconvert.runtime.formats import layer_format, span_format
from kvconvert.runtime.kinds import layer_kinds, why_no_pages
from kvconvert.runtime.load import reads_images
from kvconvert.runtime.modality import placeholder_ids
from kvconvert.samples import load_samples
from kvconvert.source import SourceModel, float_dtype, open_source
from kvconvert.workdir import HiddenStates, LayerRecord, WorkDir, WorkState

logger = logging.getLogger(__name__)


def calibrate(
    model: str,
    work: Path | str,
    recipe: Recipe,
    data: str | None = None,
    samples: int = 64,
    seq_len: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    restart: bool = False,
    progress: bool = True,
) -> WorkDir:
    """Convert every decoder layer of a model into a working directory, or go on where an earlier run stopped.

    Args:
        model: directory or Hub id.
        work: working directory, absent, empty, or begun from the same inputs.
        recipe: what to do.
        data: calibration data, None for what ships with kvconvert: text, or drawings for a model that sees.
        samples, seq_len: calibration sequences and tokens in each; None takes 512, or what an image needs.
        seed: of the choice of samples.
        device: on which layers are computed.
        restart: discard what is in `work`.
        progress: show bars and a closing line on stderr.

    Returns:
        the finished working directory.

    Raises:
        KvconvertError: one of its children, for everything that can be wrong with the input; nothing half written
            stays.
    """
    target = _device(device)
    source = open_source(model)
    runner = _make_runner(source, recipe.weights, target)
    adapter = runner.adapter
    _check_recipe(runner, recipe)
    if adapter is not None:
        _check_group_size(runner, recipe.weights)
    tokens = load_samples(source, data, samples, seq_len, seed)
    if reads_images(source.config) and not tokens.info.images:
        _say(f"Calibrating with text alone: {tokens.info.source} holds no images.", progress)
    directory = WorkDir.create(work, _initial_state(model, runner, recipe, tokens, seed, target, progress), restart)
    first = directory.first_uncommitted()
    if directory.state.complete:
        _say(f"{directory.path} is already complete ({directory.state.num_layers} layers); nothing to do.", progress)
        return directory
    if first:
        _say(f"Going on at layer {first} of {directory.state.num_layers} in {directory.path}.", progress)
    source.check_finite(directory.state.kept_tensors)
    inputs = CalibrationInputs(tokens.ids, tokens.extras, tokens.visual)
    if adapter is not None:
        runner.begin(inputs)
    layers = range(first, directory.state.num_layers)
    for index in tqdm(
        layers, desc="layers", unit="layer", initial=first, total=directory.state.num_layers, disable=not progress
    ):
        if adapter is None:
            directory.commit_layer(index, {}, {}, _untouched_record(runner, recipe, index))
        else:
            _calibrate_layer(runner, directory, recipe, inputs, index)
    records = [directory.layer_record(index) for index in range(directory.state.num_layers)]
    for record in resolve_layers(recipe, records, directory.layer_plan):
        directory.replace_record(record.index, record)
    directory.finish()
    return directory


def _make_runner(source: SourceModel, weights: WeightsRecipe, device: torch.device) -> LayerRunner:
    """With the model's adapter; a recipe that keeps weights does without one that is missing or does not fit."""
    if weights.method != "none":
        return LayerRunner(source, require_adapter(source.config), device)
    adapter = find_adapter(source.config)
    if adapter is not None:
        try:
            return LayerRunner(source, adapter, device)
        except UnsupportedModelError as error:
            logger.warning("The cache is converted without calibration. %s", error)
    return LayerRunner(source, None, device)


def make_passes(
    weights: WeightsRecipe, scheme: KVScheme | None, calibration: KVCalibration, structure: LayerStructure
) -> list[CalibrationPass]:
    """The passes that a recipe asks for in one layer, in the order in which they work.

    Fold first, AWQ's search after it, and what depends on the values that the cache will see after both.
    """
    passes: list[CalibrationPass] = []
    quantize_values = None
    if scheme is not None and (scheme.key_bits < 16 or scheme.rotate_values == "folded"):
        passes.append(
            OscarPass(
                fold_values=scheme.rotate_values == "folded",
                group_size=scheme.key_group_size,
                token_norm="per_head" if scheme.token_norm == "per_head" else "joint",
                measure=scheme.token_norm_measure,
            )
        )
    if scheme is not None and scheme.boosted_for(structure.head_dim):
        passes.append(KittyPass(scheme.boost_select))
    # Values of spans and static pages have one scale per channel: scaling channels changes nothing about their error.
    if scheme is not None and scheme.value_bits < 16 and not scheme.is_span and scheme.static_scales == "none":
        group_size, rotate = scheme.value_group_for(structure.head_dim), scheme.rotate_values == "online"

        def quantize_values(values: Tensor) -> Tensor:
            return simulate_value_cache(values, scheme.value_bits, group_size, scheme.value_range, rotate)

    if weights.method == "awq":
        passes.append(AwqPass(weights.bits, weights.group_size, quantize_values))
    if scheme is not None and scheme.static_scales == "calibrated":
        passes.append(StaticScalesPass())
    if scheme is not None:
        passes += _cache_searches(scheme, calibration)
    return passes


def _cache_searches(scheme: KVScheme, calibration: KVCalibration) -> list[CalibrationPass]:
    """Passes that try formats of the cache on a sample of the finished layer's attention, with the sampler."""
    sampler = AttentionSampler()
    searches: list[CalibrationPass] = []
    sides = {"key": scheme.key_bits < 16, "value": scheme.value_bits < 16}
    ranges = {side: quantized and calibration.searches_range(side) for side, quantized in sides.items()}
    if not scheme.is_span and any(ranges.values()):
        searches.append(RangePass(sampler, ranges["key"], ranges["value"]))
    if scheme.is_span and (calibration.searches_tau or any(ranges.values())):
        grid = calibration.tau_grid if calibration.searches_tau else None
        taus = (scheme.tau1, scheme.tau2)
        searches.append(CalibQuantPass(sampler, grid, taus, ranges["key"], ranges["value"]))
    if scheme.evicts:
        searches.append(MiniKVPass(sampler, scheme.recent_ratio))
    return [sampler, *searches] if searches else []


def _cache_format(scheme: KVScheme, structure: LayerStructure) -> CacheFormat:
    """A scheme in the terms of kernels; channels that calibration will fix are ranked page by page until then."""
    heads, channels = structure.num_key_value_heads, structure.head_dim
    return CacheFormat(
        pages=layer_format(replace(scheme, boost_select="dynamic"), heads, channels, channels),
        span=span_format(scheme),
        rotate_keys=scheme.rotate_keys == "hadamard",
        rotate_values=scheme.rotate_values == "online",
        sink_tokens=scheme.sink_tokens,
        key_recent_tokens=scheme.key_recent_tokens,
        value_recent_tokens=scheme.value_recent_tokens,
        modality=scheme.modality,
    )


@torch.no_grad()
def _calibrate_layer(
    runner: LayerRunner, directory: WorkDir, recipe: Recipe, inputs: CalibrationInputs, index: int
) -> None:
    structure = runner.structure(index)
    scheme, reason = _layer_scheme(runner, recipe, index)
    passes = make_passes(recipe.weights, scheme, recipe.calibration_of(index), structure)
    layer, dtypes = runner.layer(index)
    separate = any(calibration_pass.modifies_before_observing for calibration_pass in passes)
    work = LayerWork(
        name=runner.layer_name(index),
        layer=copy.deepcopy(layer) if separate else layer,
        structure=structure,
        num_samples=inputs.ids.shape[0],
        seq_len=inputs.ids.shape[1],
        dtype=float_dtype(runner.source),
        cache=None if scheme is None else _cache_format(scheme, structure),
        visual=inputs.visual,
    )
    for calibration_pass in passes:
        calibration_pass.prepare(work)
    with ExitStack() as stack:
        writer = None
        if passes:
            hidden = _hidden_input(runner, directory, index)

            def replay() -> None:
                for _ in runner.forward(work.layer, hidden, index):
                    pass

            work.replay = replay
            if index + 1 < runner.num_layers:
                writer = stack.enter_context(directory.hidden(index + 1, runner.config.hidden_size).writing())
            with ExitStack() as hooks:
                for calibration_pass in passes:
                    hooks.enter_context(calibration_pass.observe(work))
                for batch, arguments, output in runner.forward(layer, hidden, index):
                    if separate:
                        work.layer(batch, **arguments)
                    if writer is not None:
                        writer.append(output)
        del layer
        for calibration_pass in passes:
            calibration_pass.solve(work)
            calibration_pass.apply(work)
        results = {calibration_pass.name: calibration_pass.result() for calibration_pass in passes}
        reasons = {name: text for result in results.values() for name, text in result.reasons.items()}
        for result in results.values():
            if result.scheme:
                scheme = replace(scheme, **result.scheme)
        names = runner.source.tensor_names
        notes = [reason, *(note for result in results.values() for note in result.notes)]
        record = LayerRecord(
            index=index,
            modules=[names.locate(module) for module in _layer_coverage(work, recipe.weights, reasons)],
            statistics={name: result.statistics for name, result in results.items() if result.statistics},
            reason="; ".join(filter(None, notes)),
            **_resolved(scheme, structure.head_dim, structure.num_key_value_heads),
        )
        plan = {f"layers.{index}.{name}": t for result in results.values() for name, t in result.plan.items()}
        tensors = _converted_tensors(work, dtypes, recipe.weights)
        directory.commit_layer(index, {names.of_tensor(name): t for name, t in tensors.items()}, plan, record)
        # Only now: a kill in between leaves the layer committed and its input in place, from which `_hidden_input`
        # goes on.
        if writer is not None:
            writer.commit()
    directory.hidden(index, runner.config.hidden_size).remove()


def _hidden_input(runner: LayerRunner, directory: WorkDir, index: int) -> HiddenStates:
    """The input of layer `index`, recomputed through source layers from the latest input that is still there."""
    width = runner.config.hidden_size
    available = next((i for i in range(index, -1, -1) if directory.hidden(i, width).exists()), None)
    if available is None:
        available, first = 0, directory.hidden(0, width)
        with first.writing() as writer:
            for sample in runner.first_input():
                writer.append(sample)
            writer.commit()
    for i in range(available, index):
        layer, _ = runner.layer(i)
        with directory.hidden(i + 1, width).writing() as writer:
            for *_, output in runner.forward(layer, directory.hidden(i, width), i):
                writer.append(output)
            writer.commit()
        directory.hidden(i, width).remove()
    return directory.hidden(index, width)


def _converted_tensors(work: LayerWork, dtypes: dict[str, torch.dtype], weights: WeightsRecipe) -> dict[str, Tensor]:
    """The layer's tensors under the model's names, Linears in AWQ's layout unless the recipe keeps weights.

    Everything else is stored in the source's dtype: exactly the source's bytes where no pass changed it.
    """
    tensors = {}
    # The source's own form of experts is copied, which may be a fused one.
    copied = expert_modules(work.layer) if weights.method == "none" else ()
    for name, parameter in work.layer.state_dict().items():
        if name.startswith(copied):
            continue
        module, _, kind = name.rpartition(".")
        full = f"{work.name}.{module}"
        if weights.method != "none" and kind == "weight" and module in work.structure.linears:
            try:
                packed = quantize_weight(parameter, weights.bits, weights.group_size)
            except GroupRangeError as error:
                raise NumericError(f"{full} cannot be quantized: {error}") from error
            tensors.update({f"{full}.{field}": value.cpu() for field, value in packed._asdict().items()})
        else:
            tensors[f"{full}.{kind}"] = parameter.to(dtypes[name]).cpu()
    return tensors


def _layer_coverage(work: LayerWork, weights: WeightsRecipe, reasons: dict[str, str]) -> list[ModuleCoverage]:
    copied = expert_modules(work.layer) if weights.method == "none" else ()
    coverage = [
        ModuleCoverage(
            name=f"{work.name}.{name}".rstrip("."), kind="other", treatment="kept", reason="the recipe keeps weights"
        )
        for name in copied
    ]
    for name, module in work.layer.named_modules():
        if name.startswith(copied) or not any(True for _ in module.parameters(recurse=False)):
            continue
        full, linear = f"{work.name}.{name}", name in work.structure.linears
        if linear and weights.method != "none":
            coverage.append(
                ModuleCoverage(
                    name=full,
                    treatment=weights.method,
                    bits=weights.bits,
                    group_size=weights.group_size,
                    reason=reasons.get(name, ""),
                )
            )
        else:
            reason = work.structure.unquantized.get(name, "norms and other vectors keep the source's dtype")
            reason = "the recipe keeps weights" if linear else reason
            # A router is a matrix for engines too, which have to be told that it is not quantized.
            matrix = name in work.structure.unquantized and getattr(module, "weight", None) is not None
            kind = "linear" if matrix else _kind(module)
            coverage.append(ModuleCoverage(name=full, kind=kind, treatment="kept", reason=reason))
    return coverage


def _layer_scheme(runner: LayerRunner, recipe: Recipe, index: int) -> tuple[KVScheme | None, str]:
    """The recipe's scheme resolved for one layer, and why it differs."""
    scheme, config = recipe.scheme(index), runner.config
    if scheme is None:
        return None, ""
    obstacle = why_no_pages(config, layer_kinds(config)[0][index])
    if obstacle:
        return None, obstacle
    if scheme.rotate_values == "folded":
        structure = runner.structure(index)
        obstacle = (
            "no adapter says that this architecture's values may be rotated in the weights"
            if structure is None
            else structure.fold_obstacle
        )
        if obstacle:
            return scheme.with_online_rotation(), f"values are rotated on line: {obstacle}"
    return scheme, ""


def _resolved(scheme: KVScheme | None, channels: int, kv_heads: int) -> dict[str, Any]:
    """Fields of a `LayerRecord` that describe the scheme."""
    if scheme is None:
        return {"scheme": None}
    rotates = scheme.rotate_keys != "none" or scheme.rotate_values != "none"
    return {
        "scheme": scheme.to_dict(),
        "head_dim": channels,
        "num_key_value_heads": kv_heads,
        "value_group_size": scheme.value_group_for(channels),
        "rotation": hadamard_kind(channels) if rotates else None,
    }


def _untouched_record(runner: LayerRunner, recipe: Recipe, index: int) -> LayerRecord:
    """A layer of an architecture without adapter: weights stay in the source, only the cache is described."""
    scheme, reason = _layer_scheme(runner, recipe, index)
    calibration = recipe.calibration_of(index)
    searched = [f"{side}_range" for side in ("key", "value") if calibration.searches_range(side)]
    searched += ["tau1 and tau2"] if scheme is not None and scheme.is_span and calibration.searches_tau else []
    if scheme is not None and searched:
        note = f"{', '.join(searched)} are the scheme's own, for no adapter describes this architecture's layers"
        reason = "; ".join(filter(None, (reason, note)))
    shape = layer_config(runner.config, index)
    return LayerRecord(
        index=index, modules=[], reason=reason, **_resolved(scheme, head_dim(shape), key_value_heads(shape))
    )


def _initial_state(
    model: str,
    runner: LayerRunner,
    recipe: Recipe,
    tokens: TokenData,
    seed: int,
    device: torch.device,
    progress: bool,
) -> WorkState:
    source, adapter = runner.source, runner.adapter
    prefix = f"{adapter.layers}." if adapter else None
    names = source.tensor_names
    # A checkpoint may hold more layers than the model has (for predicting several tokens); they are copied too.
    written = () if adapter is None else tuple(f"{runner.layer_name(i)}." for i in range(runner.num_layers))
    copied = runner.expert_modules() if recipe.weights.method == "none" else ()
    kept = sorted(
        stored for name, stored in names.stored.items() if not name.startswith(written) or name.startswith(copied)
    )
    modules = [
        names.locate(
            ModuleCoverage(
                name=name,
                kind=_kind(module),
                treatment="kept",
                reason=_kept_reason(name, adapter),
            )
        )
        for name, module in runner.model.named_modules()
        if (prefix is None or not name.startswith(prefix)) and any(True for _ in module.parameters(recurse=False))
    ]
    transforms = []
    schemes = [_layer_scheme(runner, recipe, index)[0] for index in range(runner.num_layers)]
    if any(scheme is not None and scheme.rotate_values == "folded" for scheme in schemes):
        transforms.append("fold_value_rotation")
    if recipe.weights.method == "awq":
        transforms += ["awq_scale", "awq_clip"]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors")}
    return WorkState(
        versions={"kvconvert": kvconvert.__version__, **versions},
        recipe=recipe.to_dict(),
        source=source.info(progress),
        model=model,
        directory=str(source.directory.resolve()),
        data=tokens.info,
        seed=seed,
        device=device.type,
        num_layers=runner.num_layers,
        adapter=adapter.model_type if adapter else None,
        kept_tensors=kept,
        kept_modules=modules,
        transforms=transforms,
    )


def _kept_reason(name: str, adapter: Adapter | None) -> str:
    """Why a module outside the decoder layers keeps its weights."""
    if adapter is None:
        return "the recipe keeps weights"
    language = adapter.layers.rpartition(".")[0]
    if name.startswith(f"{adapter.base}.") and not f"{name}.".startswith(f"{language}."):
        return "outside the language model, which alone is quantized"
    return "outside the decoder layers"


def _check_recipe(runner: LayerRunner, recipe: Recipe) -> None:
    """Refuse, before any work, a cache that this model cannot have or whose calibration it does not allow."""
    listed = max((index for override in recipe.layers for index in override.index), default=0)
    if listed >= runner.num_layers:
        raise RecipeError(
            f"[[kv.layers]] lists layer {listed}, but this model has layers 0 to {runner.num_layers - 1}."
        )
    obstacles = [why_no_pages(runner.config, kind) for kind in layer_kinds(runner.config)[0]]
    if recipe.weights.method == "none" and all(obstacles):
        raise UnsupportedModelError(
            f"There is nothing to convert: the recipe leaves the weights alone, and no layer of this "
            f"{runner.config.model_type} model can keep its keys and values in a kvconvert cache ({obstacles[0]})."
        )
    shapes = [layer_config(runner.config, index) for index in range(runner.num_layers)]
    for scheme in recipe.schemes():
        for channels in dict.fromkeys(map(head_dim, shapes)):
            layer_format(replace(scheme, boost_select="dynamic"), 1, channels, channels)
        if scheme.modality != "all":
            placeholder_ids(runner.source.config, scheme.modality)
        measured = {
            "boost_select": scheme.boost_select == "calibrated",
            "static_scales": scheme.static_scales == "calibrated",
            "allocation": scheme.allocation in ("var_prop", "var_inv", "calibrated"),
        }
        field = next((name for name, asked in measured.items() if asked), None)
        if runner.adapter is None and field is not None:
            raise RecipeError(
                f"[kv] {field} = {getattr(scheme, field)!r} follows from calibration, and no adapter describes this "
                "architecture's layers; choose a value that needs none."
            )


def _check_group_size(runner: LayerRunner, weights: WeightsRecipe) -> None:
    """Refuse, before any work, weights that the recipe's groups do not fit."""
    if weights.method == "none":
        return
    checked: list[LayerStructure] = []
    for index in range(runner.num_layers):
        structure = runner.structure(index)
        if structure in checked:
            continue
        checked.append(structure)
        layer = runner.model.get_submodule(runner.layer_name(index))
        linears = {name: layer.get_submodule(name) for name in structure.linears}
        for name, linear in linears.items():
            if linear.in_features % weights.group_size:
                fitting = [g for g in (128, 64, 32, 16) if all(x.in_features % g == 0 for x in linears.values())]
                advice = (
                    f"set group_size = {fitting[0]}" if fitting else "no group size from 16 to 128 fits all of them"
                )
                raise RecipeError(
                    f"[weights] group_size = {weights.group_size} does not divide the {linear.in_features} inputs of "
                    f"{runner.layer_name(index)}.{name}; {advice}."
                )
            if linear.out_features % 8:
                raise RecipeError(
                    f"{runner.layer_name(index)}.{name} has {linear.out_features} outputs, which AWQ's layout cannot "
                    'pack by eight; set [weights] method = "none".'
                )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name} is not a device; give cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name} asks for a GPU that torch does not find; give cpu.")
    return device


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "norm" if "norm" in type(module).__name__.lower() else "other"


def _say(message: str, progress: bool) -> None:
    logger.info(message)
    if progress:
        tqdm.write(message, file=sys.stderr)
