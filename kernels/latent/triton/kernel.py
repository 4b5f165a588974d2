"""The split-KV decode kernel over pages of latents: every head attends to the same latents, which are keys and values.

A program serves a block of heads for one work item (`kernels/decode/plan.py`); heads are the rows of both products.
What codes cost on their way to the tensor cores decides its forms. Words hold codes of one token, of channels that lie
`columns` apart (`PageFormat.by_token`), and one field of them is a tile of latents in the layout of its words:

    scores [heads, tokens]   = (queries * scale) codes^T  + queries . offset
    sums   [heads, channels] = (weights codes) * scale    + sum of weights * offset

With the page's scales, one for a channel, in the queries and in the sums, codes stay the subnormal fp16 numbers that an
AND cuts out of their words (`kernels/decode/triton/tiles.py`). A thread cuts them out of registers in the layout that a
matrix instruction takes, once for each product, and no number made of a code ever lies in memory. Words are read again
for the second product, from the first cache, so that registers need not hold them in two layouts.

Blocks of many heads share what it costs to dequantize a tile, which both products read from shared memory as they read
full-precision latents.

RoPE parts have 8 bits and a scale per token. Scores are kept times log2(e), so that exponentials are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.decode.triton import block_of, power_above
from kvconvert.kernels.decode.triton.kernel import (
    ITEM,
    LOWEST,
    PAGES_FROM,
    PAGES_HIDDEN,
    PAGES_SLOT,
    PAGES_TO,
    RESIDUAL_FROM,
    RESIDUAL_SLOT,
    RESIDUAL_TO,
    ROW,
    SEQUENCE,
    TOKENS,
    buffer_token,
)
from kvconvert.kernels.decode.triton.softmax import LOG2_E
from kvconvert.kernels.decode.triton.tiles import PAGE, exp2, half_pointer
from kvconvert.kernels.latent.triton import (
    chunk_columns,
    column_tile,
    columns,
    field_place,
    fields,
    rope_tile,
    top_place,
)
from kvconvert.kernels.launches.triton import kernel

# The power of two by which a code in a word's lowest field exceeds the subnormal number that it spells.
SUBNORMAL = tl.constexpr(24)
# Weights are raised by this power of two, so that fp16 holds small ones.
WEIGHT_POWER = tl.constexpr(4)
# With these bits a code is the fp16 number BIAS + code.
BIASED, BIAS = tl.constexpr(0x6400), tl.constexpr(1024.0)


@triton.jit
def product(left, right, total, F: tl.constexpr):
    """`total` plus a product."""
    if F.compiled:
        return tl.dot(left, right, total)
    else:
        # The interpreter's products take bf16 numbers for integers.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)


@triton.jit
def load(pointers, known, ALL: tl.constexpr):
    """What is there where it is `known`, else zeros; without a mask, which would be looked at, where ALL is."""
    if ALL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=known, other=0)


@triton.jit
def lowered(words, FIELD: tl.constexpr, BITS: tl.constexpr, F: tl.constexpr):
    """Words with a field in their lower halves, where fp16's mantissa is."""
    if FIELD * BITS < 8:
        return words
    elif F.compiled:
        # Of two neighbours at once: bits of the upper one come into the lower one, above every field.
        return tl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    else:
        return words >> 8


@triton.jit
def subnormal(words, FIELD: tl.constexpr, BITS: tl.constexpr, F: tl.constexpr):
    """A field as the fp16 number that its bits spell: code * 2^(`field_place` - SUBNORMAL)."""
    mask = tl.full(words.shape, (2**BITS - 1) << field_place(FIELD, BITS), tl.int16)
    words = lowered(words, FIELD, BITS, F)
    if F.compiled:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [words, mask], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return (words & mask).to(tl.float16, bitcast=True)


