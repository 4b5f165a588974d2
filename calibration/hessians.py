"""E[x x^T] of the inputs of a layer's Linears, over all calibration tokens, gathered by hooks: GPTQ's Hessians."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from kvconvert.calibration.activations import input_points
from kvconvert.calibration.matmul_precision import float32_products
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.errors import NumericError
from kvconvert.models.structure import LayerStructure

# Numbers of a stored block, which bound what a product takes beside the sum. All blocks are of about 64 MiB: the C
# library keeps smaller ones when they are freed.
BLOCK_NUMBERS = 2**23
_ADDED_ROWS = 64  # of a block, added at a time


def block_rows(width: int) -> Iterator[tuple[int, int]]:
    """The first row of each block of a sum, and how many rows it has."""
    start = 0
    while start < width:
        rows = min(width - start, -(-BLOCK_NUMBERS // (width - start)))
        yield start, rows
        start += rows


class SquareSum:
    """The sum of x x^T: its upper triangle in blocks of rows, each from its diagonal on, in float64.

    Batches' products are float32; that their sum is float64 makes it independent of how many ranks share the batches.

    Args:
        width: channels of x.
        device: of x.
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
            with float32_products(x.device):
                product = x[:, start : start + len(block)].T @ x[:, start:]
            for total, some in zip(block.split(_ADDED_ROWS), product.split(_ADDED_ROWS), strict=True):
                total += some  # which makes a float64 copy of it
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
    """

    def __init__(self, structure: LayerStructure, ranks: Ranks = ALONE) -> None:
        self.structure, self.ranks = structure, ranks
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
            x = args[0].detach().flatten(0, -2).float()
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
