"""Short causal convolutions, sequence by sequence: the oracle, and the path without kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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
