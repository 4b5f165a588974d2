"""From products of queries and keys to weights, and sums of weighted values.

Factors, caps, shifts, masks, and the running softmax come first: scores are kept times log2(e), so that exponentials
are powers of two. Then how sums begin, what a page adds, how they are stored as a partial result, and merged.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.decode.triton import (
    block_of,
    field_bits,
    first_group,
    last_group,
    plane_weight,
    query_columns,
    query_rows,
    value_lanes,
)
from kvconvert.kernels.decode.triton.tiles import (
    PAGE,
    add_page_values,
    add_residual_values,
    exp2,
    half_pointer,
    in_token_order,
    spread_columns,
)
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.pages.triton import OFFSET_UNIT, in_bytes

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def residual_finish(x, factor, softcap, F: tl.constexpr):
    """`finish_scores` of tokens outside of spans."""
    x = x * factor[None, :, None]
    if F.softcap:
        x = capped(x, softcap)
    if F.softcap or F.tau:
        x = x * LOG2_E
    return x


@triton.constexpr_function
def applies_factor(shape):
    """Whether products become scores by a factor alone, which one instruction applies with the maximum."""
    return not (shape.softcap or shape.tau or shape.centered)


@triton.jit
def capped(x, softcap):
    """softcap tanh(x / softcap), as 1 - 2 / (exp(2 z) + 1) with a limit beyond which fp32 knows no difference."""
    z = tl.minimum(tl.maximum(x / softcap, -15.0), 15.0)
    return softcap * (1.0 - 2.0 / (tl.exp2(z * (2.0 * LOG2_E)) + 1.0))


@triton.jit
def finish_scores(x, factor, softcap, slope, shift, F: tl.constexpr):
    """Scores [M, rows, P] from products: times factor [rows], capped, shifted (CalibQuant), and times log2(e); the
    products themselves where `page_softmax_step` applies the factor.
    """
    if applies_factor(F):
        return x
    else:
        return shaped_scores(x * factor[None, :, None], softcap, slope, shift, F)


@triton.jit
def shaped_scores(x, softcap, slope, shift, F: tl.constexpr):
    """What `finish_scores` does to products that were multiplied with its factor."""
    if F.softcap:
        x = capped(x, softcap)
    if F.tau:
        x = x * slope[None, :, None] + shift[None, :, None]
    if F.softcap or F.tau:
        x = x * LOG2_E
    return x


@triton.jit
def product_factor(unit, scaling, F: tl.constexpr):
    """What products of queries divided by `unit` are multiplied with, log2(e) included unless it has to come later."""
    if F.softcap or F.tau:
        return unit * scaling
    else:
        return unit * (scaling * LOG2_E)


@triton.jit
def hide(x, token, start, first, limit, mask, mask_query, F: tl.constexpr):
    """Scores [M, rows, P] with minus infinity for tokens [M, P], of which the first is `start`, before `first`, beyond
    `limit` or masked (uint8, 0 hides).
    """
    if F.ragged:
        # Few pages hide tokens: a comparison for each score would take a tenth of a page's instructions.
        if start < first or start + PAGE > limit:
            x = tl.where(((token >= first) & (token < limit))[:, None, :], x, float("-inf"))
    if F.masked:
        row = tl.arange(0, query_rows(F))
        where = mask + (row % F.queries)[None, :, None] * mask_query + token[:, None, :]
        real = (token < limit)[:, None, :] & (row < F.group * F.queries)[None, :, None]
        x = tl.where(tl.load(where, mask=real, other=0) > 0, x, float("-inf"))
    return x


@triton.jit
def softmax_step(x, maximum, F: tl.constexpr):
    """Weights of scores [M, rows, P], the new maximum [rows], and the factor for what was summed before."""
    highest = tl.maximum(maximum, tl.max(tl.max(x, 2), 0))
    alpha = exp2(maximum - highest, F.inline_asm)
    return exp2(x - highest[None, :, None], F.inline_asm), highest, alpha


@triton.jit
def page_softmax_step(x, factor, maximum, F: tl.constexpr):
    """`softmax_step` of what `finish_scores` returns."""
    if applies_factor(F):
        highest = tl.maximum(maximum, tl.max(tl.max(x, 2), 0) * factor)
        alpha = exp2(maximum - highest, F.inline_asm)
        return exp2(x * factor[None, :, None] - highest[None, :, None], F.inline_asm), highest, alpha
    else:
        return softmax_step(x, maximum, F)


@triton.jit
def extremes_reduced(extremes, item_rows, row, block, blocks, head, heads, tau1, tau2, F: tl.constexpr):
    """Slope and shift [rows] of CalibQuant's map from the smallest and largest score of all items of a row."""
    r = tl.arange(0, query_rows(F))
    low = tl.full([query_rows(F)], float("inf"), tl.float32)
    high = tl.full([query_rows(F)], float("-inf"), tl.float32)
    for item in range(tl.load(item_rows + row), tl.load(item_rows + row + 1)):
        where = extremes + (((item * blocks + block) * heads + head) * query_rows(F) + r) * 2
        low = tl.minimum(low, tl.load(where))
        high = tl.maximum(high, tl.load(where + 1))
    width = high - low
    slope = tl.where(width > 0, tl.maximum(1.0 - (tau2 - tau1) / tl.maximum(width, 1e-37), 0.0), 0.0)
    return slope, low - tau1 - low * slope, (width > 0) & (width <= tau2 - tau1)


