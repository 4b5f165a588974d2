"""Choosing the next token of every row of a batch, on the device, each row by its own parameters and random stream."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.kernels import device as devices
from kvconvert.kernels.sampling.reference import (
    CANDIDATES,
    COLDEST,
    HOTTEST,
    gumbel_noise,
    sample_likeliest,
    sample_reference,
)

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Sums over more do not fit 64 bits.
MOST_TOKENS = 1 << 22


def unsupported(logits: Tensor) -> str | None:
    """Why the Triton kernels cannot choose from these logits; None if they can."""
    reason = devices.unsupported(logits.device)
    if reason is not None:
        return reason
    if logits.dtype not in KERNEL_DTYPES:
        return "the kernels of sampling take logits in float16, bfloat16, or float32"
    if logits.stride(1) != 1 or not 0 < logits.shape[1] <= MOST_TOKENS:
        return f"the kernels of sampling take the logits of a row side by side, and at most {MOST_TOKENS}"
    return None


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
    *,
    restrict: bool = True,
) -> Tensor:
    """One token per row.

    The kernels sort nothing: they find the least logit that may be drawn, bit by bit. Which token is the last of a
    top_p they decide as the reference does unless the sum before it is within 2e-6 of top_p, for the last digits of
    exponentials differ.

    Args:
        logits: [B, V], of any floating-point dtype.
        temperature, top_p: float32 [B]; rows of temperature 0 take the most likely token, the lowest id among equals.
        top_k: int64 [B], 0 for all.
        seeds, counters: int64 [B], see `gumbel_noise`.
        restrict: False where no row has a top_k or top_p, which saves the search.

    Returns:
        int64 [B].
    """
    if unsupported(logits) is None:
        from kvconvert.kernels.sampling import triton as launch

        return launch.sample(logits, temperature, top_k, top_p, seeds, counters, restrict)
    if not restrict or logits.device.type != "cpu" or logits.shape[1] <= 4 * CANDIDATES:
        return sample_reference(logits, temperature, top_k, top_p, seeds, counters, restrict=restrict)
    # What a row draws must not depend on the others, so that each is decided for itself.
    tokens = sample_likeliest(logits, temperature, top_k, top_p, seeds, counters)
    left = tokens < 0
    if left.any():
        own = [column[left] for column in (logits, temperature, top_k, top_p, seeds, counters)]
        tokens[left] = sample_reference(*own, restrict=True)
    return tokens
