"""The kernel that rounds keys with error feedback: codes of pages whose norms, scales and channels are written already.

`kernels/pages/reference.py` says what is computed. Channels follow one another, but tokens are independent: a program
takes some tokens of a page, those that share a few lanes, so that even one page fills many programs. It holds their
keys in registers, [channels, tokens], a token in each thread, and takes 16 channels at a time: these one by one, then
all later channels by a product of matrices. Where the codes of a block are known they take the place of its keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.page_formats import PageLayout
from kvconvert.kernels.pages.triton import (
    TABLE_COLUMNS,
    field_width,
    fields_of,
    halves_of,
    in_bytes,
    load_grid,
    nearest_codes,
    read_tokens,
    reciprocal,
    slots_of,
    store_words,
    tile_of,
)
from kvconvert.kernels.pages.triton.quantize import JOINT, NO_NORM

# Tokens of one program: those of one warp.
FEEDBACK_TOKENS = 32
# Channels whose errors reach later ones by one product.
CHANNEL_BLOCK = 16


@triton.constexpr_function
def program_lanes(layout):
    """Lanes whose tokens one program takes."""
    return min(layout.lanes, FEEDBACK_TOKENS * layout.lanes // layout.page_size)


@triton.jit
def _boosted(record_bytes, boosted, part, head, slot, F: tl.constexpr):
    """Boosted channels of a page's head by their numbers: int32, -1 where there is none."""
    if F.channels >= 0:
        chosen = tl.load(record_bytes + (part + F.channels) * 2 + slot, mask=slot < F.boosted, other=0).to(tl.int32)
        chosen = tl.where(slot < F.boosted, chosen, -1)
    else:
        chosen = tl.load(boosted + head * F.boosted + slot, mask=slot < F.boosted, other=-1).to(tl.int32)
    return chosen


