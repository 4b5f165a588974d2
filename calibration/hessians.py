"""E[x x^T] of the inputs of a layer's Linears, over all calibration tokens, gathered by hooks: GPTQ's Hessians.

`factorize` makes the triangular factor of a Hessian's inverse that GPTQ needs, in the Hessian's own memory.

Row i of U, upper triangular with U^T U = H^-1, is that of H_FF^-1 (columns F = i, i + 1, ... still free) over the root
of its diagonal entry. With R upper triangular and H = R R^T, which is a Cholesky factorization that begins with the
last column, U = R^-1. Both steps go block by block and read nothing below the diagonal, so that H itself stays there:
what a rounding costs can be computed afterwards, and more damping be tried, without a second matrix. One of 14,336
inputs takes 0.8 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kvconvert.calibration.activations import input_points
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.errors import NumericError
from kvconvert.kernels.device import float32_products
from kvconvert.models.structure import LayerStructure

# Numbers of a stored block, which bound what a product takes beside the sum. All blocks are of about 64 MiB: the C
# library keeps smaller ones when they are freed.
BLOCK_NUMBERS = 2**23
_ADDED_ROWS = 64  # of a block, added at a time
_FEWEST_ROWS = 192  # of a block, below which products take no less time


def block_rows(width: int) -> Iterator[tuple[int, int]]:
    """The first row of each block of a sum, and how many rows it has.

    Of a sum that would be a single block they are fewer: what is below the diagonal is not computed.
    """
    start, most = 0, width if width**2 > BLOCK_NUMBERS else max(_FEWEST_ROWS, -(-width // 4))
    while start < width:
        rows = min(width - start, most, -(-BLOCK_NUMBERS // (width - start)))
        yield start, rows
        start += rows


class SquareSum:
    """The sum of x x^T: its upper triangle in blocks of rows, each from its diagonal on, in float64.

    Batches' products are float32; that their sum is float64 makes it independent of how many ranks share the batches.

    Args:
        width: channels of x.
        device: the device of x.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width, self.device = width, device
        self.blocks = {
            start: torch.zeros(rows, width - start, dtype=torch.float64, device=device)
            for start, rows in block_rows(width)
        }

    def add(self, x: Tensor) -> None:
        """Count tokens [n, width], float32."""
        for start, block in self.blocks.items():
            product = x[:, start : start + len(block)].T @ x[:, start:]
            rows = _ADDED_ROWS if x.device.type == "cpu" else len(block)
            for total, some in zip(block.split(rows), product.split(rows), strict=True):
                total += some  # of which a CPU makes a float64 copy
            product = None

    def mean(self, count: int, release: bool = False) -> Tensor:
        """The sum over `count`, float32 [width, width]; its own memory is given up where `release` is set.

        From the last rows to the first: so they are written one after another, and each block is read for the last time
        when its own rows are.
        """
        result = torch.empty(self.width, self.width, device=self.device)
        for start in reversed(list(self.blocks)):
            stop = start + len(self.blocks[start])
            for first, block in self.blocks.items():
                if first < start:
                    result[start:stop, first : first + len(block)] = block[:, start - first : stop - first].T
            result[start:stop, start:] = self.blocks[start]
            result[start:stop].div_(count)
            block = None
            if release:
                del self.blocks[start]
        return result


class HessianRecorder:
    """Adds up x x^T for every distinct input of the layer's Linears; Linears that share one share it.

    A routed expert's count the tokens that the router selects it for. Memory is a little more than 4 bytes times the
    square of each distinct input's channels: 19 MB for 1,536, 0.89 GB for 14,336.

    Args:
        structure: names of the layer's parts.
        ranks: processes that share the tokens.
        stride: distance between the tokens of a batch that count.
    """

    def __init__(self, structure: LayerStructure, ranks: Ranks = ALONE, stride: int = 1) -> None:
        self.structure, self.ranks, self.stride = structure, ranks, stride
        self.tokens: dict[str, int] = {}
        self._sums: dict[str, SquareSum] = {}

    @contextmanager
    def attached(self, layer: nn.Module) -> Iterator[None]:
        """Hooks on the layer, removed on exit."""
        with ExitStack() as hooks:
            for point in input_points(self.structure):
                hooks.callback(layer.get_submodule(point).register_forward_pre_hook(self._hook(point)).remove)
            yield
        self._reduce(layer)

    def _hook(self, point: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().flatten(0, -2)[:: self.stride].float()
            if point not in self._sums:
                self._sums[point] = SquareSum(x.shape[1], x.device)
            self._sums[point].add(x)
            self.tokens[point] = self.tokens.get(point, 0) + x.shape[0]

        return record

    def _reduce(self, layer: nn.Module) -> None:
        """Sums and tokens of all ranks; an expert may have got tokens on some of them only."""
        if self.ranks.size == 1:
            return
        points = input_points(self.structure)
        tokens = self.ranks.sum_(torch.tensor([self.tokens.get(point, 0) for point in points])).tolist()
        self.tokens = {point: count for point, count in zip(points, tokens, strict=True) if count}
        for point in self.tokens:
            if point not in self._sums:
                weight = layer.get_submodule(point).weight
                self._sums[point] = SquareSum(weight.shape[1], weight.device)
            for block in self._sums[point].blocks.values():
                self.ranks.sum_(block)

    def of(self, point: str, input_scale: Tensor | None = None, release: bool = False) -> Tensor:
        """The Hessian of an input, float32 [in, in].

        Args:
            point: see `kvconvert.calibration.activations.point_of`.
            input_scale: what the Linear's input channels were multiplied by since: the input was divided by it.
            release: it is asked for the last time, and the recorder forgets it.

        Raises:
            NumericError: it holds NaN or infinity.
        """
        hessian = (self._sums.pop(point) if release else self._sums[point]).mean(self.tokens[point], release)
        for rows in hessian.split(512):
            _check_finite(rows, point)
        return hessian if input_scale is None else hessian.div_(input_scale).div_(input_scale[:, None])


def _check_finite(moments: Tensor, point: str) -> None:
    if not moments.isfinite().all():
        raise NumericError(
            f"the input of {point} holds NaN or infinity on the calibration data; check the source model."
        )


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
        """The cost of each input's squared rounding error when those rounded later make up for it, float32 [in].

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
        total, rows = 0.0, ERROR_ROWS if weight.device.type == "cpu" else len(weight)
        for some, others in zip(weight.split(rows), rounded.split(rows), strict=True):
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
        with float32_products(matrix.device):
            inverted = _cholesky_(matrix, block) and _invert_(matrix, block)
        if inverted:
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


def _invert_(matrix: Tensor, block: int) -> bool:
    """The inverse of an upper triangular matrix in its place, and whether it is finite.

    What is below the diagonal stays.
    """
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
    return all(rows.isfinite().all() for rows in matrix.split(block))
