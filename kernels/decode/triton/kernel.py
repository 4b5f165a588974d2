"""The fused split-KV decode kernel: quantized pages or spans, half-quantized pages and full-precision tokens in one
launch.

One program of one warp serves one KV head of one work item (see `kernels/decode/plan.py`) for all query heads that
read it, so that nothing is repeated per query head. Codes are the M operand of the matrix products and queries the N
operand, which is padded to eight columns anyway. Key scales go into the query and value scales into the probabilities,
group by group; offsets become one product per group. Sums of probabilities stay spread over the warp until the end.

Scores are kept times log2(e), so that exponentials are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.decode.plan import Item
from kvconvert.kernels.decode.triton import (
    block_of,
    boosted_queries,
    code_operands,
    column_queries,
    key_lanes,
    largest_power,
    plain_queries,
    query_columns,
    query_rows,
    rows_of_columns,
)
from kvconvert.kernels.decode.triton.center import page_center
from kvconvert.kernels.decode.triton.softmax import (
    add_values,
    capped,
    extremes_reduced,
    finish_scores,
    hide,
    no_values,
    page_softmax_step,
    product_factor,
    residual_finish,
    shaped_scores,
    softmax_step,
    store_page_values,
    store_partial,
    store_stats,
)
from kvconvert.kernels.decode.triton.tiles import (
    PAGE,
    add_residual_page,
    add_residual_values,
    in_token_order,
    page_scores,
    page_tokens,
    residual_scores,
    token_places,
)
from kvconvert.kernels.launches.triton import kernel

# Stands for minus infinity among maxima; differences of two of them are 0 instead of NaN.
LOWEST = tl.constexpr(-1e30)
(SEQUENCE, PAGES_FROM, PAGES_TO, HALF_FROM, HALF_TO, RESIDUAL_FROM, RESIDUAL_TO, PAGES_SLOT, HALF_SLOT, RESIDUAL_SLOT,
 SCALES, TOKENS, PAGES_MASK, HALF_MASK, RESIDUAL_MASK, HALF_ENTRY, PAGES_HIDDEN, HALF_HIDDEN) = (
    tl.constexpr(column.value) for column in Item
)  # fmt: skip
ITEM = tl.constexpr(len(Item))
# Columns of a row's description, see `ResidualWindows`.
ROW = tl.constexpr(8)
# Tokens of a page of 16 bits that are taken at a time, and how often.
CHUNK = tl.constexpr(32)
CHUNKS = tl.constexpr(4)


@triton.jit
def page_parts(key_base, shared, key_unit, scale_row, head, F: tl.constexpr):
    """Pointers to a key page's head part, norms, scales and offsets."""
    record = key_base + key_unit * 8
    page = record + head * F.keys.head_stride
    norms = (record if F.keys.norm == 1 else page) + F.keys.norm_start
    if F.keys.groups > 0:
        return page, norms, page + F.keys.scale, page + F.keys.offset
    else:
        scales = key_base + tl.load(shared + scale_row * 4) * 8 + head * F.keys.head_dim
        offsets = key_base + tl.load(shared + scale_row * 4 + 1) * 8 + head * F.keys.head_dim
        return page, norms, scales, offsets


