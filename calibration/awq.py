"""AWQ as a calibration pass (Lin et al., "Activation-aware Weight Quantization"): scales, then clips, by search.

`awq_scales` searches what each input channel is multiplied by, and `awq_scaling.search_clips` how far weights are
clamped afterwards.
Each looks at a part of the layer, so that the whole can come out worse than plain rounding. A layer therefore keeps
what gives its output the least error: rounding alone, clips, or scales and clips; of equal ones the first.

The error is that of the whole decoder layer's output on some of the calibration sequences, rounded as it will be
stored, as the next layer reads it. That is through a norm N, for which the layer's own first one stands (its weights
undone by no scale):

    sum over tokens t of || N(y_t) - N(y*_t) ||^2 / sum over tokens t of || N(y*_t) ||^2      (y* without any rounding)

Without the norm it would be the error of the attention sink, whose output is up to 1,000 times as large as that of
other tokens, or of a few large channels that norms make small again: benchmarks/WEIGHTS.md.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvconvert.calibration.activations import (
    MIN_EXPERT_TOKENS,
    ActivationRecorder,
    ActivationStatistics,
    same_argument_chunks,
)
from kvconvert.calibration.awq_scales import search_scales
from kvconvert.calibration.awq_scaling import (
    Scaling,
    Widths,
    apply_clips,
    apply_scales,
    reader_scales,
    scaled_modules,
    scaled_parameters,
    search_clips,
    while_computing,
    width_of,
)
from kvconvert.calibration.protocol import CalibrationPass, LayerJob, LayerWork, PassResult
from kvconvert.errors import NumericError
from kvconvert.kernels.device import tf32_products
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.models.structure import LayerStructure

SAMPLE_TOKENS = 1024
_CHUNK_WEIGHTS = 2**22  # rounded at once


@dataclass(frozen=True)
class LayerSample:
    """Whole sequences that went through a layer.

    Attributes:
        inputs: float32 [n, T, hidden]; outputs: the same, N of the unquantized layer's.
        arguments: the layer's others, for each sequence, as a batch of one.
        norm: N.
    """

    inputs: Tensor
    outputs: Tensor
    arguments: Sequence[dict[str, Any]]
    norm: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def error(self, layer: nn.Module) -> float:
        """The error, as above, of the layer's output with the parameters that it has now."""
        errors = []
        for some in same_argument_chunks(self.arguments, len(self.inputs)):
            output = self.norm(_tensor(layer(self.inputs[some], **self.arguments[some.start])))
            errors.append((output - self.outputs[some]).square_().sum(dtype=torch.float64))
        return float(torch.stack(errors).sum() / self.outputs.square().sum(dtype=torch.float64))


