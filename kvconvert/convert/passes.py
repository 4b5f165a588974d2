"""One job per decoder layer, the passes that it asks for and their order, and what they decide over all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from kvconvert.calibration.attention_sample import AttentionSampler
from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.calibquant import CalibQuantPass
from kvconvert.calibration.gptq import GptqPass
from kvconvert.calibration.keys import ErrorFeedbackPass, KeyTreatmentPass
from kvconvert.calibration.kitty import KittyPass
from kvconvert.calibration.kvzip import KVzipPass
from kvconvert.calibration.minikv import MiniKVPass
from kvconvert.calibration.oscar import OscarPass
from kvconvert.calibration.protocol import CalibrationPass, LayerJob, MeasuredLayer, PassResult
from kvconvert.calibration.scales import ClipRatioPass, StaticScalesPass
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.workdir import LayerRecord
from kvconvert.errors import UnsupportedModelError
from kvconvert.methods import PLAN_TENSORS, KVScheme
from kvconvert.models.configuration import (
    ATTENDS_IN_PARTS,
    has_short_windows,
    is_latent,
    layer_config,
    layer_types_of,
    pages_unsupported,
    stored_shape,
)
from kvconvert.recipes.recipe import Recipe
from kvconvert.runtime.hf.cache_layers import check_shared_budget

# In the order in which they work: what folds first, the searches for weights after it, and what depends on the values
# that the cache will store after both. Passes that evaluate a sample of the finished layer's attention stand last.
PASSES: tuple[type[CalibrationPass], ...] = (
    OscarPass,
    KittyPass,
    AwqPass,
    GptqPass,
    StaticScalesPass,
    KeyTreatmentPass,
    ErrorFeedbackPass,
    ClipRatioPass,
    CalibQuantPass,
    MiniKVPass,
    KVzipPass,
)


def make_passes(job: LayerJob) -> list[CalibrationPass]:
    """The passes that a job asks for, in order; the sampler stands before the first that needs it."""
    if job.is_latent:
        job = replace(job, scheme=None)
    sampler = AttentionSampler()
    passes = [made for kind in PASSES if (made := kind.of(job, sampler)) is not None]
    first = next((i for i, made in enumerate(passes) if made.reads_sample), None)
    if first is not None:
        passes.insert(first, sampler)
    return passes


def plan_of(made: CalibrationPass, result: PassResult, index: int) -> dict[str, Tensor]:
    """A pass's tensors for the KV plan, by their names in it; every name has to be one that a method declares."""
    undeclared = result.plan.keys() - PLAN_TENSORS.keys()
    if undeclared:
        raise ValueError(f"no method declares the plan tensors {sorted(undeclared)} of the pass {made.name}")
    return {f"layers.{index}.{name}": tensor for name, tensor in result.plan.items()}


def resolve_layers(
    recipe: Recipe, records: list[LayerRecord], plan: Callable[[int], dict[str, Tensor]]
) -> list[LayerRecord]:
    """The layers' final records: what can only be decided when every layer is measured, each pass's `resolve`.

    A pure function of the recipe and of what the passes wrote into their plans, so that repeating it after a kill, even
    on records that it changed before, gives the same records.

    Args:
        recipe: the recipe of the calibration.
        records: the records of all layers.
        plan: reads a layer's plan tensors, by the names layers.{i}.{what}.
    """
    layers = {
        record.index: MeasuredLayer(
            nominal,
            scheme,
            {name.split(".", 2)[2]: tensor for name, tensor in plan(record.index).items()},
        )
        for record in records
        if (scheme := record.scheme()) is not None and (nominal := recipe.scheme(record.index)) is not None
    }
    resolved = {record.index: record for record in records}
    for kind in PASSES:
        for index, (chosen, statistics) in kind.resolve(layers, recipe.calibration).items():
            scheme = replace(layers[index].scheme, **chosen)
            layers[index] = replace(layers[index], scheme=scheme)
            record = resolved[index]
            resolved[index] = record.model_copy(
                update={"kv": scheme.to_dict(), "statistics": record.statistics | {kind.name: statistics}}
            )
    return [*resolved.values()]


def layer_jobs(runner: LayerRunner, recipe: Recipe) -> list[LayerJob]:
    """The jobs of all layers, in order.

    Raises:
        RecipeError, UnsupportedModelError: the heads of the model's layers cannot share a budget as the recipe wants.
    """
    kinds, latent = layer_types_of(runner.config)[0], is_latent(runner.config)
    short = has_short_windows(runner.config)
    jobs = []
    for index in range(runner.num_layers):
        structure, name = runner.structure(index), runner.layer_name(index)
        if latent or structure is None or structure.key is None:
            shape = stored_shape(layer_config(runner.config, index))
        else:
            shape = structure.shape
        stated = recipe.scheme(index)
        if stated is not None and short[index]:
            stated = recipe.calibration_of(index).of_window(stated)
        scheme, reason = _scheme(runner, stated, index, kinds[index])
        searched = recipe.calibration_of(index).searched(scheme) if scheme is not None else []
        if latent and searched:
            reason = f"{', '.join(searched)} are the scheme's own, for calibration knows no latents"
        jobs.append(
            LayerJob(
                index=index,
                name=name,
                weights=recipe.weights,
                scheme=scheme,
                search=recipe.calibration_of(index),
                structure=structure,
                reason=reason,
                **dict(zip(("heads", "key_dim", "value_dim"), shape, strict=True)),
                is_latent=latent,
                bits={
                    linear: recipe.weights.bits_of(f"{name}.{linear}", index)
                    for linear in (() if structure is None else structure.linears)
                },
            )
        )
    if any(job.scheme is not None and job.scheme.heads_apart for job in jobs):
        _check_heads_apart(runner, [recipe.scheme(job.index) for job in jobs], kinds)
    return jobs


def _check_heads_apart(runner: LayerRunner, schemes: list[KVScheme | None], kinds: list[str]) -> None:
    """Refuse now what no cache of the bundle would do."""
    check_shared_budget(runner.source.config, schemes, kinds)
    if any(getattr(module, "sinks", None) is not None for module in runner.model.modules()):
        selection = next(scheme.selection for scheme in schemes if scheme is not None and scheme.heads_apart)
        raise UnsupportedModelError(
            f'This model\'s attention has sink logits, which selection = "{selection}" does not support; choose '
            'selection = "attention".'
        )


def _scheme(runner: LayerRunner, scheme: KVScheme | None, index: int, layer_type: str) -> tuple[KVScheme | None, str]:
    """The recipe's scheme as one layer can have it, and why it differs."""
    if scheme is None:
        return None, ""
    structure = runner.structure(index)
    unsupported_reason = pages_unsupported(runner.config, layer_type, scheme)
    if unsupported_reason is None and structure is not None and not structure.attends_once:
        unsupported_reason = ATTENDS_IN_PARTS
    if unsupported_reason:
        return None, unsupported_reason
    if scheme.folds_values and runner.has_packed(index):
        return scheme.with_online_rotation(), "values are rotated at run time: the source's quantized weights are kept"
    if scheme.folds_values:
        unsupported_reason = (
            "the structure of this model's layers is unknown"
            if structure is None
            else structure.fold_unsupported_reason
        )
        if unsupported_reason:
            return scheme.with_online_rotation(), f"values are rotated at run time: {unsupported_reason}"
    return scheme, ""
