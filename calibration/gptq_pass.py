"""GPTQ as a calibration pass: alone, or on weights that AWQ scaled ("awq+gptq", table 9 of AWQ's paper).

After AWQ's scales are in the weights, the Hessians of the unscaled inputs are divided by them, so one run over the data
serves both. AWQ's clips, which both search, only bound the grids: weights are not clamped, and what a clip costs is an
error like any other, which later columns make up for. Weights of an expert with too few tokens of its own are rounded
to nearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from kvconvert.calibration.activations import MIN_EXPERT_TOKENS, ActivationStatistics, point_of
from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.awq_clips import search_clips
from kvconvert.calibration.gptq import DAMPING, compensate_by, rounding_order
from kvconvert.calibration.hessian_factor import ERROR_ROWS, Factor, factorize
from kvconvert.calibration.hessians import HessianRecorder
from kvconvert.calibration.protocol import CalibrationPass, LayerWork, PassRequest, PassResult
from kvconvert.calibration.weight_grid import WeightGrid
from kvconvert.errors import NumericError

_CHUNK_WEIGHTS = 2**24


def outputs_at_once(outputs: int, inputs: int, device: str) -> int:
    """How many outputs of a weight are compensated together: none depends on another.

    On a CPU so many as bounds what is beside the Hessian; on a GPU all, where every column costs a few launches.
    """
    bounded = max(1, _CHUNK_WEIGHTS // inputs // ERROR_ROWS) * ERROR_ROWS
    return min(outputs, bounded) if device == "cpu" else outputs


class GptqPass(CalibrationPass):
    """Find codes by error compensation; the layer's Linears are left with the values that these codes stand for.

    Args:
        bits, group_size: of the weights; `LayerWork.bits` says which Linears have other bits.
        awq: searches scales and clips first; None takes the weights as they are and searches clips alone.
    """

    name = "gptq"

    def __init__(self, bits: int, group_size: int, awq: AwqPass | None = None) -> None:
        self.bits, self.group_size, self.awq = bits, group_size, awq
        self._hessians: HessianRecorder | None = None
        self._last: tuple[str, Factor] | None = None
        self._result = PassResult()

    @classmethod
    def of(cls, request: PassRequest) -> GptqPass | None:
        """Of a recipe whose weights are compensated."""
        weights = request.weights
        if not weights.compensates:
            return None
        awq = AwqPass(weights.bits, weights.group_size, clamps=False) if weights.scales else None
        return cls(weights.bits, weights.group_size, awq)

    @contextmanager
    def observe(self, work: LayerWork) -> Iterator[None]:
        """Record the Hessians, and what AWQ's search needs."""
        self._hessians = HessianRecorder(work.structure, work.ranks)
        with ExitStack() as hooks:
            if self.awq is not None:
                hooks.enter_context(self.awq.observe(work))
            hooks.enter_context(self._hessians.attached(work.layer))
            yield

    def solve(self, work: LayerWork) -> None:
        """Search AWQ's scales."""
        if self.awq is not None:
            self.awq.solve(work)

    def apply(self, work: LayerWork) -> None:
        """Scale the layer, fix every Linear's grid, and replace its weight by values of that grid."""
        scales: dict[str, Tensor] = {}
        if self.awq is not None:
            self.awq.apply(work)
            scales, clips = self.awq.input_scales, self.awq.clips
        else:
            clips = self._search_clips(work)
        losses: dict[str, dict[str, float]] = {}
        reasons = {} if self.awq is None else dict(self.awq.result().reasons)
        for number, name in self._by_input(work):
            linear = work.layer.get_submodule(name)
            bound = clips[name][0] if name in clips else None
            try:
                grid = WeightGrid.of(linear.weight, work.bits.get(name, self.bits), self.group_size, bound)
                if self._has_tokens(work, name):
                    if work.ranks.owner(number) == work.ranks.rank:
                        losses[name] = self._compensate_(work, name, grid, scales.get(name))
                else:
                    linear.weight.data.copy_(grid.round(linear.weight))
                    note = f"its expert saw fewer than {MIN_EXPERT_TOKENS} calibration tokens and is rounded to nearest"
                    reasons[name] = "; ".join(filter(None, (reasons.get(name), note)))
            except NumericError as error:
                raise NumericError(f"GPTQ cannot quantize {work.name}.{name}: {error}") from error
            work.grids[name] = grid
        losses = dict(work.ranks.gather_list(list(losses.items())))
        for number, name in enumerate(work.structure.linears):
            if name in losses:
                work.ranks.broadcast_(work.layer.get_submodule(name).weight.data, work.ranks.owner(number))
        statistics: dict[str, Any] = {} if self.awq is None else dict(self.awq.result().statistics)
        self._result = PassResult(statistics=statistics | {"compensation": losses}, reasons=reasons)
        self._hessians = self._last = None

    def result(self) -> PassResult:
        """AWQ's statistics, and for every compensated Linear its output's error when rounded and when compensated."""
        return self._result

    def _has_tokens(self, work: LayerWork, name: str) -> bool:
        count = self._hessians.tokens.get(point_of(work.structure, name), 0)
        experts = work.structure.experts
        routed = experts is not None and experts.owner(name) is not None
        return count >= (MIN_EXPERT_TOKENS if routed else 1)

    def _search_clips(self, work: LayerWork) -> dict[str, tuple[Tensor, float, float]]:
        points = {point_of(work.structure, name) for name in work.structure.linears if self._has_tokens(work, name)}
        moments = {point: self._hessians.diagonal_blocks(point, self.group_size) for point in points}
        return search_clips(
            work.layer,
            work.structure,
            ActivationStatistics(second_moment=moments),
            {},
            dict.fromkeys(work.structure.linears, self.bits) | dict(work.bits),
            self.group_size,
            work.ranks,
        )

    @staticmethod
    def _by_input(work: LayerWork) -> list[tuple[int, str]]:
        """The layer's Linears with their numbers, those that read the same input one after another."""
        linears = list(enumerate(work.structure.linears))
        points = [point_of(work.structure, name) for _, name in linears]
        return sorted(linears, key=lambda linear: points.index(points[linear[0]]))

    def _factor(self, work: LayerWork, name: str, input_scale: Tensor | None) -> Factor:
        """Of the Hessian of a Linear's input, kept until another one is asked for: it is the largest thing here."""
        point = point_of(work.structure, name)
        if self._last is None or self._last[0] != point:
            self._last = None  # frees it before there is another
            hessian = self._hessians.of(point, input_scale, release=True)
            self._last = point, factorize(hessian, rounding_order(hessian), DAMPING)
        return self._last[1]

    def _compensate_(
        self, work: LayerWork, name: str, grid: WeightGrid, input_scale: Tensor | None
    ) -> dict[str, float]:
        """Replace a Linear's weight by values of its grid, some outputs at a time; the error before and after."""
        factor, weight = self._factor(work, name, input_scale), work.layer.get_submodule(name).weight.data
        losses = {"loss_before": 0.0, "loss_after": 0.0}
        size = outputs_at_once(*weight.shape, weight.device.type)
        for start in range(0, len(weight), size):
            rows = slice(start, start + size)
            part, some = weight[rows], grid.of_rows(rows)
            losses["loss_before"] += factor.output_error(part, some.round(part))
            found = compensate_by(part, factor, some)
            losses["loss_after"] += factor.output_error(part, found)
            part.copy_(found)
            found = None  # frees it before there is another
        return losses if factor.damping == DAMPING else losses | {"damping": factor.damping}
