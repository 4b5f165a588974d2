"""Quantization of spans on a GPU: channel ranges and scales, then codes by the kernels that write pages."""

from __future__ import annotations

import torch
import triton.language as tl

from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.page_formats import (
    PAGE_SIZE,
    ChannelScales,
    PageLayout,
    SideTensors,
    Span,
    SpanFormat,
    SpanSide,
    key_blocks,
    value_blocks,
)
from kvconvert.kernels.pages.triton import affine_grid, flag_if, storable, tile_of
from kvconvert.kernels.pages.triton.launch import UNFUSED, quantize_listed, shrinkage, warps_for
from kvconvert.kernels.quantizer import new_flag, raise_if_flagged


@kernel(do_not_specialize=["count"])
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


@kernel(do_not_specialize=["parts"])
def channel_scale_kernel(
    extremes,
    scales,
    offsets,
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
    """Float16 scale and offset [H, D] of a span's channels, from `channel_range_kernel`'s extremes."""
    head = tl.program_id(0)
    part, channel = tl.arange(0, PART_TILE)[:, None], tl.arange(0, TILE)
    there = (part < parts) & (channel < HEAD_SIZE)[None, :]
    at = extremes + (part * HEADS + head) * HEAD_SIZE + channel[None, :]
    low = tl.min(tl.load(at, mask=there, other=float("inf")), 0)
    high = tl.max(tl.load(at + parts * HEADS * HEAD_SIZE, mask=there, other=float("-inf")), 0)
    LEVELS: tl.constexpr = 2.0**BITS - 1.0
    scale, offset = affine_grid(low, high, LEVELS, 1.0 / LEVELS, factor, shrink)
    present = channel < HEAD_SIZE
    flag_if(tl.sum((present & ~storable(scale, offset)).to(tl.int32), 0) > 0, flag, 0, head, 1, HEADS)
    tl.store(scales + head * HEAD_SIZE + channel, scale, mask=present)
    tl.store(offsets + head * HEAD_SIZE + channel, offset, mask=present)


# Parts of a span whose ranges are found by one program per head each, and tokens that it reads at a time.
SPAN_PARTS = 64
RANGE_TOKENS = 32


def quantize_span(
    keys: torch.Tensor, values: torch.Tensor, f: SpanFormat, feedback: torch.Tensor | None = None
) -> Span:
    """`quantize_span` of kernels/spans/__init__.py: keys [H, n, D], values [H, n, E] of any strides that
    `unsupported` accepts.

    Raises:
        GroupRangeError: NaN, infinity, or a scale or offset beyond float16; `index` is (head,).
    """
    heads, tokens = keys.shape[:2]
    blocks = -(-tokens // PAGE_SIZE)
    flag = new_flag(keys.device)
    sides = []
    for x, bits, factor in ((keys, f.key_bits, f.key_clip_ratio), (values, f.value_bits, f.value_clip_ratio)):
        scales = _channel_scales(x, bits, factor, flag)
        codes = _span_codes(x, bits, blocks, scales, flag, x is keys, feedback)
        sides.append(SpanSide(codes, *scales))
    raise_if_flagged(flag, heads, of_span=True)
    return Span(tokens, *sides)


def _channel_scales(x: torch.Tensor, bits: int, factor: float, flag: torch.Tensor) -> ChannelScales:
    heads, tokens, dim = x.shape
    tile = tile_of(dim, bits)
    part_tokens = -(-tokens // SPAN_PARTS // PAGE_SIZE) * PAGE_SIZE or PAGE_SIZE
    parts = -(-tokens // part_tokens)
    extremes = torch.empty(2, parts, heads, dim, dtype=torch.float32, device=x.device)
    scales = ChannelScales(*(torch.empty(heads, dim, dtype=torch.float16, device=x.device) for _ in range(2)))
    channel_range_kernel[(parts * heads,)](
        x, extremes, flag, x.stride(0), x.stride(1), tokens, part_tokens, heads, dim, tile, RANGE_TOKENS,
        num_warps=warps_for(RANGE_TOKENS * tile), **UNFUSED,
    )  # fmt: skip
    channel_scale_kernel[(heads,)](
        extremes, *scales, flag, parts, *shrinkage(factor), bits, heads, dim, tile, SPAN_PARTS, num_warps=4, **UNFUSED
    )
    return scales


def _span_codes(
    x: torch.Tensor,
    bits: int,
    blocks: int,
    scales: ChannelScales,
    flag: torch.Tensor,
    is_key: bool,
    feedback: torch.Tensor | None,
) -> torch.Tensor:
    """Codes of a span in blocks, which are static pages of their own scales; the last may be partly filled."""
    heads, tokens, dim = x.shape
    first = torch.arange(0, blocks * PAGE_SIZE, PAGE_SIZE)
    table = torch.zeros(blocks, 5, dtype=torch.int64)
    table[:, 0], table[:, 1], table[:, 3] = first * x.stride(1), x.stride(0), (tokens - first).clamp(max=PAGE_SIZE)
    f = (key_blocks if is_key else value_blocks)(heads, dim, bits)
    layout = PageLayout.of(f)
    table[:, 2] = torch.arange(blocks) * layout.record
    table = table.to(x.device, non_blocking=True)
    codes = torch.empty(blocks, heads, layout.lanes, layout.rows, dtype=torch.int16, device=x.device)
    tensors = SideTensors(static=scales, feedback=feedback if is_key else None)
    quantize_listed(x, table, codes, f, flag, tensors=tensors, partial=True)
    return codes
