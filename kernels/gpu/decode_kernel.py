"""The fused split-KV decode kernel: quantized pages or spans, half pages and full-precision tokens in one launch.

One program of one warp serves one KV head of one work item (see `kernels/decode_plan.py`) for all query heads that
read it, so that nothing is repeated per query head. Codes are the M operand of the matrix products and queries the N
operand, which is padded to eight columns anyway. Key scales go into the query and value scales into the probabilities,
group by group; minima become one product per group. Sums of probabilities stay spread over the warp until the end.

Scores are kept times log2(e), so that exponentials are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.gpu.decode_shape import (
    DecodeShape,
    block_of,
    code_rows,
    field_bits,
    first_group,
    key_lanes,
    last_group,
    plane_weight,
    query_columns,
    query_rows,
    value_lanes,
)
from kvconvert.kernels.gpu.decode_tiles import (
    PAGE,
    add_dense_values,
    add_page_values,
    dense_scores,
    exp2,
    half_pointer,
    in_token_order,
    page_scores,
    page_tokens,
    spread_columns,
)

LOG2_E = tl.constexpr(1.4426950408889634)
# Stands for minus infinity among maxima; differences of two of them are 0 instead of NaN.
LOWEST = tl.constexpr(-1e30)
# Columns of a work item and of a row's description, see `kernels/decode_plan.py`.
ITEM = tl.constexpr(16)
ROW = tl.constexpr(8)


@triton.jit
def load_queries(queries, channel, known, first, F: tl.constexpr, COPIES: tl.constexpr):
    """Queries at `channel` [K] as fp32 [K, N]: each in the first COPIES of its columns, zeros in the others.

    `first` [N] are the pointers' offsets of each column's query, -1 for none.
    """
    column = tl.arange(0, query_rows(F) * query_columns(F)) % query_columns(F)
    mask = known[:, None] & ((first >= 0) & (column < COPIES))[None, :]
    return tl.load(queries + first[None, :] + channel[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def high_and_low(query, F: tl.constexpr):
    """fp32 queries in two columns as fp16: rounded in the first, what that leaves in the second."""
    column = tl.arange(0, query_rows(F) * query_columns(F)) % query_columns(F)
    high = query.to(tl.float16)
    return tl.where((column == 1)[None, :], (query - high.to(tl.float32)).to(tl.float16), high)


@triton.jit
def fp16_queries(queries, channel, known, first, unit, F: tl.constexpr):
    """Operands for `scaled_query` and for the product with minima."""
    if F.split_query:
        query = load_queries(queries, channel, known, first, F, 2) / unit[None, :]
        return query, high_and_low(query, F)
    else:
        query = (load_queries(queries, channel, known, first, F, 1) / unit[None, :]).to(tl.float16)
        return query, query


@triton.jit
def largest_power(queries, first, F: tl.constexpr):
    """For each column the power of two just above its query's largest magnitude, so that fp16 holds their quotient."""
    channel = tl.arange(0, block_of(F.key_dim))
    query = load_queries(queries, channel, channel < F.key_dim, first, F, query_columns(F))
    largest = tl.max(tl.abs(query), 0)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0
    return tl.where(largest > 1e-30, power, 1.0)


@triton.jit
def rows_of_columns(x, F: tl.constexpr):
    """[N] to [rows], equal in all columns of a query."""
    return tl.max(tl.reshape(x, [query_rows(F), query_columns(F)]), 1)


@triton.jit
def dense_finish(x, factor, softcap, F: tl.constexpr):
    """`finish_scores` of tokens outside of spans."""
    x = x * factor[None, :, None]
    if F.softcap:
        x = capped(x, softcap)
    if F.softcap or F.tau:
        x = x * LOG2_E
    return x


@triton.jit
def capped(x, softcap):
    """softcap tanh(x / softcap), as 1 - 2 / (exp(2 z) + 1) with a limit beyond which fp32 knows no difference."""
    z = tl.minimum(tl.maximum(x / softcap, -15.0), 15.0)
    return softcap * (1.0 - 2.0 / (tl.exp2(z * (2.0 * LOG2_E)) + 1.0))


