"""Queries of the decode kernel, in the forms that its matrix products want."""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.decode.triton.shape import block_of, code_rows, query_columns, query_rows


@triton.jit
def load_queries(queries, channel, known, first, F: tl.constexpr, COPIES: tl.constexpr):
    """Queries at `channel` [K] as fp32 [K, N]: each in the first COPIES of its columns, zeros in the others.

    `first` [N] are the pointers' offsets of each column's query, -1 for none.
    """
    column = tl.arange(0, query_rows(F) * query_columns(F)) % query_columns(F)
    mask = known[:, None] & ((first >= 0) & (column < COPIES))[None, :]
    return tl.load(queries + first[None, :] + channel[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def plain_queries(queries, first, F: tl.constexpr, DTYPE: tl.constexpr):
    """Queries [D, N] for products with full-precision keys."""
    channel = tl.arange(0, block_of(F.key_dim))
    return load_queries(queries, channel, channel < F.key_dim, first, F, 1).to(DTYPE)


@triton.jit
def high_and_low(query, F: tl.constexpr):
    """fp32 queries in two columns as fp16: rounded in the first, what that leaves in the second."""
    column = tl.arange(0, query_rows(F) * query_columns(F)) % query_columns(F)
    high = query.to(tl.float16)
    return tl.where((column == 1)[None, :], (query - high.to(tl.float32)).to(tl.float16), high)


@triton.jit
def fp16_queries(queries, channel, known, first, unit, F: tl.constexpr):
    """Operands for `scaled_query` and for the product with offsets."""
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
    return power_above(tl.max(tl.abs(query), 0))


@triton.jit
def power_above(largest):
    """The power of two just above each magnitude."""
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0
    return tl.where(largest > 1e-30, power, 1.0)


@triton.jit
def rows_of_columns(x, F: tl.constexpr):
    """[N] to [rows], equal in all columns of a query."""
    return tl.max(tl.reshape(x, [query_rows(F), query_columns(F)]), 1)


@triton.jit
def column_queries(row, head, block, query_row, query_head, query_token, count, F: tl.constexpr):
    """Offset of each column's query, -1 where there is none: row r = query head r // queries, query r % queries."""
    r = tl.arange(0, query_rows(F) * query_columns(F)) // query_columns(F)
    member = r // F.queries
    token = block * F.queries + r % F.queries
    offset = row.to(tl.int64) * query_row + (head * F.group + member) * query_head + token * query_token
    return tl.where((member < F.group) & (token < count), offset, -1)


@triton.jit
def code_operands(queries, first, largest, F: tl.constexpr):
    """The queries in every form that `page_scores` wants; a placeholder for 16-bit keys."""
    if F.key_bits == 16:
        return (largest,)
    else:
        ROWS: tl.constexpr = code_rows(F.key_bits, F.key_dim)
        channel = tl.arange(0, block_of(ROWS))
        query, bias = fp16_queries(queries, channel, channel < ROWS, first, largest, F)
        if F.key_dim > ROWS:
            upper, bias_upper = fp16_queries(queries, ROWS + channel, channel < ROWS, first, largest, F)
            return query, bias, upper, bias_upper
        else:
            return query, bias


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
        return residual_nothing(F), tl.full([16], -1, tl.int32)


@triton.jit
def residual_nothing(F: tl.constexpr):
    """A placeholder where nothing is boosted."""
    return tl.zeros([16, query_rows(F) * query_columns(F)], tl.float16)
