"""Packed states, and a token of the rules that read them, in PyTorch: the oracle, and the path without kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

LARGEST_CODE = 2047
# Added to a squared length before its root is taken, as transformers' and flash-linear-attention's rules do.
EPSILON = 1e-6


def channels_of(packed: Tensor) -> int:
    """N of packed states [B, ..., K, 3 N / 2 + 4]."""
    return (packed.shape[-1] - 4) * 2 // 3


def pack_reference(states: Tensor) -> Tensor:
    """Packed states, see `packed_like`, of float32 [B, ..., K, N]; a row that is not finite is not once it is read."""
    *_, rows, channels = states.shape
    scales = states.abs().amax(-1, keepdim=True) / LARGEST_CODE
    inverse = torch.where(scales > 0, 1 / scales, 0)
    codes = (states * inverse).round().nan_to_num(0).to(torch.int32)
    first, second = (codes & 15).to(torch.uint8).chunk(2, -1)
    parts = (codes >> 4).to(torch.int8).view(torch.uint8), first | second << 4, scales.view(torch.uint8)
    joined = torch.cat([part.flatten(-2) for part in parts], -1)
    return joined.unflatten(-1, (rows, channels * 3 // 2 + 4))


def unpack_reference(packed: Tensor) -> Tensor:
    """float32 states [B, ..., K, N] of packed ones."""
    rows, channels = packed.shape[-2], channels_of(packed)
    sizes = [rows * channels, rows * channels // 2, rows * 4]
    high, low, scales = (part.unflatten(-1, (rows, -1)) for part in packed.flatten(-2).split(sizes, -1))
    below = torch.cat([low & 15, low >> 4], -1)
    codes = high.view(torch.int8).to(torch.int32) * 16 + below
    return codes.float() * scales.clone(memory_format=torch.contiguous_format).view(torch.float32)


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


class SelectiveToken(NamedTuple):
    """What Mamba 2 makes of one token of each sequence, and the layer's parameters, see `selective_step`.

    Attributes:
        x: [B, H, P].
        dt: [B, H].
        decay: [H], negative.
        b, c: [B, G, N], H a multiple of G.
        d, dt_bias: [H] or None.
        gate: [B, H, P] or None.
    """

    x: Tensor
    dt: Tensor
    decay: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    dt_bias: Tensor | None
    gate: Tensor | None


def selective_step_reference(token: SelectiveToken, states: Tensor) -> tuple[Tensor, Tensor]:
    """See `selective_step`; states float32 [B, H, P, N], which are returned as they are after the token."""
    x, dt, decay, b, c, d, dt_bias, gate = token
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
