"""One decoder layer of a calibration: read, run, searched, written."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from kvconvert.cache.format import CacheFormat
from kvconvert.calibration.activations import count_routed
from kvconvert.calibration.protocol import CalibrationPass, LayerWork
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.convert.hidden_states import HiddenStates, HiddenWriter
from kvconvert.convert.input_capture import CalibrationInputs
from kvconvert.convert.layer_records import converted_tensors, layer_coverage, layer_scheme, resolved_fields
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.passes import make_passes, plan_of
from kvconvert.convert.recipe import Recipe
from kvconvert.convert.work_records import LayerRecord
from kvconvert.convert.workdir import WorkDir
from kvconvert.models.layer_types import changing_rope
from kvconvert.models.source import float_dtype


@torch.no_grad()
def calibrate_layer(
    runner: LayerRunner,
    directory: WorkDir,
    recipe: Recipe,
    inputs: CalibrationInputs,
    index: int,
    ranks: Ranks = ALONE,
) -> None:
    """One decoder layer: read, run, searched, written. Its input is taken from the directory if it is there."""
    with ExitStack() as stack:
        writer = None
        passes = _passes(runner, recipe, index)
        # Before the layer is read: where the input is gone, the layers before it are read again, one at a time.
        hidden = _hidden_input(runner, directory, recipe, inputs, index) if passes else None
        work, dtypes = _prepared(runner, recipe, inputs, index, passes, directory)
        if hidden is not None:
            # Not `work` itself: in a cycle the layer would stay in memory until the collector happens to run.
            def replay(layer: nn.Module = work.layer) -> None:
                for _ in runner.forward(layer, hidden, index):
                    pass

            work.replay, work.first_sample, work.ranks = replay, hidden.first, ranks
            if ranks.size > 1 and work.structure.experts is not None and recipe.weights.scales:
                work.routed = count_routed(work.layer, work.structure, replay, ranks)
            if index + 1 < runner.num_layers:
                writer = stack.enter_context(_writing(runner, directory, index + 1))
            with ExitStack() as hooks:
                for calibration_pass in passes:
                    hooks.enter_context(calibration_pass.observe(work))
                for *_, output in runner.forward(work.layer, hidden, index):
                    if writer is not None:
                        writer.append(output)
        for calibration_pass in passes:
            calibration_pass.solve(work)
            calibration_pass.apply(work)
        if ranks.is_first:
            _commit(runner, directory, recipe, work, dtypes, passes, index)
        ranks.wait()
        # Only now: a kill in between leaves the layer committed and its input in place, from which `_hidden_input`
        # goes on.
        if writer is not None:
            directory.commit_hidden(index + 1, writer)
    if writer is None:
        directory.drop_hidden(index)


def _commit(
    runner: LayerRunner,
    directory: WorkDir,
    recipe: Recipe,
    work: LayerWork,
    dtypes: dict[str, torch.dtype],
    passes: list[CalibrationPass],
    index: int,
) -> None:
    """Write what the passes made of a layer."""
    scheme, reason = layer_scheme(runner, recipe, index)
    results = {calibration_pass.name: calibration_pass.result() for calibration_pass in passes}
    reasons = {name: text for result in results.values() for name, text in result.reasons.items()}
    for result in results.values():
        if result.scheme:
            scheme = replace(scheme, **result.scheme)
    names, kept = runner.source.tensor_names, runner.packed(index)
    notes = [reason, *(note for result in results.values() for note in result.notes)]
    record = LayerRecord(
        index=index,
        modules=[names.locate(module) for module in layer_coverage(work, recipe.weights, reasons, kept)],
        statistics={name: result.statistics for name, result in results.items() if result.statistics},
        reason="; ".join(filter(None, notes)),
        **resolved_fields(scheme, work.structure.head_dim, work.structure.num_key_value_heads),
    )
    plan: dict[str, Tensor] = {}
    for calibration_pass in passes:
        plan |= plan_of(calibration_pass, results[calibration_pass.name], index)
    passes.clear()  # and their samples, before weights are packed
    keep = directory.mapped().copy if runner.maps_experts(index) else None
    tensors = converted_tensors(work, dtypes, recipe.weights, kept, keep)
    directory.commit_layer(index, {names.of_tensor(name): t for name, t in tensors.items()}, plan, record)


def _passes(runner: LayerRunner, recipe: Recipe, index: int) -> list[CalibrationPass]:
    """New passes for a layer, in order."""
    scheme, _ = layer_scheme(runner, recipe, index)
    return make_passes(recipe.weights, scheme, recipe.calibration_of(index), runner.structure(index))


def _prepared(
    runner: LayerRunner,
    recipe: Recipe,
    inputs: CalibrationInputs,
    index: int,
    passes: list[CalibrationPass],
    directory: WorkDir,
) -> tuple[LayerWork, dict[str, torch.dtype]]:
    """A layer after its passes' `prepare`, which leaves its function as it is, and the dtypes of its parameters."""
    structure = runner.structure(index)
    scheme, _ = layer_scheme(runner, recipe, index)
    layer, dtypes = runner.layer(index, directory.mapped())
    work = LayerWork(
        name=runner.layer_name(index),
        layer=layer,
        structure=structure,
        num_samples=inputs.ids.shape[0],
        seq_len=inputs.ids.shape[1],
        dtype=float_dtype(runner.source),
        cache=None
        if scheme is None
        else CacheFormat.of(scheme.uncalibrated(), heads=structure.num_key_value_heads, key_dim=structure.head_dim),
        visual=inputs.visual,
        changing_rope=changing_rope(runner.config),
        bits={
            linear: recipe.weights.bits_of(f"{runner.layer_name(index)}.{linear}", index)
            for linear in structure.linears
        },
    )
    for calibration_pass in passes:
        calibration_pass.prepare(work)
    return work, dtypes


def _hidden_input(
    runner: LayerRunner, directory: WorkDir, recipe: Recipe, inputs: CalibrationInputs, index: int
) -> HiddenStates:
    """The input of layer `index`, recomputed from the latest input that is still there.

    It runs through the same prepared layers as the first time, so that its bytes are the same.
    """
    width = runner.config.hidden_size
    available = next((i for i in range(index, -1, -1) if directory.hidden(i, width).exists()), None)
    if available is None:
        available, hidden = 0, directory.hidden(0, width)
        own = range(hidden.first, hidden.first + hidden.shape[0])
        with _writing(runner, directory, 0) as writer:
            for number, sample in enumerate(runner.first_input()):
                if number in own:
                    writer.append(sample)
            directory.commit_hidden(0, writer)
    for i in range(available, index):
        work, _ = _prepared(runner, recipe, inputs, i, _passes(runner, recipe, i), directory)
        with _writing(runner, directory, i + 1) as writer:
            for *_, output in runner.forward(work.layer, directory.hidden(i, width), i):
                writer.append(output)
            directory.commit_hidden(i + 1, writer)
        del work
    return directory.hidden(index, width)


def _writing(runner: LayerRunner, directory: WorkDir, index: int) -> AbstractContextManager[HiddenWriter]:
    """Write the input of layer `index`."""
    width = runner.config.hidden_size
    hold = runner.device if runner.has_room(directory.hidden(index, width).shape) else None
    return directory.writing_hidden(index, width, hold)