@triton.jit
def finish_scores(x, factor, softcap, slope, shift, F: tl.constexpr):
    """Scores [M, rows, P] from products: times factor [rows], capped, shifted (CalibQuant), and times log2(e)."""
    x = x * factor[None, :, None]
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
def hide(x, token, limit, mask, mask_query, F: tl.constexpr):
    """Scores [M, rows, P] with minus infinity for tokens [M, P] beyond `limit` or masked (uint8, 0 hides)."""
    if F.ragged:
        x = tl.where((token < limit)[:, None, :], x, float("-inf"))
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
def store_partial(out, slot, head, heads, plane_rows, known, total, F: tl.constexpr):
    """Write weighted values [M, N], whose rows are the channels `plane_rows`."""
    row = tl.arange(0, query_rows(F) * query_columns(F)) // query_columns(F)
    first = tl.arange(0, query_rows(F) * query_columns(F)) % query_columns(F) == 0
    place = (slot * heads + head).to(tl.int64) * query_rows(F)
    where = out + (place + row)[None, :] * F.value_dim + plane_rows[:, None]
    tl.store(where, total, mask=known[:, None] & first[None, :])


@triton.jit
def store_stats(stats, slot, head, heads, maximum, weight, F: tl.constexpr):
    """Write maximum and sum of weights [rows]."""
    row = tl.arange(0, query_rows(F))
    where = stats + ((slot * heads + head).to(tl.int64) * query_rows(F) + row) * 2
    tl.store(where, maximum)
    tl.store(where + 1, weight)


@triton.jit
def column_queries(row, head, block, query_row, query_head, query_token, count, F: tl.constexpr):
    """Offset of each column's query, -1 where there is none: row r = query head r // queries, query r % queries."""
    r = tl.arange(0, query_rows(F) * query_columns(F)) // query_columns(F)
    member = r // F.queries
    token = block * F.queries + r % F.queries
    offset = row.to(tl.int64) * query_row + (head * F.group + member) * query_head + token * query_token
    return tl.where((member < F.group) & (token < count), offset, -1)


@triton.jit
def page_parts(key_base, shared, key_unit, segment, head, F: tl.constexpr):
    """Pointers to a key page's head part, norms, scales and minima."""
    record = key_base + key_unit * 8
    page = record + head * F.key_head
    if F.norm == 1:
        norms = record + F.joint_norm
    else:
        norms = page + F.key_norm
    if F.key_groups > 0:
        return page, norms, page + F.key_scale, page + F.key_minimum
    else:
        scales = key_base + tl.load(shared + segment * 4) * 8 + head * F.key_dim
        minima = key_base + tl.load(shared + segment * 4 + 1) * 8 + head * F.key_dim
        return page, norms, scales, minima


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


@triton.jit
def shared_value_scales(value_base, shared, segment, head, F: tl.constexpr, J: tl.constexpr):
    """Scale and minimum of the channels of plane J, where many pages share them."""
    LANES: tl.constexpr = value_lanes(F)
    lane = tl.arange(0, block_of(LANES))
    known = lane < LANES
    channel = head * F.value_dim + J * LANES + lane
    scale = tl.load(half_pointer(value_base + tl.load(shared + segment * 4 + 2) * 8) + channel, mask=known, other=0.0)
    least = tl.load(half_pointer(value_base + tl.load(shared + segment * 4 + 3) * 8) + channel, mask=known, other=0.0)
    return scale.to(tl.float32), least.to(tl.float32)


