"""AWQ as a calibration pass (Lin et al., "Activation-aware Weight Quantization"): scales, then clips, by search.

`awq_scales` searches what each input channel is multiplied by, and `awq_clips` how far weights are clamped afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kvconvert.calibration.activations import MIN_EXPERT_TOKENS, ActivationRecorder
from kvconvert.calibration.awq_clips import Widths, apply_clips, search_clips
from kvconvert.calibration.awq_scales import apply_scales, reader_scales, search_scales
from kvconvert.calibration.matmul_precision import tf32_products
from kvconvert.calibration.protocol import CalibrationPass, LayerWork, PassRequest, PassResult
from kvconvert.calibration.value_cache import value_rounding
from kvconvert.errors import NumericError


def _short(label: str) -> str:
    """A label without the hundreds of readers that a layer of experts has."""
    readers = label.split(", ")
    return label if len(readers) <= 8 else f"{readers[0]} and {len(readers) - 1} more"


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


class AwqPass(CalibrationPass):
    """Scale search, then clip search; the layer's Linears are left ready for rounding to nearest.

    Args:
        bits, group_size: of the weights; `LayerWork.bits` says which Linears have other bits.
        quantize_values: see `search_scales`; None takes what the layer's own cache makes of values.
        clamps: whether weights are clamped to the clips; another pass may only want to know them.

    Attributes:
        input_scales: by Linear, what `apply` multiplied its input channels by.
        clips: see `search_clips`; from `apply` on.
        remaining: `ActivationStatistics.remaining` for weights that another pass will compensate, which sets it before
            `solve`.
    """

    name = "awq"

    def __init__(
        self,
        bits: int,
        group_size: int,
        quantize_values: Callable[[Tensor], Tensor] | None = None,
        clamps: bool = True,
    ) -> None:
        self.bits, self.group_size, self.quantize_values, self.clamps = bits, group_size, quantize_values, clamps
        self.input_scales: dict[str, Tensor] = {}
        self.clips: dict[str, tuple[Tensor, float, float]] = {}
        self.remaining: dict[str, Tensor] = {}
        self._recorder: ActivationRecorder | None = None
        self._result = PassResult()

    @classmethod
    def of(cls, request: PassRequest) -> AwqPass | None:
        """Of a recipe whose weights are searched."""
        weights = request.weights
        return cls(weights.bits, weights.group_size) if weights.method == "awq" else None

    @contextmanager
    def observe(self, work: LayerWork) -> Iterator[None]:
        """Record what the search needs of the Linears' and the attention's inputs."""
        self._recorder = ActivationRecorder(
            work.structure,
            work.num_samples,
            work.seq_len,
            self.group_size,
            work.first_sample,
            work.ranks,
            work.routed,
        )
        with self._recorder.attached(work.layer):
            yield

    def _widths(self, work: LayerWork) -> Widths:
        return dict.fromkeys(work.structure.linears, self.bits) | dict(work.bits)

    def solve(self, work: LayerWork) -> None:
        """Search the scales."""
        try:
            self._statistics = self._recorder.result()
            self._statistics.remaining = self.remaining
            self._recorder = None
            with tf32_products(_device(work.layer)):
                self._scalings, self._skipped = search_scales(
                    work.layer,
                    work.structure,
                    self._statistics,
                    self._widths(work),
                    self.group_size,
                    dtype=work.dtype,
                    quantize_values=self.quantize_values or value_rounding(work.cache),
                    ranks=work.ranks,
                )
        except NumericError as error:
            raise NumericError(f"AWQ cannot quantize {work.name}: {error}") from error

    def apply(self, work: LayerWork) -> None:
        """Scale the layer, search the clips on the scaled weights, and clamp them."""
        apply_scales(work.layer, work.structure, self._scalings, work.dtype)
        self.input_scales = reader_scales(self._scalings)
        with tf32_products(_device(work.layer)):
            clips = self.clips = search_clips(
                work.layer,
                work.structure,
                self._statistics,
                self.input_scales,
                self._widths(work),
                self.group_size,
                work.ranks,
            )
        if self.clamps:
            apply_clips(work.layer, clips, self.group_size)
        statistics = {
            "scales": {
                _short(s.label): {"ratio": s.ratio, "loss_before": s.loss_before, "loss_after": s.loss_after}
                for s in self._scalings
            },
            "clips": {name: {"loss_before": before, "loss_after": after} for name, (_, before, after) in clips.items()},
        }
        reasons: dict[str, str] = {}
        for label, reason in self._skipped.items():
            for linear in re.split(" -> |, ", label):
                if linear in work.structure.linears:
                    reasons[linear] = f"AWQ scaling {_short(label)} skipped: {reason}"
        experts = work.structure.experts
        if experts is not None:
            statistics["tokens_per_expert"] = list(self._statistics.routed)
            for number, count in enumerate(self._statistics.routed):
                if count < MIN_EXPERT_TOKENS:
                    note = (
                        f"its expert saw fewer than {MIN_EXPERT_TOKENS} calibration tokens and was calibrated on those "
                        "of the whole layer"
                    )
                    for linear in experts.linears(number):
                        reasons[linear] = "; ".join(filter(None, (reasons.get(linear), note)))
        self._statistics = None  # hundreds of megabytes that later passes do not need
        self._result = PassResult(statistics=statistics, reasons=reasons)

    def result(self) -> PassResult:
        """Chosen ratio and loss of every scale, loss of every clip, and the pairs that were skipped."""
        return self._result
