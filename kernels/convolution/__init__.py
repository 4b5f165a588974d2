"""Short causal convolutions, as linear attention and state-space layers begin with, of sequences side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvconvert.kernels import device as devices

# Tokens that flash-linear-attention's kernels read together.
CHUNK = 64
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class SideBySide:
    """Sequences whose tokens lie one sequence after another.

    Args:
        lengths: tokens of each, at least 1.
        device: the tokens' device.

    Attributes:
        lengths: as given.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self.lengths, self._device = lengths, device

    @cached_property
    def ends(self) -> Tensor:
        """int32 [S + 1]: 0, and where each sequence ends."""
        return devices.upload(ends_of(self.lengths), self._device)

    @cached_property
    def owners(self) -> Tensor:
        """int32 [N], the number of each token's sequence."""
        return devices.upload(owners_of(self.lengths), self._device)

    @cached_property
    def chunks(self) -> Tensor:
        """int32 [C, 2], see `chunks_of`."""
        return devices.upload(chunks_of(self.lengths), self._device)


def ends_of(lengths: Sequence[int]) -> np.ndarray:
    """`SideBySide.ends`, on the host."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def owners_of(lengths: Sequence[int]) -> np.ndarray:
    """`SideBySide.owners`, on the host."""
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def chunks_of(lengths: Sequence[int], count: int | None = None) -> np.ndarray:
    """The chunks of CHUNK tokens that each sequence is divided into, as flash-linear-attention's kernels take them.

    Args:
        lengths: tokens of each sequence.
        count: of chunks; those beyond a pass's own lie behind the end of the last sequence. None for no others.

    Returns:
        int32 [C, 2]: each chunk's sequence, and its number in it.
    """
    own = -(-np.asarray(lengths, dtype=np.int32) // CHUNK)
    sequences = np.full(own.sum() if count is None else count, len(lengths) - 1, dtype=np.int32)
    sequences[: own.sum()] = np.repeat(np.arange(len(lengths), dtype=np.int32), own)
    first = np.cumsum(own, dtype=np.int32) - own
    return np.stack([sequences, np.arange(len(sequences), dtype=np.int32) - first[sequences]], 1)


def unsupported(x: Tensor, weight: Tensor, states: Tensor) -> str | None:
    """Why the Triton kernels cannot take these tensors; None if they can."""
    reason = devices.unsupported(x.device)
    if reason is not None:
        return reason
    if x.dtype not in KERNEL_DTYPES or {weight.dtype, states.dtype} != {x.dtype}:
        return "the kernels of convolutions take float16, bfloat16, or float32, the same for tokens, weight, and states"
    if x.stride(1) != 1:
        return "the kernels of convolutions need channels side by side"
    return None


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, sequences: SideBySide, silu: bool
) -> tuple[Tensor, Tensor]:
    """Causal convolution of each channel with its own weights, from each sequence's state on.

    Args:
        x: [N, C], tokens of all sequences.
        weight: [C, K]; bias: [C] or None.
        states: [S, C, L], the newest L >= K - 1 tokens of each sequence before these, zeros where it had fewer.
        sequences: where each begins.
        silu: whether the result passes through SiLU.

    Returns:
        [N, C] in the dtype of x, and the states after these tokens, [S, C, L].
    """
    if unsupported(x, weight, states) is not None:
        return convolve_reference(x, weight, bias, states, sequences.lengths, silu)
    from kvconvert.kernels.convolution import triton as launch

    return launch.convolve(x, weight, bias, states, sequences.ends, sequences.owners, silu)


def convolve_step(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, silu: bool) -> Tensor:
    """`convolve` of one token of each sequence, whose states it overwrites.

    Args:
        x: [B, C].
        weight, bias, silu: as `convolve` takes them.
        states: [B, C, L], contiguous.

    Returns:
        [B, C] in the dtype of x.
    """
    if unsupported(x, weight, states) is not None:
        return convolve_step_reference(x, weight, bias, states, silu)
    from kvconvert.kernels.convolution import triton as launch

    return launch.convolve_step(x, weight, bias, states, silu)


def convolve_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, lengths: list[int], silu: bool
) -> tuple[Tensor, Tensor]:
    """See `convolve`; sums are taken in the dtype of `weight`, and SiLU is applied to what is rounded to it."""
    taps, kept, found, after = weight.shape[1], states.shape[2], [], []
    for part, state in zip(x.split(lengths), states, strict=True):
        whole = torch.cat([state, part.T.to(state.dtype)], 1)
        after.append(whole[:, -kept:])
        used = whole[None, :, whole.shape[1] - len(part) - (taps - 1) :].to(weight.dtype)
        y = functional.conv1d(used, weight[:, None], bias, groups=len(weight))[0].T
        found.append((functional.silu(y) if silu else y).to(x.dtype))
    return torch.cat(found), torch.stack(after)


def convolve_step_reference(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, silu: bool) -> Tensor:
    """See `convolve_step`."""
    y, after = convolve_reference(x, weight, bias, states, [1] * len(x), silu)
    states.copy_(after)
    return y
