"""Weights moved, before they are rounded, to where they make up for what was quantized before them.

A Linear of the quantized model reads y where that of the source model reads x, and what it adds goes to a residual
stream that is off by r, the source's minus the quantized model's. So its rounded weight Q has to come close to

    minimize  sum over tokens of || r + W x - Q y ||^2  +  lambda sum_i (Q - W)_i^2 H_ii,     H = sum of y y^T,

where r counts for Linears that write to the stream. Without rounding the least is at

    W* = W + E (H + lambda diag(H))^-1,     E = sum of (r + W (x - y)) y^T

and rounding costs tr (Q - W*) (H + lambda diag(H)) (Q - W*)^T more: GPTQ's problem for W* and the quantized model's
inputs. Matching W x by one cross moment is Qronos (Zhang et al., arXiv 2505.11695) and, column by column, GPTAQ (Li et
al., arXiv 2504.02692); adding r is what keeps errors from growing from layer to layer. Measured: benchmarks/WEIGHTS.md.

Linears of a layer go one after another, each with the y that the rounded ones before it leave. What a writer's output
would have to be, r + W x, is the source model's stream behind it less the quantized model's before it: with
T = sum of (r + W x) y^T its E is T - W H, so that x is not needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.calibration.hessians import FACTOR_BLOCK, Factor, SquareSum, block_rows
from kvconvert.calibration.ranks import Ranks
from kvconvert.kernels.device import float32_products


class CrossSum:
    """The sum of e y^T in float64, for the same reason as in `SquareSum`.

    Args:
        rows, width: channels of e and of y.
        device: of both.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.total = torch.zeros(rows, width, dtype=torch.float64, device=device)

    def add(self, e: Tensor, y: Tensor) -> None:
        """Count tokens [n, rows] and [n, width], float32."""
        for start, rows in block_rows(self.total.shape[0]):
            with float32_products(y.device):
                self.total[start : start + rows] += e[:, start : start + rows].T @ y

    def mean(self, count: int) -> Tensor:
        """The sum over `count`, float32 [rows, width]; the sum is given up."""
        result = (self.total / count).float()
        del self.total
        return result


class Mismatch:
    """H and E of one input of the quantized model.

    Args:
        rows: outputs of the Linear where it writes to the residual stream: its E is gathered then. None gathers the sum
            of (x - y) y^T, from which that of any Linear with this input follows.
        width: channels of the input.
        device: of all tensors.
    """

    def __init__(self, rows: int | None, width: int, device: torch.device) -> None:
        self.writes, self.tokens = rows is not None, 0
        self._squares = SquareSum(width, device)
        self._cross = CrossSum(width if rows is None else rows, width, device)

    def add(self, wanted: Tensor, y: Tensor) -> None:
        """Count tokens [n, in] of the quantized model.

        Args:
            wanted: what the source model has instead of y, [n, in]; of a writer r + W x, [n, out], which is what its
                output would have to be.
            y: the input.
        """
        self._squares.add(y)
        self._cross.add(wanted if self.writes else wanted - y, y)
        self.tokens += len(y)

    def reduce(self, ranks: Ranks) -> None:
        """Sum over all ranks' tokens."""
        self.tokens = int(ranks.sum_(torch.tensor(self.tokens)))
        for block in (*self._squares.blocks.values(), self._cross.total):
            ranks.sum_(block)

    def moments(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """H per token, float32 [in, in], and E or what E is W times; the sums are given up.

        Args:
            weight: float32 [out, in], of the writer.
        """
        hessian, cross = self._squares.mean(self.tokens, release=True), self._cross.mean(self.tokens)
        if self.writes:
            with float32_products(cross.device):
                cross.addmm_(weight, hessian, alpha=-1)
        return hessian, cross

    def target(self, cross: Tensor, weight: Tensor) -> Tensor:
        """E per token of a Linear with this input, float32 [out, in], from what `moments` gives."""
        if self.writes:
            return cross
        with float32_products(cross.device):
            return weight @ cross


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
    with float32_products(target.device):
        for start, stop in blocks:
            rows = factor.matrix[start:stop, start:].triu()
            found[:, start:].addmm_(target[:, start:] @ rows.T, rows)
    result = torch.empty_like(found)
    result[:, factor.order] = found
    return result