class LayerSampler:
    """Takes a `LayerSample` of at most `SAMPLE_TOKENS` tokens, or one sequence, while calibration data runs.

    The sequences are evenly spaced, and lie between those on which `ActivationRecorder` compares scales of attention.

    Args:
        work: the layer.
    """

    def __init__(self, work: LayerWork) -> None:
        count = min(work.num_samples, max(1, SAMPLE_TOKENS // work.seq_len))
        self._wanted = {(4 * i + 1) * work.num_samples // (4 * count) for i in range(count)}
        self._seen, self._ranks, self._norm = work.first_sample, work.ranks, _first_norm(work)
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._arguments: list[dict[str, Any]] = []

    @contextmanager
    def attached(self, layer: nn.Module) -> Iterator[None]:
        """A hook on the layer, removed on exit; then every rank has the sample of all."""
        with ExitStack() as hooks:
            hooks.callback(layer.register_forward_hook(self._hook, with_kwargs=True).remove)
            yield
        self._inputs, self._outputs = (self._ranks.gather_list(tensors) for tensors in (self._inputs, self._outputs))
        self._arguments = self._ranks.gather_list(self._arguments)

    def _hook(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        keep = [i for i in range(hidden.shape[0]) if self._seen + i in self._wanted]
        self._seen += hidden.shape[0]
        self._inputs.append(hidden[keep].detach().float())
        self._outputs.append(self._norm(_tensor(output)[keep].detach().float()))
        self._arguments += [kwargs] * len(keep)

    def result(self) -> LayerSample:
        """The sample."""
        return LayerSample(torch.cat(self._inputs), torch.cat(self._outputs), self._arguments, self._norm)


def _first_norm(work: LayerWork) -> Callable[[Tensor], Tensor]:
    """A copy of the norm that the layer's input goes through, or one without weights where there is none."""
    for group in work.structure.norm_groups:
        if group.norm is not None and work.structure.attention in group.inspected:
            return copy.deepcopy(work.layer.get_submodule(group.norm))
    return lambda hidden: nn.functional.rms_norm(hidden, hidden.shape[-1:])


@contextmanager
def quantized(
    layer: nn.Module,
    structure: LayerStructure,
    scalings: Sequence[Scaling],
    clips: Mapping[str, Tensor],
    bits: Widths,
    group_size: int,
    dtype: torch.dtype,
) -> Iterator[None]:
    """Within the block a layer computes with the parameters that would be stored; it keeps its own.

    Args:
        layer: decoder layer in float32.
        structure: its names.
        scalings: by which it is scaled first.
        clips: bounds to which scaled weights are clamped then, by Linear.
        bits, group_size: to which they are rounded in the end.
        dtype: in which everything else is stored.

    Raises:
        GroupRangeError: weights leave the range of fp16; where a Linear computes.
    """

    def stored(name: str) -> dict[str, Tensor]:
        found = scaled_parameters(layer, structure, name, scalings, dtype)
        quantized = {}
        if name in structure.linears:
            weight = found.pop("weight")
            quantized["weight"] = _rounded(weight, clips.get(name), width_of(bits, name), group_size)
        return quantized | {kind: tensor.to(dtype).float() for kind, tensor in found.items()}

    with ExitStack() as stack:
        for name in dict.fromkeys((*structure.linears, *scaled_modules(scalings))):
            while_computing(stack, layer.get_submodule(name), lambda name=name: stored(name))
        yield


def _rounded(weight: Tensor, clip: Tensor | None, bits: int, group_size: int) -> Tensor:
    """`fake_quantize_weight`, some rows at a time."""
    found, size = torch.empty_like(weight), max(1, _CHUNK_WEIGHTS // weight.shape[1])
    for start in range(0, len(weight), size):
        rows = slice(start, start + size)
        found[rows] = fake_quantize_weight(weight[rows], bits, group_size, None if clip is None else clip[rows])
    return found


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _short(label: str) -> str:
    """A label without the hundreds of readers that a layer of experts has."""
    readers = label.split(", ")
    return label if len(readers) <= 8 else f"{readers[0]} and {len(readers) - 1} more"


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


class _Candidate(NamedTuple):
    """Scales and clips that a layer may keep; `clips` as `search_clips` finds them."""

    name: str
    scalings: list[Scaling]
    clips: dict[str, tuple[Tensor, float, float]]


class AwqPass(CalibrationPass):
    """Scale search, clip search, and what of both to keep; the layer's Linears are left ready for rounding to nearest.

    Args:
        bits, group_size: bits and group size of the weights; `LayerWork.bits` says which Linears have other bits.
        compensated: another pass rounds the weights: it gets all scales, and no clips are searched.

    Attributes:
        input_scales: by Linear, what `apply` multiplies its input channels by; from `solve` on.
        clips: see `search_clips`; from `solve` on.
        remaining: `ActivationStatistics.remaining` for weights that another pass will compensate, which sets it before
            `solve`.
    """

    name = "awq"

    def __init__(self, bits: int, group_size: int, compensated: bool = False) -> None:
        self.bits, self.group_size, self.compensated = bits, group_size, compensated
        self.input_scales: dict[str, Tensor] = {}
        self.clips: dict[str, tuple[Tensor, float, float]] = {}
        self.remaining: dict[str, Tensor] = {}
        self._recorder: ActivationRecorder | None = None
        self._sampler: LayerSampler | None = None
        self._result = PassResult()

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> AwqPass | None:
        """The pass for a recipe whose weights are searched."""
        weights = job.weights
        return cls(weights.bits, weights.group_size) if weights.method == "awq" else None

    @contextmanager
    def observe(self, work: LayerWork) -> Iterator[None]:
        """Record what the search needs of the Linears' and the attention's inputs."""
        self._recorder = ActivationRecorder(
            work.structure,
            work.num_samples,
            work.seq_len,
            None if self.compensated else self.group_size,
            work.first_sample,
            work.ranks,
            work.routed,
        )
        with ExitStack() as hooks:
            hooks.enter_context(self._recorder.attached(work.layer))
            if not self.compensated:
                self._sampler = LayerSampler(work)
                hooks.enter_context(self._sampler.attached(work.layer))
            yield

    def _widths(self, work: LayerWork) -> Widths:
        return dict.fromkeys(work.structure.linears, self.bits) | dict(work.bits)

    def solve(self, work: LayerWork) -> None:
        """Search scales, clips with and without them, and choose."""
        try:
            observed = self._recorder.result()
            observed.remaining = self.remaining
            self._recorder = None
            with tf32_products(_device(work.layer)):
                scalings, skipped = search_scales(
                    work.layer,
                    work.structure,
                    observed,
                    self._widths(work),
                    self.group_size,
                    dtype=work.dtype,
                    quantize_values=value_rounding(work.cache),
                    ranks=work.ranks,
                )
                clips = {} if self.compensated else self._clips(work, observed, scalings)
                kept, errors = _Candidate("scales and clips", scalings, clips), {}
                if self._sampler is not None:
                    clipped = _Candidate("clips", [], self._clips(work, observed, []))
                    sample = self._sampler.result()
                    self._sampler = None
                    kept, errors = self._choose(work, sample, [_Candidate("rounding", [], {}), clipped, kept])
        except NumericError as error:
            raise NumericError(f"AWQ cannot quantize {work.name}: {error}") from error
        self._scalings, self.clips = kept.scalings, kept.clips
        self.input_scales = reader_scales(kept.scalings)
        self._result = self._found(work, observed, scalings, skipped)
        if errors:
            self._result.statistics |= {"layer_error": errors, "kept": kept.name}

    def _clips(
        self, work: LayerWork, observed: ActivationStatistics, scalings: list[Scaling]
    ) -> dict[str, tuple[Tensor, float, float]]:
        return search_clips(
            work.layer, work.structure, observed, scalings, self._widths(work), self.group_size, work.ranks
        )

    def _choose(
        self, work: LayerWork, sample: LayerSample, candidates: list[_Candidate]
    ) -> tuple[_Candidate, dict[str, float]]:
        """The first of the candidates with the least error, and the errors of all."""

        def error(candidate: _Candidate) -> float:
            clips = {name: bound for name, (bound, *_) in candidate.clips.items()}
            with quantized(
                work.layer,
                work.structure,
                candidate.scalings,
                clips,
                self._widths(work),
                self.group_size,
                work.dtype,
            ):
                return sample.error(work.layer)

        errors = work.ranks.share(error, candidates)
        best = candidates[errors.index(min(errors))]
        return best, {candidate.name: found for candidate, found in zip(candidates, errors, strict=True)}

    def apply(self, work: LayerWork) -> None:
        """Scale the layer and clamp its weights."""
        apply_scales(work.layer, work.structure, self._scalings, work.dtype)
        apply_clips(work.layer, self.clips, self.group_size)

    def _found(
        self, work: LayerWork, observed: ActivationStatistics, scalings: list[Scaling], skipped: dict[str, str]
    ) -> PassResult:
        statistics = {
            "scales": {
                _short(s.label): {"ratio": s.ratio, "loss_before": s.loss_before, "loss_after": s.loss_after}
                for s in scalings
            },
            "clips": {
                name: {"loss_before": before, "loss_after": after} for name, (_, before, after) in self.clips.items()
            },
        }
        reasons: dict[str, str] = {}
        for label, reason in skipped.items():
            for linear in re.split(" -> |, ", label):
                if linear in work.structure.linears:
                    reasons[linear] = f"AWQ scaling {_short(label)} skipped: {reason}"
        experts = work.structure.experts
        if experts is not None:
            statistics["tokens_per_expert"] = list(observed.routed)
            for number, count in enumerate(observed.routed):
                if count < MIN_EXPERT_TOKENS:
                    note = (
                        f"its expert saw fewer than {MIN_EXPERT_TOKENS} calibration tokens and was calibrated on those "
                        "of the whole layer"
                    )
                    for linear in experts.linears(number):
                        reasons[linear] = "; ".join(filter(None, (reasons.get(linear), note)))
        return PassResult(statistics=statistics, reasons=reasons)

    def result(self) -> PassResult:
        """Ratio and loss of every scale found, loss of every clip kept, skipped pairs, errors of the finished layer."""
        return self._result


def value_rounding(cache: LayerFormat | None) -> Callable[[Tensor], Tensor] | None:
    """How a cache rounds values [..., head_dim]; None where scaling channels changes nothing about their error.

    That is so where values are not quantized, and for spans and static pages, which have one scale per channel.
    """
    if cache is None or cache.span is not None or cache.values.static or cache.values.bits == 16:
        return None
    f = cache.values
    return lambda values: simulate_value_cache(values, f.bits, f.group_size, f.clip_ratio, cache.rotations.values)


def simulate_value_cache(values: Tensor, bits: int, group_size: int, clip_ratio: float, rotate: bool) -> Tensor:
    """Values [..., head_dim] as read back from a cache: quantized per token over groups of channels, float32.

    Args:
        bits, group_size, clip_ratio: as in a KV scheme; 16 bits leave values as they are.
        rotate: rotate before and back after quantizing (schemes that rotate at run time; folded weights give rotated
            values).

    Raises:
        GroupRangeError: values beyond fp16.
    """
    if bits == 16:
        return values
    stored = hadamard_transform(values) if rotate else values
    quantized = quantize(stored, bits, group_size, dim=-1, clip_ratio=clip_ratio)
    read = dequantize(*quantized, group_size, dim=-1)
    return hadamard_transform(read, inverse=True) if rotate else read
