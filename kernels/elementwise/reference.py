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
        alpha: the factor in the sigmoid of "silu".
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


@dataclass(frozen=True)
class Norm:
    """Which of transformers' RMSNorms: x / sqrt(mean x^2 + eps) in float32, times weight + offset.

    Attributes:
        eps: see above.
        offset: 0, or 1 as in Gemma.
        rounded: the normalised values are rounded to the dtype of x before they are multiplied, as in Llama.
    """

    eps: float
    offset: float = 0.0
    rounded: bool = True


def rms_norm_reference(x: Tensor, weight: Tensor | None, kind: Norm) -> Tensor:
    """Normalise the last dimension; weight [channels], or None for no weight. Result in the dtype of x."""
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + kind.eps)
    if weight is None:
        return values.to(x.dtype)
    if kind.rounded:
        return ((weight + kind.offset if kind.offset else weight) * values.to(x.dtype)).to(x.dtype)
    return (values * (weight.float() + kind.offset)).to(x.dtype)


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor | None, kind: Norm) -> Tensor:
    """`rms_norm_reference` times silu(gate) in float32; gate of the shape of x. Result in the dtype of x."""
    return (rms_norm_reference(x, weight, kind) * functional.silu(gate.float())).to(x.dtype)


def rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions of queries and keys [B, heads, T, D] by halves; cos and sin [1 or B, T, R], R <= D.

    Channel i of the first R / 2 forms a pair with channel i + R / 2; channels from R on stay as they are.
    """
    cos, sin, size = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]

    def rotated(x: Tensor) -> Tensor:
        x, rest = x[..., :size], x[..., size:]
        turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        return torch.cat((x * cos + turned * sin, rest), -1)

    return rotated(q), rotated(k)
