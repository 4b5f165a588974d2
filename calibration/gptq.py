"""GPTQ (Frantar et al., arXiv 2210.17323): a weight's rounding error is made up for by the weights not yet rounded.

For the inputs X of a Linear, rounding its weight W to Q costs || (W - Q) X^T ||^2 = sum over rows of d H d^T with the
Hessian H = E[x x^T]. Columns are rounded one after another; after column i the columns F that are still free move by
the step that is best for them (equations 2 and 3; the same for all rows, since H does not depend on the row):

    W_F  <-  W_F - (w_i - q_i) [H_FF^-1]_i,: / [H_FF^-1]_ii            (F contains i here)

`compensate` takes all the rows of H_FF^-1 that are needed from one triangular factor (the paper's step 3, see
`factorize`) and moves columns beyond a block of 128 once per block (its step 2).

Grids are static: scale and zero of every group of inputs are fixed before any column moves, by search
(`WeightGrid.searched`). So columns may be rounded in any order without a table of which group a column belongs to, and
the stored layout is AWQ's own.
The order is that of descending H_ii: inputs that matter most are rounded while all others can still make up for it.

Damping adds to each diagonal entry a share of itself, H + lambda diag(H), where the paper adds a share of the mean: so
the result does not depend on how inputs are scaled, and one large input, such as that of the tokens which attention
uses as a sink, does not keep all others from being made up for. An input that never occurs (H_ii = 0) is rounded to
nearest, and moves nothing.

As a calibration pass it rounds alone, or weights that AWQ scaled ("awq+gptq", table 9 of AWQ's paper).
Each distinct input's Hessian is factorized once, before anything is chosen: scales and grids are searched by what
compensation leaves of an error (`Factor.remaining`), and the factor for scaled weights is that factor scaled. Inputs
are rounded in the order of their second moments in the unscaled model, whatever the scales. What a narrow grid cuts off
of a weight is an error like any other, which later columns make up for. Weights of an expert with too few tokens of its
own are rounded to nearest.

Where the data of the quantized model is at hand too (`LayerWork.paired`), scales are searched as above, but what is
rounded is each Linear's weight corrected for everything quantized before it, and its grid and compensation are those of
the quantized model's inputs:

A Linear of the quantized model reads y where that of the source model reads x, and what it adds goes to a residual
stream that is off by r, the source's minus the quantized model's. So its rounded weight Q has to come close to

    minimize  sum over tokens of || r + W x - Q y ||^2  +  lambda sum_i (Q - W)_i^2 H_ii,     H = sum of y y^T,

where r counts for Linears that write to the stream. Without rounding the least is at

    W* = W + E (H + lambda diag(H))^-1,     E = sum of (r + W (x - y)) y^T

and rounding costs tr (Q - W*) (H + lambda diag(H)) (Q - W*)^T more: GPTQ's problem for W* and the quantized model's
inputs. Matching W x by one cross moment is Qronos (Zhang et al., arXiv 2505.11695) and, column by column, GPTAQ (Li et
al., arXiv 2504.02692); adding r is what keeps errors from growing from layer to layer. Measured: benchmarks/WEIGHTS.md.

Linears of a layer go one after another, each with the y that the rounded ones before it leave. A writer's r + W (x - y)
is the source model's stream behind it less the quantized model's with W y added, so that x is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvconvert.calibration.activations import MIN_EXPERT_TOKENS, input_points, point_of
from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.hessians import (
    ERROR_ROWS,
    FACTOR_BLOCK,
    Factor,
    HessianRecorder,
    SquareSum,
    block_rows,
    factorize,
)
from kvconvert.calibration.protocol import CalibrationPass, LayerJob, LayerWork, PassResult
from kvconvert.calibration.ranks import Ranks
from kvconvert.calibration.weight_grid import WeightGrid
from kvconvert.errors import NumericError
from kvconvert.kernels.compensation import round_columns_
from kvconvert.kernels.device import tf32_products
from kvconvert.methods.awq import KEPT_BITS


class Mismatch:
    """H and E of one input of the quantized model, or what E is a Linear's weight times.

    E is summed in float64, for the same reason as H in `SquareSum`.

    Args:
        rows: channels of what is missing: outputs of a Linear that writes to the residual stream, or the input's own.
        width: channels of the input.
        device: the device of all tensors.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.tokens = 0
        self._squares = SquareSum(width, device)
        self._cross = torch.zeros(rows, width, dtype=torch.float64, device=device)

    def add(self, missing: Tensor, y: Tensor) -> None:
        """Count tokens of the quantized model.

        Args:
            missing: r + W (x - y), [n, rows], of a Linear that writes to the stream, else x - y; float32.
            y: the input, float32 [n, in].
        """
        self._squares.add(y)
        for start, rows in block_rows(len(self._cross)):
            self._cross[start : start + rows] += missing[:, start : start + rows].T @ y
        self.tokens += len(y)

    def reduce(self, ranks: Ranks) -> None:
        """Sum over all ranks' tokens."""
        self.tokens = int(ranks.sum_(torch.tensor(self.tokens)))
        for block in (*self._squares.blocks.values(), self._cross):
            ranks.sum_(block)

    def moments(self) -> tuple[Tensor, Tensor]:
        """H per token, float32 [in, in], and the mean of missing y^T, float32 [rows, in]; the sums are given up."""
        cross = (self._cross / self.tokens).float()
        del self._cross
        return self._squares.mean(self.tokens, release=True), cross


