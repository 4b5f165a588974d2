"""Weights moved, before they are rounded, to where they make up for what was quantized before them.

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

import torch
from torch import Tensor

from kvconvert.calibration.hessians import FACTOR_BLOCK, Factor, SquareSum, block_rows
from kvconvert.calibration.ranks import Ranks


class Mismatch:
    """H and E of one input of the quantized model, or what E is a Linear's weight times.

    E is summed in float64, for the same reason as H in `SquareSum`.

    Args:
        rows: channels of what is missing: outputs of a Linear that writes to the residual stream, or the input's own.
        width: channels of the input.
        device: of all tensors.
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
