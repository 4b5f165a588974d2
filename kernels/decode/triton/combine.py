"""Partial attention results of one query row, merged into its output."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["count"])
def combine_kernel(
    partial,
    stats,
    slot_rows,
    sink_logits,
    out,
    out_row,
    out_head,
    out_token,
    count,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    SINK_LOGITS: tl.constexpr,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the slots of a sequence for one query head, query and block of channels.

    partial fp32 [slots * blocks, H, ROWS, E]; stats fp32 [slots * blocks, H, ROWS, 2]: maximum of scores times log2(e),
    and sum of weights. `sink_logits` fp32 [Hq] are logits of a virtual token without a value.
    """
    CHANNEL_BLOCKS: tl.constexpr = (VALUE_DIM + BLOCK_DIM - 1) // BLOCK_DIM
    row = tl.program_id(0) // CHANNEL_BLOCKS
    query_head = tl.program_id(1)
    token = tl.program_id(2)
    blocks = (count + QUERIES - 1) // QUERIES
    block = token // QUERIES
    head = query_head // GROUP
    r = (query_head % GROUP) * QUERIES + token % QUERIES
    begin = tl.load(slot_rows + row)
    end = tl.load(slot_rows + row + 1)
    slot = tl.arange(0, BLOCK_SLOTS)
    channel = tl.program_id(0) % CHANNEL_BLOCKS * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()

    highest = tl.full([BLOCK_SLOTS], LOWEST, tl.float32)
    for start in range(begin, end, BLOCK_SLOTS):
        known = start + slot < end
        place = (((start + slot) * blocks + block) * HEADS + head).to(tl.int64) * ROWS + r
        highest = tl.maximum(highest, tl.load(stats + place * 2, mask=known, other=LOWEST))
    maximum = tl.max(highest, 0)
    if SINK_LOGITS:
        sink_logit = tl.load(sink_logits + query_head).to(tl.float32) * LOG2_E
        maximum = tl.maximum(maximum, sink_logit)

    total = tl.zeros([BLOCK_SLOTS, BLOCK_DIM], tl.float32)
    weight = tl.zeros([BLOCK_SLOTS], tl.float32)
    for start in range(begin, end, BLOCK_SLOTS):
        known = start + slot < end
        place = (((start + slot) * blocks + block) * HEADS + head).to(tl.int64) * ROWS + r
        factor = tl.exp2(tl.load(stats + place * 2, mask=known, other=LOWEST) - maximum)
        own = tl.load(stats + place * 2 + 1, mask=known, other=0.0)
        # What is empty was never written.
        written = known & (own > 0)
        values = tl.load(
            partial + place[:, None] * VALUE_DIM + channel[None, :],
            mask=written[:, None] & (channel < VALUE_DIM)[None, :],
            other=0.0,
        )
        factor = tl.where(written, factor, 0.0)
        weight += own * factor
        total += values * factor[:, None]
    all_weight = tl.sum(weight, 0)
    if SINK_LOGITS:
        all_weight += tl.exp2(sink_logit - maximum)
    result = tl.sum(total, 0) / tl.where(all_weight > 0, all_weight, 1.0)
    where = out + row.to(tl.int64) * out_row + query_head * out_head + token * out_token + channel
    tl.store(where, result.to(out.dtype.element_ty), mask=channel < VALUE_DIM)