@torch.no_grad()
def correction(target: Tensor, factor: Factor, block: int = FACTOR_BLOCK) -> Tensor:
    """E (H + lambda diag(H))^-1 by the factor of H, whose damping is lambda: float32 [out, in].

    Args:
        target: E, float32 [out, in].
        factor: U with U^T U = (H + lambda diag(H))^-1, inputs in its order.
        block: rows and columns that are worked on at a time.
    """
    size = len(factor.order)
    blocks = [(start, min(start + block, size)) for start in range(0, size, block)]
    target, found = target[:, factor.order], torch.zeros_like(target)
    for start, stop in blocks:
        rows = factor.matrix[start:stop, start:].triu()
        found[:, start:].addmm_(target[:, start:] @ rows.T, rows)
    result = torch.empty_like(found)
    result[:, factor.order] = found
    return result


DAMPING = 0.3
# Of the quantized model's inputs, and of the correction: benchmarks/WEIGHTS.md.
CORRECTED_DAMPING = 1.0
SEARCH_STRIDE = 2  # of tokens, where Hessians are for searches alone
_BLOCK = 128


def rounding_order(hessian: Tensor) -> Tensor:
    """Inputs by descending share of the output: int64 [in]."""
    return hessian.diagonal().argsort(descending=True, stable=True)


@torch.no_grad()
def compensate(weight: Tensor, factor: Factor, grid: WeightGrid) -> Tensor:
    """Round a weight to a grid such that later columns make up for the error of earlier ones.

    Args:
        weight: float32 [out, in].
        factor: the factor of the input's Hessian, in whose order columns are rounded; several Linears may share it.
        grid: the weight's grid.

    Returns:
        float32 [out, in], every entry a value of the grid.
    """
    order, columns = factor.order, weight.shape[1]
    free = weight.new_empty(columns, weight.shape[0], dtype=torch.float32)  # a column of the weight is contiguous
    for place, some in zip(free.split(_BLOCK), order.split(_BLOCK), strict=True):
        place.copy_(weight[:, some].T)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        rows, (scale, zero) = factor.matrix[start:stop], grid.of_columns(order[start:stop])
        errors = round_columns_(free[start:stop], scale, zero, rows[:, start:stop], 2**grid.bits - 1)
        free[stop:].addmm_(rows[:, stop:].T, errors, alpha=-1)
    result = torch.empty_like(weight, dtype=torch.float32)
    for place, some in zip(free.split(_BLOCK), order.split(_BLOCK), strict=True):
        result[:, some] = place.T
    return result


_CHUNK_WEIGHTS = 2**24


