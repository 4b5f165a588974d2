"""Packed states, and a token of the rules that read them, in PyTorch: the oracle, and the path without kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LARGEST_CODE = 2047
# Added to a squared length before its root is taken, as transformers' and flash-linear-attention's rules do.
EPSILON = 1e-6


def pack_reference(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`PackedStates` of states [B, ..., N]. A row that is not finite is not a number once it is read."""
    states = states.float()
    scales = states.abs().amax(-1) / LARGEST_CODE
    inverse = torch.where(scales > 0, 1 / scales, 0)
    codes = (states * inverse[..., None]).round().nan_to_num(0).to(torch.int32)
    first, second = (codes & 15).to(torch.uint8).chunk(2, -1)
    return (codes >> 4).to(torch.int8), first | second << 4, scales


def unpack_reference(high: Tensor, low: Tensor, scales: Tensor) -> Tensor:
    """float32 states of `PackedStates`."""
    below = torch.cat([low & 15, low >> 4], -1)
    return (high.to(torch.int32) * 16 + below).float() * scales[..., None]


def gated_delta_step_reference(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """See `gated_delta_step`; states float32 [B, H, K, V], which are returned as they are after the token."""
    shared = value.shape[2] // query.shape[2]

    def prepared(x: Tensor) -> Tensor:
        x = x[:, 0].float()
        return (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()).repeat_interleave(shared, 1)

    query, key = prepared(query) * query.shape[-1] ** -0.5, prepared(key)
    kept = decay[:, 0].float().exp()[..., None]
    states = states * (kept if decay.ndim == 4 else kept[..., None])
    change = (value[:, 0].float() - torch.einsum("bhkv,bhk->bhv", states, key)) * beta[:, 0].float()[..., None]
    states = states + key[..., None] * change[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", states, query)[:, None].to(value.dtype), states


def selective_step_reference(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    gate: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `selective_step`; states float32 [B, H, P, N], which are returned as they are after the token."""
    shared = x.shape[1] // b.shape[1]
    b, c = (value.float().repeat_interleave(shared, 1) for value in (b, c))
    dt = functional.softplus(dt.float() + (0 if dt_bias is None else dt_bias.float()))
    states = (
        states * (dt * decay.float()).exp()[..., None, None] + (dt[..., None] * x.float())[..., None] * b[:, :, None]
    )
    output = (states @ c[..., None])[..., 0]
    if d is not None:
        output = output + d.float()[:, None] * x.float()
    if gate is not None:
        output = output * functional.silu(gate.float())
    return output.to(x.dtype), states
