"""Recurrent states of linear attention and state-space layers, stored in 12 bits a number.

A state is read and written with every token, so that its rounding errors add up: with 8 bits they are several times
those of bfloat16, with 12 a quarter of them (benchmarks/RESULTS.md, "States of linear attention").
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.kernels import device as devices
from kvconvert.kernels.states.reference import (
    SelectiveToken,
    channels_of,
    gated_delta_step_reference,
    pack_reference,
    selective_step_reference,
    unpack_reference,
)

# Channels that a kernel holds at once.
_MOST_CHANNELS = 256


def packed_like(states: Tensor) -> Tensor:
    """Zeros for states [B, ..., K, N]: uint8 [B, ..., K, 3 N / 2 + 4].

    A number is code * scale, and the largest code of a row 2047. The bytes of a matrix [K, N] are an int8 for each
    number, bits 4 to 11 of its code; a byte for each number i < N / 2 of a row, with bits 0 to 3 of the codes of i, in
    its lower half, and of i + N / 2; and a float32 for each row, its scale.
    """
    return states.new_zeros(*states.shape[:-1], states.shape[-1] * 3 // 2 + 4, dtype=torch.uint8)


def is_packed(states: Tensor | None) -> bool:
    """Whether these are packed states."""
    return states is not None and states.dtype == torch.uint8


def can_pack(states: Tensor) -> bool:
    """Whether states [B, ..., N] are packed: float32 matrices, no vectors and no states of 16 bits."""
    return states.dtype == torch.float32 and states.ndim >= 3 and states.shape[-1] % 2 == 0


def unsupported(states: Tensor) -> str | None:
    """Why the Triton kernels cannot pack states; None if they can."""
    return _unsupported(states.shape[-1], states.device)


def _unsupported(channels: int, device: torch.device) -> str | None:
    if channels > _MOST_CHANNELS or channels < 16 or channels & (channels - 1):
        return f"the kernels of states take 16, 32, 64, 128 or {_MOST_CHANNELS} channels"
    return devices.unsupported(device)


def pack(states: Tensor, packed: Tensor) -> None:
    """Write float32 states over packed ones of the same shape."""
    if unsupported(states) is not None:
        packed.copy_(pack_reference(states))
        return
    from kvconvert.kernels.states import triton as launch

    launch.pack(states.contiguous(), packed)


def unpack(packed: Tensor) -> Tensor:
    """The states, float32 [B, ..., K, N]."""
    if _unsupported(channels_of(packed), packed.device) is not None:
        return unpack_reference(packed)
    from kvconvert.kernels.states import triton as launch

    return launch.unpack(packed)


def step_unsupported(query: Tensor, value: Tensor, packed: Tensor) -> str | None:
    """Why the kernel of `gated_delta_step` cannot take these tensors; None if it can."""
    key_dim, value_dim = packed.shape[2], channels_of(packed)
    if (reason := _unsupported(value_dim, packed.device)) is not None:
        return reason
    if max(key_dim, value_dim) > 128 or key_dim < 16 or key_dim & (key_dim - 1):
        return "the kernel of a step takes heads of 16, 32, 64 or 128 channels"
    if value.shape[2] % query.shape[2]:
        return "heads of values do not share those of keys evenly"
    return None


def gated_delta_step(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, packed: Tensor) -> Tensor:
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
        output, states = gated_delta_step_reference(query, key, value, decay, beta, unpack_reference(packed))
        pack(states, packed)
        return output
    from kvconvert.kernels.states import triton as launch

    return launch.gated_delta_step(query, key, value, decay, beta, packed)


def selective_step(token: SelectiveToken, packed: Tensor) -> Tensor:
    """One token of Mamba 2 for each sequence, which its packed state takes up (arXiv 2405.21060, eq. 2).

        h = exp(dt decay) h + dt x b^T,  output = (h c + d x) silu(gate),  dt = softplus(dt + dt_bias)

    Args:
        token: one of each sequence.
        packed: of states [B, H, P, N], which are overwritten.

    Returns:
        [B, H, P] in the dtype of x.
    """
    x = token.x
    if _unsupported(channels_of(packed), packed.device) is not None or x.shape[2] not in (16, 32, 64, 128):
        output, states = selective_step_reference(token, unpack_reference(packed))
        pack(states, packed)
        return output
    from kvconvert.kernels.states import triton as launch

    return launch.selective_step(token, packed)
