"""Short causal convolutions in Triton, and their launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.launches.triton import kernel

TOKENS, CHANNELS = 32, 128


@kernel(do_not_specialize=["tokens", "stride"])
def convolve_kernel(
    x,
    weight,
    bias,
    states,
    ends,
    owners,
    y,
    tokens,
    channels,
    stride,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """TOKENS tokens of CHANNELS channels. What comes before a sequence's first token is in its state."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    exists = token < tokens
    owner = tl.load(owners + token, mask=exists, other=0)
    first = tl.load(ends + owner, mask=exists, other=0)[:, None]
    state = states + (owner[:, None].to(tl.int64) * channels + channel) * KEPT
    here, token, inside = exists[:, None], token[:, None], channel < channels
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1 - tap)
        new = source >= first
        value = tl.load(x + source.to(tl.int64) * stride + channel, mask=here & inside & new, other=0.0).to(tl.float32)
        value += tl.load(state + (KEPT + source - first), mask=here & inside & (new == 0), other=0.0).to(tl.float32)
        total += value * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total.to(DTYPE).to(tl.float32)
        total = total / (1.0 + tl.exp(-total))
    tl.store(y + token.to(tl.int64) * channels + channel, total.to(DTYPE), mask=here & inside)


@kernel(do_not_specialize=["stride"])
def states_kernel(
    x, states, ends, after, channels, stride, KEPT: tl.constexpr, KEPT_TILE: tl.constexpr, CHANNELS: tl.constexpr
):
    """The newest KEPT tokens of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    place = tl.arange(0, KEPT_TILE)[None, :]
    first, length = tl.load(ends + row), tl.load(ends + row + 1) - tl.load(ends + row)
    inside = (channel < channels) & (place < KEPT)
    source = length - KEPT + place
    new = source >= 0
    line = (row * channels + channel) * KEPT
    value = tl.load(x + (first + source).to(tl.int64) * stride + channel, mask=inside & new, other=0.0)
    value += tl.load(states + line + length + place, mask=inside & (new == 0), other=0.0)
    tl.store(after + line + place, value, mask=inside)


@kernel(do_not_specialize=["stride"])
def step_kernel(
    x,
    weight,
    bias,
    states,
    y,
    channels,
    stride,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One token of one sequence, whose state moves on by it."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside, place = channel < channels, tl.arange(0, KEPT_TILE)[None, :]
    new = tl.load(x + row * stride + channel, mask=inside, other=0.0)
    state = states + ((row * channels + channel) * KEPT)[:, None] + place
    exists = inside[:, None] & (place < KEPT)
    tap = place - (KEPT - TAPS + 1)
    taps = weight + (channel * TAPS)[:, None] + tap
    before = tl.load(state, mask=exists, other=0.0)
    total = tl.sum(before.to(tl.float32) * tl.load(taps, mask=exists & (tap >= 0), other=0.0).to(tl.float32), 1)
    total += new.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total.to(DTYPE).to(tl.float32)
        total = total / (1.0 + tl.exp(-total))
    after = tl.load(state + 1, mask=exists & (place < KEPT - 1), other=0.0)
    tl.debug_barrier()  # what one thread overwrites another one may still read
    tl.store(state, tl.where(place == KEPT - 1, new[:, None], after), mask=exists)
    tl.store(y + row * channels + channel, total.to(DTYPE), mask=inside)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, ends: Tensor, owners: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """`convolve_reference`, with float32 sums; ends int32 [S + 1] and owners int32 [N] as `SideBySide` has them."""
    (tokens, channels), (count, _, kept) = x.shape, states.shape
    weight, states = weight.contiguous(), states.contiguous()
    y, after = torch.empty(tokens, channels, dtype=x.dtype, device=x.device), torch.empty_like(states)
    convolve_kernel[(triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS))](
        x, weight, weight if bias is None else bias, states, ends, owners, y, tokens, channels, x.stride(0),
        TAPS=weight.shape[1], KEPT=kept, HAS_BIAS=bias is not None, SILU=silu, TOKENS=TOKENS, CHANNELS=CHANNELS,
        num_warps=4,
    )  # fmt: skip
    states_kernel[(count, triton.cdiv(channels, CHANNELS))](
        x, states, ends, after, channels, x.stride(0), KEPT=kept, KEPT_TILE=triton.next_power_of_2(kept),
        CHANNELS=CHANNELS, num_warps=4,
    )  # fmt: skip
    return y, after


def convolve_step(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, silu: bool) -> Tensor:
    """`convolve_step_reference`, with float32 sums."""
    (rows, channels), kept = x.shape, states.shape[2]
    weight, y = weight.contiguous(), torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    step_kernel[(rows, triton.cdiv(channels, CHANNELS))](
        x, weight, weight if bias is None else bias, states, y, channels, x.stride(0), TAPS=weight.shape[1], KEPT=kept,
        KEPT_TILE=triton.next_power_of_2(kept), HAS_BIAS=bias is not None, SILU=silu, CHANNELS=CHANNELS, num_warps=4,
    )  # fmt: skip
    return y
