"""Linears that read the same tensor (q, k, v; gate, up) computed as one product.

Nothing in a model has to know: the first Linear that is called with a tensor computes the outputs of all, and each
other one takes its own when it is called with that very tensor, unchanged since. Any order of calls is right, and so is
any number of them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvconvert.kernels.linear.packed_layout import PackedWeight
from kvconvert.kernels.linear.shared_storage import PackedLinear, SharedStorage

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
