"""Scale and zero of each group of a weight, apart from its codes: what a search that chooses codes one by one keeps.

w = (q - z) scale with integers q and z from 0 to 2^bits - 1, as in `kernels.linear.awq_format`, whose rounding to
nearest this is when nothing moves the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvconvert.kernels.linear.awq_format import SMALLEST_HALF, clipped_groups, group_grid

RANGES = tuple(1 - step / 20 for step in range(12))  # of a group's whole range, to search
_SEARCHED_WEIGHTS = {"cpu": 2**20, "cuda": 2**24}  # at a time


@dataclass(frozen=True)
class WeightGrid:
    """The values that a Linear's quantized weight can have.

    Attributes:
        scale: float32 [out, in / group_size], numbers that fp16 holds; never 0.
        zero: float32 [out, in / group_size], integers 0 to 2^bits - 1.
        bits, group_size: bits and group size of the weight.
    """

    scale: Tensor
    zero: Tensor
    bits: int
    group_size: int

    @classmethod
    def of(cls, weight: Tensor, bits: int, group_size: int) -> WeightGrid:
        """The grid from each group's smallest to its largest weight and 0.

        Args:
            weight: [out, in], any float dtype.
            bits, group_size: bits and group size of the grid.

        Raises:
            GroupRangeError: NaN, infinity, or a scale beyond fp16; its index is (output, group).
        """
        scale, zero = group_grid(clipped_groups(weight, group_size, None), bits)
        return cls(scale.squeeze(-1), zero.squeeze(-1), bits, group_size)

    @classmethod
    def searched(cls, weight: Tensor, bits: int, group_size: int, costs: Tensor) -> WeightGrid:
        """The grid with the least rounding error among those from each group's whole range down to `RANGES[-1]` of it.

        A narrower one lies in the middle of the group's range, as nearly as zeros that are integers allow: one on each
        side of it is tried. Where errors cost nothing the whole range is kept.

        Args:
            weight: float32 [out, in].
            bits, group_size: bits and group size of the grid.
            costs: the weight of the squared error of each input, [in].

        Raises:
            GroupRangeError: see `of`.
        """
        parts = []
        for rows in weight.split(max(1, _SEARCHED_WEIGHTS[weight.device.type] // weight.shape[1])):
            whole, top = cls.of(rows, bits, group_size), 2**bits - 1
            groups, by_group = rows.unflatten(-1, (-1, group_size)), costs.unflatten(0, (-1, group_size))
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scale, zero = whole.scale, whole.zero
            least = (whole.round(rows).view_as(groups) - groups).square_().mul_(by_group).sum(-1)
            for share in RANGES:
                some = ((high - low) / top * share).clamp(min=SMALLEST_HALF).half().float()
                steps = groups / some[..., None]
                nearest, first = steps.round(), (top / 2 - (low + high) / (2 * some)).floor()
                for middle in (first, first + 1):
                    middle = middle.clamp(0, top)
                    error = nearest.clamp(-middle[..., None], top - middle[..., None]).sub_(steps)
                    error = error.square_().mul_(by_group).sum(-1) * some.square()
                    better = error < least
                    least = torch.where(better, error, least)
                    scale, zero = torch.where(better, some, scale), torch.where(better, middle, zero)
            parts.append((scale, zero))
        return cls(*map(torch.cat, zip(*parts, strict=True)), bits, group_size)

    def of_rows(self, rows: slice) -> WeightGrid:
        """The grid of some outputs."""
        return replace(self, scale=self.scale[rows], zero=self.zero[rows])

    def of_columns(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero of inputs [n], each float32 [n, out] and contiguous."""
        group = columns // self.group_size
        return self.scale.T[group], self.zero.T[group]

    def nearest(self, values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The grid's values next to `values`, by scale and zero of the same shape."""
        codes = (values / scale).round_().add_(zero).clamp_(0, 2**self.bits - 1)
        return codes.sub_(zero).mul_(scale)

    def round(self, weight: Tensor) -> Tensor:
        """The grid's values next to a weight [out, in]: rounding to nearest."""
        return self.nearest(self._grouped(weight), self.scale[..., None], self.zero[..., None]).flatten(1)

    def codes(self, weight: Tensor) -> Tensor:
        """The codes q, uint8 [out, in], of a weight that consists of the grid's values."""
        codes = (self._grouped(weight) / self.scale[..., None]).round_().add_(self.zero[..., None])
        return codes.clamp_(0, 2**self.bits - 1).to(torch.uint8).flatten(1)

    def _grouped(self, weight: Tensor) -> Tensor:
        return weight.float().unflatten(-1, (-1, self.group_size))
