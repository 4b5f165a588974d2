"""Short causal convolutions in Triton, and their launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.launches.triton import kernel

# Tokens and channels of a program; fewer channels than threads, so that weights come in the layout of tokens.
TOKENS, CHANNELS = 64, 128


@triton.jit
def _finished(total, bias, channel, inside, DTYPE: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    """What follows the products with weights."""
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total.to(DTYPE).to(tl.float32)
        total = total / (1.0 + tl.exp(-total))
    return total.to(DTYPE)


@triton.jit
def _keep(x, states, after, row, length, channel, channels, stride, KEPT: tl.constexpr, KEPT_TILE: tl.constexpr):
    """The newest KEPT tokens of one sequence, whose first token x points to."""
    place = tl.arange(0, KEPT_TILE)[None, :]
    inside = (channel < channels) & (place < KEPT)
    source = length - KEPT + place
    new = source >= 0
    line = (row * channels + channel) * KEPT
    value = tl.load(x + source.to(tl.int64) * stride + channel, mask=inside & new, other=0.0)
    value += tl.load(states + line + length + place, mask=inside & (new == 0), other=0.0)
    tl.store(after + line + place, value, mask=inside)


@triton.jit
def _convolve(x, weight, bias, ends, owners, y, block, tokens, lane, channels, stride, TAPS: tl.constexpr,
              HAS_BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """TOKENS tokens, but for the first TAPS - 1 of a sequence."""
    token, channel = block * TOKENS + tl.arange(0, TOKENS), lane[None, :]
    exists = token < tokens
    first = tl.load(ends + tl.load(owners + token, mask=exists, other=0), mask=exists, other=0)
    here = (exists & (token - (TAPS - 1) >= first))[:, None]
    token, inside = token[:, None].to(tl.int64), channel < channels
    total = (here & inside).to(tl.float32) * 0.0
    for tap in tl.static_range(TAPS):
        place = x + (token - (TAPS - 1 - tap)) * stride + channel
        value = tl.load(place, mask=here & inside, other=0.0).to(tl.float32)
        total += value * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    total = _finished(total, bias, channel, inside, y.dtype.element_ty, HAS_BIAS, SILU)
    tl.store(y + token * channels + channel, total, mask=here & inside)


@triton.jit
def _begin(x, weight, bias, state, y, length, channel, channels, stride, TAPS: tl.constexpr,
           HAS_BIAS: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """The first TAPS - 1 tokens of one sequence, which x and y point to, after the state that ends before `state`."""
    inside = channel < channels
    for token in tl.static_range(TAPS - 1):
        exists = inside & (tl.zeros_like(channel) + token < length)
        total = inside.to(tl.float32) * 0.0
        for tap in tl.static_range(TAPS):
            if token + tap < TAPS - 1:
                value = tl.load(state + (token + tap - (TAPS - 1)), mask=exists, other=0.0)
            else:
                value = tl.load(x + (token + tap - (TAPS - 1)) * stride + channel, mask=exists, other=0.0)
            each = tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0)
            total += value.to(tl.float32) * each.to(tl.float32)
        total = _finished(total, bias, channel, inside, y.dtype.element_ty, HAS_BIAS, SILU)
        tl.store(y + token * channels + channel, total, mask=exists)


@kernel(do_not_specialize=["tokens", "blocks"])
def convolve_kernel(
    x,
    weight,
    bias,
    states,
    ends,
    owners,
    y,
    after,
    tokens,
    blocks,
    channels,
    stride,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """TOKENS tokens of CHANNELS channels in each of the first `blocks` programs of these channels. Each of the others
    has one sequence: its first tokens, before which its state lies, and the state after it.
    """
    block, channel = tl.program_id(1), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    if block < blocks:
        _convolve(
            x, weight, bias, ends, owners, y, block, tokens, channel, channels, stride, TAPS, HAS_BIAS, SILU, TOKENS
        )
    else:
        row = (block - blocks).to(tl.int64)
        first, end = tl.load(ends + row).to(tl.int64), tl.load(ends + row + 1)
        begin, length, state = x + first * stride, end - first.to(tl.int32), states + (row * channels + channel) * KEPT
        target = y + first * channels
        _begin(begin, weight, bias, state + KEPT, target, length, channel, channels, stride, TAPS, HAS_BIAS, SILU)
        _keep(begin, states, after, row, length, channel[:, None], channels, stride, KEPT, KEPT_TILE)


@kernel
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
    blocks = triton.cdiv(tokens, TOKENS)
    convolve_kernel[(triton.cdiv(channels, CHANNELS), blocks + count)](
        x, weight, weight if bias is None else bias, states, ends, owners, y, after, tokens, blocks, channels,
        x.stride(0), TAPS=weight.shape[1], KEPT=kept, KEPT_TILE=triton.next_power_of_2(kept), HAS_BIAS=bias is not None,
        SILU=silu, TOKENS=TOKENS, CHANNELS=CHANNELS, num_warps=8,
    )  # fmt: skip
    return y, after


def convolve_step(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, silu: bool) -> Tensor:
    """`convolve_step_reference`, with float32 sums."""
    (rows, channels), kept = x.shape, states.shape[2]
    weight, y = weight.contiguous(), torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    step_kernel[(rows, triton.cdiv(channels, CHANNELS))](
        x, weight, weight if bias is None else bias, states, y, channels, x.stride(0), TAPS=weight.shape[1], KEPT=kept,
        KEPT_TILE=triton.next_power_of_2(kept), HAS_BIAS=bias is not None, SILU=silu, CHANNELS=CHANNELS,
        num_warps=4,
    )  # fmt: skip
    return y