@triton.jit
def whole_number(words, FIELD: tl.constexpr, BITS: tl.constexpr, F: tl.constexpr):
    """A field as the fp16 number code * 2^`field_place`."""
    mask = tl.full(words.shape, (2**BITS - 1) << field_place(FIELD, BITS), tl.int16)
    bias = tl.full(words.shape, BIASED, tl.int16)
    words = lowered(words, FIELD, BITS, F)
    if F.compiled:
        biased = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, mask, bias], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        biased = ((words & mask) | bias).to(tl.float16, bitcast=True)
    return biased - tl.full(words.shape, BIAS, tl.float16)


@triton.jit
def whole_numbers(words, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, F: tl.constexpr):
    """COUNT fields of words [T, K], one after another: `whole_number` [T, COUNT K]."""
    if COUNT == 1:
        return whole_number(words, FIRST, BITS, F)
    else:
        first = whole_numbers(words, FIRST, COUNT // 2, BITS, F)
        second = whole_numbers(words, FIRST + COUNT // 2, COUNT // 2, BITS, F)
        pair = tl.permute(tl.join(first, second), (0, 2, 1))
        return tl.reshape(pair, [pair.shape[0], 2 * pair.shape[2]])


@triton.jit
def one_below_the_other(first, second):
    """Tensors [K, T] as [2 K, T]; no number leaves its thread."""
    pair = tl.permute(tl.join(first, second), (2, 0, 1))
    return tl.reshape(pair, [2 * pair.shape[1], pair.shape[2]])


@triton.jit
def rope_channel(index, F: tl.constexpr):
    """The channels at places of a RoPE part's two fields, one after another, and where there is one."""
    if rope_tile(F) * 2 == F.rope:
        return index, index < F.rope
    else:
        return index // rope_tile(F) * (F.rope // 2) + index % rope_tile(F), index % rope_tile(F) < F.rope // 2


@triton.jit
def latent_channel(index, F: tl.constexpr):
    """The same of a latent's fields."""
    if columns(F) == column_tile(F):
        return index, index < F.rank
    else:
        return index // column_tile(F) * columns(F) + index % column_tile(F), index % column_tile(F) < columns(F)


@triton.jit
def rope_words(record, token, F: tl.constexpr):
    """Words [rope / 2, T] of tokens' RoPE parts."""
    column = tl.arange(0, rope_tile(F))[:, None]
    pointers = record + column * PAGE + token[None, :]
    return load(pointers, column < F.rope // 2, rope_tile(F) * 2 == F.rope)


@triton.jit
def channel_scales(record, channel, known, F: tl.constexpr):
    """Scales and offsets, fp16, of a page's channels."""
    scales, ALL = half_pointer(record) + channel, columns(F) == column_tile(F)
    return load(scales + F.scale, known, ALL), load(scales + F.offset, known, ALL)


@triton.jit
def token_scales(record, token, F: tl.constexpr):
    """The same of the tokens of a page's RoPE parts."""
    scales = half_pointer(record) + token
    return tl.load(scales + F.rope_scale), tl.load(scales + F.rope_offset)


@triton.jit
def no_sums(HEADS: tl.constexpr, CHANNELS: tl.constexpr):
    """What tokens are added to: maximum and sum of weights [heads], and sums of latents [heads, channels]."""
    maximum = tl.full([HEADS], LOWEST, tl.float32)
    return maximum, tl.zeros([HEADS], tl.float32), tl.zeros([HEADS, CHANNELS], tl.float32)


@triton.jit
def weights_of(scores, hidden, maximum, weight, F: tl.constexpr):
    """Weights [heads, T] of tokens that are not `hidden`, their sum, what former sums are multiplied with, and the new
    maximum and sum.
    """
    x = tl.where(hidden[None, :], float("-inf"), scores)
    highest = tl.maximum(maximum, tl.max(x, 1))
    kept = exp2(maximum - highest, F.compiled)
    p = exp2(x - highest[:, None], F.compiled)
    added = tl.sum(p, 1)
    return p, added, kept, highest, weight * kept + added


@triton.jit
def tile_step(queries, tile, rope, hidden, factor, sums, F: tl.constexpr):
    """Add latents `tile` [T, channels] with RoPE parts `rope` [channels, T], of the dtype of `queries`, which are those
    of latents and of RoPE parts.
    """
    scores = tl.zeros([queries[0].shape[0], tile.shape[0]], tl.float32)
    scores = product(queries[0], tl.trans(tile), scores, F)
    scores = product(queries[1], rope, scores, F) * factor
    p, _, kept, maximum, weight = weights_of(scores, hidden, sums[0], sums[1], F)
    return maximum, weight, product(p.to(tile.dtype), tile, sums[2] * kept[:, None], F)


@triton.jit
def exact_queries(queries, rope_queries, real, F: tl.constexpr):
    """Queries [heads, channels] of latents and of RoPE parts, from pointers [heads]."""
    channel, part = tl.arange(0, block_of(F.rank))[None, :], tl.arange(0, block_of(F.rope))[None, :]
    query = tl.load(queries[:, None] + channel, mask=real[:, None] & (channel < F.rank), other=0.0)
    return query, tl.load(rope_queries[:, None] + part, mask=real[:, None] & (part < F.rope), other=0.0)


@triton.jit
def exact_step(queries, latents, rope, token, hidden, factor, sums, IN_PAGE: tl.constexpr, F: tl.constexpr):
    """`tile_step` of full-precision tokens `token` [T] of a page, all of which exist, or of buffers, of which those are
    read that are not `hidden`.
    """
    channel, part = tl.arange(0, block_of(F.rank))[None, :], tl.arange(0, block_of(F.rope))[None, :]
    there = IN_PAGE | (hidden == 0)[:, None]
    latents, rope = latents + token[:, None] * F.rank + channel, rope + token[:, None] * F.rope + part
    tile = load(latents, there & (channel < F.rank), IN_PAGE and block_of(F.rank) == F.rank)
    rope_tile = load(rope, there & (part < F.rope), IN_PAGE and block_of(F.rope) == F.rope)
    return tile_step(queries, tile, tl.trans(rope_tile), hidden, factor, sums, F)


@triton.jit
def dequantized_queries(queries, rope_queries, real, F: tl.constexpr):
    """`exact_queries` in the order of codes."""
    channel, known = latent_channel(tl.arange(0, fields(F) * column_tile(F)), F)
    part, has_part = rope_channel(tl.arange(0, 2 * rope_tile(F)), F)
    query = tl.load(queries[:, None] + channel[None, :], mask=real[:, None] & known[None, :], other=0.0)
    return query, tl.load(rope_queries[:, None] + part[None, :], mask=real[:, None] & has_part[None, :], other=0.0)


@triton.jit
def dequantized_step(queries, record, rope_record, token, hidden, factor, sums, F: tl.constexpr):
    """`tile_step` of tokens `token` [T] of a page, dequantized to the queries' dtype."""
    column, index = tl.arange(0, column_tile(F))[None, :], tl.arange(0, fields(F) * column_tile(F))
    words = load(record + token[:, None] * columns(F) + column, column < columns(F), columns(F) == column_tile(F))
    channel, known = latent_channel(index, F)
    scale, offset = channel_scales(record, channel, known, F)
    scale = (scale.to(tl.float32) * tl.exp2(-(index // column_tile(F) * F.bits % 8).to(tl.float32))).to(tl.float16)
    tile = whole_numbers(words, 0, fields(F), F.bits, F) * scale[None, :] + offset[None, :]
    scale, offset = token_scales(rope_record, token, F)
    words = rope_words(rope_record, token, F)
    rope = one_below_the_other(whole_number(words, 0, 8, F), whole_number(words, 1, 8, F))
    rope = rope * scale[None, :] + offset[None, :]
    dtype: tl.constexpr = queries[0].dtype
    return tile_step(queries, tile.to(dtype), rope.to(dtype), hidden, factor, sums, F)


@triton.jit
def chunk_channel(k, field, F: tl.constexpr):
    """The channels of a chunk, which is a field of `chunk_columns` words, and where there is one."""
    column = k * chunk_columns(F) + tl.arange(0, chunk_columns(F))
    return field * columns(F) + column, column < columns(F)


@triton.jit
def chunk_words(record, k, F: tl.constexpr, AGAIN: tl.constexpr):
    """Words [PAGE, chunk_columns] whose fields are chunks; AGAIN says that they have been read before."""
    column = (k * chunk_columns(F) + tl.arange(0, chunk_columns(F)))[None, :]
    pointers = record + tl.arange(0, PAGE)[:, None] * columns(F) + column
    if AGAIN:
        # Another modifier keeps the compiler from taking both for one, whose words would stay in registers.
        return tl.load(pointers, mask=column < columns(F), other=0, cache_modifier=".ca")
    else:
        return load(pointers, column < columns(F), columns(F) == column_tile(F))


@triton.jit
def code_queries(queries, rope_queries, real, F: tl.constexpr):
    """Queries as fp16 numbers in the order of codes.

    Returns:
        latents', chunks [heads, chunk_columns] raised by what their fields lack of the highest place; RoPE parts', one
        half and the other; each head's sum of these; and what scores of all are to be multiplied with.
    """
    largest = 0.0
    for k in tl.static_range(column_tile(F) // chunk_columns(F)):
        for field in tl.static_range(fields(F)):
            channel, known = chunk_channel(k, field, F)
            query = tl.load(queries[:, None] + channel[None, :], mask=real[:, None] & known[None, :], other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(query.to(tl.float32))))
    part = tl.arange(0, rope_tile(F))[None, :]
    known = real[:, None] & (part < F.rope // 2)
    low = tl.load(rope_queries[:, None] + part, mask=known, other=0.0).to(tl.float32)
    high = tl.load(rope_queries[:, None] + F.rope // 2 + part, mask=known, other=0.0).to(tl.float32)
    unit = power_above(tl.maximum(largest, tl.max(tl.maximum(tl.abs(low), tl.abs(high)))))
    chunks = ()
    for k in tl.static_range(column_tile(F) // chunk_columns(F)):
        for field in tl.static_range(fields(F)):
            channel, known = chunk_channel(k, field, F)
            query = tl.load(queries[:, None] + channel[None, :], mask=real[:, None] & known[None, :], other=0.0)
            raised = 2.0 ** (top_place(F.bits) - field_place(field, F.bits))
            chunks = chunks + ((query.to(tl.float32) * (raised / unit)).to(tl.float16),)
    low, high = (low / unit).to(tl.float16), (high / unit).to(tl.float16)
    return chunks, (low, high), tl.sum(low.to(tl.float32) + high.to(tl.float32), 1), unit


@triton.jit
def code_step(queries, record, rope_record, hidden, factor, sums, F: tl.constexpr):
    """Add a page's tokens that are not `hidden` [PAGE]; `queries` as of `code_queries`, sums of latents chunks."""
    chunks, rope_query, rope_sum = queries
    token = tl.arange(0, PAGE)
    scores = tl.zeros([chunks[0].shape[0], PAGE], tl.float32)
    constant = tl.zeros(chunks[0].shape, tl.float32)
    for k in tl.static_range(column_tile(F) // chunk_columns(F)):
        words = tl.trans(chunk_words(record, k, F, False))
        for field in tl.static_range(fields(F)):
            channel, known = chunk_channel(k, field, F)
            scale, offset = channel_scales(record, channel, known, F)
            query = chunks[k * fields(F) + field]
            lacking = 2.0 ** (field_place(field, F.bits) - top_place(F.bits))
            constant += (query * offset[None, :]).to(tl.float32) * lacking
            scores = product(query * scale[None, :], subnormal(words, field, F.bits, F), scores, F)
    words = rope_words(rope_record, token, F)
    rope_scores = product(rope_query[0], subnormal(words, 0, 8, F), tl.zeros(scores.shape, tl.float32), F)
    rope_scores = product(rope_query[1], subnormal(words, 1, 8, F), rope_scores, F)
    scale, offset = token_scales(rope_record, token, F)
    scores = scores * 2.0 ** (SUBNORMAL - top_place(F.bits))
    scores += rope_scores * (scale.to(tl.float32) * 2.0**SUBNORMAL)[None, :]
    scores += tl.sum(constant, 1)[:, None] + rope_sum[:, None] * offset.to(tl.float32)[None, :]

    p, added, kept, maximum, weight = weights_of(scores * factor, hidden, sums[0], sums[1], F)
    p = (p * 2.0**WEIGHT_POWER).to(tl.float16)
    totals = ()
    for k in tl.static_range(column_tile(F) // chunk_columns(F)):
        words = chunk_words(record, k, F, True)
        for field in tl.static_range(fields(F)):
            channel, known = chunk_channel(k, field, F)
            scale, offset = channel_scales(record, channel, known, F)
            none = tl.zeros(chunks[0].shape, tl.float32)
            total = product(p, subnormal(words, field, F.bits, F), none, F)
            total *= (scale.to(tl.float32) * 2.0 ** (SUBNORMAL - WEIGHT_POWER - field_place(field, F.bits)))[None, :]
            total += sums[2][k * fields(F) + field] * kept[:, None]
            totals = totals + (total + added[:, None] * offset.to(tl.float32)[None, :],)
    return maximum, weight, totals


@triton.jit
def no_chunks(HEADS: tl.constexpr, F: tl.constexpr):
    """`no_sums` whose sums of latents are chunks."""
    totals = ()
    for _ in tl.static_range(fields(F) * (column_tile(F) // chunk_columns(F))):
        totals = totals + (tl.zeros([HEADS, chunk_columns(F)], tl.float32),)
    return tl.full([HEADS], LOWEST, tl.float32), tl.zeros([HEADS], tl.float32), totals


@triton.jit
def store_stats(stats, maximum, weight):
    """Write a slot's maximum and sum of weights to pointers [heads]."""
    tl.store(stats, maximum)
    tl.store(stats + 1, weight)


@triton.jit
def store_sums(out, channel, known, total):
    """Write sums [heads, channels] of a slot to pointers [heads]."""
    tl.store(out[:, None] + channel[None, :], total, mask=tl.broadcast_to(known[None, :], total.shape))


@kernel(do_not_specialize=["query_row", "rope_row"])
def latent_decode_kernel(
    queries,
    rope_queries,
    out,
    stats,
    key_base,
    value_base,
    key_table,
    value_table,
    items,
    rows,
    residual,
    query_row,
    query_head,
    rope_row,
    rope_head,
    scaling,
    F: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Partial attention of one work item for a block of heads; see `latent_decode`. TILE tokens are read at a time
    that are in full precision or dequantized.
    """
    if DEPENDENT:
        # The merge may be set up as soon as every program has begun; it waits for all their results.
        tl.extra.cuda.gdc_launch_dependents()
    DTYPE: tl.constexpr = residual.dtype.element_ty
    STEPS: tl.constexpr = PAGE // TILE
    block = tl.program_id(1)
    item = items + tl.program_id(0) * ITEM
    row = tl.load(item + SEQUENCE)
    described = rows + row * ROW
    member = tl.arange(0, F.block)
    head = block * F.block + member
    real = head < F.heads
    queries += row.to(tl.int64) * query_row + head * query_head
    rope_queries += row.to(tl.int64) * rope_row + head * rope_head
    factor = scaling * LOG2_E
    within = tl.arange(0, TILE)
    every = tl.arange(0, block_of(F.rank))

    # The residual window comes first: nothing that it needs has to stay in registers while pages are read.
    begin = tl.load(item + RESIDUAL_FROM)
    if begin < tl.load(item + RESIDUAL_TO):
        # The plan's last end is open.
        stop = tl.minimum(tl.load(item + RESIDUAL_TO), tl.load(described + 7).to(tl.int32))
        sink_tokens = tl.load(described + 4)
        latents = residual + tl.load(described) * 8
        rope = residual + tl.load(described + 2) * 8
        # Both sides are quantized together, so that they lack the same tokens.
        skip = tl.load(described + 5)
        given = exact_queries(queries, rope_queries, real, F)
        sums = no_sums(F.block, block_of(F.rank))
        for start in tl.range(begin, stop, TILE):
            token = start + within
            place = buffer_token(token, sink_tokens, skip)
            sums = exact_step(given, latents, rope, place, token >= stop, factor, sums, False, F)
        slot = (tl.load(item + RESIDUAL_SLOT) * tl.num_programs(1) + block).to(tl.int64) * F.block + member
        store_stats(stats + slot * 2, sums[0], sums[1])
        store_sums(out + slot * F.rank, every, every < F.rank, sums[2])

    begin, end = tl.load(item + PAGES_FROM), tl.load(item + PAGES_TO)
    if begin < end:
        hidden, limit = tl.load(item + PAGES_HIDDEN), tl.load(item + TOKENS)
        slot = (tl.load(item + PAGES_SLOT) * tl.num_programs(1) + block).to(tl.int64) * F.block + member
        if F.bits == 16:
            given = exact_queries(queries, rope_queries, real, F)
            sums = no_sums(F.block, block_of(F.rank))
            for step in tl.range(0, (end - begin) * STEPS):
                page, number = begin + step // STEPS, step * TILE + within
                token = (step - step // STEPS * STEPS) * TILE + within
                latents = (key_base + tl.load(key_table + page) * 8).to(tl.pointer_type(DTYPE))
                rope = (value_base + tl.load(value_table + page) * 8).to(tl.pointer_type(DTYPE))
                unseen = (number < hidden) | (number >= limit)
                sums = exact_step(given, latents, rope, token, unseen, factor, sums, True, F)
            store_sums(out + slot * F.rank, every, every < F.rank, sums[2])
        elif F.dequantizes:
            given = dequantized_queries(queries, rope_queries, real, F)
            sums = no_sums(F.block, fields(F) * column_tile(F))
            for step in tl.range(0, (end - begin) * STEPS):
                page, number = begin + step // STEPS, step * TILE + within
                token = (step - step // STEPS * STEPS) * TILE + within
                record = key_base + tl.load(key_table + page) * 8
                rope_record = value_base + tl.load(value_table + page) * 8
                unseen = (number < hidden) | (number >= limit)
                sums = dequantized_step(given, record, rope_record, token, unseen, factor, sums, F)
            channel, known = latent_channel(tl.arange(0, fields(F) * column_tile(F)), F)
            store_sums(out + slot * F.rank, channel, known, sums[2])
        else:
            chunks, rope_query, rope_sum, unit = code_queries(queries, rope_queries, real, F)
            sums = no_chunks(F.block, F)
            for page in tl.range(begin, end):
                record = key_base + tl.load(key_table + page) * 8
                rope_record = value_base + tl.load(value_table + page) * 8
                number = (page - begin) * PAGE + tl.arange(0, PAGE)
                unseen = (number < hidden) | (number >= limit)
                given = (chunks, rope_query, rope_sum)
                sums = code_step(given, record, rope_record, unseen, factor * unit, sums, F)
            for k in tl.static_range(column_tile(F) // chunk_columns(F)):
                for field in tl.static_range(fields(F)):
                    channel, known = chunk_channel(k, field, F)
                    store_sums(out + slot * F.rank, channel, known, sums[2][k * fields(F) + field])
        store_stats(stats + slot * 2, sums[0], sums[1])
