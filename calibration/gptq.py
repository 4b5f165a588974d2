"""GPTQ (Frantar et al., arXiv 2210.17323): a weight's rounding error is made up for by the weights not yet rounded.

For the inputs X of a Linear, rounding its weight W to Q costs || (W - Q) X^T ||^2 = sum over rows of d H d^T with the
Hessian H = E[x x^T]. Columns are rounded one after another; after column i the columns F that are still free move by
the step that is best for them (equations 2 and 3; the same for all rows, since H does not depend on the row):

    W_F  <-  W_F - (w_i - q_i) [H_FF^-1]_i,: / [H_FF^-1]_ii            (F contains i here)

`compensate_reference` says just that. `compensate` takes all the rows of H_FF^-1 that are needed from one triangular
factor (the paper's step 3, see `factorize`) and moves columns beyond a block of 128 once per block (its step 2).

Grids are static: scale and zero of every group of inputs are fixed from the weight before any column moves. So columns
may be rounded in any order without a table of which group a column belongs to, and the stored layout is AWQ's own.
The order is that of descending H_ii: inputs that matter most are rounded while all others can still make up for it.

Damping adds to each diagonal entry a share of itself, H + lambda diag(H), where the paper adds a share of the mean: so
the result does not depend on how inputs are scaled, and one large input, such as that of the tokens which attention
uses as a sink, does not keep all others from being made up for. An input that never occurs (H_ii = 0) is rounded to
nearest, and moves nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvconvert.calibration.hessian_factor import Factor, damped_diagonal, factorize
from kvconvert.calibration.weight_grid import WeightGrid

DAMPING = 0.1
_BLOCK = 128


class Compensated(NamedTuple):
    """A Linear's weight on its grid.

    Attributes:
        weight: float32 [out, in], every entry a value of the grid.
        damping: share of its own that each diagonal entry grew by: the one asked for, or more where that was too
            little for float32.
    """

    weight: Tensor
    damping: float


def rounding_order(hessian: Tensor) -> Tensor:
    """Inputs by descending share of the output: int64 [in]."""
    return hessian.diagonal().argsort(descending=True, stable=True)


@torch.no_grad()
def compensate_reference(
    weight: Tensor, hessian: Tensor, grid: WeightGrid, order: Tensor | None = None, damping: float = DAMPING
) -> Tensor:
    """The definition, column by column with an inverse for each: see `compensate`, whose result this is. Slow."""
    order = torch.arange(weight.shape[1], device=weight.device) if order is None else order
    free, hessian = weight.double().clone(), hessian.double().clone()
    hessian.diagonal().copy_(damped_diagonal(hessian.diagonal(), damping))
    result = torch.empty_like(weight, dtype=torch.float32)
    for position, column in enumerate(order.tolist()):
        rounded = grid.round_columns(
            free[:, column : column + 1].float(), torch.tensor([column], device=weight.device)
        )[:, 0]
        result[:, column] = rounded
        rest = order[position:]
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        error = (free[:, column] - rounded.double()) / inverse[0, 0]
        free[:, rest] -= error[:, None] * inverse[0]
    return result


def compensate(
    weight: Tensor, hessian: Tensor, grid: WeightGrid, order: Tensor | None = None, damping: float = DAMPING
) -> Compensated:
    """Round a weight to a grid such that later columns make up for the error of earlier ones.

    Args:
        weight: float32 [out, in].
        hessian: float32 [in, in], E[x x^T] of the Linear's input (any positive multiple gives the same).
        grid: of the weight.
        order: int64 [in], a permutation: in which columns are rounded. None takes them from left to right.
        damping: share of itself that is added to each entry of H's diagonal.

    Raises:
        NumericError: the Hessian is not finite, or no damping up to 1 makes it positive definite.
    """
    order = torch.arange(weight.shape[1], device=weight.device) if order is None else order
    factor = factorize(hessian.clone(), order, damping)
    return Compensated(compensate_by(weight, factor, grid), factor.damping)


@torch.no_grad()
def compensate_by(weight: Tensor, factor: Factor, grid: WeightGrid) -> Tensor:
    """`compensate` with the Hessian's factor, in whose order columns are rounded; several Linears may share it."""
    order, columns = factor.order, weight.shape[1]
    free = weight.new_empty(columns, weight.shape[0], dtype=torch.float32)  # a column of the weight is contiguous
    for place, some in zip(free.split(_BLOCK), order.split(_BLOCK), strict=True):
        place.copy_(weight[:, some].T)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        block, errors = free[start:stop], torch.empty_like(free[start:stop])
        rows, (scale, zero) = factor.matrix[start:stop], grid.of_columns(order[start:stop])
        for i in range(stop - start):
            nearest = grid.nearest(block[i], scale[i], zero[i])
            errors[i] = (block[i] - nearest) / rows[i, start + i]
            block[i + 1 :].addr_(rows[i, start + i + 1 : stop], errors[i], alpha=-1)
            block[i] = nearest
        free[stop:].addmm_(rows[:, stop:].T, errors, alpha=-1)
    result = torch.empty_like(weight, dtype=torch.float32)
    for place, some in zip(free.split(_BLOCK), order.split(_BLOCK), strict=True):
        result[:, some] = place.T
    return result


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """Mean squared error of the outputs, summed over them: trace of D H D^T for D = rounded - weight."""
    delta = rounded - weight
    return float(((delta @ hessian) * delta).sum(dtype=torch.float64))