@triton.jit
def no_values(key_lanes: tl.constexpr, F: tl.constexpr):
    """Sums of weighted values to begin with, for `add_page_values`, or for `add_dense_values` at 16 bits."""
    N: tl.constexpr = query_rows(F) * query_columns(F)
    totals = ()
    offsets = ()
    if F.value_bits == 16:
        totals = (tl.zeros([block_of(F.value_dim), N], tl.float32),)
        offsets = (tl.zeros([1], tl.float32),)
    else:
        for _ in tl.static_range(16 // field_bits(F.value_bits)):
            totals = totals + (tl.zeros([block_of(value_lanes(F)), N], tl.float32),)
        for _ in tl.static_range(max(F.value_groups, 1)):
            offsets = offsets + (tl.zeros([key_lanes, query_rows(F)], tl.float32),)
    return totals, offsets


@triton.jit
def add_values(value_base, unit, head, p, alpha, totals, offsets, F: tl.constexpr, DTYPE: tl.constexpr):
    """The page at `unit` of the value pool, weighted by p [lanes, rows, planes], added to the sums."""
    if F.value_bits == 16:
        token = tl.arange(0, PAGE)
        page = (value_base + unit * 8).to(tl.pointer_type(DTYPE)) + head * PAGE * F.value_dim
        total = add_dense_values(page, F.value_dim, token, token < PAGE, in_token_order(p), alpha, totals[0], F)
        return (total,), offsets
    else:
        page = value_base + unit * 8 + head * F.value_head
        return add_page_values(page, page + F.value_scale, page + F.value_minimum, p, alpha, totals, offsets, F)


@triton.jit
def store_page_values(out, slot, head, heads, totals, offsets, weight, value_base, shared, segment, F: tl.constexpr):
    """The weighted values of all channels, with scales that were left out and minima, as one partial."""
    if F.value_bits == 16:
        channel = tl.arange(0, block_of(F.value_dim))
        store_partial(out, slot, head, heads, channel, channel < F.value_dim, totals[0], F)
    else:
        FIELD: tl.constexpr = field_bits(F.value_bits)
        LANES: tl.constexpr = value_lanes(F)
        GROUP_SIZE: tl.constexpr = F.value_dim // max(F.value_groups, 1)
        lane = tl.arange(0, block_of(LANES))
        for j in tl.static_range(16 // FIELD):
            total = totals[j] * plane_weight(j, FIELD)
            if F.value_groups > 0:
                for group in tl.static_range(first_group(j, LANES, GROUP_SIZE), last_group(j, LANES, GROUP_SIZE) + 1):
                    own = (j * LANES + lane) // GROUP_SIZE == group
                    offset = spread_columns(tl.sum(offsets[group], 0)[None, :], F)
                    total = tl.where(own[:, None], total + offset, total)
            else:
                scale, least = shared_value_scales(value_base, shared, segment, head, F, j)
                total = total * scale[:, None] + least[:, None] * spread_columns(weight[None, :], F)
            store_partial(out, slot, head, heads, j * LANES + lane, lane < LANES, total, F)


@triton.jit
def key_products(key_base, unit, shared, segment, head, operands, dense_query, boost, boost_channel, F: tl.constexpr):
    """Products with the keys of the page at `unit`: [lanes, rows, planes]."""
    if F.key_bits == 16:
        token = tl.arange(0, PAGE)
        page = (key_base + unit * 8).to(tl.pointer_type(dense_query.dtype)) + head * PAGE * F.key_dim
        return dense_scores(page, F.key_dim, token, token < PAGE, dense_query, F)
    else:
        page, norms, scales, minima = page_parts(key_base, shared, unit, segment, head, F)
        return page_scores(page, norms, scales, minima, operands, boost, boost_channel, F)


@triton.jit
def boosted_queries(queries, key_base, unit, boosted, head, first, largest, F: tl.constexpr):
    """Numbers of the boosted channels, -1 for padding, and the queries there."""
    if F.boosted > 0:
        place = tl.arange(0, block_of(F.boosted))
        known = place < F.boosted
        if F.boost_stored:
            page = (key_base + unit * 8 + head * F.key_head + F.key_channels).to(tl.pointer_type(tl.uint8))
            channel = tl.load(page + place, mask=known, other=0).to(tl.int32)
        else:
            channel = tl.load(boosted + head * F.boosted + place, mask=known, other=0)
        query, _ = fp16_queries(queries, channel, known, first, largest, F)
        return query, tl.where(known, channel, -1)
    else:
        return dense_nothing(F), tl.full([16], -1, tl.int32)


@triton.jit
def dense_nothing(F: tl.constexpr):
    """A placeholder where nothing is boosted."""
    return tl.zeros([16, query_rows(F) * query_columns(F)], tl.float16)


@triton.jit
def code_operands(queries, first, largest, F: tl.constexpr):
    """The queries in every form that `page_scores` wants; a placeholder for 16-bit keys."""
    if F.key_bits == 16:
        return (largest,)
    else:
        ROWS: tl.constexpr = code_rows(F.key_bits, F.key_dim)
        channel = tl.arange(0, block_of(ROWS))
        query, bias = fp16_queries(queries, channel, channel < ROWS, first, largest, F)
        if F.key_bits == 1:
            upper, bias_upper = fp16_queries(queries, ROWS + channel, channel < ROWS, first, largest, F)
            return query, bias, upper, bias_upper
        else:
            return query, bias


@triton.jit
def buffer_token(token, sinks, skip):
    """Index in a full-precision buffer of a token of the tail: behind the sinks, `skip` tokens are not part of it."""
    return tl.where(token < sinks, token, token + skip)


@triton.jit(do_not_specialize=["query_row", "count"])
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
    segment = tl.load(item + 10)
    limit = tl.load(item + 11)
    first = column_queries(tl.load(item), head, block, query_row, query_head, query_token, count, F)
    largest = largest_power(queries, first, F)
    factor = rows_of_columns(largest, F) * scaling
    operands = code_operands(queries, first, largest, F)
    begin = tl.load(item + 1)
    low = tl.full([LANES, R], float("inf"), tl.float32)
    high = tl.full([LANES, R], float("-inf"), tl.float32)
    key_next = tl.load(key_table + begin)
    for page in tl.range(begin, tl.load(item + 2), num_stages=STAGES):
        key_unit = key_next
        key_next = tl.load(key_table + page + 1)
        x = key_products(
            key_base, key_unit, shared, segment, head, operands, operands[0], operands[0], operands[0], F
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


@triton.jit(do_not_specialize=["query_row", "mask_row", "mask_head", "mask_query", "count"])
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
    dense,
    shared,
    boosted,
    mask,
    extremes,
    item_rows,
    flattened,
    query_row,
    query_head,
    query_token,
    mask_row,
    mask_head,
    mask_query,
    count,
    scaling,
    softcap,
    tau1,
    tau2,
    F: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Partial attention of one work item, KV head and block of queries; see `decode_attention`."""
    DTYPE: tl.constexpr = dense.dtype.element_ty
    KEY_LANES: tl.constexpr = key_lanes(F)
    R: tl.constexpr = query_rows(F)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    block = tl.program_id(2)
    item = items + tl.program_id(0) * ITEM
    row = tl.load(item)
    slot = tl.load(item + 7) * tl.num_programs(2) + block
    segment = tl.load(item + 10)
    first = column_queries(row, head, block, query_row, query_head, query_token, count, F)
    mask_here = mask + row.to(tl.int64) * mask_row + head * mask_head + block * F.queries * mask_query
    largest = largest_power(queries, first, F)
    one = tl.full([R], 1.0, tl.float32)
    if F.key_bits < 16:
        factor = product_factor(rows_of_columns(largest, F), scaling, F)
    else:
        factor = product_factor(one, scaling, F)
    described = rows + row * ROW
    channel = tl.arange(0, block_of(F.key_dim))
    dense_query = load_queries(queries, channel, channel < F.key_dim, first, F, 1).to(DTYPE)
    operands = code_operands(queries, first, largest, F)
    slope = one
    shift = one
    if F.tau:
        slope, shift, flat = extremes_reduced(
            extremes, item_rows, row, block, tl.num_programs(2), head, heads, tau1, tau2, F
        )
        if tl.program_id(0) == tl.load(item_rows + row):
            real = tl.arange(0, R) < F.group * F.queries
            tl.atomic_add(flattened, tl.sum((flat & real).to(tl.int64), 0))

    if tl.load(item + 1) < tl.load(item + 2):
        begin = tl.load(item + 1)
        limit = tl.load(item + 11)
        page_mask = mask_here + tl.load(item + 12)
        maximum = tl.full([R], LOWEST, tl.float32)
        weight = tl.zeros([KEY_LANES, R], tl.float32)
        totals, offsets = no_values(KEY_LANES, F)
        key_next = tl.load(key_table + begin)
        value_next = tl.load(value_table + begin)
        for page in tl.range(begin, tl.load(item + 2), num_stages=STAGES):
            key_unit = key_next
            value_unit = value_next
            # The tables have one entry more than there are pages.
            key_next = tl.load(key_table + page + 1)
            value_next = tl.load(value_table + page + 1)
            boost, boost_channel = boosted_queries(queries, key_base, key_unit, boosted, head, first, largest, F)
            x = key_products(key_base, key_unit, shared, segment, head, operands, dense_query, boost, boost_channel, F)
            x = finish_scores(x, factor, softcap, slope, shift, F)
            token = (page - begin) * PAGE + page_tokens(KEY_LANES)
            x = hide(x, token, limit, page_mask, mask_query, F)
            p, maximum, alpha = softmax_step(x, maximum, F)
            weight = weight * alpha[None, :] + tl.sum(p, 2)
            totals, offsets = add_values(value_base, value_unit, head, p, alpha, totals, offsets, F, DTYPE)
        total_weight = tl.sum(weight, 0)
        store_stats(stats, slot, head, heads, maximum, total_weight, F)
        store_page_values(out, slot, head, heads, totals, offsets, total_weight, value_base, shared, segment, F)

    if F.half > 0:
        if tl.load(item + 3) < tl.load(item + 4):
            # Pages whose other side is still in the buffer, behind the sinks.
            begin = tl.load(item + 3)
            half_mask = mask_here + tl.load(item + 13)
            table_begin = tl.load(item + 15)
            sinks = tl.load(described + 4)
            half_slot = tl.load(item + 8) * tl.num_programs(2) + block
            in_page = tl.arange(0, PAGE)
            maximum = tl.full([R], LOWEST, tl.float32)
            if F.half == 1:
                weight = tl.zeros([KEY_LANES, R], tl.float32)
                total = tl.zeros([block_of(F.value_dim), R * query_columns(F)], tl.float32)
                values = dense + (tl.load(described + 2) + head * tl.load(described + 3)) * 8
                for page in range(begin, tl.load(item + 4)):
                    key_unit = tl.load(key_table + table_begin + page)
                    boost, boost_channel = boosted_queries(
                        queries, key_base, key_unit, boosted, head, first, largest, F
                    )
                    x = key_products(
                        key_base, key_unit, shared, segment, head, operands, dense_query, boost, boost_channel, F
                    )
                    x = finish_scores(x, factor, softcap, slope, shift, F)
                    x = hide(x, (page - begin) * PAGE + page_tokens(KEY_LANES), 1 << 30, half_mask, mask_query, F)
                    p, maximum, alpha = softmax_step(x, maximum, F)
                    weight = weight * alpha[None, :] + tl.sum(p, 2)
                    token = sinks + page * PAGE + in_page
                    total = add_dense_values(
                        values, F.value_dim, token, in_page < PAGE, in_token_order(p), alpha, total, F
                    )
                store_stats(stats, half_slot, head, heads, maximum, tl.sum(weight, 0), F)
                value_channel = tl.arange(0, block_of(F.value_dim))
                store_partial(out, half_slot, head, heads, value_channel, value_channel < F.value_dim, total, F)
            else:
                weight = tl.zeros([PAGE, R], tl.float32)
                totals, offsets = no_values(PAGE, F)
                keys = dense + (tl.load(described) + head * tl.load(described + 1)) * 8
                for page in range(begin, tl.load(item + 4)):
                    token = sinks + page * PAGE + in_page
                    x = dense_scores(keys, F.key_dim, token, in_page < PAGE, dense_query, F)
                    x = finish_scores(x, product_factor(one, scaling, F), softcap, slope, shift, F)
                    x = hide(x, (page - begin) * PAGE + in_page[:, None], 1 << 30, half_mask, mask_query, F)
                    p, maximum, alpha = softmax_step(x, maximum, F)
                    weight = weight * alpha[None, :] + tl.sum(p, 2)
                    value_unit = tl.load(value_table + table_begin + page)
                    totals, offsets = add_values(value_base, value_unit, head, p, alpha, totals, offsets, F, DTYPE)
                total_weight = tl.sum(weight, 0)
                store_stats(stats, half_slot, head, heads, maximum, total_weight, F)
                store_page_values(
                    out, half_slot, head, heads, totals, offsets, total_weight, value_base, shared, segment, F
                )

    begin = tl.load(item + 5)
    if begin < tl.load(item + 6):
        # The plan's last end is open.
        stop = tl.minimum(tl.load(item + 6), tl.load(described + 7).to(tl.int32))
        dense_mask = mask_here + tl.load(item + 14)
        sinks = tl.load(described + 4)
        keys = dense + (tl.load(described) + head * tl.load(described + 1)) * 8
        values = dense + (tl.load(described + 2) + head * tl.load(described + 3)) * 8
        key_skip = tl.load(described + 5)
        value_skip = tl.load(described + 6)
        dense_slot = tl.load(item + 9) * tl.num_programs(2) + block
        maximum = tl.full([R], LOWEST, tl.float32)
        weight = tl.zeros([R], tl.float32)
        total = tl.zeros([block_of(F.value_dim), R * query_columns(F)], tl.float32)
        dense_factor = product_factor(one, scaling, F)
        for start in range(begin, stop, F.tile):
            token = start + tl.arange(0, F.tile)
            known = token < stop
            x = dense_scores(keys, F.key_dim, buffer_token(token, sinks, key_skip), known, dense_query, F)
            # Full-precision tokens are no part of a span, so that nothing shifts their scores.
            x = dense_finish(x, dense_factor, softcap, F)
            x = tl.where(known[:, None, None], x, float("-inf"))
            if F.masked:
                x = hide(x, token[:, None], stop, dense_mask, mask_query, F)
            p, maximum, alpha = softmax_step(x, maximum, F)
            p = tl.reshape(p, [F.tile, R])
            weight = weight * alpha + tl.sum(p, 0)
            total = add_dense_values(
                values, F.value_dim, buffer_token(token, sinks, value_skip), known, p, alpha, total, F
            )
        store_stats(stats, dense_slot, head, heads, maximum, weight, F)
        value_channel = tl.arange(0, block_of(F.value_dim))
        store_partial(out, dense_slot, head, heads, value_channel, value_channel < F.value_dim, total, F)
