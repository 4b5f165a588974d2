"""Linears that read the same tensor (q, k, v; gate, up) computed as one product.

Nothing in a model has to know: the first Linear that is called with a tensor computes the outputs of all, and each
other one takes its own when it is called with that very tensor, unchanged since. Any order of calls is right, and so is
any number of them.

Their weights lie in one buffer of the GPU's layout, so that one launch can read them all. Tiles of 32 outputs are the
layout's slowest dimension: Linears with the same inputs and groups lie behind each other as if they were one with all
their outputs. Each of them holds its part as a view and works alone as before.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

    def keep_values(self, dequantize: Callable[[PackedWeight], Tensor]) -> Tensor:
        """Keep what the weights stand for, as `PackedWeight.values`, as long as the buffer; returns it."""
        weight, bias = self.packed()
        weight = replace(weight, values=dequantize(weight))
        self._packed = weight, bias
        return weight.values

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


logger = logging.getLogger(__name__)

# Products in a row of which a part was computed for nothing, after which Linears compute alone again.
MOST_WASTED = 3

Product = Callable[[Tensor, PackedWeight, Tensor | None], Tensor]


@dataclass
class _Waiting:
    """Outputs that were computed for Linears which have not been called yet, by `id`, and how many of these there are.

    An output that a graph's capture computed is good within this capture only.
    """

    input: weakref.ref[Tensor]
    version: int
    captured: bool
    outputs: dict[int, Tensor]
    unclaimed: int

    def claim(self, linear: PackedLinear, x: Tensor, captured: bool) -> Tensor | None:
        """The output for a Linear, if it is that for this input."""
        if self.input() is not x or self.version != x._version or self.captured != captured:
            return None
        output = self.outputs.pop(id(linear), None)
        self.unclaimed -= output is not None
        return output


class SharedInput:
    """Lets Linears with a common input share one product, as long as they are in fact called with one tensor.

    Outputs are slices [..., out] of one tensor, with its row stride. They are kept until they are taken, and no longer
    than the input lives. Tensors of torch's inference mode have no version that would tell whether they have changed;
    with these, and where a gradient is recorded, each Linear computes alone.

    Args:
        linears: those that read one input.
        product: computes rows [n, in] times a packed weight plus a bias, [n, out].
    """

    def __init__(self, linears: Sequence[PackedLinear], product: Product) -> None:
        self.storage = SharedStorage(linears)
        self._product = product
        self._waiting: _Waiting | None = None
        self._wasted = 0
        for linear in linears:
            linear.shared_input = self

    def output(self, linear: PackedLinear, x: Tensor) -> Tensor | None:
        """One Linear's output for x [..., in]: the one that waits for it, or that of a new product of all of them.

        None if this input asks for a product of its own.
        """
        if x.is_inference() or (x.requires_grad and torch.is_grad_enabled()) or x.device != linear.scales.device:
            return None
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        waiting = self._waiting
        output = None if waiting is None else waiting.claim(linear, x, captured)
        return self._compute(linear, x, captured) if output is None else output

    def _compute(self, linear: PackedLinear, x: Tensor, captured: bool) -> Tensor | None:
        # An output that waits in vain is one that the model asks for with another tensor, or never.
        self._wasted = self._wasted + 1 if self._waiting is not None and self._waiting.unclaimed else 0
        if self._wasted >= MOST_WASTED:
            self.dissolve()
            return None
        weight, bias = self.storage.packed()
        y = self._product(x.reshape(-1, weight.inputs), weight, bias).view(*x.shape[:-1], weight.outputs)
        outputs, start = {}, 0
        for other in self.storage.linears:
            outputs[id(other)] = y[..., start : start + other.out_features]
            start += other.out_features
        own = outputs.pop(id(linear))
        self._waiting = _Waiting(weakref.ref(x, lambda _: outputs.clear()), x._version, captured, outputs, len(outputs))
        return own

    def dissolve(self) -> None:
        """Let every Linear compute alone from now on."""
        logger.debug("Linears that were taken to share their input are called with different tensors.")
        self._waiting = None
        self.storage.dissolve()
        for linear in self.storage.linears:
            linear.shared_input = None
