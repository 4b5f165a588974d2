"""Kernels that write value pages, unquantized pages, and the scales of spans.

One program reads a block of a page's values of one head once. The tile is [planes, tokens, lanes], so that the codes
which share a lane lie in one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.gpu.affine import (
    TABLE_COLUMNS,
    affine_grid,
    any_true,
    flag_if,
    nearest_codes,
    read_signs,
    read_tokens,
    storable,
)


@triton.jit
def _value_codes(
    x,
    plane,
    lane,
    records,
    target,
    factor,
    shrink,
    LEVELS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PLANES: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    LANE_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """Codes of values float32 [PLANES, TOKENS, LANE_TILE] by ranges of channels, which it stores at `target` [TOKENS].

    Also returns whether each scale and minimum can be stored.
    """
    GROUPS: tl.constexpr = HEAD_SIZE // GROUP
    if LANES != LANE_TILE or (GROUP % LANES != 0 and LANES % GROUP != 0):
        codes, bad = _straddling_codes(
            x, plane * LANES + lane, lane < LANES, records, target, factor, shrink, LEVELS, GROUPS, GROUP, PAGE, MINIMUM
        )
    else:
        if GROUP >= LANES:
            # A group is some whole planes.
            groups = tl.reshape(x, [GROUPS, GROUP // LANES, TOKENS, LANES])
            low = tl.min(tl.min(groups, 1, keep_dims=True), 3, keep_dims=True)
            high = tl.max(tl.max(groups, 1, keep_dims=True), 3, keep_dims=True)
            at = target[None, None, :, None] + tl.arange(0, GROUPS)[:, None, None, None] * PAGE
        else:
            # A plane is some whole groups.
            groups = tl.reshape(x, [PLANES, TOKENS, LANES // GROUP, GROUP])
            low, high = tl.min(groups, 3, keep_dims=True), tl.max(groups, 3, keep_dims=True)
            within = tl.arange(0, LANES // GROUP)[None, None, :, None]
            group = tl.arange(0, PLANES)[:, None, None, None] * (LANES // GROUP) + within
            at = target[None, :, None, None] + group * PAGE
        scale, minimum = affine_grid(low, high, LEVELS, 1.0 / LEVELS, factor, shrink)
        codes = tl.reshape(nearest_codes(groups, scale, minimum, LEVELS), [PLANES, TOKENS, LANE_TILE])
        bad = any_true(~storable(scale, minimum))
        tl.store(records + at, scale.to(tl.int16, bitcast=True))
        tl.store(records + at + MINIMUM, minimum.to(tl.int16, bitcast=True))
    return codes, bad


@triton.jit
def _straddling_codes(
    x,
    channel,
    present,
    records,
    target,
    factor,
    shrink,
    LEVELS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """`_value_codes` where groups and planes do not nest: one group after another."""
    codes = tl.zeros_like(x).to(tl.int32)
    bad = False
    for group in tl.static_range(GROUPS):
        member = present & (channel // GROUP == group)
        low = tl.min(tl.min(tl.where(member, x, float("inf")), 2), 0)
        high = tl.max(tl.max(tl.where(member, x, float("-inf")), 2), 0)
        scale, minimum = affine_grid(low, high, LEVELS, 1.0 / LEVELS, factor, shrink)
        codes = tl.where(member, nearest_codes(x, scale[None, :, None], minimum[None, :, None], LEVELS), codes)
        bad |= tl.sum(storable(scale, minimum).to(tl.int32), 0) < x.shape[1]
        tl.store(records + target + group * PAGE, scale.to(tl.int16, bitcast=True))
        tl.store(records + target + group * PAGE + MINIMUM, minimum.to(tl.int16, bitcast=True))
    return codes, bad


@triton.jit
def value_page_kernel(
    values,
    records,
    table,
    static_scales,
    static_minima,
    flag,
    token_stride,
    factor,
    shrink,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    PARTIAL: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    LANES: tl.constexpr,
    LANE_TILE: tl.constexpr,
    SCALE: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """TOKENS rows of one head's part of a value page. HEAD_STRIDE to MINIMUM are fields of `ValueLayout`."""
    PAIRED: tl.constexpr = BITS == 1
    WIDTH: tl.constexpr = 2 if PAIRED else BITS
    PLANES: tl.constexpr = 16 // WIDTH
    ROWS: tl.constexpr = PAGE // 2 if PAIRED else PAGE
    BLOCKS: tl.constexpr = ROWS // TOKENS
    block, place = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    page, head = place // HEADS, place % HEADS
    offset = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    offset += head * tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    part = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8) + head * HEAD_STRIDE
    plane, lane = tl.arange(0, PLANES)[:, None, None], tl.arange(0, LANE_TILE)[None, None, :]
    row = block * TOKENS + tl.arange(0, TOKENS)
    channel = plane * LANES + lane
    LEVELS: tl.constexpr = 2.0**BITS - 1.0
    fields = tl.zeros([PLANES, TOKENS, LANE_TILE], tl.int32)
    total = tl.zeros([TOKENS, LANE_TILE], tl.float32)
    for half in tl.static_range(2 if PAIRED else 1):
        token = row + half * ROWS
        present = lane < LANES
        if PARTIAL:
            present = present & (token < tl.load(table + page * TABLE_COLUMNS + 3))[None, :, None]
        pointers = values + offset + token[None, :, None] * token_stride + channel
        x = tl.load(pointers, mask=present, other=0.0).to(tl.float32)
        # A sum of finite numbers overflows only beyond what float16 scales describe; static ones clamp that.
        total += tl.sum(x * 0.0 if STATIC else x, 0)
        if STATIC:
            at = head * HEAD_SIZE + channel
            scale = tl.load(static_scales + at, mask=lane < LANES, other=0.0)
            minimum = tl.load(static_minima + at, mask=lane < LANES, other=0.0)
            codes = nearest_codes(x, scale, minimum, LEVELS)
            if PARTIAL:
                codes = tl.where(present, codes, 0)
        else:
            target = part + SCALE + token
            codes, bad = _value_codes(
                x, plane, lane, records, target, factor, shrink, LEVELS, HEAD_SIZE, PLANES, TOKENS, LANES, LANE_TILE,
                GROUP, PAGE, MINIMUM - SCALE,
            )  # fmt: skip
            flag_if(bad, flag, page, head, 1, HEADS)
        fields += codes << half
    flag_if(~(tl.abs(tl.sum(tl.sum(total, 1), 0)) < float("inf")), flag, page, head, 1, HEADS)
    lanes = tl.sum(fields << (plane * WIDTH), 0).to(tl.int16)
    lane = tl.arange(0, LANE_TILE)
    tl.store(records + part + lane[None, :] * ROWS + row[:, None], lanes, mask=(lane < LANES)[None, :])


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
    minima,
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
    """Float16 scale and minimum [H, D] of a span's channels, from `channel_range_kernel`'s extremes."""
    head = tl.program_id(0)
    part, channel = tl.arange(0, PART_TILE)[:, None], tl.arange(0, TILE)
    there = (part < parts) & (channel < HEAD_SIZE)[None, :]
    at = extremes + (part * HEADS + head) * HEAD_SIZE + channel[None, :]
    low = tl.min(tl.load(at, mask=there, other=float("inf")), 0)
    high = tl.max(tl.load(at + parts * HEADS * HEAD_SIZE, mask=there, other=float("-inf")), 0)
    LEVELS: tl.constexpr = 2.0**BITS - 1.0
    scale, minimum = affine_grid(low, high, LEVELS, 1.0 / LEVELS, factor, shrink)
    present = channel < HEAD_SIZE
    flag_if(tl.sum((present & ~storable(scale, minimum)).to(tl.int32), 0) > 0, flag, 0, head, 1, HEADS)
    tl.store(scales + head * HEAD_SIZE + channel, scale, mask=present)
    tl.store(minima + head * HEAD_SIZE + channel, minimum, mask=present)


@triton.jit
def copy_page_kernel(
    source,
    target,
    table,
    matrix,
    token_stride,
    normaliser,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """One head of an unquantized page, [P, channels] in the dtype of both."""
    page, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    offset = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    offset += head * tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    part = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8) + head * (HEAD_SIZE * PAGE)
    token, channel = tl.arange(0, PAGE), tl.arange(0, TILE)
    present = channel[None, :] < HEAD_SIZE
    signs = read_signs(matrix, channel, HEAD_SIZE, TILE, ROTATE)
    x = read_tokens(source, offset, token, channel, present, signs, normaliser, token_stride, HEAD_SIZE, TILE, ROTATE)
    tl.store(target + part + token[:, None] * HEAD_SIZE + channel[None, :], x, mask=present)
