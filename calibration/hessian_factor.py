"""The triangular factor of a Hessian's inverse that GPTQ needs, made in the Hessian's own memory.

Row i of U, upper triangular with U^T U = H^-1, is that of H_FF^-1 (columns F = i, i + 1, ... still free) over the root
of its diagonal entry. With R upper triangular and H = R R^T, which is a Cholesky factorization that begins with the
last column, U = R^-1. Both steps go block by block and read nothing below the diagonal, so that H itself stays there:
what a rounding costs can be computed afterwards, and more damping be tried, without a second matrix. One of 14,336
inputs takes 0.8 GB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvconvert.errors import NumericError

_MOST_DAMPING = 1.0
FACTOR_BLOCK = 1024  # rows and columns of a block
ERROR_ROWS = 256  # of a weight, whose error is worked out together


@dataclass(frozen=True)
class Factor:
    """A Hessian in rounding order, and the factor of its inverse.

    Attributes:
        matrix: float32 [in, in]; on and above the diagonal U, below it the Hessian.
        diagonal: float32 [in], of the Hessian, without damping.
        order: int64 [in], the inputs in which rows and columns are.
        damping: share of itself that was added to each entry of the diagonal.
    """

    matrix: Tensor
    diagonal: Tensor
    order: Tensor
    damping: float

    @torch.no_grad()
    def remaining(self) -> Tensor:
        """What a squared rounding error of each input costs when those rounded later make up for it, float32 [in].

        1 / [H_FF^-1]_ii, the part of the input's second moment that no combination of the later ones has. The sum of
        these costs over all inputs is the compensated weight's error (with the damped Hessian), so that a search can
        compare scales and clips by it without compensating for each. 0 for an input that never occurs.
        """
        costs = torch.empty_like(self.diagonal)
        costs[self.order] = torch.where(self.diagonal == 0, 0.0, self.matrix.diagonal().square().reciprocal_())
        return costs

    @torch.no_grad()
    def scaled_(self, input_scale: Tensor, block: int = FACTOR_BLOCK) -> Factor:
        """The factor for weights whose input channels were multiplied by a scale [in], in this one's memory.

        The Hessian of inputs divided by s is S^-1 H S^-1, damped by a share of the diagonal too, and has U S. Inputs
        stay in their order, which is that of what they weigh in the unscaled model.
        """
        scale = input_scale[self.order]
        for start, stop in _blocks(len(scale), block):
            rows = self.matrix[start:stop]
            below = rows.tril(start - 1)
            rows.sub_(below).mul_(scale).add_(below.div_(scale).div_(scale[start:stop, None]))
        return replace(self, diagonal=self.diagonal / scale.square())

    @torch.no_grad()
    def output_error(self, weight: Tensor, rounded: Tensor) -> float:
        """Mean squared error of the outputs, summed over them: trace of D H D^T for D = rounded - weight, [out, in]."""
        total = 0.0
        for some, others in zip(weight.split(ERROR_ROWS), rounded.split(ERROR_ROWS), strict=True):
            delta = (others - some)[:, self.order]
            total += float((delta.square() * self.diagonal).sum(dtype=torch.float64))
            for start, stop in _blocks(len(self.order), FACTOR_BLOCK):
                below = self.matrix[start:stop, :stop].tril(start - 1)
                total += 2 * float(((delta[:, start:stop] @ below) * delta[:, :stop]).sum(dtype=torch.float64))
        return total


def damped_diagonal(diagonal: Tensor, damping: float) -> Tensor:
    """The diagonal with a share of each entry added to it."""
    # Inputs that never occur: any positive number keeps them apart from the others.
    return torch.where(diagonal == 0, 1.0, diagonal * (1 + damping))


@torch.no_grad()
def factorize(hessian: Tensor, order: Tensor, damping: float, block: int = FACTOR_BLOCK) -> Factor:
    """The factor of a Hessian's inverse; tries ten times the damping for as long as float32 needs more.

    Args:
        hessian: float32 [in, in], symmetric; its memory becomes the factor's.
        order: int64 [in], a permutation.
        damping: share of itself that is added to each entry of the diagonal.
        block: rows and columns that are worked on at a time.

    Raises:
        NumericError: the Hessian is not finite, or no damping up to 1 makes it positive definite.
    """
    if not all(rows.isfinite().all() for rows in hessian.split(block)):
        raise NumericError("the second moments of its input hold NaN or infinity")
    matrix = _permuted_(hessian, order, block)
    diagonal = matrix.diagonal().clone()
    while damping <= _MOST_DAMPING:
        matrix.diagonal().copy_(damped_diagonal(diagonal, damping))
        if _cholesky_(matrix, block):
            _invert_(matrix, block)
            if all(rows.isfinite().all() for rows in matrix.split(block)):
                return Factor(matrix, diagonal, order, damping)
        for start, stop in _blocks(len(matrix), block):
            _set_upper(matrix[start:stop, start:stop], matrix[start:stop, start:stop].tril(-1).T)
            matrix[start:stop, stop:] = matrix[stop:, start:stop].T
        damping *= 10
    raise NumericError("the second moments of its input are not positive definite even with damping")


def _blocks(size: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, size)) for start in range(0, size, block)]


def _permuted_(matrix: Tensor, order: Tensor, block: int) -> Tensor:
    """Rows and columns in another order, in place."""
    for rows in matrix.split(block):
        rows.copy_(rows[:, order])
    for columns in matrix.split(block, dim=1):
        columns.copy_(columns[order])
    return matrix


def _set_upper(square: Tensor, upper: Tensor) -> None:
    """Replace what is on and above the diagonal by an upper triangular matrix."""
    square.copy_(square.tril(-1).add_(upper))


def _cholesky_(matrix: Tensor, block: int) -> bool:
    """R with R R^T = H in place of the upper triangle of H; False where H is not positive definite."""
    blocks = _blocks(len(matrix), block)
    for k, (start, stop) in reversed(list(enumerate(blocks))):
        square = matrix[start:stop, start:stop]
        # The usual factorization reads the lower triangle from its first column on: all turned around.
        lower, failed = torch.linalg.cholesky_ex(square.triu().flip(0, 1))
        if failed:
            return False
        upper = lower.flip(0, 1)
        _set_upper(square, upper)
        above = matrix[:start, start:stop]
        above.copy_(torch.linalg.solve_triangular(upper.T, above, upper=False, left=False))
        for first, last in blocks[:k]:
            rows = above[first:last]
            diagonal = matrix[first:last, first:last]
            diagonal.sub_((rows @ rows.T).triu_())
            matrix[first:last, last:start].addmm_(rows, above[last:].T, alpha=-1)
    return True


def _invert_(matrix: Tensor, block: int) -> None:
    """The inverse of an upper triangular matrix in its place; what is below its diagonal stays."""
    blocks = _blocks(len(matrix), block)
    for k, (start, stop) in enumerate(blocks):
        square = matrix[start:stop, start:stop]
        unit = torch.eye(stop - start, dtype=matrix.dtype, device=matrix.device)
        inverse = torch.linalg.solve_triangular(square.triu(), unit, upper=True)
        _set_upper(square, inverse)
        product = matrix[:start, start:stop] @ inverse
        for first, last in blocks[:k]:
            diagonal = matrix[first:last, first:last].triu()
            rows = (diagonal @ product[first:last]).addmm_(matrix[first:last, last:start], product[last:])
            matrix[first:last, start:stop] = rows.neg_()
