"""Short causal convolutions, as linear attention and state-space layers begin with, of sequences side by side."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvconvert.kernels import device as devices
from kvconvert.kernels.convolution.reference import convolve_reference, convolve_step_reference

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class SideBySide:
    """Sequences whose tokens lie one sequence after another.

    Args:
        lengths: tokens of each, at least 1.
        device: the tokens' device.

    Attributes:
        lengths: as given.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        self.lengths, self._device = lengths, device

    @cached_property
    def ends(self) -> Tensor:
        """int32 [S + 1]: 0, and where each sequence ends."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(self._device, torch.int32)

    @cached_property
    def owners(self) -> Tensor:
        """int32 [N], the number of each token's sequence."""
        numbers = torch.arange(len(self.lengths), dtype=torch.int32)
        return numbers.repeat_interleave(torch.tensor(self.lengths)).to(self._device)


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