LOWEST = tl.constexpr(-1e30)


@triton.jit
def store_partial(out, slot, head, heads, plane_rows, known, total, F: tl.constexpr):
    """Write weighted values [M, N], whose rows are the channels `plane_rows`."""
    row = tl.arange(0, query_rows(F) * query_columns(F)) // query_columns(F)
    first = tl.arange(0, query_rows(F) * query_columns(F)) % query_columns(F) == 0
    place = (slot * heads + head).to(tl.int64) * query_rows(F)
    where = out + (place + row)[None, :] * F.values.head_dim + plane_rows[:, None]
    tl.store(where, total, mask=known[:, None] & first[None, :])


@triton.jit
def store_stats(stats, slot, head, heads, maximum, weight, F: tl.constexpr):
    """Write maximum and sum of weights [rows]."""
    row = tl.arange(0, query_rows(F))
    where = stats + ((slot * heads + head).to(tl.int64) * query_rows(F) + row) * 2
    tl.store(where, maximum)
    tl.store(where + 1, weight)


@triton.jit
def shared_value_scales(value_base, shared, scale_row, head, F: tl.constexpr, J: tl.constexpr):
    """Scale and offset of the channels of plane J, where many pages share them."""
    LANES: tl.constexpr = value_lanes(F)
    lane = tl.arange(0, block_of(LANES))
    known = lane < LANES
    channel = head * F.values.head_dim + J * LANES + lane
    scale = tl.load(half_pointer(value_base + tl.load(shared + scale_row * 4 + 2) * 8) + channel, mask=known, other=0.0)
    least = tl.load(half_pointer(value_base + tl.load(shared + scale_row * 4 + 3) * 8) + channel, mask=known, other=0.0)
    return scale.to(tl.float32), least.to(tl.float32)


@triton.jit
def no_values(key_lanes: tl.constexpr, F: tl.constexpr):
    """Sums of weighted values to begin with, for `add_page_values`, or for `add_residual_values` at 16 bits."""
    N: tl.constexpr = query_rows(F) * query_columns(F)
    totals = ()
    constants = ()
    if F.values.bits == 16:
        totals = (tl.zeros([block_of(F.values.head_dim), N], tl.float32),)
        constants = (tl.zeros([1], tl.float32),)
    else:
        for _ in tl.static_range(16 // field_bits(F.values.bits)):
            totals = totals + (tl.zeros([block_of(value_lanes(F)), N], tl.float32),)
        for _ in tl.static_range(max(F.values.groups, 1)):
            constants = constants + (tl.zeros([key_lanes, query_rows(F)], tl.float32),)
    return totals, constants


@triton.jit
def add_values(value_base, unit, head, p, alpha, totals, constants, F: tl.constexpr, DTYPE: tl.constexpr):
    """The page at `unit` of the value pool, weighted by p [lanes, rows, planes], added to the sums."""
    if F.values.bits == 16:
        token = tl.arange(0, PAGE)
        page = (value_base + unit * 8).to(tl.pointer_type(DTYPE)) + head * PAGE * F.values.head_dim
        total = add_residual_values(
            page, token * F.values.head_dim, token < PAGE, in_token_order(p), alpha, totals[0], F
        )
        return (total,), constants
    else:
        page = value_base + unit * 8 + head * F.values.head_stride
        return add_page_values(page, page + F.values.scale, page + F.values.offset, p, alpha, totals, constants, F)


@triton.jit
def store_page_values(
    out, slot, head, heads, totals, constants, weight, value_base, shared, scale_row, F: tl.constexpr
):
    """The weighted values of all channels, with scales that were left out and offsets, as one partial."""
    if F.values.bits == 16:
        channel = tl.arange(0, block_of(F.values.head_dim))
        store_partial(out, slot, head, heads, channel, channel < F.values.head_dim, totals[0], F)
    else:
        LANES: tl.constexpr = value_lanes(F)
        GROUP_SIZE: tl.constexpr = F.values.head_dim // max(F.values.groups, 1)
        lane = tl.arange(0, block_of(LANES))
        for j in tl.static_range(16 // field_bits(F.values.bits)):
            total = totals[j] * plane_weight(j, F.values.bits)
            if F.values.groups > 0:
                for group in tl.static_range(first_group(j, LANES, GROUP_SIZE), last_group(j, LANES, GROUP_SIZE) + 1):
                    own = (j * LANES + lane) // GROUP_SIZE == group
                    constant = spread_columns(tl.sum(constants[group], 0)[None, :], F)
                    if in_bytes(F.values.scale, F.values.offset):
                        constant *= OFFSET_UNIT
                    total = tl.where(own[:, None], total + constant, total)
            else:
                scale, least = shared_value_scales(value_base, shared, scale_row, head, F, j)
                total = total * scale[:, None] + least[:, None] * spread_columns(weight[None, :], F)
            store_partial(out, slot, head, heads, j * LANES + lane, lane < LANES, total, F)


@kernel(do_not_specialize=["count"])
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
