"""Everything that a specialisation of the decode kernel is made for, and what follows from it at compile time."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kvconvert.kernels.page_formats import PAGE_SIZE, PageLayout


@dataclass(frozen=True)
class DecodeShape:
    """The constants of one specialisation.

    Attributes:
        keys, values: of pages or span blocks; these have no `groups` where many pages share one set of scales, which
            then are per channel for values too.
        group, queries: query heads per KV head, and queries of one program.
        split_query: whether a second column holds what rounding to fp16 leaves of a scaled query.
        half_quantized: 0 where keys and values are quantized together, 1 where values stay longer in full precision, 2
            where keys do.
        masked, ragged, softcap, tau, centered: which of these apply; ragged: the last page of an item may be
            incomplete, or first tokens of its first one hidden; centered: pages of keys lack a constant part, whose
            scores are added.
        placed: whether a table says where each full-precision token is, instead of one beside the other.
        tile: full-precision tokens per step.
        inline_asm: False under the interpreter.
    """

    keys: PageLayout
    values: PageLayout
    group: int
    queries: int
    split_query: bool
    half_quantized: int
    masked: bool
    ragged: bool
    softcap: bool
    tau: bool
    centered: bool
    placed: bool
    tile: int
    inline_asm: bool


@triton.constexpr_function
def block_of(size):
    """The power of two, at least 16, that holds a size: what matrix products want."""
    block = 16
    while block < size:
        block *= 2
    return block


@triton.constexpr_function
def query_rows(shape):
    """Query heads times queries of a program, rounded up to a power of two."""
    rows = 1
    while rows < shape.group * shape.queries:
        rows *= 2
    return rows


@triton.constexpr_function
def query_columns(shape):
    """Columns of the N operand per query row: matrix products have at least eight."""
    rows = 1
    while rows < shape.group * shape.queries:
        rows *= 2
    return max(8 // rows, 2 if shape.split_query else 1)


@triton.constexpr_function
def field_bits(bits):
    """Bits of a lane's field: 1-bit codes come in pairs, as do the lowest bits of 3-bit codes."""
    return {1: 2, 3: 2}.get(bits, bits)


@triton.constexpr_function
def code_rows(bits, size):
    """Rows of codes of one operand, for a contracted axis of this size: half of it where codes are in pairs."""
    return size // 2 if bits in (1, 3) else size


@triton.constexpr_function
def stored_rows(bits, size):
    """Words of a lane for a contracted axis of this size: of both planes at 3 bits."""
    return {1: size // 2, 3: size // 2 * 3}.get(bits, size)


@triton.constexpr_function
def key_lanes(shape):
    """Lanes of a key page, the first axis of its scores; at 16 bits its tokens."""
    return PAGE_SIZE if shape.keys.bits == 16 else PAGE_SIZE * field_bits(shape.keys.bits) // 16


@triton.constexpr_function
def value_lanes(shape):
    """Lanes of a value page."""
    return shape.values.head_dim * field_bits(shape.values.bits) // 16


@triton.constexpr_function
def is_low(j, bits):
    """Whether field j lies within the ten bits of an fp16 mantissa before lanes are moved."""
    return j < {1: 5, 2: 5, 3: 4, 4: 2, 8: 1}[bits]


@triton.constexpr_function
def shift_count(bits):
    """Bits by which lanes are moved to bring their upper fields into the mantissa."""
    return {1: 10, 2: 10, 3: 8, 4: 8, 8: 8}[bits]


@triton.constexpr_function
def plane_position(j, bits):
    """The first bit of field j, where lanes were moved if it does not lie within the mantissa before.

    Codes of 3 bits are put together in fields of 4, see `joined_words`.
    """
    if bits == 3:
        return 4 * (j // 2 % 2) + j % 2
    return field_bits(bits) * j - (0 if is_low(j, bits) else shift_count(bits))


@triton.constexpr_function
def plane_mask(j, half, bits):
    """The bits of field j that are codes of one half of the rows."""
    return ((1 << bits) - 1) << (plane_position(j, bits) + (half if bits == 1 else 0))


@triton.constexpr_function
def plane_weight(j, bits):
    """What the numbers spelled by field j have to be multiplied with to be codes."""
    return 2.0 ** (24 - plane_position(j, bits))


@triton.constexpr_function
def first_group(j, lanes, group_size):
    """The first value group that plane j has channels of."""
    return j * lanes // group_size


@triton.constexpr_function
def last_group(j, lanes, group_size):
    """The last value group that plane j has channels of."""
    return (j * lanes + lanes - 1) // group_size


@triton.jit
def key_channels(F: tl.constexpr):
    """Channel of each row of the queries' operand, and whether it has one. Where codes are in pairs, each half of the
    channels is padded by itself.
    """
    ROWS: tl.constexpr = code_rows(F.keys.bits, F.keys.head_dim)
    if F.keys.head_dim == ROWS or block_of(ROWS) == ROWS:
        row = tl.arange(0, block_of(F.keys.head_dim))
        return row, row < F.keys.head_dim
    else:
        row = tl.arange(0, 2 * block_of(ROWS))
        return row // block_of(ROWS) * ROWS + row % block_of(ROWS), row % block_of(ROWS) < ROWS


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
    channel = tl.arange(0, block_of(F.keys.head_dim))
    return load_queries(queries, channel, channel < F.keys.head_dim, first, F, 1).to(DTYPE)


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
    channel = tl.arange(0, block_of(F.keys.head_dim))
    query = load_queries(queries, channel, channel < F.keys.head_dim, first, F, query_columns(F))
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
    if F.keys.bits == 16:
        return (largest,)
    else:
        channel, known = key_channels(F)
        return fp16_queries(queries, channel, known, first, largest, F)


@triton.jit
def boosted_queries(queries, key_base, unit, boosted, head, first, largest, F: tl.constexpr):
    """Numbers of the boosted channels, -1 for padding, and the queries there."""
    if F.keys.boosted > 0:
        place = tl.arange(0, block_of(F.keys.boosted))
        known = place < F.keys.boosted
        if F.keys.channels >= 0:
            page = (key_base + unit * 8 + head * F.keys.head_stride + F.keys.channels).to(tl.pointer_type(tl.uint8))
            channel = tl.load(page + place, mask=known, other=0).to(tl.int32)
        else:
            channel = tl.load(boosted + head * F.keys.boosted + place, mask=known, other=0)
        query, _ = fp16_queries(queries, channel, known, first, largest, F)
        return query, tl.where(known, channel, -1)
    else:
        return residual_nothing(F), tl.full([16], -1, tl.int32)


@triton.jit
def residual_nothing(F: tl.constexpr):
    """A placeholder where nothing is boosted."""
    return tl.zeros([16, query_rows(F) * query_columns(F)], tl.float16)