@triton.jit
def _picked(x, where):
    """The part of float32 x along its first dimension where `where` is true, exactly.

    Of whole numbers a compiler that knows `where` leaves out the zeros; a sum of floats with zeros it has to compute.
    """
    return tl.sum(tl.where(where, x.to(tl.int32, bitcast=True), 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def _words(fields, BITS: tl.constexpr, PLANES: tl.constexpr, LANE_TILE: tl.constexpr):
    """What `fields_of` gives of [rows, PLANES * LANE_TILE] codes in words int32 [rows, LANE_TILE]."""
    planes = tl.reshape(fields, [fields.shape[0], PLANES, LANE_TILE])
    return tl.sum(planes << (tl.arange(0, PLANES) * field_width(BITS))[None, :, None], 1)


@triton.jit
def _half(codes, HALF: tl.constexpr, SPAN: tl.constexpr):
    """Rows HALF * SPAN to (HALF + 1) * SPAN of int32 codes [2 * SPAN, tokens]."""
    halves = tl.reshape(codes, [2, SPAN, codes.shape[1]])
    return tl.sum(tl.where(tl.arange(0, 2)[:, None, None] == HALF, halves, 0), 0)


@kernel
def key_feedback_kernel(
    tokens,
    records,
    record_bytes,
    table,
    static_scales,
    static_offsets,
    boosted,
    feedback,
    feedback_table,
    scratch,
    token_stride,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Codes of the tokens that share `program_lanes`, of one head of a key page; constants as for `page_kernel`."""
    LANE_TILE: tl.constexpr = program_lanes(F)
    TILE: tl.constexpr = tile_of(F.head_dim, F.bits)
    SLOTS: tl.constexpr = slots_of(F.boosted)
    HALVES: tl.constexpr = halves_of(F.bits)
    ROWS: tl.constexpr = F.head_dim // HALVES
    SPAN: tl.constexpr = TILE // HALVES
    BLOCKS: tl.constexpr = TILE // BLOCK
    BLOCKS_OF_HALF: tl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = ROWS % BLOCK == 0
    PLANES: tl.constexpr = F.page_size // F.lanes
    TOKENS: tl.constexpr = PLANES * LANE_TILE
    DIVISIONS: tl.constexpr = F.lanes // LANE_TILE
    division = tl.program_id(0) % DIVISIONS
    page, head = tl.program_id(0) // (DIVISIONS * F.heads), tl.program_id(0) // DIVISIONS % F.heads
    start = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    start += head * tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    record = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8)
    count = tl.load(table + page * TABLE_COLUMNS + 3)
    hidden = tl.load(table + page * TABLE_COLUMNS + 4).to(tl.int32)
    part = record + head * F.head_stride
    factors = feedback + tl.multiple_of(tl.load(feedback_table + page), 8) + head * F.head_dim * F.head_dim

    which = tl.arange(0, TOKENS)
    token = which // LANE_TILE * F.lanes + division * LANE_TILE + which % LANE_TILE
    # At 1 and 3 bits the second half of the channels begins in the middle of the tile.
    position = tl.arange(0, TILE)
    channel = tl.where(position % SPAN < ROWS, position % SPAN + position // SPAN * ROWS, F.head_dim)
    present = (channel < F.head_dim)[None, :]
    if PARTIAL:
        present &= (token < count)[:, None]
    w = read_tokens(tokens + start, token[:, None], hidden, channel[None, :], present, token_stride).to(tl.float32)
    if F.norm != NO_NORM:
        norms = records + (record if F.norm == JOINT else part) + F.norm_start
        norm = tl.load(norms + token).to(tl.float16, bitcast=True).to(tl.float32)
        w *= reciprocal(norm)[:, None]
    w = tl.trans(w)
    slot = tl.arange(0, SLOTS)
    chosen = slot
    if F.boosted > 0:
        chosen = _boosted(record_bytes, boosted, part, head, slot, F)

    row, number = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCKS)[:, None, None]
    group = part + token // F.group_size * F.head_dim
    exchange = scratch + tl.program_id(0) * BLOCK * (TOKENS + 1) + row * (TOKENS + 1) + which[None, :]
    for step in range(HALVES * BLOCKS_OF_HALF):
        block = step // BLOCKS_OF_HALF * (SPAN // BLOCK) + step % BLOCKS_OF_HALF
        first = block * BLOCK % SPAN
        base = first + block * BLOCK // SPAN * ROWS
        within = tl.arange(0, BLOCK)
        own = base + within if EVEN else tl.where(first + within < ROWS, base + within, F.head_dim)
        # By way of memory, so that a thread gets all channels of a token: as a product leaves them, they lie across
        # threads. Rows are one number longer than they have to be, lest a load become one of neighbouring tokens.
        tl.store(exchange, _picked(tl.reshape(w, [BLOCKS, BLOCK, TOKENS]), number == block))
        tl.debug_barrier()
        current = tl.load(exchange)
        tl.debug_barrier()
        codes = tl.zeros([BLOCK, TOKENS], tl.float32)
        for i in tl.static_range(BLOCK):
            # Beyond the last channel another one stands in, whose error is not passed on.
            single = base + i if EVEN else tl.minimum(base + i, F.head_dim - 1)
            if F.static:
                scale = tl.load(static_scales + head * F.head_dim + single)
                offset = tl.load(static_offsets + head * F.head_dim + single)
            else:
                at = records + group + single
                scale, offset = load_grid(at + F.scale, at + F.offset, None, in_bytes(F.scale, F.offset))
            levels = 2.0**F.bits - 1.0
            if F.boosted > 0:
                levels = tl.where(tl.max((chosen == single).to(tl.int32), 0) > 0, 4.0**F.bits - 1.0, levels)
            value = _picked(current, row == i)
            code = (nearest_codes(value, scale, offset, levels) & 255).to(tl.float32)
            error = value - (code * scale.to(tl.float32) + offset.to(tl.float32))
            if not EVEN:
                error = tl.where(first + i < ROWS, error, 0.0)
            if EVEN:
                near = tl.load(factors + single * F.head_dim + tl.multiple_of(base, BLOCK) + within)
            else:
                near = tl.load(factors + single * F.head_dim + own, mask=own < F.head_dim, other=0.0)
            later = tl.fma(-error[None, :], near.to(tl.float32)[:, None], current)
            # Of a channel that is done its error remains.
            current = tl.where(row > i, later, tl.where(row == i, error[None, :], current))
            codes = tl.where(row == i, code[None, :], codes)
        at = factors + own[None, :] * F.head_dim + channel[:, None]
        if EVEN and F.head_dim == TILE:
            far = tl.load(at)
        else:
            far = tl.load(at, mask=(own < F.head_dim)[None, :] & (channel < F.head_dim)[:, None], other=0.0)
        # Left of the diagonal is nothing, so that codes stay as they are. float16 numbers are exact in tf32; errors
        # are sums of two such numbers, as good as float32.
        far = far.to(tl.float32)
        coarse = (current.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        w = tl.dot(far, -coarse, acc=w, input_precision="tf32")
        w = tl.dot(far, coarse - current, acc=w, input_precision="tf32")
        done = tl.where(number == block, codes[None, :, :], tl.reshape(w, [BLOCKS, BLOCK, TOKENS]))
        w = tl.reshape(done, [TILE, TOKENS])

    codes = w.to(tl.int32)
    if PARTIAL:
        codes = tl.where((token < count)[None, :], codes, 0)
    lane = (division * LANE_TILE + tl.arange(0, LANE_TILE))[None, :]
    if F.boosted > 0:
        HIGH_ROWS: tl.constexpr = F.high_rows
        high = (codes >> F.bits).to(tl.float16)
        fields = tl.zeros([SLOTS, TOKENS], tl.int32)
        for half in tl.static_range(HALVES):
            # A product with zeros and ones picks out the boosted channels in their order.
            sought = tl.where(slot < HIGH_ROWS, slot + half * HIGH_ROWS, F.boosted)
            picked = _boosted(record_bytes, boosted, part, head, sought, F)
            selection = (picked[:, None] == channel[None, :]).to(tl.float16)
            fields += fields_of(tl.dot(selection, high).to(tl.int32), half, F.bits)
        target = records + part + F.high + lane * HIGH_ROWS + slot[:, None]
        words = _words(fields, F.bits, PLANES, LANE_TILE)
        tl.store(target, words.to(tl.int16), mask=(slot < HIGH_ROWS)[:, None])
        codes &= 2**F.bits - 1
    line = tl.arange(0, SPAN)[:, None]
    if F.bits == 3:
        words = _words(fields_of(_half(codes, 0, SPAN), 0, F.bits), F.bits, PLANES, LANE_TILE)
        second = _words(fields_of(_half(codes, 1, SPAN), 1, F.bits), F.bits, PLANES, LANE_TILE)
    else:
        fields = codes
        if HALVES == 2:
            fields = fields_of(_half(codes, 0, SPAN), 0, F.bits) | fields_of(_half(codes, 1, SPAN), 1, F.bits)
        words = _words(fields, F.bits, PLANES, LANE_TILE)
        second = words
    store_words(records + part + lane * F.rows + line, words, second, line < ROWS, ROWS, F.bits)


def feedback_warps(layout: PageLayout) -> int:
    """Warps of `key_feedback_kernel`: as many as give a token to each thread."""
    return max(1, layout.page_size // layout.lanes * program_lanes(layout) // 32)