def outputs_at_once(outputs: int, inputs: int, device: str) -> int:
    """How many outputs of a weight are compensated together: none depends on another.

    On a CPU a number that bounds what is beside the Hessian; on a GPU all, where every column costs a few launches.
    """
    bounded = max(1, _CHUNK_WEIGHTS // inputs // ERROR_ROWS) * ERROR_ROWS
    return min(outputs, bounded) if device == "cpu" else outputs


class GptqPass(CalibrationPass):
    """Find codes by error compensation; the layer's Linears are left with the values that these codes stand for.

    Args:
        bits, group_size: bits and group size of the weights; `LayerWork.bits` says which Linears have other bits.
        awq: searches scales first; None takes the weights as they are.
    """

    name = "gptq"
    reads_random = True

    def __init__(self, bits: int, group_size: int, awq: AwqPass | None = None) -> None:
        self.bits, self.group_size, self.awq = bits, group_size, awq
        self._hessians: HessianRecorder | None = None
        self._factors: dict[str, Factor] = {}
        self._orders: dict[str, Tensor] = {}
        self._remaining: dict[str, Tensor] = {}
        self._inputs: dict[str | None, list[str]] = {}
        self._result = PassResult()

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> GptqPass | None:
        """The pass for a recipe whose weights are compensated."""
        weights = job.weights
        if not weights.compensates:
            return None
        awq = AwqPass(weights.bits, weights.group_size, compensated=True) if weights.scales else None
        return cls(weights.bits, weights.group_size, awq)

    @contextmanager
    def observe(self, work: LayerWork) -> Iterator[None]:
        """Record the Hessians, and what AWQ's search needs."""
        stride = 1 if work.paired is None else SEARCH_STRIDE
        self._hessians = HessianRecorder(work.structure, work.ranks, stride)
        with ExitStack() as hooks:
            if self.awq is not None:
                hooks.enter_context(self.awq.observe(work))
            hooks.enter_context(self._hessians.attached(work.layer))
            if work.paired is not None:
                points = [point for point in input_points(work.structure) if point not in work.structure.writers]
                streams = [after for _, after in work.structure.writers.values()]
                hooks.enter_context(work.paired.recording(work.layer, (*points, *streams)))
            yield

    def solve(self, work: LayerWork) -> None:
        """Factorize the Hessians, and search AWQ's scales."""
        self._inputs, self._remaining = self._by_input(work), {}
        for number, point in enumerate(filter(None, self._inputs)):
            owner = work.ranks.owner(number)
            if owner == work.ranks.rank:
                try:
                    hessian = self._hessians.of(point, release=True)
                    factor = factorize(hessian, rounding_order(hessian), DAMPING)
                except NumericError as error:
                    raise NumericError(f"GPTQ cannot quantize {work.name}.{point}: {error}") from error
                remaining = factor.remaining()
                self._orders[point] = factor.order
                if work.paired is None:
                    self._factors[point] = factor
            else:
                weight = work.layer.get_submodule(point).weight
                remaining = weight.new_empty(weight.shape[1], dtype=torch.float32)
            self._remaining[point] = work.ranks.broadcast_(remaining, owner)
        self._hessians = None
        if self.awq is not None:
            self.awq.remaining = self._remaining
            self.awq.solve(work)

    def apply(self, work: LayerWork) -> None:
        """Scale the layer, correct every Linear's weight, fix its grid, and replace it by values of that grid."""
        scales: dict[str, Tensor] = {}
        if self.awq is not None:
            self.awq.apply(work)
            scales = self.awq.input_scales
        losses: dict[str, dict[str, float]] = {}
        reasons = {} if self.awq is None else dict(self.awq.result().reasons)
        for name in self._inputs.pop(None, ()):
            weight = work.layer.get_submodule(name).weight.data
            self._set_grid(work, name, weight.new_ones(weight.shape[1]))
            weight.copy_(work.grids[name].round(weight))
            note = f"its expert saw fewer than {MIN_EXPERT_TOKENS} calibration tokens and is rounded to nearest"
            reasons[name] = "; ".join(filter(None, (reasons.get(name), note)))
        for number, (point, names) in enumerate(self._inputs.items()):
            factor = self._factors.pop(point, None)
            if work.paired is not None:
                factor = self._correct_(work, number, point, scales.get(names[0]))
            elif factor is not None and names[0] in scales:
                factor = factor.scaled_(scales[names[0]])
            for name in names if factor is not None else ():
                if self._keeps(work, name):
                    weight = work.layer.get_submodule(name).weight.data
                    weight.copy_(weight.to(work.dtype))  # corrected, and as it will be stored
                    continue
                self._set_grid(work, name, factor.remaining())
                losses[name] = self._compensate_(work.layer.get_submodule(name).weight.data, factor, work.grids[name])
            if work.paired is not None:  # the inputs of those that follow depend on them
                self._broadcast(work, number, names)
        if work.paired is None:
            for number, names in enumerate(self._inputs.values()):
                self._broadcast(work, number, names)
        losses = dict(work.ranks.gather_list(list(losses.items())))
        statistics: dict[str, Any] = {} if self.awq is None else dict(self.awq.result().statistics)
        self._result = PassResult(statistics=statistics | {"compensation": losses}, reasons=reasons)

    def _correct_(self, work: LayerWork, number: int, point: str, scale: Tensor | None) -> Factor | None:
        """Correct the weights that read an input; the factor of its Hessian, or None where another rank has it.

        Args:
            work: the layer, its Linears before these already rounded.
            number, point: the input's number and the module that reads it.
            scale: by which the input was divided since it was recorded, [in].
        """
        linear = work.layer.get_submodule(point)
        outputs, inputs = linear.weight.shape
        before, after = work.structure.writers.get(point, (None, None))
        mismatch = Mismatch(inputs if before is None else outputs, inputs, linear.weight.device)
        kept, names = (point, (point,)) if before is None else (after, (before, point))
        for wanted, found in work.paired.of(work.layer, kept, names):
            y = found[point]
            if before is not None:
                # Not by the module, whose hooks end this run.
                missing = wanted - found[before] - functional.linear(y, linear.weight, linear.bias)
            else:
                missing = (wanted if scale is None else wanted / scale) - y
            mismatch.add(missing.flatten(0, -2), y.flatten(0, -2))
        mismatch.reduce(work.ranks)
        if work.ranks.owner(number) != work.ranks.rank:
            return None
        hessian, cross = mismatch.moments()
        try:
            factor = factorize(hessian, self._orders.pop(point), CORRECTED_DAMPING)
        except NumericError as error:
            raise NumericError(f"GPTQ cannot quantize {work.name}.{point}: {error}") from error
        for name in self._inputs[point]:
            weight = work.layer.get_submodule(name).weight.data
            weight.add_(correction(weight @ cross if before is None else cross, factor))
        return factor

    def _keeps(self, work: LayerWork, name: str) -> bool:
        return work.bits.get(name, self.bits) == KEPT_BITS

    def _set_grid(self, work: LayerWork, name: str, costs: Tensor) -> None:
        weight = work.layer.get_submodule(name).weight.data
        try:
            work.grids[name] = WeightGrid.searched(weight, work.bits.get(name, self.bits), self.group_size, costs)
        except NumericError as error:
            raise NumericError(f"GPTQ cannot quantize {work.name}.{name}: {error}") from error

    def _broadcast(self, work: LayerWork, number: int, names: list[str]) -> None:
        """Weights and grids to the ranks that have not computed them."""
        owner = work.ranks.owner(number)
        for name in names:
            weight = work.layer.get_submodule(name).weight.data
            if self._keeps(work, name):
                work.ranks.broadcast_(weight, owner)
                continue
            if owner != work.ranks.rank:
                numbers = weight.new_empty(2, len(weight), weight.shape[1] // self.group_size, dtype=torch.float32)
                work.grids[name] = WeightGrid(*numbers, work.bits.get(name, self.bits), self.group_size)
            for tensor in (weight, work.grids[name].scale, work.grids[name].zero):
                work.ranks.broadcast_(tensor, owner)

    def result(self) -> PassResult:
        """AWQ's statistics, and for every compensated Linear its output's error when rounded and when compensated."""
        return self._result

    def _by_input(self, work: LayerWork) -> dict[str | None, list[str]]:
        """The layer's Linears by the input that they read; None for those of experts with too few tokens."""
        experts, found = work.structure.experts, {}
        for name in work.structure.linears:
            point = point_of(work.structure, name)
            routed = experts is not None and experts.owner(name) is not None
            enough = self._hessians.tokens.get(point, 0) >= (MIN_EXPERT_TOKENS if routed else 1)
            found.setdefault(point if enough else None, []).append(name)
        return found

    @staticmethod
    def _compensate_(weight: Tensor, factor: Factor, grid: WeightGrid) -> dict[str, float]:
        """Replace a weight by values of its grid, some outputs at a time; the error before and after."""
        losses = {"loss_before": 0.0, "loss_after": 0.0}
        size = outputs_at_once(*weight.shape, weight.device.type)
        with tf32_products(weight.device):
            for start in range(0, len(weight), size):
                rows = slice(start, start + size)
                part, some = weight[rows], grid.of_rows(rows)
                losses["loss_before"] += factor.output_error(part, some.round(part))
                found = compensate(part, factor, some)
                losses["loss_after"] += factor.output_error(part, found)
                part.copy_(found)
                found = None  # frees it before there is another
        return losses if factor.damping in (DAMPING, CORRECTED_DAMPING) else losses | {"damping": factor.damping}
