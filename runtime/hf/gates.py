"""Which of the kernels' gates a transformers module computes, found by trying values instead of by its class."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvconvert.kernels.elementwise import Gate, gated_reference

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
# Far enough for any limit, near enough for every bend.
GRID = (
    -40.0,
    -9.0,
    -7.5,
    -6.5,
    -3.0,
    -1.3,
    -0.6,
    -0.1,
    0.0,
    0.05,
    0.4,
    1.1,
    2.5,
    5.0,
    6.8,
    7.2,
    9.5,
    11.0,
    40.0,
    300.0,
)


def find_gate(function: Callable[[Tensor, Tensor], Tensor], module: nn.Module) -> Gate | None:
    """The `Gate` that a function of gate and up [n] (float32, on the CPU) computes; None if there is no such one.

    `module` is asked for the constants `alpha` and `limit`, which some activations have.
    """
    grid = torch.tensor(GRID)
    gate, up = (values.flatten() for values in torch.meshgrid(grid, grid, indexing="ij"))
    found = function(gate, up)
    for kind in _candidates(module):
        if torch.allclose(found, gated_reference(gate, up, kind), rtol=1e-5, atol=1e-6):
            return kind
    return None


def _candidates(module: nn.Module) -> list[Gate]:
    kinds = [Gate(activation) for activation in ACTIVATIONS]
    limit = next((getattr(module, name) for name in ("limit", "swiglu_limit") if hasattr(module, name)), None)
    if isinstance(limit, (int, float)):
        alpha = getattr(module, "alpha", 1.0)
        alphas = {1.0, float(alpha)} if isinstance(alpha, (int, float)) else {1.0}
        kinds += [Gate("silu", alpha, float(limit), offset) for alpha in sorted(alphas) for offset in (0.0, 1.0)]
    return kinds
