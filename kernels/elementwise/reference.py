"""What lies between a model's products, step by step as transformers computes it: the oracle, and the CPU's path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Gate:
    """How a gated MLP joins its two projections: activation(gate) (up + offset).

    Attributes:
        activation: "silu" is x sigmoid(alpha x).
        alpha: of "silu".
        limit: gate is first clamped from above, up from both sides; infinity for neither.
        offset: added to up.
    """

    activation: Activation
    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0


def gated_reference(gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
    """Join two projections of one shape and dtype."""
    if kind.limit != float("inf"):
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    if kind.activation == "silu":
        active = functional.silu(gate) if kind.alpha == 1 else gate * torch.sigmoid(gate * kind.alpha)
    elif kind.activation == "relu":
        active = functional.relu(gate)
    else:
        active = functional.gelu(gate, approximate="tanh" if kind.activation == "gelu_tanh" else "none")
    return active * (up + kind.offset if kind.offset else up)
