"""The kernel that rounds keys with error feedback: codes of pages whose norms, scales and channels are written already.

`kernels/pages/reference.py` says what is computed. Channels follow one another, but tokens are independent: a program
takes some tokens of a page, those that share a few lanes, so that even one page fills many programs. It holds their
keys in registers, [channels, tokens], a token in each thread, and takes 16 channels at a time: these one by one, then
all later channels by a product of matrices. Where the codes of a block are known they take the place of its keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvconvert.kernels.launches.triton import kernel
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
    store_words,
)
from kvconvert.kernels.pages.triton.quantize import JOINT, NO_NORM

# Tokens of one program: those of one warp.
FEEDBACK_TOKENS = 32
# Channels whose errors reach later ones by one product.
CHANNEL_BLOCK = 16


class PageFeedback(NamedTuple):
    """Matrices F of pages that one launch writes.

    Attributes:
        base: a float16 tensor, from whose address matrices count.
        offsets: int64 [N], of each page's F [H, D, D], in elements; multiples of 8.
    """

    base: torch.Tensor
    offsets: torch.Tensor


@triton.jit
def _boosted(
    record_bytes,
    boosted,
    part,
    head,
    slot,
    BOOSTED: tl.constexpr,
    DYNAMIC: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Boosted channels of a page's head by their numbers: int32, -1 where there is none."""
    if DYNAMIC:
        chosen = tl.load(record_bytes + (part + CHANNELS) * 2 + slot, mask=slot < BOOSTED, other=0).to(tl.int32)
        chosen = tl.where(slot < BOOSTED, chosen, -1)
    else:
        chosen = tl.load(boosted + head * BOOSTED + slot, mask=slot < BOOSTED, other=-1).to(tl.int32)
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
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    LANE_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    BOOSTED: tl.constexpr,
    SLOTS: tl.constexpr,
    DYNAMIC: tl.constexpr,
    STATIC: tl.constexpr,
    PARTIAL: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    LANES: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    HIGH: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    NORM_START: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Codes of the tokens that share LANE_TILE lanes, of one head of a key page; constants as for `page_kernel`."""
    HALVES: tl.constexpr = halves_of(BITS)
    ROWS: tl.constexpr = HEAD_SIZE // HALVES
    SPAN: tl.constexpr = TILE // HALVES
    BLOCKS: tl.constexpr = TILE // BLOCK
    BLOCKS_OF_HALF: tl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = ROWS % BLOCK == 0
    PLANES: tl.constexpr = PAGE // LANES
    TOKENS: tl.constexpr = PLANES * LANE_TILE
    DIVISIONS: tl.constexpr = LANES // LANE_TILE
    division = tl.program_id(0) % DIVISIONS
    page, head = tl.program_id(0) // (DIVISIONS * HEADS), tl.program_id(0) // DIVISIONS % HEADS
    start = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS), 8)
    start += head * tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 1), 8)
    record = tl.multiple_of(tl.load(table + page * TABLE_COLUMNS + 2), 8)
    count = tl.load(table + page * TABLE_COLUMNS + 3)
    hidden = tl.load(table + page * TABLE_COLUMNS + 4).to(tl.int32)
    part = record + head * HEAD_STRIDE
    factors = feedback + tl.multiple_of(tl.load(feedback_table + page), 8) + head * HEAD_SIZE * HEAD_SIZE

    which = tl.arange(0, TOKENS)
    token = which // LANE_TILE * LANES + division * LANE_TILE + which % LANE_TILE
    # At 1 and 3 bits the second half of the channels begins in the middle of the tile.
    position = tl.arange(0, TILE)
    channel = tl.where(position % SPAN < ROWS, position % SPAN + position // SPAN * ROWS, HEAD_SIZE)
    present = (channel < HEAD_SIZE)[None, :]
    if PARTIAL:
        present &= (token < count)[:, None]
    w = read_tokens(tokens + start, token[:, None], hidden, channel[None, :], present, token_stride).to(tl.float32)
    if NORM != NO_NORM:
        norms = records + (record if NORM == JOINT else part) + NORM_START
        norm = tl.load(norms + token).to(tl.float16, bitcast=True).to(tl.float32)
        w *= reciprocal(norm)[:, None]
    w = tl.trans(w)
    slot = tl.arange(0, SLOTS)
    chosen = slot
    if BOOSTED > 0:
        chosen = _boosted(record_bytes, boosted, part, head, slot, BOOSTED, DYNAMIC, CHANNELS)

    row, number = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCKS)[:, None, None]
    group = part + token // GROUP * HEAD_SIZE
    exchange = scratch + tl.program_id(0) * BLOCK * (TOKENS + 1) + row * (TOKENS + 1) + which[None, :]
    for step in range(HALVES * BLOCKS_OF_HALF):
        block = step // BLOCKS_OF_HALF * (SPAN // BLOCK) + step % BLOCKS_OF_HALF
        first = block * BLOCK % SPAN
        base = first + block * BLOCK // SPAN * ROWS
        within = tl.arange(0, BLOCK)
        own = base + within if EVEN else tl.where(first + within < ROWS, base + within, HEAD_SIZE)
        # By way of memory, so that a thread gets all channels of a token: as a product leaves them, they lie across
        # threads. Rows are one number longer than they have to be, lest a load become one of neighbouring tokens.
        tl.store(exchange, _picked(tl.reshape(w, [BLOCKS, BLOCK, TOKENS]), number == block))
        tl.debug_barrier()
        current = tl.load(exchange)
        tl.debug_barrier()
        codes = tl.zeros([BLOCK, TOKENS], tl.float32)
        for i in tl.static_range(BLOCK):
            # Beyond the last channel another one stands in, whose error is not passed on.
            single = base + i if EVEN else tl.minimum(base + i, HEAD_SIZE - 1)
            if STATIC:
                scale = tl.load(static_scales + head * HEAD_SIZE + single)
                offset = tl.load(static_offsets + head * HEAD_SIZE + single)
            else:
                at = records + group + single
                scale, offset = load_grid(at + SCALE, at + OFFSET, None, in_bytes(SCALE, OFFSET))
            levels = 2.0**BITS - 1.0
            if BOOSTED > 0:
                levels = tl.where(tl.max((chosen == single).to(tl.int32), 0) > 0, 4.0**BITS - 1.0, levels)
            value = _picked(current, row == i)
            code = (nearest_codes(value, scale, offset, levels) & 255).to(tl.float32)
            error = value - (code * scale.to(tl.float32) + offset.to(tl.float32))
            if not EVEN:
                error = tl.where(first + i < ROWS, error, 0.0)
            if EVEN:
                near = tl.load(factors + single * HEAD_SIZE + tl.multiple_of(base, BLOCK) + within)
            else:
                near = tl.load(factors + single * HEAD_SIZE + own, mask=own < HEAD_SIZE, other=0.0)
            later = tl.fma(-error[None, :], near.to(tl.float32)[:, None], current)
            # Of a channel that is done its error remains.
            current = tl.where(row > i, later, tl.where(row == i, error[None, :], current))
            codes = tl.where(row == i, code[None, :], codes)
        at = factors + own[None, :] * HEAD_SIZE + channel[:, None]
        if EVEN and TILE == HEAD_SIZE:
            far = tl.load(at)
        else:
            far = tl.load(at, mask=(own < HEAD_SIZE)[None, :] & (channel < HEAD_SIZE)[:, None], other=0.0)
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
    if BOOSTED > 0:
        HIGH_ROWS: tl.constexpr = (BOOSTED + HALVES - 1) // HALVES
        high = (codes >> BITS).to(tl.float16)
        fields = tl.zeros([SLOTS, TOKENS], tl.int32)
        for half in tl.static_range(HALVES):
            # A product with zeros and ones picks out the boosted channels in their order.
            sought = tl.where(slot < HIGH_ROWS, slot + half * HIGH_ROWS, BOOSTED)
            picked = _boosted(record_bytes, boosted, part, head, sought, BOOSTED, DYNAMIC, CHANNELS)
            selection = (picked[:, None] == channel[None, :]).to(tl.float16)
            fields += fields_of(tl.dot(selection, high).to(tl.int32), half, BITS)
        target = records + part + HIGH + lane * HIGH_ROWS + slot[:, None]
        words = _words(fields, BITS, PLANES, LANE_TILE)
        tl.store(target, words.to(tl.int16), mask=(slot < HIGH_ROWS)[:, None])
        codes &= 2**BITS - 1
    line = tl.arange(0, SPAN)[:, None]
    if BITS == 3:
        words = _words(fields_of(_half(codes, 0, SPAN), 0, BITS), BITS, PLANES, LANE_TILE)
        second = _words(fields_of(_half(codes, 1, SPAN), 1, BITS), BITS, PLANES, LANE_TILE)
    else:
        fields = codes
        if HALVES == 2:
            fields = fields_of(_half(codes, 0, SPAN), 0, BITS) | fields_of(_half(codes, 1, SPAN), 1, BITS)
        words = _words(fields, BITS, PLANES, LANE_TILE)
        second = words
    store_words(records + part + lane * STORED_ROWS + line, words, second, line < ROWS, ROWS, BITS)


def feedback_constants(constants: dict[str, Any]) -> dict[str, Any]:
    """Compile-time arguments of `key_feedback_kernel`, from those of `page_kernel` for the same pages."""
    others = ("KEYS", "CHUNK", "ROW_TILE", "LANE_TILE", "BY_TOKEN")
    own = {name: value for name, value in constants.items() if name not in others}
    planes = constants["PAGE"] // constants["LANES"]
    lanes = min(constants["LANES"], FEEDBACK_TOKENS // planes)
    return own | {"LANE_TILE": lanes, "BLOCK": CHANNEL_BLOCK}


def feedback_warps(constants: dict[str, Any]) -> int:
    """Warps of `key_feedback_kernel`: as many as give a token to each thread."""
    tokens = constants["PAGE"] // constants["LANES"] * constants["LANE_TILE"]
    return max(1, tokens // 32)


def launch_feedback(feedback: PageFeedback, pages: int, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """Write the codes of key pages anew, with error feedback.

    Args:
        feedback: the pages' matrices.
        pages: how many.
        arguments: the other arguments that the kernel shares with `page_kernel`, by name.
        constants: those of `page_kernel`.
    """
    own = feedback_constants(constants)
    programs = pages * own["HEADS"] * (own["LANES"] // own["LANE_TILE"])
    tokens = own["PAGE"] // own["LANES"] * own["LANE_TILE"]
    scratch = feedback.base.new_empty(programs * CHANNEL_BLOCK * (tokens + 1), dtype=torch.float32)
    key_feedback_kernel[(programs,)](
        **arguments,
        feedback=feedback.base,
        feedback_table=feedback.offsets,
        scratch=scratch,
        **own,
        num_warps=feedback_warps(own),
        enable_fp_fusion=False,
    )
