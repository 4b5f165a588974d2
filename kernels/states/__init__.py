"""Recurrent states of linear attention and state-space layers, stored in 12 bits a number.

A state is read and written with every token, so that its rounding errors add up: with 8 bits they are several times
those of bfloat16, with 12 a quarter of them (benchmarks/RESULTS.md, "States of linear attention"). A code is an integer
of 12 bits: its upper 8 are an int8, and the lower 4 of two numbers of a row share a byte.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvconvert.kernels import device as devices
from kvconvert.kernels.states.reference import (
    gated_delta_step_reference,
    pack_reference,
    selective_step_reference,
    unpack_reference,
)

# Channels that a kernel holds at once.
_MOST_CHANNELS = 256


class PackedStates(NamedTuple):
    """States [B, ..., N] in 12 bits: code * scale.

    Attributes:
        high: int8 [B, ..., N], bits 4 to 11 of the codes.
        low: uint8 [B, ..., N / 2], bits 0 to 3 of the codes of numbers i (lower half of a byte) and i + N / 2.
        scales: float32 [B, ...], of each row of N numbers: its largest magnitude / 2047.
    """

    high: Tensor
    low: Tensor
    scales: Tensor

    @classmethod
    def like(cls, states: Tensor) -> PackedStates:
        """Zeros for states of this shape."""
        *rows, channels = states.shape
        return cls(
            states.new_zeros(*rows, channels, dtype=torch.int8),
            states.new_zeros(*rows, channels // 2, dtype=torch.uint8),
            states.new_zeros(*rows, dtype=torch.float32),
        )

    def to(self, dtype: torch.dtype) -> PackedStates:
        """The same: some modules of transformers convert the states that a rule returns."""
        return self


def can_pack(states: Tensor) -> bool:
    """Whether states [B, ..., N] are packed: float32 matrices, no vectors and no states of 16 bits."""
    return states.dtype == torch.float32 and states.ndim >= 3 and states.shape[-1] % 2 == 0


def unsupported(states: Tensor) -> str | None:
    """Why the Triton kernels cannot pack and unpack states; None if they can."""
    channels = states.shape[-1]
    if channels > _MOST_CHANNELS or channels < 16 or channels & (channels - 1):
        return f"the kernels of states take 16, 32, 64, 128 or {_MOST_CHANNELS} channels"
    return devices.unsupported(states.device)


def pack(states: Tensor, packed: PackedStates) -> None:
    """Write float32 states over packed ones of the same shape."""
    if unsupported(states) is not None:
        for target, source in zip(packed, pack_reference(states), strict=True):
            target.copy_(source)
        return
    from kvconvert.kernels.states import triton as launch

    launch.pack(states.contiguous(), packed)


def unpack(packed: PackedStates) -> Tensor:
    """The states, float32 [B, ..., N]."""
    if unsupported(packed.high) is not None:
        return unpack_reference(*packed)
    from kvconvert.kernels.states import triton as launch

    return launch.unpack(packed)


def step_unsupported(query: Tensor, value: Tensor, packed: PackedStates) -> str | None:
    """Why the kernel of `gated_delta_step` cannot take these tensors; None if it can."""
    key_dim, value_dim = packed.high.shape[2:]
    if unsupported(packed.high) is not None:
        return unsupported(packed.high)
    if max(key_dim, value_dim) > 128 or key_dim < 16 or key_dim & (key_dim - 1):
        return "the kernel of a step takes heads of 16, 32, 64 or 128 channels"
    if value.shape[2] % query.shape[2]:
        return "heads of values do not share those of keys evenly"
    return None


def gated_delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, packed: PackedStates
) -> Tensor:
    """One token of the gated delta rule for each sequence, which its packed state takes up (arXiv 2412.06464, eq. 10).

        S = exp(decay) S + key (beta (value - key^T exp(decay) S))^T,  output = query^T S / sqrt(K)

    Queries and keys are normalized to length 1 first. Kimi Delta Attention (arXiv 2510.26692) has a decay for each
    channel of the keys. The output is that of the state before it is rounded.

    Args:
        query, key: [B, 1, H_K, K].
        value: [B, 1, H, V], H a multiple of H_K.
        decay: [B, 1, H] or [B, 1, H, K], the logarithm of what the state keeps.
        beta: [B, 1, H].
        packed: of states [B, H, K, V], which are overwritten.

    Returns:
        [B, 1, H, V] in the dtype of `value`.
    """
    if step_unsupported(query, value, packed) is not None:
        output, states = gated_delta_step_reference(query, key, value, decay, beta, unpack_reference(*packed))
        pack(states, packed)
        return output
    from kvconvert.kernels.states import triton as launch

    return launch.gated_delta_step(query, key, value, decay, beta, packed)


def selective_step(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    gate: Tensor | None,
    packed: PackedStates,
) -> Tensor:
    """One token of Mamba 2 for each sequence, which its packed state takes up (arXiv 2405.21060, eq. 2).

        h = exp(dt decay) h + dt x b^T,  output = (h c + d x) silu(gate),  dt = softplus(dt + dt_bias)

    Args:
        x: [B, H, P].
        dt: [B, H].
        decay: [H], negative.
        b, c: [B, G, N], H a multiple of G.
        d, dt_bias: [H] or None.
        gate: [B, H, P] or None.
        packed: of states [B, H, P, N], which are overwritten.

    Returns:
        [B, H, P] in the dtype of x.
    """
    if unsupported(packed.high) is not None or x.shape[2] not in (16, 32, 64, 128):
        output, states = selective_step_reference(x, dt, decay, b, c, d, dt_bias, gate, unpack_reference(*packed))
        pack(states, packed)
        return output
    from kvconvert.kernels.states import triton as launch

    return launch.selective_step(x, dt, decay, b, c, d, dt_bias, gate, packed)
