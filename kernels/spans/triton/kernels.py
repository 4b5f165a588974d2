"""Kernels that find the scales of a span: each channel's range over all tokens, in parts, and what follows from it."""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.pages.triton.affine import affine_grid, flag_if, storable


@triton.jit(do_not_specialize=["count"])
def channel_range_kernel(
    tokens,
    extremes,
    flag,
    head_stride,
    token_stride,
    count,
    part_tokens,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Lowest and highest number of each channel in one part of a span: float32 `extremes` [2, parts, H, D]."""
    head, part = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    parts = tl.num_programs(0) // HEADS
    channel = tl.arange(0, TILE)
    base = tokens + head.to(tl.int64) * head_stride + channel[None, :]
    low = tl.full([ROWS, TILE], float("inf"), tl.float32)
    high = tl.full([ROWS, TILE], float("-inf"), tl.float32)
    check = tl.zeros([ROWS, TILE], tl.float32)
    stop = tl.minimum(count, (part + 1) * part_tokens)
    for first in range(part * part_tokens, stop, ROWS):
        # Rows beyond the end repeat the last one.
        token = tl.minimum(first + tl.arange(0, ROWS), stop - 1).to(tl.int64)
        x = tl.load(base + token[:, None] * token_stride, mask=channel[None, :] < HEAD_SIZE, other=0.0).to(tl.float32)
        low, high = tl.minimum(low, x), tl.maximum(high, x)
        check += x * 0.0
    flag_if(tl.sum(tl.sum(check, 1), 0) != 0.0, flag, 0, head, 1, HEADS)
    target = extremes + (part * HEADS + head) * HEAD_SIZE + channel
    tl.store(target, tl.min(low, 0), mask=channel < HEAD_SIZE)
    tl.store(target + parts * HEADS * HEAD_SIZE, tl.max(high, 0), mask=channel < HEAD_SIZE)


@triton.jit(do_not_specialize=["parts"])
def channel_scale_kernel(
    extremes,
    scales,
    zero_points,
    flag,
    parts,
    factor,
    shrink,
    BITS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PART_TILE: tl.constexpr,
):
    """Float16 scale and zero point [H, D] of a span's channels, from `channel_range_kernel`'s extremes."""
    head = tl.program_id(0)
    part, channel = tl.arange(0, PART_TILE)[:, None], tl.arange(0, TILE)
    there = (part < parts) & (channel < HEAD_SIZE)[None, :]
    at = extremes + (part * HEADS + head) * HEAD_SIZE + channel[None, :]
    low = tl.min(tl.load(at, mask=there, other=float("inf")), 0)
    high = tl.max(tl.load(at + parts * HEADS * HEAD_SIZE, mask=there, other=float("-inf")), 0)
    LEVELS: tl.constexpr = 2.0**BITS - 1.0
    scale, zero_point = affine_grid(low, high, LEVELS, 1.0 / LEVELS, factor, shrink)
    present = channel < HEAD_SIZE
    flag_if(tl.sum((present & ~storable(scale, zero_point)).to(tl.int32), 0) > 0, flag, 0, head, 1, HEADS)
    tl.store(scales + head * HEAD_SIZE + channel, scale, mask=present)
    tl.store(zero_points + head * HEAD_SIZE + channel, zero_point, mask=present)
