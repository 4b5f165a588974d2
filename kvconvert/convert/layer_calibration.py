"""One decoder layer of a calibration: read, run, searched, written; and what the working directory says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from kvconvert.bundle.manifest import ModuleCoverage
from kvconvert.cache import layer_format, rotation_kinds
from kvconvert.calibration.activations import count_routed, input_points
from kvconvert.calibration.protocol import CalibrationPass, LayerJob, LayerWork
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.calibration.weight_grid import WeightGrid
from kvconvert.convert.input_capture import CalibrationInputs, HiddenPart, HiddenStates, HiddenWriter
from kvconvert.convert.layer_runner import LayerRunner, PackedLinear, RunnerInputs
from kvconvert.convert.passes import make_passes, plan_of
from kvconvert.convert.workdir import LayerRecord, WorkDir
from kvconvert.errors import NumericError, counted
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight, pack_bits, quantize_weight
from kvconvert.kernels.quantizer import GroupRangeError
from kvconvert.methods import KVScheme
from kvconvert.methods.awq import KEPT_BITS, WeightsRecipe
from kvconvert.models.configuration import changing_rope
from kvconvert.models.experts import expert_modules
from kvconvert.models.source import float_dtype


def pairs_models(jobs: Sequence[LayerJob]) -> bool:
    """Whether passes compare the source model with the one quantized so far, whose data then runs along."""
    return all(job.weights.compensates and job.structure is not None and job.structure.writers for job in jobs)


@dataclass(frozen=True)
class LayerCalibration:
    """State that the layers of one calibration share.

    Attributes:
        runner: the runner of the model, which knows the layers' structure and was given `inputs`.
        directory: where results are written.
        jobs: the jobs of all layers, in order.
        inputs: calibration sequences.
        ranks: the processes that share them.
        executor: one thread, in which a layer is written while the next is computed, if its input is in memory; None
            writes it first.
        running: what was given to the executor and not waited for.
        watch: entered around the work of every pass.
        show: shows what is being done.
    """

    runner: LayerRunner
    directory: WorkDir
    jobs: Sequence[LayerJob]
    inputs: CalibrationInputs
    ranks: Ranks = ALONE
    executor: ThreadPoolExecutor | None = None
    running: list[Future[None]] = field(default_factory=list)
    watch: Callable[[CalibrationPass], AbstractContextManager[None]] = lambda calibration_pass: nullcontext()
    show: Callable[[str], None] = lambda stage: None

    def wait(self) -> None:
        """Return when nothing is being written any more; raises what writing has failed with."""
        while self.running:
            self.running.pop().result()

    @torch.no_grad()
    def run(self, index: int) -> None:
        """One decoder layer: read, run, searched, written. Its input is taken from the directory if it is there."""
        runner, directory, ranks, job = self.runner, self.directory, self.ranks, self.jobs[index]
        with ExitStack() as stack:
            writer = None
            passes = make_passes(job)
            self.show(f"layer {index}, reading")
            # Before the layer is read: where the input is gone, the layers before it are read again, one at a time.
            hidden, quantized = self._hidden_input(index) if passes else (None, None)
            work, dtypes = self._prepared(job, passes)
            if hidden is not None:
                own, text = hidden.shape[0], min(hidden.shape[0], self.inputs.text - hidden.first)
                observed = HiddenPart(hidden, 0, text, hidden.first)

                # Not `work` itself: in a cycle the layer would stay in memory until the collector happens to run.
                def replay(layer: nn.Module = work.layer) -> None:
                    for _ in runner.forward(layer, observed, index):
                        pass

                work.replay, work.first_sample, work.ranks = replay, hidden.first, ranks
                if self._paired:
                    work.paired = RunnerInputs(runner, index, work.structure, quantized, self._keep(work))
                if ranks.size > 1 and work.structure.experts is not None and job.weights.scales:
                    work.routed = count_routed(work.layer, work.structure, replay, ranks)
                if index + 1 < runner.num_layers:
                    writer = stack.enter_context(self._writing(index + 1))
                self.show(f"layer {index}, activations of {counted(own, 'sequence')}")
                with ExitStack() as hooks:
                    for calibration_pass in (made for made in passes if made.reads_random):
                        hooks.enter_context(calibration_pass.observe(work))
                    with ExitStack() as hooks_of_text:
                        for calibration_pass in (made for made in passes if not made.reads_random):
                            hooks_of_text.enter_context(calibration_pass.observe(work))
                        self._append(work.layer, observed, index, writer)
                    if text < own:
                        self._append(work.layer, HiddenPart(hidden, text, own, hidden.first + text), index, writer)
            for calibration_pass in passes:
                self.show(f"layer {index}, {calibration_pass.name.replace('_', ' ')}")
                with self.watch(calibration_pass):
                    calibration_pass.solve(work)
                    calibration_pass.apply(work)
            if work.paired is not None:
                work.paired.release()
            if ranks.is_first:
                made, commit = self._commit(job, work, dtypes, passes)
                # Inputs in files wait for the layer before them, so that a resume finds one or the other.
                self.wait()
                if self.executor is not None and ranks.size == 1 and _in_memory(writer):
                    self.running.append(self.executor.submit(commit))
                else:
                    commit()
            ranks.wait()
            if writer is not None and self._paired:
                made = made if ranks.is_first else directory.layer_tensors(index)
                self._append_quantized(work, index, quantized, writer, made)
            # Only now: a kill in between leaves the layer committed and its input in place, from which `_hidden_input`
            # goes on.
            if writer is not None:
                directory.commit_hidden(index + 1, writer)
        if writer is None:
            directory.drop_hidden(index)

    def _append(
        self, layer: nn.Module, inputs: HiddenStates | HiddenPart, index: int, writer: HiddenWriter | None
    ) -> None:
        """Run a layer, and write the next one's input if there is one."""
        for *_, output in self.runner.forward(layer, inputs, index):
            if writer is not None:
                writer.append(output)

    def _commit(
        self, job: LayerJob, work: LayerWork, dtypes: dict[str, torch.dtype], passes: list[CalibrationPass]
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return a layer's tensors by the checkpoint's names, and a function that writes them."""
        runner, index, scheme = self.runner, job.index, job.scheme
        results = {calibration_pass.name: calibration_pass.result() for calibration_pass in passes}
        reasons = {name: text for result in results.values() for name, text in result.reasons.items()}
        for result in results.values():
            if result.scheme:
                scheme = replace(scheme, **result.scheme)
        names, kept = runner.source.tensor_names, runner.packed(index)
        notes = [job.reason, *(note for result in results.values() for note in result.notes)]
        record = LayerRecord(
            index=index,
            modules=[
                module.stored_under(names.of_module(module.name))
                for module in layer_coverage(work, job.weights, reasons, kept)
            ],
            statistics={name: result.statistics for name, result in results.items() if result.statistics},
            reason="; ".join(filter(None, notes)),
            **resolved_fields(scheme, job),
        )
        plan: dict[str, Tensor] = {}
        for calibration_pass in passes:
            plan |= plan_of(calibration_pass, results[calibration_pass.name], index)
        passes.clear()  # and their samples, before weights are packed
        keep = self.directory.mapped().copy if runner.maps_experts(index) else None
        tensors = converted_tensors(work, dtypes, job.weights, kept, keep)
        tensors = {names.of_tensor(name): tensor for name, tensor in tensors.items()}
        return tensors, partial(self.directory.commit_layer, index, tensors, plan, record)

    def _prepared(self, job: LayerJob, passes: list[CalibrationPass]) -> tuple[LayerWork, dict[str, torch.dtype]]:
        """A layer after its passes' `prepare`, which leaves its function as it is, and its parameters' dtypes."""
        runner, inputs = self.runner, self.inputs
        layer, dtypes = runner.layer(job.index, self.directory.mapped())
        work = LayerWork(
            name=job.name,
            layer=layer,
            structure=job.structure,
            num_samples=inputs.text,
            seq_len=inputs.ids.shape[1],
            dtype=float_dtype(runner.source),
            cache=None
            if job.scheme is None or job.is_latent
            else layer_format(job.scheme.uncalibrated(), heads=job.heads, key_dim=job.key_dim, value_dim=job.value_dim),
            visual=inputs.visual,
            changing_rope=changing_rope(runner.config),
            bits=job.bits,
        )
        for calibration_pass in passes:
            calibration_pass.prepare(work)
        return work, dtypes

    @cached_property
    def _paired(self) -> bool:
        """See `pairs_models`."""
        return pairs_models(self.jobs)

    def _keep(self, work: LayerWork) -> Callable[[Tensor], Tensor]:
        """Where all tokens' inputs of a layer's Linears have room: on a GPU beside those of layers, or in files."""
        points = input_points(work.structure)
        width = sum(work.layer.get_submodule(point).weight.shape[1] for point in points)
        width += 2 * self.runner.config.hidden_size  # the residual stream
        if self.runner.has_room((work.num_samples, work.seq_len, width)):
            return lambda tensor: tensor
        mapped = self.directory.mapped()
        return lambda tensor: mapped.copy(tensor.cpu())

    def _states(self, index: int) -> HiddenStates:
        """The input of a layer: the source model's, and from the second layer on that of the one quantized so far."""
        return self.directory.hidden(index, self.runner.config.hidden_size, self.models(index))

    def models(self, index: int) -> int:
        """Whose inputs of a layer are kept: the source model's, and that of the one quantized so far."""
        return 2 if self._paired and index else 1

    def _parts(self, index: int) -> tuple[HiddenStates | HiddenPart, HiddenStates | HiddenPart]:
        """The source model's input of a layer, and the other's: the same where no layer precedes."""
        states = self._states(index)
        if self.models(index) == 1:
            return states, states
        count = states.shape[0] // 2
        return HiddenPart(states, 0, count, states.first), HiddenPart(states, count, 2 * count, states.first)

    def _append_quantized(
        self,
        work: LayerWork,
        index: int,
        inputs: HiddenStates | HiddenPart,
        writer: HiddenWriter,
        stored: Mapping[str, Tensor],
    ) -> None:
        """Run a layer as it is stored, so that a resumed calibration computes the same.

        From what its passes computed last, where what is stored is what they left.
        """
        names = self.runner.source.tensor_names
        for name, parameter in work.layer.state_dict().items():
            module, _, kind = name.rpartition(".")
            full = f"{work.name}.{module}".rstrip(".")
            packed = [stored.get(names.of_tensor(f"{full}.{field}")) for field in AwqWeight._fields]
            if kind == "weight" and all(field is not None for field in packed):
                value = dequantize_weight(AwqWeight(*(field.to(parameter.device) for field in packed)))
            else:
                value = stored[names.of_tensor(f"{full}.{kind}")]
            value = value.to(parameter.device, parameter.dtype)
            if work.paired is not None and not torch.equal(value, parameter):
                work.paired = None
            parameter.copy_(value)
        paired = work.paired or RunnerInputs(self.runner, index, work.structure, inputs, lambda tensor: tensor)
        for output in paired.outputs(work.layer):
            writer.append(output)

    def _hidden_input(self, index: int) -> tuple[HiddenStates | HiddenPart, HiddenStates | HiddenPart]:
        """The inputs of layer `index`, see `_parts`, recomputed from the latest ones that are still there.

        They run through the same layers as the first time, so that their bytes are the same.
        """
        runner, directory = self.runner, self.directory
        available = next((i for i in range(index, -1, -1) if self._states(i).exists()), None)
        if available is None:
            available, hidden = 0, self._states(0)
            own = range(hidden.first, hidden.first + hidden.shape[0])
            with self._writing(0) as writer:
                for number, sample in enumerate(runner.first_input()):
                    if number in own:
                        writer.append(sample)
                directory.commit_hidden(0, writer)
        for job in self.jobs[available:index]:
            work, _ = self._prepared(job, make_passes(job))
            hidden, quantized = self._parts(job.index)
            with self._writing(job.index + 1) as writer:
                self._append(work.layer, hidden, job.index, writer)
                if self._paired:
                    stored = directory.layer_tensors(job.index)
                    self._append_quantized(work, job.index, quantized, writer, stored)
                directory.commit_hidden(job.index + 1, writer)
            del work
        return self._parts(index)

    def _writing(self, index: int) -> AbstractContextManager[HiddenWriter]:
        """Write the input of layer `index`."""
        runner, width = self.runner, self.runner.config.hidden_size
        hold = runner.device if runner.has_room(self._states(index).shape) else None
        return self.directory.writing_hidden(index, width, hold, self.models(index))


def _in_memory(writer: HiddenWriter | None) -> bool:
    return writer is not None and writer.held is not None and not writer.has_file


def resolved_fields(scheme: KVScheme | None, job: LayerJob) -> dict[str, Any]:
    """Fields of a `LayerPlan` that describe the scheme."""
    if scheme is None:
        return {"kv": None}
    return {
        "kv": scheme.to_dict(),
        "head_dim": job.key_dim,
        "value_head_dim": job.value_dim if job.value_dim != job.key_dim else None,
        "num_key_value_heads": job.heads,
        "value_group_size": scheme.value_group_for(job.value_dim),
        **dict(zip(("rotation", "value_rotation"), rotation_kinds(scheme, job.key_dim, job.value_dim), strict=True)),
    }


def untouched_record(job: LayerJob) -> LayerRecord:
    """A layer of unknown structure: weights stay in the source, only the cache is described."""
    reason, searched = job.reason, job.search.searched(job.scheme)
    if job.scheme is not None and searched:
        note = f"{', '.join(searched)} are the scheme's own, for the structure of this model's layers is unknown"
        reason = "; ".join(filter(None, (reason, note)))
    return LayerRecord(index=job.index, modules=[], reason=reason, **resolved_fields(job.scheme, job))


def converted_tensors(
    work: LayerWork,
    dtypes: dict[str, torch.dtype],
    weights: WeightsRecipe,
    kept: Mapping[str, PackedLinear],
    keep: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The layer's tensors under the model's names, Linears packed unless the recipe keeps weights.

    Those of `kept` are the source's own codes. Everything else is stored in the source's dtype: exactly the source's
    bytes where no pass changed it. `keep` puts packed tensors elsewhere than in memory.
    """
    tensors = {}
    keep = keep or (lambda tensor: tensor)
    # The source's own form of experts is copied, which may be a fused one.
    copied = expert_modules(work.layer) if not weights.quantizes else ()
    for name, parameter in work.layer.state_dict().items():
        if name.startswith(copied):
            continue
        module, _, kind = name.rpartition(".")
        # The layer may own a tensor itself (Gemma 4's layer_scalar).
        full = f"{work.name}.{module}".rstrip(".")
        if kind == "weight" and module in kept:
            packed = kept[module].weight
            if not torch.equal(parameter, dequantize_weight(packed).to(parameter.device)):
                raise ValueError(f"a pass has changed {full}, whose codes are the source's")
            tensors.update({f"{full}.{field}": value for field, value in packed._asdict().items()})
        elif weights.quantizes and kind == "weight" and work.bits.get(module, KEPT_BITS) != KEPT_BITS:
            try:
                grid = work.grids.get(module)
                packed = (
                    quantize_weight(parameter, work.bits[module], weights.group_size)
                    if grid is None
                    else _pack(parameter, grid)
                )
            except GroupRangeError as error:
                raise NumericError(f"{full} cannot be quantized: {error}") from error
            tensors.update({f"{full}.{field}": keep(value.cpu()) for field, value in packed._asdict().items()})
        else:
            tensors[f"{full}.{kind}"] = parameter.to(dtypes[name]).cpu()
    return tensors


def _pack(weight: Tensor, grid: WeightGrid) -> AwqWeight:
    """A weight that consists of a grid's values, as it is stored."""
    return AwqWeight(
        qweight=pack_bits(grid.codes(weight).T, grid.bits),
        qzeros=pack_bits(grid.zero.T.to(torch.uint8), grid.bits),
        scales=grid.scale.T.to(torch.float16).contiguous(),
    )


def layer_coverage(
    work: LayerWork, weights: WeightsRecipe, reasons: dict[str, str], kept: Mapping[str, PackedLinear]
) -> list[ModuleCoverage]:
    """Coverage of every module of a layer that has parameters; `reasons` are the passes', by Linear."""
    copied = expert_modules(work.layer) if not weights.quantizes else ()
    coverage = [
        ModuleCoverage(
            name=f"{work.name}.{name}".rstrip("."), kind="other", method="kept", reason="the recipe keeps weights"
        )
        for name in copied
    ]
    for name, module in work.layer.named_modules():
        if name.startswith(copied) or not _is_stored(module):
            continue
        full, linear = f"{work.name}.{name}".rstrip("."), name in work.structure.linears
        if name in kept:
            packing = kept[name].packing
            coverage.append(
                ModuleCoverage(
                    name=full,
                    method=packing.method,
                    bits=packing.bits,
                    group_size=packing.group_size,
                    reason="quantized in the source, whose codes are kept",
                )
            )
        elif linear and weights.quantizes and work.bits[name] != KEPT_BITS:
            coverage.append(
                ModuleCoverage(
                    name=full,
                    method=weights.method,
                    bits=work.bits[name],
                    group_size=weights.group_size,
                    reason=reasons.get(name, ""),
                )
            )
        else:
            reason = work.structure.unquantized.get(name, "norms and other vectors keep the source's dtype")
            if linear:
                share = weights.quantizes and weights.kept_share
                reason = "16 bits: among those that lose most at 4" if share else "the recipe keeps weights"
            # A router is a matrix for engines too, which have to be told that it is not quantized.
            matrix = name in work.structure.unquantized and getattr(module, "weight", None) is not None
            kind = "linear" if matrix else module_kind(module)
            coverage.append(ModuleCoverage(name=full, kind=kind, method="kept", reason=reason))
    return coverage


def _is_stored(module: nn.Module) -> bool:
    """Whether a module has parameters, or matrices that checkpoints hold besides."""
    derived = module._non_persistent_buffers_set
    buffers = (buffer for name, buffer in module.named_buffers(recurse=False) if name not in derived)
    return any(True for _ in module.parameters(recurse=False)) or any(buffer.ndim > 1 for buffer in buffers)


def module_kind(module: nn.Module) -> str:
    """A module in the words of `ModuleCoverage.kind`."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "norm" if "norm" in type(module).__name__.lower() else "other"
