"""Kernels that write value pages and unquantized pages.

One program reads a block of a page's values of one head once, plane by plane: tiles [tokens, lanes] of neighbouring
channels, so that the codes which share a lane lie in one thread and packing exchanges nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.pages.triton.affine import (
    TABLE_COLUMNS,
    field_width,
    fields_of,
    flag_if,
    group_grid,
    halves_of,
    in_bytes,
    nearest_codes,
    read_tokens,
    storable,
    store_grid,
    store_words,
)


@triton.jit
def _grouped_fields(
    pointers,
    records,
    target,
    factor,
    shrink,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PLANES: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    LANE_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Codes of TOKENS tokens in their places in words, int32 [TOKENS, LANE_TILE], by ranges of GROUP channels.

    Scales go to `target` [TOKENS], zero points ZERO_POINT further. Also returns sums of the values, and where a scale
    or zero point cannot be stored, [TOKENS, 1].
    """
    WIDTH: tl.constexpr = field_width(BITS)
    LEVELS: tl.constexpr = 2.0**BITS - 1.0
    lane = tl.arange(0, LANE_TILE)[None, :]
    planes = ()
    total = tl.zeros([TOKENS, LANE_TILE], tl.float32)
    for plane in tl.static_range(PLANES):
        x = tl.load(pointers + plane * LANES, mask=lane < LANES, other=0.0).to(tl.float32)
        total += x
        planes = planes + (x,)
    scales = ()
    zero_points = ()
    unstorable = tl.zeros([TOKENS, 1], tl.int32)
    for group in tl.static_range(HEAD_SIZE // GROUP):
        low = tl.full([TOKENS, LANE_TILE], float("inf"), tl.float32)
        high = tl.full([TOKENS, LANE_TILE], float("-inf"), tl.float32)
        for plane in tl.static_range(group * GROUP // LANES, (group * GROUP + GROUP - 1) // LANES + 1):
            if LANES == LANE_TILE and plane * LANES >= group * GROUP and plane * LANES + LANES <= group * GROUP + GROUP:
                low, high = tl.minimum(low, planes[plane]), tl.maximum(high, planes[plane])
            else:
                member = (lane < LANES) & ((plane * LANES + lane) // GROUP == group)
                low = tl.minimum(low, tl.where(member, planes[plane], float("inf")))
                high = tl.maximum(high, tl.where(member, planes[plane], float("-inf")))
        low, high = tl.min(low, 1, keep_dims=True), tl.max(high, 1, keep_dims=True)
        scale, zero_point = group_grid(low, high, LEVELS, 1.0 / LEVELS, factor, shrink, BYTES)
        unstorable |= storable(scale, zero_point).to(tl.int32) ^ 1
        at = records + target[:, None] + group * PAGE
        store_grid(at, at + ZERO_POINT, scale, zero_point, None, BYTES)
        scales = scales + (scale,)
        zero_points = zero_points + (zero_point,)
    fields = tl.zeros([TOKENS, LANE_TILE], tl.int32)
    for plane in tl.static_range(PLANES):
        scale, zero_point = scales[plane * LANES // GROUP], zero_points[plane * LANES // GROUP]
        for group in tl.static_range(plane * LANES // GROUP + 1, (plane * LANES + LANES - 1) // GROUP + 1):
            later = plane * LANES + lane >= group * GROUP
            scale, zero_point = tl.where(later, scales[group], scale), tl.where(later, zero_points[group], zero_point)
        codes = nearest_codes(planes[plane], scale, zero_point, LEVELS)
        fields += fields_of(codes, HALF, BITS) << (plane * WIDTH)
    return fields, total, unstorable


@triton.jit
def _static_fields(
    pointers,
    exists,
    scales,
    zero_points,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    PLANES: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    LANE_TILE: tl.constexpr,
):
    """`_grouped_fields` by known scales of channels; tokens that do not exist get code 0."""
    WIDTH: tl.constexpr = field_width(BITS)
    LEVELS: tl.constexpr = 2.0**BITS - 1.0
    lane = tl.arange(0, LANE_TILE)[None, :]
    fields = tl.zeros([TOKENS, LANE_TILE], tl.int32)
    total = tl.zeros([TOKENS, LANE_TILE], tl.float32)
    for plane in tl.static_range(PLANES):
        x = tl.load(pointers + plane * LANES, mask=exists & (lane < LANES), other=0.0).to(tl.float32)
        # Values beyond their range are clamped, so that only what is not finite may count.
        total += x * 0.0
        scale = tl.load(scales + plane * LANES + lane, mask=lane < LANES, other=0.0)
        zero_point = tl.load(zero_points + plane * LANES + lane, mask=lane < LANES, other=0.0)
        codes = tl.where(exists, nearest_codes(x, scale, zero_point, LEVELS), 0)
        fields += fields_of(codes, HALF, BITS) << (plane * WIDTH)
    return fields, total


@kernel
def value_page_kernel(
    values,
    records,
    table,
    static_scales,
    static_zero_points,
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
    STORED_ROWS: tl.constexpr,
    LANE_TILE: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO_POINT: tl.constexpr,
):
    """TOKENS rows of one head's part of a value page. HEAD_STRIDE to ZERO_POINT are fields of `PageLayout`,
    whose `rows` are STORED_ROWS.
    """
    # Two tokens share a field of single bits: number i its lower bit, number i + half its upper one.
    HALVES: tl.constexpr = halves_of(BITS)
    PLANES: tl.constexpr = 16 // field_width(BITS)
    ROWS: tl.constexpr = PAGE // HALVES
    BLOCKS: tl.constexpr = ROWS // TOKENS
    block, place = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    page, head = place // HEADS, place % HEADS
    offset = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    offset += head * tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    part = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8) + head * HEAD_STRIDE
    count = tl.load(table + page * TABLE_COLUMNS + 3)
    hidden = tl.load(table + page * TABLE_COLUMNS + 4)
    lane = tl.arange(0, LANE_TILE)[None, :]
    row = block * TOKENS + tl.arange(0, TOKENS)
    lanes = tl.zeros([TOKENS, LANE_TILE], tl.int32)
    second_lanes = tl.zeros([TOKENS, LANE_TILE], tl.int32)
    total = tl.zeros([TOKENS, LANE_TILE], tl.float32)
    unstorable = tl.zeros([TOKENS, 1], tl.int32)
    for half in tl.static_range(HALVES):
        token = row + half * ROWS
        pointers = values + offset + tl.maximum(token, hidden)[:, None] * token_stride + lane
        if STATIC:
            exists = (token < (count if PARTIAL else PAGE))[:, None]
            fields, sums = _static_fields(
                pointers, exists, static_scales + head * HEAD_SIZE, static_zero_points + head * HEAD_SIZE, BITS,
                half, PLANES, TOKENS, LANES, LANE_TILE,
            )  # fmt: skip
        else:
            fields, sums, bad = _grouped_fields(
                pointers, records, part + SCALE + token, factor, shrink, BITS, half, HEAD_SIZE, PLANES, TOKENS,
                LANES, LANE_TILE, GROUP, PAGE, ZERO_POINT - SCALE, in_bytes(SCALE, ZERO_POINT),
            )  # fmt: skip
            unstorable |= bad
        total += sums
        if BITS == 3 and half == 1:
            second_lanes += fields
        else:
            lanes += fields
    # A sum of finite numbers overflows only beyond what float16 scales describe.
    is_finite = tl.abs(tl.sum(tl.sum(total, 1), 0)) < float("inf")
    flag_if(~is_finite | (tl.max(tl.max(unstorable, 1), 0) > 0), flag, page, head, 1, HEADS)
    store_words(records + part + lane * STORED_ROWS + row[:, None], lanes, second_lanes, lane < LANES, ROWS, BITS)


@kernel
def copy_page_kernel(
    source,
    target,
    table,
    token_stride,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One head of an unquantized page, [P, channels] in the dtype of both."""
    page, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    offset = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    offset += head * tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    part = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8) + head * (HEAD_SIZE * PAGE)
    hidden = tl.load(table + page * TABLE_COLUMNS + 4)
    token, channel = tl.arange(0, PAGE), tl.arange(0, TILE)
    present = channel[None, :] < HEAD_SIZE
    x = read_tokens(source, offset, token, hidden, channel, present, token_stride)
    tl.store(target + part + token[:, None] * HEAD_SIZE + channel[None, :], x, mask=present)
