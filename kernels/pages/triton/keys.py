"""Kernels that write key pages: norms, ranking of channels, ranges, codes and packing without a copy between.

One program writes a page's record of one head, chunk by chunk: as many tokens as make whole groups and whole planes of
a lane. A chunk's tile is [tokens, channels], whose rows that share a lane a thread holds together, so that packing
exchanges nothing between threads. Only a norm over all heads needs a launch of its own, since every head's program has
to know it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.pages.formats import TokenNorm
from kvconvert.kernels.pages.triton.affine import (
    LARGEST_HALF,
    TABLE_COLUMNS,
    any_true,
    channel_parts,
    flag_if,
    group_grid,
    in_bytes,
    nearest_codes,
    packed_codes,
    read_tokens,
    reciprocal,
    storable,
    store_grid,
    store_words,
)

NO_NORM, JOINT, PER_HEAD = (tl.constexpr(norm.mode) for norm in TokenNorm)


@kernel
def joint_norm_kernel(
    keys,
    records,
    table,
    flag,
    token_stride,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    OFFSET: tl.constexpr,
    MEAN_ABS: tl.constexpr,
):
    """Norms over all heads of TOKENS tokens of a page, float16 at OFFSET of its record."""
    page, block = tl.program_id(0) // (PAGE // TOKENS), tl.program_id(0) % (PAGE // TOKENS)
    offset = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    head_stride = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    record = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8)
    hidden = tl.load(table + page * TABLE_COLUMNS + 4)
    token, channel = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, TILE)
    present = channel[None, :] < HEAD_SIZE
    total = tl.zeros([TOKENS, TILE], tl.float32)
    for head in tl.static_range(HEADS):
        x = read_tokens(keys, offset + head * head_stride, token, hidden, channel, present, token_stride).to(tl.float32)
        total += tl.abs(x) if MEAN_ABS else x * x
    norm = tl.sum(total, 1) / (HEADS * HEAD_SIZE)
    if not MEAN_ABS:
        norm = tl.sqrt_rn(norm)
    flag_if(tl.sum((norm <= LARGEST_HALF).to(tl.int32), 0) < TOKENS, flag, page, 0, 0, HEADS)
    tl.store(records + record + OFFSET + token, norm.to(tl.float16).to(tl.int16, bitcast=True))


@triton.jit
def _norms(
    keys,
    offset,
    token,
    hidden,
    joint,
    token_stride,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    MEAN_ABS: tl.constexpr,
):
    """Norms of some tokens, float16, and whether one cannot be stored: read at `joint` or computed of one head."""
    bad = False
    if NORM == JOINT:
        norm = tl.load(joint + token).to(tl.float16, bitcast=True)
    else:
        channel = tl.arange(0, TILE)
        x = read_tokens(keys, offset, token, hidden, channel, channel[None, :] < HEAD_SIZE, token_stride)
        x = x.to(tl.float32)
        size = tl.sum(tl.abs(x) if MEAN_ABS else x * x, 1) / HEAD_SIZE
        if not MEAN_ABS:
            size = tl.sqrt_rn(size)
        norm = size.to(tl.float16)
        bad = tl.max((size <= LARGEST_HALF).to(tl.int32) ^ 1, 0) > 0
    return norm, bad


@triton.jit
def _scores(
    keys,
    offset,
    hidden,
    joint,
    token_stride,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    NORM: tl.constexpr,
    MEAN_ABS: tl.constexpr,
):
    """Kitty's score of each channel, the sum of its magnitudes over the page's tokens that are not hidden: [TILE], -1
    beyond the head's."""
    channel = tl.arange(0, TILE)
    total = tl.zeros([STEP, TILE], tl.float32)
    for step in range(PAGE // STEP):
        token = step * STEP + tl.arange(0, STEP)
        present = (token >= hidden)[:, None] & (channel < HEAD_SIZE)[None, :]
        x = read_tokens(keys, offset, token, hidden, channel, present, token_stride).to(tl.float32)
        if NORM != NO_NORM:
            norm, _ = _norms(keys, offset, token, hidden, joint, token_stride, HEAD_SIZE, TILE, NORM, MEAN_ABS)
            x *= reciprocal(norm.to(tl.float32))[:, None]
        total += tl.abs(x)
    return tl.where(channel < HEAD_SIZE, tl.sum(total, 0), -1.0)


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
def _grouped_codes(
    x,
    levels,
    inverse_levels,
    factor,
    shrink,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Codes [CHUNK, CHANNELS] with their float16 scale and zero point [groups, 1, CHANNELS], of keys float32."""
    groups = tl.reshape(x, [CHUNK // GROUP, GROUP, CHANNELS])
    low, high = tl.min(groups, 1, keep_dims=True), tl.max(groups, 1, keep_dims=True)
    scale, zero_point = group_grid(low, high, levels, inverse_levels, factor, shrink, BYTES)
    return tl.reshape(nearest_codes(groups, scale, zero_point, levels), [CHUNK, CHANNELS]), scale, zero_point


@triton.jit
def _places(channel, chosen, SLOTS: tl.constexpr):
    """Each channel's index in `chosen` [SLOTS], -1 where it is not there."""
    found = channel[:, None] == chosen[None, :]
    return tl.sum(tl.where(found, tl.arange(0, SLOTS)[None, :] + 1, 0), 1) - 1


@triton.jit
def _paired_high_lanes(
    keys,
    offset,
    hidden,
    chosen,
    joint,
    token_stride,
    factor,
    shrink,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    MEAN_ABS: tl.constexpr,
    SLOTS: tl.constexpr,
    HIGH_ROWS: tl.constexpr,
    LANES: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Lanes int16 [LANES, SLOTS] of the upper bits of 1-bit keys' boosted channels, two of which share a field.

    These two may lie anywhere, so the boosted channels are read and quantized once more, in their order in the record.
    """
    slot = tl.arange(0, SLOTS)
    lanes = tl.zeros([LANES, SLOTS], tl.int32)
    for step in range(PAGE // CHUNK):
        token = step * CHUNK + tl.arange(0, CHUNK)
        inverse_norm = tl.full([CHUNK], 1.0, tl.float32)
        if NORM != NO_NORM:
            norm, _ = _norms(keys, offset, token, hidden, joint, token_stride, HEAD_SIZE, TILE, NORM, MEAN_ABS)
            inverse_norm = reciprocal(norm.to(tl.float32))
        for half in tl.static_range(2):
            picked = (slot[None, :] == slot[:, None] + half * HIGH_ROWS) & (slot < HIGH_ROWS)[:, None]
            channel = tl.sum(tl.where(picked, chosen[None, :] + 1, 0), 1) - 1
            present = (channel >= 0)[None, :]
            x = read_tokens(keys, offset, token, hidden, channel, present, token_stride).to(tl.float32)
            x *= inverse_norm[:, None]
            codes, _, _ = _grouped_codes(x, 3.0, 1.0 / 3.0, factor, shrink, CHUNK, GROUP, SLOTS, BYTES)
            bit = tl.where(present, (codes >> 1) & 1, 0)
            lanes += packed_codes(bit, step * (CHUNK // LANES), half, 1, CHUNK, SLOTS, LANES)
    return lanes.to(tl.int16)


@kernel
def key_page_kernel(
    keys,
    records,
    record_bytes,
    table,
    static_scales,
    static_zero_points,
    boosted,
    flag,
    token_stride,
    factor,
    shrink,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    MEAN_ABS: tl.constexpr,
    BOOSTED: tl.constexpr,
    SLOTS: tl.constexpr,
    DYNAMIC: tl.constexpr,
    STATIC: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PARTIAL: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    LANES: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    HIGH: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    PER_HEAD_NORM: tl.constexpr,
    CHANNELS: tl.constexpr,
    JOINT_NORM: tl.constexpr,
):
    """ROW_TILE channels (pairs at 1 and 3 bits, all that share words if BY_TOKEN) of one head's part of a key page.

    HEAD_STRIDE to JOINT_NORM are fields of `PageLayout`, whose `rows` are STORED_ROWS. What ranks channels or takes
    norms of one head sees all of it.
    """
    # Two channels share a field of single bits: number i its lower bit, number i + half its upper one. By token, a
    # word has a field of each part of the channels.
    HALVES: tl.constexpr = channel_parts(BITS, BY_TOKEN)
    ROWS: tl.constexpr = HEAD_SIZE // HALVES
    BLOCKS: tl.constexpr = (ROWS + ROW_TILE - 1) // ROW_TILE
    LEVELS: tl.constexpr = 2.0**BITS - 1.0
    FINE_LEVELS: tl.constexpr = 4.0**BITS - 1.0
    BYTES: tl.constexpr = in_bytes(SCALE, ZERO_POINT)
    block = tl.program_id(0) % BLOCKS
    page, head = tl.program_id(0) // (BLOCKS * HEADS), tl.program_id(0) // BLOCKS % HEADS
    offset = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    offset += head * tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    record = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8)
    count = tl.load(table + page * TABLE_COLUMNS + 3)
    hidden = tl.load(table + page * TABLE_COLUMNS + 4)
    part = record + head * HEAD_STRIDE
    joint = records + record + JOINT_NORM
    within, slot = tl.arange(0, CHUNK), tl.arange(0, SLOTS)

    chosen = tl.full([SLOTS], -1, tl.int32)
    if BOOSTED > 0 and DYNAMIC:
        score = _scores(
            keys, offset, hidden, joint, token_stride, HEAD_SIZE, TILE, PAGE, CHUNK * ROW_TILE // TILE,
            NORM, MEAN_ABS,
        )  # fmt: skip
        chosen = _highest(score, TILE, SLOTS, BOOSTED)
        tl.store(record_bytes + (part + CHANNELS) * 2 + slot, chosen.to(tl.uint8), mask=slot < BOOSTED)
    elif BOOSTED > 0:
        chosen = tl.load(boosted + head * BOOSTED + slot, mask=slot < BOOSTED, other=-1).to(tl.int32)

    row, group = block * ROW_TILE + tl.arange(0, ROW_TILE), tl.arange(0, CHUNK // GROUP)
    there = (row < ROWS)[None, :]
    lanes = tl.zeros([LANES, ROW_TILE], tl.int32)
    second_lanes = tl.zeros([LANES, ROW_TILE], tl.int32)
    high_lanes = tl.zeros([LANES, ROW_TILE], tl.int32)
    unstorable = tl.zeros([CHUNK // GROUP, 1, ROW_TILE], tl.int32)
    total = tl.zeros([16, ROW_TILE], tl.float32)
    for step in range(PAGE // CHUNK):
        token = step * CHUNK + within
        present = there & (token < count)[:, None] if PARTIAL else there
        inverse_norm = tl.full([CHUNK], 1.0, tl.float32)
        if NORM != NO_NORM:
            norm, bad = _norms(keys, offset, token, hidden, joint, token_stride, HEAD_SIZE, TILE, NORM, MEAN_ABS)
            inverse_norm = reciprocal(norm.to(tl.float32))
            if NORM == PER_HEAD:
                flag_if(bad, flag, page, head, 0, HEADS)
                tl.store(records + part + PER_HEAD_NORM + token, norm.to(tl.int16, bitcast=True))
        for half in tl.static_range(HALVES):
            channel = row + half * ROWS
            x = read_tokens(keys, offset, token, hidden, channel, present, token_stride).to(tl.float32)
            if NORM == NO_NORM:
                # A sum of finite numbers overflows only beyond what float16 scales describe; static ones clamp that.
                checked = x * 0.0 if STATIC else x
                total += tl.sum(tl.reshape(checked, [CHUNK // 16, 16, ROW_TILE]), 0)
            else:
                x *= inverse_norm[:, None]
            if STATIC:
                at = head * HEAD_SIZE + channel
                scale = tl.load(static_scales + at, mask=row < ROWS, other=0.0)[None, :]
                zero_point = tl.load(static_zero_points + at, mask=row < ROWS, other=0.0)[None, :]
                codes = nearest_codes(x, scale, zero_point, LEVELS)
            else:
                levels = tl.full([1, 1, ROW_TILE], LEVELS, tl.float32)
                inverse_levels = tl.full([1, 1, ROW_TILE], 1.0 / LEVELS, tl.float32)
                if BOOSTED > 0:
                    is_fine = (_places(channel, chosen, SLOTS) >= 0)[None, None, :]
                    levels = tl.where(is_fine, FINE_LEVELS, levels)
                    inverse_levels = tl.where(is_fine, 1.0 / FINE_LEVELS, inverse_levels)
                codes, scale, zero_point = _grouped_codes(
                    x, levels, inverse_levels, factor, shrink, CHUNK, GROUP, ROW_TILE, BYTES
                )
                unstorable |= storable(scale, zero_point).to(tl.int32) ^ 1
                place = step * (CHUNK // GROUP) + group[:, None, None]
                target = records + part + place * HEAD_SIZE + channel[None, None, :]
                store_grid(target + SCALE, target + ZERO_POINT, scale, zero_point, there[None, :, :], BYTES)
            if BOOSTED > 0:
                if HALVES == 1:
                    high = (codes >> BITS) & (2**BITS - 1)
                    high_lanes += packed_codes(high, step * (CHUNK // LANES), 0, BITS, CHUNK, ROW_TILE, LANES)
                codes &= 2**BITS - 1
            if PARTIAL:
                codes = tl.where(present, codes, 0)
            if BY_TOKEN:
                words = packed_codes(codes, half, 0, BITS, CHUNK, ROW_TILE, LANES)
            else:
                words = packed_codes(codes, step * (CHUNK // LANES), half, BITS, CHUNK, ROW_TILE, LANES)
            if BITS == 3 and half == 1:
                second_lanes += words
            else:
                lanes += words
    if NORM == NO_NORM:
        flag_if(~(tl.abs(tl.sum(tl.sum(total, 1), 0)) < float("inf")), flag, page, head, 1, HEADS)
    if not STATIC:
        flag_if(any_true(unstorable != 0), flag, page, head, 1, HEADS)
    lane = tl.arange(0, LANES)[:, None]
    store_words(records + part + lane * STORED_ROWS + row[None, :], lanes, second_lanes, there, ROWS, BITS)

    if BOOSTED > 0 and HALVES == 1:
        slot_of = _places(row, chosen, SLOTS)[None, :]
        tl.store(records + part + HIGH + lane * BOOSTED + slot_of, high_lanes.to(tl.int16), mask=slot_of >= 0)
    elif BOOSTED > 0:
        high_lanes = _paired_high_lanes(
            keys, offset, hidden, chosen, joint, token_stride, factor, shrink, HEAD_SIZE, TILE, PAGE, CHUNK,
            GROUP, NORM, MEAN_ABS, SLOTS, (BOOSTED + 1) // 2, LANES, BYTES,
        )  # fmt: skip
        HIGH_ROWS: tl.constexpr = (BOOSTED + 1) // 2
        target = records + part + HIGH + lane * HIGH_ROWS + slot[None, :]
        tl.store(target, high_lanes, mask=(slot < HIGH_ROWS)[None, :])
