"""Weights of several quantized Linears in one buffer of the GPU's layout, so that one launch can read them all.

Tiles of 32 outputs are the layout's slowest dimension: Linears with the same inputs and groups lie behind each other as
if they were one with all their outputs. Each of them holds its part as a view and works alone as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.kernels.linear.awq_format import AwqWeight
from kvconvert.kernels.linear.packed_layout import TILE, PackedWeight, has_layout, pack_weight

# Any change of layout, of whichever Linear.
layout_lock = threading.Lock()


class PackedLinear(Protocol):
    """What is asked of a Linear here; `QuantizedLinear` has all of it."""

    in_features: int
    out_features: int
    group_size: int
    bits: int
    scales: Tensor
    bias: Tensor | None
    storage: SharedStorage | None
    awq_weight: Callable[[], AwqWeight]
    gpu_weight: Callable[[], PackedWeight | None]
    adopt_gpu_weight: Callable[[PackedWeight], None]
    leave_cpu_layout: Callable[[], None]


def unsupported(linears: Sequence[PackedLinear]) -> str | None:
    """Why Linears cannot lie in one buffer; None if they can."""
    first = linears[0]
    if len(linears) < 2:
        return "there is only one Linear"
    if any((other.in_features, other.group_size) != (first.in_features, first.group_size) for other in linears):
        return "numbers of inputs or group sizes differ"
    if any(other.bits != first.bits for other in linears):
        return "widths of weights differ"
    if not has_layout(first.group_size):
        return f"the GPU layout has no groups of {first.group_size} inputs"
    if any(linear.out_features % TILE for linear in linears[:-1]):
        return f"outputs of a Linear are no multiple of {TILE}"
    if len({linear.scales.device for linear in linears}) > 1:
        return "Linears are on different devices"
    if len({linear.bias.dtype for linear in linears if linear.bias is not None}) > 1:
        return "dtypes of biases differ"
    if any(linear.storage is not None for linear in linears):
        return "a Linear shares its buffer with others already"
    return None


class SharedStorage:
    """One packed weight for several Linears, made when first asked for and again after one of them left.

    A Linear leaves, with its weights intact, when it is moved, cast, copied or loaded.

    Args:
        linears: in order of their outputs; see `unsupported`.
    """

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        if reason := unsupported(linears):
            raise UsageError(f"These Linears cannot share a buffer: {reason}.")
        self.linears = tuple(linears)
        self.outputs = sum(linear.out_features for linear in linears)
        self._packed: tuple[PackedWeight, Tensor | None] | None = None
        for linear in linears:
            linear.storage = self

    def packed(self) -> tuple[PackedWeight, Tensor | None]:
        """All weights as one, and all biases as one [outputs], zeros where a Linear has none; None without any."""
        packed = self._packed
        if packed is None:
            for linear in self.linears:
                linear.leave_cpu_layout()
            with layout_lock, torch.inference_mode(False):
                packed = self._packed = self._packed or (self._pack(), self._pack_biases())
        return packed

    def release(self) -> None:
        """Forget the buffer, which the Linears' views keep alive as long as they need it."""
        self._packed = None

    def dissolve(self) -> None:
        """Leave the Linears to themselves, in whatever layout they are."""
        self.release()
        for linear in self.linears:
            linear.storage = None

    def _pack(self) -> PackedWeight:
        first, tiles = self.linears[0], -(-self.outputs // TILE)
        lanes = grid = None
        start = 0
        for linear in self.linears:
            part = linear.gpu_weight() or pack_weight(linear.awq_weight())
            if lanes is None:
                lanes = part.lanes.new_empty(tiles, *part.lanes.shape[1:])
                grid = part.grid.new_empty(tiles, *part.grid.shape[1:])
            here = slice(start, start + part.lanes.shape[0])
            lanes[here], grid[here] = part.lanes, part.grid
            linear.adopt_gpu_weight(replace(part, lanes=lanes[here], grid=grid[here]))
            start = here.stop
        return PackedWeight(lanes, grid, first.in_features, self.outputs, first.bits)

    def _pack_biases(self) -> Tensor | None:
        present = next((linear.bias for linear in self.linears if linear.bias is not None), None)
        if present is None:
            return None
        biases = present.new_zeros(self.outputs)
        start = 0
        for linear in self.linears:
            if linear.bias is not None:
                here = biases[start : start + linear.out_features]
                linear.bias.data = here.copy_(linear.bias)
            start += linear.out_features
        return biases