@triton.jit
def key_products(
    key_base,
    unit,
    shared,
    scale_row,
    head,
    operands,
    page_query,
    boost,
    boost_channel,
    F: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Products with the keys of the page at `unit`: [lanes, rows, planes]."""
    if F.keys.bits == 16:
        token = tl.arange(0, PAGE)
        page = (key_base + unit * 8).to(tl.pointer_type(DTYPE)) + head * PAGE * F.keys.head_dim
        return residual_scores(page, token * F.keys.head_dim, token < PAGE, page_query, F)
    else:
        page, norms, scales, offsets = page_parts(key_base, shared, unit, scale_row, head, F)
        return page_scores(page, norms, scales, offsets, operands, boost, boost_channel, F)


@triton.jit
def buffer_token(token, sink_tokens, skip):
    """Index in a full-precision buffer of a token of the residual window: behind the sink tokens, `skip` tokens are not
    part of it."""
    return tl.where(token < sink_tokens, token, token + skip)


@kernel(do_not_specialize=["query_row", "count"])
def extremes_kernel(
    queries,
    extremes,
    key_base,
    key_table,
    items,
    shared,
    query_row,
    query_head,
    query_token,
    count,
    scaling,
    softcap,
    F: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Smallest and largest score of one work item's span blocks for every query: fp32 [W * blocks, H, rows, 2]."""
    LANES: tl.constexpr = key_lanes(F)
    R: tl.constexpr = query_rows(F)
    head = tl.program_id(1)
    block = tl.program_id(2)
    item = items + tl.program_id(0) * ITEM
    scale_row = tl.load(item + SCALES)
    limit = tl.load(item + TOKENS)
    first = column_queries(tl.load(item + SEQUENCE), head, block, query_row, query_head, query_token, count, F)
    largest = largest_power(queries, first, F)
    factor = rows_of_columns(largest, F) * scaling
    operands = code_operands(queries, first, largest, F)
    begin = tl.load(item + PAGES_FROM)
    low = tl.full([LANES, R], float("inf"), tl.float32)
    high = tl.full([LANES, R], float("-inf"), tl.float32)
    key_next = tl.load(key_table + begin)
    for page in tl.range(begin, tl.load(item + PAGES_TO), num_stages=STAGES):
        key_unit = key_next
        key_next = tl.load(key_table + page + 1)
        x = key_products(
            key_base, key_unit, shared, scale_row, head, operands, first, operands[0], first, F, tl.float16
        )
        x = x * factor[None, :, None]
        if F.softcap:
            x = capped(x, softcap)
        real = ((page - begin) * PAGE + page_tokens(LANES) < limit)[:, None, :]
        low = tl.minimum(low, tl.min(tl.where(real, x, float("inf")), 2))
        high = tl.maximum(high, tl.max(tl.where(real, x, float("-inf")), 2))
    place = (tl.program_id(0) * tl.num_programs(2) + block) * tl.num_programs(1) + head
    where = extremes + (place * R + tl.arange(0, R)) * 2
    tl.store(where, tl.min(low, 0))
    tl.store(where + 1, tl.max(high, 0))


@kernel(
    do_not_specialize=[
        "clamped_rows",
        "query_row",
        "mask_row",
        "mask_head",
        "mask_query",
        "place_row",
        "count",
    ]
)
def decode_kernel(
    queries,
    out,
    stats,
    key_base,
    value_base,
    key_table,
    value_table,
    items,
    rows,
    residual,
    places,
    shared,
    boosted,
    mask,
    extremes,
    center_rest,
    center_mean,
    item_rows,
    clamped_rows,
    query_row,
    query_head,
    query_token,
    mask_row,
    mask_head,
    mask_query,
    place_row,
    count,
    scaling,
    softcap,
    tau1,
    tau2,
    F: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Partial attention of one work item, KV head and block of queries; see `decode_attention`."""
    if DEPENDENT:
        # The merge may be set up as soon as every program has begun; it waits for all their results.
        tl.extra.cuda.gdc_launch_dependents()
    DTYPE: tl.constexpr = residual.dtype.element_ty
    KEY_LANES: tl.constexpr = key_lanes(F)
    R: tl.constexpr = query_rows(F)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    block = tl.program_id(2)
    blocks = tl.num_programs(2)
    item = items + tl.program_id(0) * ITEM
    row = tl.load(item + SEQUENCE)
    slot = tl.load(item + PAGES_SLOT) * blocks + block
    scale_row = tl.load(item + SCALES)
    first = column_queries(row, head, block, query_row, query_head, query_token, count, F)
    mask_here = mask + row.to(tl.int64) * mask_row + head * mask_head + block * F.queries * mask_query
    described = rows + row * ROW
    places += row.to(tl.int64) * place_row

    # The residual window comes first: nothing that it needs has to stay in registers while pages are read.
    begin = tl.load(item + RESIDUAL_FROM)
    if begin < tl.load(item + RESIDUAL_TO):
        # The plan's last end is open.
        stop = tl.minimum(tl.load(item + RESIDUAL_TO), tl.load(described + 7).to(tl.int32))
        residual_mask = mask_here + tl.load(item + RESIDUAL_MASK)
        sink_tokens = tl.load(described + 4)
        keys = residual + (tl.load(described) + head * tl.load(described + 1)) * 8
        values = residual + (tl.load(described + 2) + head * tl.load(described + 3)) * 8
        key_skip = tl.load(described + 5)
        value_skip = tl.load(described + 6)
        residual_slot = tl.load(item + RESIDUAL_SLOT) * tl.num_programs(2) + block
        maximum = tl.full([R], LOWEST, tl.float32)
        weight = tl.zeros([R], tl.float32)
        total = tl.zeros([block_of(F.values.head_dim), R * query_columns(F)], tl.float32)
        residual_factor = product_factor(tl.full([R], 1.0, tl.float32), scaling, F)
        residual_query = plain_queries(queries, first, F, DTYPE)
        for start in tl.range(begin, stop, F.tile, num_stages=STAGES):
            token = start + tl.arange(0, F.tile)
            known = token < stop
            index = buffer_token(token, sink_tokens, key_skip)
            place = token_places(index, known, places, F.keys.head_dim, DTYPE, F)
            x = residual_scores(keys, place, known, residual_query, F)
            # Full-precision tokens are no part of a span, so that nothing shifts their scores.
            x = residual_finish(x, residual_factor, softcap, F)
            x = tl.where(known[:, None, None], x, float("-inf"))
            if F.masked:
                x = hide(x, token[:, None], 0, 0, stop, residual_mask, mask_query, F)
            p, maximum, alpha = softmax_step(x, maximum, F)
            p = tl.reshape(p, [F.tile, R])
            weight = weight * alpha + tl.sum(p, 0)
            index = buffer_token(token, sink_tokens, value_skip)
            place = token_places(index, known, places, F.values.head_dim, DTYPE, F)
            total = add_residual_values(values, place, known, p, alpha, total, F)
        store_stats(stats, residual_slot, head, heads, maximum, weight, F)
        value_channel = tl.arange(0, block_of(F.values.head_dim))
        store_partial(out, residual_slot, head, heads, value_channel, value_channel < F.values.head_dim, total, F)

    if F.centered and DEPENDENT:
        tl.extra.cuda.gdc_wait()
    largest = largest_power(queries, first, F)
    one = tl.full([R], 1.0, tl.float32)
    if F.keys.bits < 16:
        factor = product_factor(rows_of_columns(largest, F), scaling, F)
    else:
        factor = product_factor(one, scaling, F)
    page_query = plain_queries(queries, first, F, DTYPE) if F.keys.bits == 16 else first
    operands = code_operands(queries, first, largest, F)
    slope = one
    shift = one
    if F.tau:
        slope, shift, flat = extremes_reduced(
            extremes, item_rows, row, block, tl.num_programs(2), head, heads, tau1, tau2, F
        )
        if tl.program_id(0) == tl.load(item_rows + row):
            real = tl.arange(0, R) < F.group * F.queries
            tl.atomic_add(clamped_rows, tl.sum((flat & real).to(tl.int64), 0))

    if F.half_quantized > 0:
        if tl.load(item + HALF_FROM) < tl.load(item + HALF_TO):
            # Pages whose other side is still in the buffer: behind the sink tokens, or from its beginning on where the
            # side has no pages yet.
            begin = tl.load(item + HALF_FROM)
            hidden = tl.load(item + HALF_HIDDEN)
            half_quantized_mask = mask_here + tl.load(item + HALF_MASK)
            table_begin = tl.load(item + HALF_ENTRY)
            key_begin = (tl.load(described + 4) + tl.load(described + 5)) % PAGE
            value_begin = (tl.load(described + 4) + tl.load(described + 6)) % PAGE
            half_quantized_slot = tl.load(item + HALF_SLOT) * tl.num_programs(2) + block
            in_page = tl.arange(0, PAGE)
            maximum = tl.full([R], LOWEST, tl.float32)
            if F.half_quantized == 1:
                weight = tl.zeros([KEY_LANES, R], tl.float32)
                total = tl.zeros([block_of(F.values.head_dim), R * query_columns(F)], tl.float32)
                values = residual + (tl.load(described + 2) + head * tl.load(described + 3)) * 8
                for page in tl.range(begin, tl.load(item + HALF_TO), num_stages=STAGES):
                    key_unit = tl.load(key_table + table_begin + page)
                    boost, boost_channel = boosted_queries(
                        queries, key_base, key_unit, boosted, head, first, largest, F
                    )
                    x = key_products(
                        key_base,
                        key_unit,
                        shared,
                        scale_row,
                        head,
                        operands,
                        page_query,
                        boost,
                        boost_channel,
                        F,
                        DTYPE,
                    )
                    if F.centered:
                        entry = table_begin + page
                        center = page_center(center_rest, center_mean, entry, block, blocks, head, heads, F)
                        x = shaped_scores(x * factor[None, :, None] + center, softcap, slope, shift, F)
                    else:
                        x = finish_scores(x, factor, softcap, slope, shift, F)
                    token = (page - begin) * PAGE + page_tokens(KEY_LANES)
                    x = hide(x, token, (page - begin) * PAGE, hidden, 1 << 30, half_quantized_mask, mask_query, F)
                    p, maximum, alpha = page_softmax_step(x, factor, maximum, F)
                    weight = weight * alpha[None, :] + tl.sum(p, 2)
                    token = value_begin + page * PAGE
                    total = add_residual_page(values, places, token, in_token_order(p), alpha, total, DTYPE, F)
                store_stats(stats, half_quantized_slot, head, heads, maximum, tl.sum(weight, 0), F)
                value_channel = tl.arange(0, block_of(F.values.head_dim))
                store_partial(
                    out, half_quantized_slot, head, heads, value_channel, value_channel < F.values.head_dim, total, F
                )
            else:
                weight = tl.zeros([PAGE, R], tl.float32)
                totals, constants = no_values(PAGE, F)
                keys = residual + (tl.load(described) + head * tl.load(described + 1)) * 8
                half_quantized_query = plain_queries(queries, first, F, DTYPE)
                plain_factor = product_factor(one, scaling, F)
                for page in tl.range(begin, tl.load(item + HALF_TO), num_stages=STAGES):
                    token = key_begin + page * PAGE + in_page
                    place = token_places(token, in_page < PAGE, places, F.keys.head_dim, DTYPE, F)
                    x = residual_scores(keys, place, in_page < PAGE, half_quantized_query, F)
                    x = finish_scores(x, plain_factor, softcap, slope, shift, F)
                    token = (page - begin) * PAGE + in_page[:, None]
                    x = hide(x, token, (page - begin) * PAGE, hidden, 1 << 30, half_quantized_mask, mask_query, F)
                    p, maximum, alpha = page_softmax_step(x, plain_factor, maximum, F)
                    weight = weight * alpha[None, :] + tl.sum(p, 2)
                    value_unit = tl.load(value_table + table_begin + page)
                    totals, constants = add_values(value_base, value_unit, head, p, alpha, totals, constants, F, DTYPE)
                total_weight = tl.sum(weight, 0)
                store_stats(stats, half_quantized_slot, head, heads, maximum, total_weight, F)
                store_page_values(
                    out,
                    half_quantized_slot,
                    head,
                    heads,
                    totals,
                    constants,
                    total_weight,
                    value_base,
                    shared,
                    scale_row,
                    F,
                )

    if tl.load(item + PAGES_FROM) < tl.load(item + PAGES_TO):
        begin = tl.load(item + PAGES_FROM)
        hidden = tl.load(item + PAGES_HIDDEN)
        limit = tl.load(item + TOKENS)
        page_mask = mask_here + tl.load(item + PAGES_MASK)
        maximum = tl.full([R], LOWEST, tl.float32)
        if F.keys.bits == 16 and F.values.bits == 16:
            weight = tl.zeros([R], tl.float32)
            total = tl.zeros([block_of(F.values.head_dim), R * query_columns(F)], tl.float32)
            in_chunk = tl.arange(0, CHUNK)
            known = in_chunk < CHUNK
            for chunk in tl.range(begin * CHUNKS, tl.load(item + PAGES_TO) * CHUNKS, num_stages=STAGES):
                step = chunk - begin * CHUNKS
                token, entry = step % CHUNKS * CHUNK + in_chunk, begin + step // CHUNKS
                keys = (key_base + tl.load(key_table + entry) * 8).to(tl.pointer_type(DTYPE))
                values = (value_base + tl.load(value_table + entry) * 8).to(tl.pointer_type(DTYPE))
                x = residual_scores(keys + head * PAGE * F.keys.head_dim, token * F.keys.head_dim, known, page_query, F)
                x = finish_scores(x, factor, softcap, slope, shift, F)
                x = hide(x, (step * CHUNK + in_chunk)[:, None], step * CHUNK, hidden, limit, page_mask, mask_query, F)
                p, maximum, alpha = page_softmax_step(x, factor, maximum, F)
                p = tl.reshape(p, [CHUNK, R])
                weight = weight * alpha + tl.sum(p, 0)
                values += head * PAGE * F.values.head_dim
                total = add_residual_values(values, token * F.values.head_dim, known, p, alpha, total, F)
            store_stats(stats, slot, head, heads, maximum, weight, F)
            value_channel = tl.arange(0, block_of(F.values.head_dim))
            store_partial(out, slot, head, heads, value_channel, value_channel < F.values.head_dim, total, F)
        else:
            weight = tl.zeros([KEY_LANES, R], tl.float32)
            totals, constants = no_values(KEY_LANES, F)
            key_next = tl.load(key_table + begin)
            value_next = tl.load(value_table + begin)
            for page in tl.range(begin, tl.load(item + PAGES_TO), num_stages=STAGES):
                key_unit = key_next
                value_unit = value_next
                # The tables have one entry more than there are pages.
                key_next = tl.load(key_table + page + 1)
                value_next = tl.load(value_table + page + 1)
                boost, boost_channel = boosted_queries(queries, key_base, key_unit, boosted, head, first, largest, F)
                x = key_products(
                    key_base, key_unit, shared, scale_row, head, operands, page_query, boost, boost_channel, F, DTYPE
                )
                if F.centered:
                    center = page_center(center_rest, center_mean, page, block, blocks, head, heads, F)
                    x = shaped_scores(x * factor[None, :, None] + center, softcap, slope, shift, F)
                else:
                    x = finish_scores(x, factor, softcap, slope, shift, F)
                token = (page - begin) * PAGE + page_tokens(KEY_LANES)
                x = hide(x, token, (page - begin) * PAGE, hidden, limit, page_mask, mask_query, F)
                p, maximum, alpha = page_softmax_step(x, factor, maximum, F)
                weight = weight * alpha[None, :] + tl.sum(p, 2)
                totals, constants = add_values(value_base, value_unit, head, p, alpha, totals, constants, F, DTYPE)
            total_weight = tl.sum(weight, 0)
            store_stats(stats, slot, head, heads, maximum, total_weight, F)
            store_page_values(out, slot, head, heads, totals, constants, total_weight, value_base, shared, scale_row, F)
