"""The Triton kernels of prompts, of one sequence or many; `kernels/prompt/triton/__init__.py` launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.ragged import tables

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below every score, yet finite, so that a row whose keys are all hidden so far gives no NaN.
LOWEST = tl.constexpr(-1.0e30)
# Rows of the log-sum-exp, and the tiles read from them, start at multiples of this many numbers.
ALIGNMENT = tl.constexpr(16)
TILE_COLUMNS = tl.constexpr(tables.TILE)


@triton.jit
def read_rows(
    source,
    head,
    first,
    count,
    head_stride,
    row_stride,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Rows first .. first + ROWS of one head as [ROWS, TILE], zeros beyond `count` rows and SIZE columns.

    Strides are in units of 8 elements, which tells the compiler that rows start at multiples of 16 bytes. Without
    BOUNDED all rows must exist.
    """
    if DESCRIPTORS:
        tile = source.load([head, first, 0]).reshape(ROWS, TILE)
    else:
        row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, TILE)[None, :]
        base = source + (head.to(tl.int64) * head_stride + first * row_stride.to(tl.int64)) * 8
        pointers = base + row * (row_stride * 8) + column
        if BOUNDED:
            inside = row < count - first
            if SIZE != TILE:
                inside &= column < SIZE
            tile = tl.load(pointers, mask=inside, other=0.0)
        elif SIZE != TILE:
            tile = tl.load(pointers, mask=column < SIZE, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _product(left, right, accumulated, INTERPRETED: tl.constexpr):
    """Matrix product with float32 sums; the interpreter knows no bfloat16 in it."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, accumulated)


@triton.jit
def _capped(scores, scaling, softcap):
    """Dot products to capped logits in units of log 2, by tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both ends."""
    grown = tl.exp2(scores * (scaling * 2.0 * LOG2_E / softcap))
    return (softcap * LOG2_E) * (1.0 - 2.0 / (1.0 + grown))


LENGTHS = [
    "query_head_stride",
    "query_stride",
    "key_head_stride",
    "key_stride",
    "value_head_stride",
    "value_stride",
    "output_head_stride",
    "output_stride",
    "query_count",
    "key_count",
    "first_query",
    "tile_count",
    "sum_stride",
    "group",
    "together",
    "window",
]


@kernel(do_not_specialize=LENGTHS)
def attention_kernel(
    queries,
    keys,
    values,
    sink_logits,
    tiles,
    output,
    log_sum_exp,
    query_head_stride,
    query_stride,
    key_head_stride,
    key_stride,
    value_head_stride,
    value_stride,
    output_head_stride,
    output_stride,
    query_count,
    key_count,
    first_query,
    tile_count,
    group,
    together,
    window,
    scaling,
    softcap,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINK_LOGITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    RAGGED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile of queries of one head: `output` [Hq, T, E] and, of one sequence, `log_sum_exp` [Hq, T].

    Query i has the position first_query + i and key j the position j; a query attends to keys up to its own position,
    all of which may lie before the queries. The log-sum-exp is natural, that of the scaled and capped scores with the
    sink logit; minus infinity, and an output of zeros, for a query that sees no key. VALUE_SIZE 0 leaves the output
    out.

    If RAGGED, the queries are those of many sequences, and `tiles` says where each tile's lie and its sequence's keys,
    see `RaggedTables`; the rows between sequences have to be numbers.

    Programs run head by head in sections of `together` query heads, whose keys and values the L2 cache can hold, and
    within a section the tiles with the most keys, which are the last, first, so that the short ones fill the end.
    """
    section, place = tl.program_id(0) // (tile_count * together), tl.program_id(0) % (tile_count * together)
    head, tile = section * together + place % together, tile_count - 1 - place // together
    key_head = head // group

    first, query_end, key_begin = tile * QUERY_ROWS, query_count, 0
    first_column = first + first_query
    if RAGGED:
        entry = tiles + tile * TILE_COLUMNS
        first, query_end = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
        if first >= query_end:
            return
        first_column, key_begin = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
        key_count = tl.load(entry + 4).to(tl.int32)
    rows = first + tl.arange(0, QUERY_ROWS)
    query = read_rows(
        queries,
        head,
        first,
        query_end,
        query_head_stride,
        query_stride,
        QUERY_ROWS,
        HEAD_SIZE,
        HEAD_TILE,
        DESCRIPTORS,
        True,
    )
    if IN_REGISTERS:
        # What has been computed with stays in registers, where Hopper's matrix product takes its left operand without
        # reading shared memory again for every tile of keys. Rows beyond the last are zeros already.
        query = tl.where(rows[:, None] < query_end, query, 0.0)

    query_columns = first_column + tl.arange(0, QUERY_ROWS)
    last_columns = tl.minimum(query_columns, key_count - 1)
    if SINK_LOGITS:
        # A virtual token that every query sees and that has no value: what the running softmax starts from.
        maximum = tl.zeros([QUERY_ROWS], tl.float32) + tl.load(sink_logits + head) * LOG2_E
        total = tl.zeros([QUERY_ROWS], tl.float32) + 1.0
    else:
        maximum = tl.zeros([QUERY_ROWS], tl.float32) + LOWEST
        total = tl.zeros([QUERY_ROWS], tl.float32)
    accumulated = tl.zeros([QUERY_ROWS, VALUE_TILE], tl.float32)

    # Keys start .. inner: some hidden by the window; inner .. diagonal: all visible; diagonal .. stop: some in future.
    stop = tl.minimum(key_count, first_column + QUERY_ROWS)
    diagonal = tl.minimum(key_count, first_column + 1) // KEY_ROWS * KEY_ROWS
    start, inner = 0, 0
    if WINDOWED:
        start = tl.maximum(0, first_column + 1 - window) // KEY_ROWS * KEY_ROWS
        inner = tl.cdiv(tl.maximum(0, first_column + QUERY_ROWS - window), KEY_ROWS) * KEY_ROWS
        inner = tl.minimum(inner, diagonal)
    for phase in tl.static_range(0 if WINDOWED else 1, 3):
        masked = phase != 1
        begin, end = inner, diagonal
        if phase == 0:
            begin, end = start, inner
        if phase == 2:
            begin, end = diagonal, stop
        for first_key in range(begin, end, KEY_ROWS):
            key = read_rows(
                keys, key_head, key_begin + first_key, key_begin + key_count, key_head_stride, key_stride,
                KEY_ROWS, HEAD_SIZE, HEAD_TILE, DESCRIPTORS, masked,
            )  # fmt: skip
            scores = _product(query, key.T, tl.zeros([QUERY_ROWS, KEY_ROWS], tl.float32), INTERPRETED)
            factor = scaling * LOG2_E
            if SOFTCAP:
                scores = _capped(scores, scaling, softcap)
                factor = 1.0
            if masked:
                columns = first_key + tl.arange(0, KEY_ROWS)[None, :]
                visible = columns <= last_columns[:, None]
                if WINDOWED:
                    visible &= columns > query_columns[:, None] - window
                scores = tl.where(visible, scores, float("-inf"))
            # The factor is positive, so it commutes with the maximum, and one instruction scales and subtracts.
            risen = tl.maximum(maximum, tl.max(scores, 1) * factor)
            weights = tl.exp2(tl.fma(scores, factor, -risen[:, None]))
            shrink = tl.exp2(maximum - risen)
            total = total * shrink + tl.sum(weights, 1)
            maximum = risen
            if VALUE_SIZE > 0:
                value = read_rows(
                    values, key_head, key_begin + first_key, key_begin + key_count, value_head_stride, value_stride,
                    KEY_ROWS, VALUE_SIZE, VALUE_TILE, DESCRIPTORS, masked,
                )  # fmt: skip
                accumulated = _product(weights.to(value.dtype), value, accumulated * shrink[:, None], INTERPRETED)

    if not RAGGED:
        sums = (maximum + tl.log2(total)) * LN_2
        tl.store(log_sum_exp + head.to(tl.int64) * query_count + rows, sums, mask=rows < query_end)
    if VALUE_SIZE > 0:
        total = tl.where(total > 0, total, 1.0)
        column = tl.arange(0, VALUE_TILE)[None, :]
        own_output = output + (head.to(tl.int64) * output_head_stride + first * output_stride.to(tl.int64)) * 8
        tl.store(
            own_output + tl.arange(0, QUERY_ROWS)[:, None] * (output_stride * 8) + column,
            (accumulated / total[:, None]).to(output.dtype.element_ty),
            mask=(rows < query_end)[:, None] & (column < VALUE_SIZE),
        )


@kernel(do_not_specialize=LENGTHS)
def column_sums_kernel(
    queries,
    keys,
    log_sum_exp,
    sums,
    query_head_stride,
    query_stride,
    key_head_stride,
    key_stride,
    sum_stride,
    query_count,
    key_count,
    group,
    together,
    window,
    scaling,
    softcap,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    MAXIMA: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The attention mass of one block of keys from all queries of one head: `sums` float32 [Hq, n]; with MAXIMA the
    largest weight.

    `log_sum_exp` is in units of log 2, its rows `sum_stride` apart in units of ALIGNMENT. Keys are the rows of the
    product, so a sum over queries runs along a thread's own registers. Order of programs as in `attention_kernel`:
    the first keys, which the most queries see, come first.
    """
    blocks = tl.cdiv(key_count, KEY_ROWS)
    section, place = tl.program_id(0) // (blocks * together), tl.program_id(0) % (blocks * together)
    head, block = section * together + place % together, place // together

    first = block * KEY_ROWS
    shift = key_count - query_count
    key_columns = first + tl.arange(0, KEY_ROWS)
    key = read_rows(
        keys, head // group, first, key_count, key_head_stride, key_stride,
        KEY_ROWS, HEAD_SIZE, HEAD_TILE, DESCRIPTORS, True,
    )  # fmt: skip
    if IN_REGISTERS:  # as in `attention_kernel`
        key = tl.where(key_columns[:, None] < key_count, key, 0.0)
    own_sums = log_sum_exp + head.to(tl.int64) * sum_stride * ALIGNMENT
    mass = tl.zeros([KEY_ROWS], tl.float32)

    # Queries start .. inner: some before some key; inner .. outer: all see all keys; outer .. stop: some beyond the
    # window's end or the last.
    start = tl.maximum(0, first - shift) // ALIGNMENT * ALIGNMENT
    inner = start + tl.cdiv(tl.maximum(0, first + KEY_ROWS - 1 - shift - start), QUERY_ROWS) * QUERY_ROWS
    stop = query_count
    last = query_count
    if WINDOWED:
        stop = tl.minimum(stop, first + KEY_ROWS - 1 - shift + window)
        last = tl.minimum(last, first - shift + window)
    outer = tl.maximum(inner, start + tl.maximum(0, last - start) // QUERY_ROWS * QUERY_ROWS)
    for phase in tl.static_range(3):
        masked = phase != 1
        begin, end = inner, outer
        if phase == 0:
            begin, end = start, tl.minimum(inner, stop)
        if phase == 2:
            begin, end = outer, stop
        for first_query in range(begin, end, QUERY_ROWS):
            query = read_rows(
                queries, head, first_query, query_count, query_head_stride, query_stride,
                QUERY_ROWS, HEAD_SIZE, HEAD_TILE, DESCRIPTORS, masked,
            )  # fmt: skip
            place_of_first = own_sums + tl.multiple_of(first_query, ALIGNMENT)
            rows = tl.arange(0, QUERY_ROWS)
            if masked:
                normalizer = tl.load(place_of_first + rows, mask=rows < query_count - first_query, other=0.0)
            else:
                normalizer = tl.load(place_of_first + rows)
            scores = _product(key, query.T, tl.zeros([KEY_ROWS, QUERY_ROWS], tl.float32), INTERPRETED)
            factor = scaling * LOG2_E
            if SOFTCAP:
                scores = _capped(scores, scaling, softcap)
                factor = 1.0
            weights = tl.exp2(tl.fma(scores, factor, -normalizer[None, :]))
            if masked:
                query_columns = first_query + rows[None, :] + shift
                visible = (key_columns[:, None] <= query_columns) & (query_columns < key_count)
                if WINDOWED:
                    visible &= key_columns[:, None] > query_columns - window
                weights = tl.where(visible, weights, 0.0)
            mass = tl.maximum(mass, tl.max(weights, 1)) if MAXIMA else mass + tl.sum(weights, 1)
    tl.store(sums + head.to(tl.int64) * key_count + key_columns, mass, mask=key_columns < key_count)
