"""E[x x^T] of the inputs of a layer's Linears, over all calibration tokens, gathered by hooks: GPTQ's Hessians."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from kvconvert.calibration.activations import input_points
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.calibration.structure import LayerStructure
from kvconvert.errors import NumericError

_ROWS = 2048  # of a product at once: bounds what it takes beside the sum


class HessianRecorder:
    """Adds up x x^T for every distinct input of the layer's Linears; Linears that share one share it.

    Each batch's product is float32, their sum float64, so that it does not depend on how many ranks share the batches.
    A routed expert's count the tokens that the router selects it for. Memory is 8 bytes times the square of each
    distinct input's channels: 19 MB for 1,536, 1.6 GB for 14,336.
    """

    def __init__(self, structure: LayerStructure, ranks: Ranks = ALONE) -> None:
        self.structure, self.ranks = structure, ranks
        self.tokens: dict[str, int] = {}
        self._sums: dict[str, Tensor] = {}

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
                self._sums[point] = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64)
            for rows, part in zip(self._sums[point].split(_ROWS), x.T.split(_ROWS), strict=True):
                rows += part @ x
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
                self._sums[point] = weight.new_zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)
            self.ranks.sum_(self._sums[point])

    def of(self, point: str, input_scale: Tensor | None = None) -> Tensor:
        """The Hessian of an input, float32 [in, in], which the recorder keeps.

        Args:
            point: see `kvconvert.calibration.activations.point_of`.
            input_scale: what the Linear's input channels were multiplied by since: the input was divided by it.

        Raises:
            NumericError: it holds NaN or infinity.
        """
        hessian = self._sums[point].float().div_(self.tokens[point])
        if not hessian.isfinite().all():
            raise NumericError(
                f"the input of {point} holds NaN or infinity on the calibration data; check the source model."
            )
        return hessian if input_scale is None else hessian / torch.outer(input_scale, input_scale)


def diagonal_blocks(hessian: Tensor, group_size: int) -> Tensor:
    """The second moments within each group of inputs: [in, in] to [in / group_size, group_size, group_size]."""
    groups = hessian.unflatten(0, (-1, group_size)).unflatten(2, (-1, group_size))
    return groups.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
