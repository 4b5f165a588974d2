"""Kernels that write pages: norms, ranking of channels, ranges, codes and packing without a copy between.

Codes are packed along one axis of a page, the tokens of keys and the channels of values, and a group of neighbors along
it shares a scale. What lies across is a row: a channel of keys, a token of values. One program writes some rows of one
head's part of a page, chunk by chunk: as much of the packed axis as makes whole groups and whole planes of a lane. A
tile is one plane, [lanes, rows], so that codes which share a lane lie in one thread and packing exchanges nothing. The
axis enters addresses alone.

Norms take a launch of their own, since they span the rows of all programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.page_formats import TokenNorm
from kvconvert.kernels.pages.triton import (
    LARGEST_HALF,
    TABLE_COLUMNS,
    channel_parts,
    field_width,
    fields_of,
    flag_if,
    group_grid,
    in_bytes,
    nearest_codes,
    padded,
    read_tokens,
    reciprocal,
    slots_of,
    storable,
    store_grid,
    store_words,
    tile_of,
)

NO_NORM, JOINT = (tl.constexpr(norm.mode) for norm in (TokenNorm.NONE, TokenNorm.JOINT))


@kernel
def norm_kernel(
    keys, records, table, flag, token_stride, F: tl.constexpr, TOKENS: tl.constexpr, MEAN_ABS: tl.constexpr
):
    """Norms of TOKENS tokens of a page, of one head or over all of them."""
    SHARED: tl.constexpr = F.heads if F.norm == JOINT else 1
    TILE: tl.constexpr = tile_of(F.head_dim, F.bits)
    block, place = tl.program_id(0) % (F.page_size // TOKENS), tl.program_id(0) // (F.page_size // TOKENS)
    page, first = place // (F.heads // SHARED), place % (F.heads // SHARED) * SHARED
    start = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    head_stride = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    record = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8)
    hidden = tl.load(table + page * TABLE_COLUMNS + 4).to(tl.int32)
    token, channel = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, TILE)[None, :]
    total = tl.zeros([TOKENS, TILE], tl.float32)
    for head in tl.static_range(SHARED):
        own = keys + start + (first + head) * head_stride
        x = read_tokens(own, token[:, None], hidden, channel, channel < F.head_dim, token_stride).to(tl.float32)
        total += tl.abs(x) if MEAN_ABS else x * x
    norm = tl.sum(total, 1) / (SHARED * F.head_dim)
    if not MEAN_ABS:
        norm = tl.sqrt_rn(norm)
    flag_if(tl.sum((norm <= LARGEST_HALF).to(tl.int32), 0) < TOKENS, flag, page, first, 0, F.heads)
    target = records + record + first * F.head_stride + F.norm_start + token
    tl.store(target, norm.to(tl.float16).to(tl.int16, bitcast=True))


@triton.jit
def _inverse_norms(norms, token):
    """What keys are multiplied with, float32, from stored norms."""
    return reciprocal(tl.load(norms + token).to(tl.float16, bitcast=True).to(tl.float32))


@triton.jit
def _scores(keys, hidden, norms, token_stride, F: tl.constexpr, STEP: tl.constexpr):
    """Kitty's score of each channel, the sum of its magnitudes over the page's tokens that are not hidden: [TILE], -1
    beyond the head's."""
    TILE: tl.constexpr = tile_of(F.head_dim, F.bits)
    channel = tl.arange(0, TILE)
    total = tl.zeros([STEP, TILE], tl.float32)
    for step in range(F.page_size // STEP):
        token = (step * STEP + tl.arange(0, STEP))[:, None]
        present = (token >= hidden) & (channel < F.head_dim)[None, :]
        x = read_tokens(keys, token, hidden, channel[None, :], present, token_stride).to(tl.float32)
        if F.norm != NO_NORM:
            x *= _inverse_norms(norms, token)
        total += tl.abs(x)
    return tl.where(channel < F.head_dim, tl.sum(total, 0), -1.0)


@triton.jit
def _highest(score, TILE: tl.constexpr, SLOTS: tl.constexpr, COUNT: tl.constexpr):
    """The COUNT channels of the highest scores, ascending, ties to the lower index: int32 [SLOTS], -1 beyond."""
    channel, slot = tl.arange(0, TILE), tl.arange(0, SLOTS)
    before = channel[None, :] < channel[:, None]
    own, other = score[:, None], score[None, :]
    is_chosen = tl.sum(((other > own) | ((other == own) & before)).to(tl.int32), 1) < COUNT
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    found = is_chosen[None, :] & (place[None, :] == slot[:, None])
    return tl.sum(tl.where(found, channel[None, :] + 1, 0), 1) - 1


@triton.jit
def _places(channel, chosen, SLOTS: tl.constexpr):
    """Each channel's index in `chosen` [SLOTS], -1 where it is not there."""
    found = channel[:, None] == chosen[None, :]
    return tl.sum(tl.where(found, tl.arange(0, SLOTS)[None, :] + 1, 0), 1) - 1


@triton.jit
def _group_range(planes, lane, NUMBER: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr):
    """Lowest and highest number [1, rows] of one group of a chunk, whose planes are WHOLE if all lanes exist."""
    for plane in tl.static_range(NUMBER * GROUP // LANES, (NUMBER * GROUP + GROUP - 1) // LANES + 1):
        below, above = planes[plane], planes[plane]
        if not WHOLE or plane * LANES < NUMBER * GROUP or plane * LANES + LANES > NUMBER * GROUP + GROUP:
            member = (lane < LANES) & ((plane * LANES + lane) // GROUP == NUMBER)
            below, above = tl.where(member, below, float("inf")), tl.where(member, above, float("-inf"))
        if plane == NUMBER * GROUP // LANES:
            low, high = below, above
        else:
            low, high = tl.minimum(low, below), tl.maximum(high, above)
    return tl.min(low, 0, keep_dims=True), tl.max(high, 0, keep_dims=True)


@triton.jit
def _grid_of(scales, offsets, lane, PLANE: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr):
    """Scale and offset of a plane's numbers, [1 or lanes, rows], from those [1, rows] of a chunk's groups."""
    scale, offset = scales[PLANE * LANES // GROUP], offsets[PLANE * LANES // GROUP]
    for group in tl.static_range(PLANE * LANES // GROUP + 1, (PLANE * LANES + LANES - 1) // GROUP + 1):
        later = PLANE * LANES + lane >= group * GROUP
        scale, offset = tl.where(later, scales[group], scale), tl.where(later, offsets[group], offset)
    return scale, offset


@triton.jit
def _paired_high_lanes(keys, hidden, chosen, norms, token_stride, factor, shrink, F: tl.constexpr, CHUNK: tl.constexpr):
    """Lanes int32 [F.lanes, SLOTS] of the upper bits of 1-bit keys' boosted channels, two of which share a field.

    These two may lie anywhere, so the boosted channels are read and quantized once more, in their order in the record.
    """
    SLOTS: tl.constexpr = slots_of(F.boosted)
    HIGH_ROWS: tl.constexpr = F.high_rows
    slot, lane = tl.arange(0, SLOTS), tl.arange(0, F.lanes)[:, None]
    LANES: tl.constexpr = F.lanes  # to functions of Triton 3.6 a field is no constant
    lanes = tl.zeros([LANES, SLOTS], tl.int32)
    for step in range(F.page_size // CHUNK):
        for half in tl.static_range(2):
            picked = (slot[None, :] == slot[:, None] + half * HIGH_ROWS) & (slot < HIGH_ROWS)[:, None]
            channel = (tl.sum(tl.where(picked, chosen[None, :] + 1, 0), 1) - 1)[None, :]
            planes = ()
            for plane in tl.static_range(CHUNK // F.lanes):
                token = step * CHUNK + plane * F.lanes + lane
                x = read_tokens(keys, token, hidden, channel, channel >= 0, token_stride).to(tl.float32)
                if F.norm != NO_NORM:
                    x *= _inverse_norms(norms, token)
                planes = planes + (x,)
            scales = ()
            offsets = ()
            for group in tl.static_range(CHUNK // F.group_size):
                low, high = _group_range(planes, lane, group, F.group_size, F.lanes, True)
                scale, offset = group_grid(low, high, 3.0, 1.0 / 3.0, factor, shrink, in_bytes(F.scale, F.offset))
                scales = scales + (scale,)
                offsets = offsets + (offset,)
            for plane in tl.static_range(CHUNK // F.lanes):
                scale, offset = _grid_of(scales, offsets, lane, plane, F.group_size, F.lanes)
                codes = nearest_codes(planes[plane], scale, offset, 3.0)
                bit = tl.where(channel >= 0, (codes >> 1) & 1, 0)
                lanes += fields_of(bit, half, 1) << ((step * (CHUNK // F.lanes) + plane) * field_width(1))
    return lanes


@kernel
def page_kernel(
    tokens,
    records,
    record_bytes,
    table,
    static_scales,
    static_offsets,
    boosted,
    flag,
    token_stride,
    factor,
    shrink,
    F: tl.constexpr,
    ROW_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """ROW_TILE rows (pairs at 1 and 3 bits, all that share words if F.by_token) of one head's part of a page.

    F is their `PageLayout`. What ranks channels sees all of them. PARTIAL pages may have fewer tokens.
    """
    # Two rows share a field of single bits: number i its lower bit, number i + half its upper one. By token, a word has
    # a field of each part of the channels.
    HALVES: tl.constexpr = channel_parts(F.bits, F.by_token)
    PACKED: tl.constexpr = F.page_size if F.is_key else F.head_dim
    ACROSS: tl.constexpr = F.head_dim if F.is_key else F.page_size
    ROWS: tl.constexpr = ACROSS // HALVES
    BLOCKS: tl.constexpr = (ROWS + ROW_TILE - 1) // ROW_TILE
    PLANES: tl.constexpr = CHUNK // F.lanes
    LOW_BITS: tl.constexpr = 2**F.bits - 1
    FINE_LEVELS: tl.constexpr = 4.0**F.bits - 1.0
    BYTES: tl.constexpr = in_bytes(F.scale, F.offset)
    LANE_TILE: tl.constexpr = padded(F.lanes)
    SLOTS: tl.constexpr = slots_of(F.boosted)
    block = tl.program_id(0) % BLOCKS
    page, head = tl.program_id(0) // (BLOCKS * F.heads), tl.program_id(0) // BLOCKS % F.heads
    start = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    tokens += start + head * tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    record = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8)
    count = tl.load(table + page * TABLE_COLUMNS + 3)
    hidden = tl.load(table + page * TABLE_COLUMNS + 4).to(tl.int32)
    part = record + head * F.head_stride
    norms = records + (record if F.norm == JOINT else part) + F.norm_start

    slot = tl.arange(0, SLOTS)
    chosen = tl.full([SLOTS], -1, tl.int32)
    if F.channels >= 0:
        TILE: tl.constexpr = tile_of(F.head_dim, F.bits)
        score = _scores(tokens, hidden, norms, token_stride, F, CHUNK * ROW_TILE // TILE)
        chosen = _highest(score, TILE, SLOTS, F.boosted)
        tl.store(record_bytes + (part + F.channels) * 2 + slot, chosen.to(tl.uint8), mask=slot < F.boosted)
    elif F.boosted > 0:
        chosen = tl.load(boosted + head * F.boosted + slot, mask=slot < F.boosted, other=-1).to(tl.int32)

    lane, row = tl.arange(0, LANE_TILE)[:, None], (block * ROW_TILE + tl.arange(0, ROW_TILE))[None, :]
    there = row < ROWS
    within = there & (lane < F.lanes) if F.lanes != LANE_TILE else there
    lanes = tl.zeros([LANE_TILE, ROW_TILE], tl.int32)
    second_lanes = tl.zeros([LANE_TILE, ROW_TILE], tl.int32)
    high_lanes = tl.zeros([LANE_TILE, ROW_TILE], tl.int32)
    unstorable = tl.zeros([1, ROW_TILE], tl.int32)
    total = tl.zeros([LANE_TILE, ROW_TILE], tl.float32)
    for step in range(PACKED // CHUNK):
        inverse_norms = ()
        for plane in tl.static_range(PLANES if F.norm != NO_NORM else 0):
            inverse_norms = inverse_norms + (_inverse_norms(norms, step * CHUNK + plane * F.lanes + lane),)
        for half in tl.static_range(HALVES):
            across = row + half * ROWS
            levels = 2.0**F.bits - 1.0
            inverse_levels = 1.0 / (2.0**F.bits - 1.0)
            if F.boosted > 0:
                is_fine = _places(tl.reshape(across, [ROW_TILE]), chosen, SLOTS)[None, :] >= 0
                levels = tl.where(is_fine, FINE_LEVELS, levels)
                inverse_levels = tl.where(is_fine, 1.0 / FINE_LEVELS, inverse_levels)
            planes = ()
            for plane in tl.static_range(PLANES):
                packed = step * CHUNK + plane * F.lanes + lane
                token, channel = (packed, across) if F.is_key else (across, packed)
                present = within & (token < count) if PARTIAL else within
                x = read_tokens(tokens, token, hidden, channel, present, token_stride).to(tl.float32)
                if F.norm == NO_NORM:
                    # A sum of finite numbers overflows only beyond what float16 scales describe; static ones clamp it.
                    total += x * 0.0 if F.static else x
                else:
                    x *= inverse_norms[plane]
                planes = planes + (x,)
            scales = ()
            offsets = ()
            for group in tl.static_range(0 if F.static else CHUNK // F.group_size):
                low, high = _group_range(planes, lane, group, F.group_size, F.lanes, F.lanes == LANE_TILE)
                scale, offset = group_grid(low, high, levels, inverse_levels, factor, shrink, BYTES)
                unstorable |= storable(scale, offset).to(tl.int32) ^ 1
                target = records + part + (step * (CHUNK // F.group_size) + group) * ACROSS + across
                store_grid(target + F.scale, target + F.offset, scale, offset, there, BYTES)
                scales = scales + (scale,)
                offsets = offsets + (offset,)
            for plane in tl.static_range(PLANES):
                number = step * PLANES + plane
                packed = step * CHUNK + plane * F.lanes + lane
                if F.static:
                    channel = head * F.head_dim + (across if F.is_key else packed)
                    known = channel < head * F.head_dim + F.head_dim
                    scale = tl.load(static_scales + channel, mask=known, other=0.0)
                    offset = tl.load(static_offsets + channel, mask=known, other=0.0)
                else:
                    scale, offset = _grid_of(scales, offsets, lane, plane, F.group_size, F.lanes)
                codes = nearest_codes(planes[plane], scale, offset, levels)
                if F.boosted > 0:
                    if HALVES == 1:
                        high_lanes += ((codes >> F.bits) & LOW_BITS) << (number * field_width(F.bits))
                    codes &= LOW_BITS
                if PARTIAL:
                    codes = tl.where(within & ((packed if F.is_key else across) < count), codes, 0)
                if F.by_token:
                    lanes += codes << (half * F.bits)
                elif F.bits == 3 and half == 1:
                    second_lanes += fields_of(codes, half, F.bits) << (number * field_width(F.bits))
                else:
                    lanes += fields_of(codes, half, F.bits) << (number * field_width(F.bits))
    bad = tl.max(tl.max(unstorable, 1), 0) > 0
    if F.norm == NO_NORM:
        bad |= ~(tl.abs(tl.sum(tl.sum(total, 1), 0)) < float("inf"))
    flag_if(bad, flag, page, head, 1, F.heads)
    store_words(records + part + lane * F.rows + row, lanes, second_lanes, within, ROWS, F.bits)

    if F.boosted > 0 and HALVES == 1:
        slot_of = _places(tl.reshape(row, [ROW_TILE]), chosen, SLOTS)[None, :]
        tl.store(records + part + F.high + lane * F.boosted + slot_of, high_lanes.to(tl.int16), mask=slot_of >= 0)
    elif F.boosted > 0:
        paired = _paired_high_lanes(tokens, hidden, chosen, norms, token_stride, factor, shrink, F, CHUNK)
        target = records + part + F.high + lane * F.high_rows + slot[None, :]
        tl.store(target, paired.to(tl.int16), mask=(slot < F.high_rows)[None, :])


@kernel
def copy_page_kernel(source, target, table, token_stride, F: tl.constexpr):
    """One head of an unquantized page, [P, channels] in the dtype of both."""
    TILE: tl.constexpr = tile_of(F.head_dim, F.bits)
    page, head = tl.program_id(0) // F.heads, tl.program_id(0) % F.heads
    start = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    start += head * tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    part = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8) + head * (F.head_dim * F.page_size)
    hidden = tl.load(table + page * TABLE_COLUMNS + 4).to(tl.int32)
    token, channel = tl.arange(0, F.page_size)[:, None], tl.arange(0, TILE)[None, :]
    x = read_tokens(source + start, token, hidden, channel, channel < F.head_dim, token_stride)
    tl.store(target + part + token * F.head_dim + channel, x, mask=channel < F.head_dim)
