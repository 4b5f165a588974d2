"""The split-KV decode kernel over pages of latents: every head attends to the same latents, which are keys and values.

A program of four warps serves a block of heads of one work item (`kernels/decode/plan.py`). Latents are the left factor
of both products, codes in registers, and heads the columns of the right one, so that a code is cut out of its word once
for all heads of the block. A latent's channels are taken in chunks, once for the scores and once for the output,

    scores         = sum over chunks of codes[:, chunk] (queries * scale)[chunk]       [tokens, heads]
    output[chunk] += scale[chunk] * (codes[:, chunk]^T p) + zero_point[chunk] * sum(p)

with the page's scales, one for a channel, in the queries and in the sums, so that codes stay the subnormal fp16 numbers
that an AND cuts out of their words (`kernels/decode/triton/tiles.py`). For the scores a page's 128 tokens are 64 rows,
which fill a matrix instruction of four warps, and two fields in each: several rows share a word, moved down by as many
bits as bring their own fields to its lower end. RoPE parts have 8 bits and a scale per token.

Scores are kept times log2(e), so that exponentials are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.decode.triton.kernel import ITEM, LOWEST, ROW, buffer_token
from kvconvert.kernels.decode.triton.queries import power_above
from kvconvert.kernels.decode.triton.scores import LOG2_E
from kvconvert.kernels.decode.triton.shape import block_of
from kvconvert.kernels.decode.triton.tiles import PAGE, exp2, half_pointer, shift_lanes
from kvconvert.kernels.latent.triton.shape import (
    block_heads,
    chunk_channels,
    chunk_count,
    lanes,
    page_rows,
    power_of_two,
    row_fields,
    step_tokens,
)
from kvconvert.kernels.launches.triton import kernel

# Weights are raised by this power of two, less the position of their codes, so that fp16 holds small ones.
WEIGHT_POWER = tl.constexpr(14)


@triton.jit
def product(left, right, total, F: tl.constexpr):
    """`total` plus a product."""
    if F.compiled:
        return tl.dot(left, right, total)
    else:
        # The interpreter's products take bf16 numbers for integers.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)


@triton.jit
def field(words, J: tl.constexpr, BITS: tl.constexpr, F: tl.constexpr):
    """Field J of words, which has to lie within an fp16 mantissa, as the fp16 numbers that it spells."""
    mask = tl.full(words.shape, ((1 << BITS) - 1) << (BITS * J), tl.uint16)
    if F.compiled:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [words, mask], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return (words & mask).to(tl.float16, bitcast=True)


@triton.jit
def row_words(record, channel, known, row, F: tl.constexpr):
    """Words of rows at `channel`, moved down so that the row's fields are the lowest."""
    words = tl.load(record + row % lanes(F) * F.rank + channel, mask=known, other=0)
    count = tl.broadcast_to((row // lanes(F) * (row_fields(F) * F.bits)).to(tl.uint16), words.shape)
    if F.compiled:
        # Neighbours, which move alike, may spill into bits that no field has.
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, 0, $2;", "=r,r,r", [words, count], dtype=tl.uint16, is_pure=True, pack=2
        )
    else:
        return words >> count


@triton.jit
def prefetch(base, unit, UNITS: tl.constexpr, F: tl.constexpr):
    """Ask for the record at `unit`, of so many 2-byte units, to be in the L2 cache soon."""
    if F.compiled:
        LINE: tl.constexpr = 64
        line = tl.arange(0, power_of_two(UNITS // LINE + 1))
        # The last line may begin before the record's end and end behind it.
        address = (base + unit * 8 + tl.minimum(line * LINE, UNITS - 1)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def head_queries(queries, channel, known):
    """Queries [K, heads] at `channel` [K], zeros where that is not known: of a pointer, offsets of heads, and which of
    these there are."""
    first, head, real = queries
    return tl.load(first + channel[:, None] + head[None, :], mask=known[:, None] & real[None, :], other=0.0)


@triton.jit
def chunk(number, F: tl.constexpr):
    """Channels of a chunk, and which of them there are."""
    channel = number * chunk_channels(F) + tl.arange(0, chunk_channels(F))
    return channel, channel < F.rank


@triton.jit
def no_sums(F: tl.constexpr):
    """Maxima, sums of weights, and sums of latents, chunk by chunk, before anything was read."""
    totals = ()
    for _ in tl.static_range(chunk_count(F)):
        totals = totals + (tl.zeros([chunk_channels(F), block_heads(F)], tl.float32),)
    return tl.full([block_heads(F)], LOWEST, tl.float32), tl.zeros([block_heads(F)], tl.float32), totals


@triton.jit
def exact_step(latents, rope, token, seen, queries, rope_queries, factor, sums, F: tl.constexpr):
    """`sums` with full-precision tokens `token` [T], of which those `seen` count."""
    maximum, weight, totals = sums
    x = tl.zeros([step_tokens(F), block_heads(F)], tl.float32)
    for c in tl.static_range(chunk_count(F)):
        channel, known = chunk(c, F)
        here = latents + token[:, None] * F.rank + channel[None, :]
        tile = tl.load(here, mask=seen[:, None] & known[None, :], other=0.0)
        x = product(tile, head_queries(queries, channel, known), x, F)
    channel = tl.arange(0, block_of(F.rope))
    known = channel < F.rope
    here = rope + token[:, None] * F.rope + channel[None, :]
    tile = tl.load(here, mask=seen[:, None] & known[None, :], other=0.0)
    x = product(tile, head_queries(rope_queries, channel, known), x, F) * factor
    x = tl.where(seen[:, None], x, float("-inf"))
    highest = tl.maximum(maximum, tl.max(x, 0))
    alpha = exp2(maximum - highest, F.compiled)
    p = exp2(x - highest[None, :], F.compiled)
    weight = weight * alpha + tl.sum(p, 0)
    p = p.to(latents.dtype.element_ty)
    added = ()
    for c in tl.static_range(chunk_count(F)):
        channel, known = chunk(c, F)
        here = latents + token[None, :] * F.rank + channel[:, None]
        tile = tl.load(here, mask=seen[None, :] & known[:, None], other=0.0)
        added = added + (product(tile, p, totals[c] * alpha[None, :], F),)
    return highest, weight, added


@triton.jit
def row_token(J: tl.constexpr, F: tl.constexpr):
    """Tokens of field J of all rows of a page's scores."""
    row = tl.arange(0, page_rows(F))
    return (row // lanes(F) * row_fields(F) + J) * lanes(F) + row % lanes(F)


@triton.jit
def rope_scores(record, operands, F: tl.constexpr):
    """Products of queries with the RoPE parts of a page: fp32 [rows, heads] of each field, to be multiplied with the
    weight of the latents' codes there.

    RoPE parts are packed along their channels: a word holds channels c and c + rope / 2.
    """
    lower, upper, total = operands
    channel = tl.arange(0, block_of(F.rope // 2))
    halves = half_pointer(record)
    scores = ()
    for j in tl.static_range(row_fields(F)):
        token = row_token(j, F)
        here = record + channel[None, :] * PAGE + token[:, None]
        words = tl.load(here, mask=(channel < F.rope // 2)[None, :], other=0)
        x = tl.dot(field(words, 0, 8, F), lower, tl.zeros([page_rows(F), block_heads(F)], tl.float32))
        x = tl.dot(field(shift_lanes(words, 8, F.compiled), 0, 8, F), upper, x)
        scale = tl.load(halves + F.rope_scale + token).to(tl.float32) * 2.0 ** (F.bits * j)
        zero_point = tl.load(halves + F.rope_zero_point + token).to(tl.float32) * 2.0 ** (F.bits * j - 24)
        scores = scores + (x * scale[:, None] + total[None, :] * zero_point[:, None],)
    return scores


@triton.jit
def latent_scores(record, queries, inverse, scores, F: tl.constexpr):
    """`scores` plus products of queries with the codes of a page, and the queries' products with its zero points."""
    halves = half_pointer(record)
    offset = tl.zeros([chunk_channels(F), block_heads(F)], tl.float32)
    for c in tl.range(chunk_count(F), num_stages=F.stages):
        channel, known = chunk(c, F)
        query = head_queries(queries, channel, known).to(tl.float32)
        scale = tl.load(halves + F.scale + channel, mask=known, other=0.0).to(tl.float32)
        zero_point = tl.load(halves + F.zero_point + channel, mask=known, other=0.0).to(tl.float32)
        offset += query * zero_point[:, None]
        scaled = (query * inverse[None, :] * scale[:, None]).to(tl.float16)
        words = row_words(record, channel[None, :], known[None, :], tl.arange(0, page_rows(F))[:, None], F)
        more = ()
        for j in tl.static_range(row_fields(F)):
            more = more + (tl.dot(field(words, j, F.bits, F), scaled, scores[j]),)
        scores = more
    return scores, tl.sum(offset, 0)


@triton.jit
def softmax_step(scores, offset, first, limit, factor, unit, maximum, F: tl.constexpr):
    """Weights of a page's tokens from number `first` on and before `limit`, by fields, raised for products with codes;
    their sum, the new maximum, and the factor for what was summed before, [heads].
    """
    offset *= factor
    largest = tl.full([page_rows(F), block_heads(F)], float("-inf"), tl.float32)
    found = ()
    for j in tl.static_range(row_fields(F)):
        token = row_token(j, F)
        x = scores[j] * (unit * factor * 2.0 ** (24 - F.bits * j))[None, :] + offset[None, :]
        x = tl.where(((token >= first) & (token < limit))[:, None], x, float("-inf"))
        largest = tl.maximum(largest, x)
        found = found + (x,)
    highest = tl.maximum(maximum, tl.max(largest, 0))
    every = tl.zeros([page_rows(F), block_heads(F)], tl.float32)
    weights = ()
    for j in tl.static_range(row_fields(F)):
        p = exp2(found[j] - highest[None, :], F.compiled)
        every += p
        weights = weights + ((p * 2.0 ** (WEIGHT_POWER - F.bits * j)).to(tl.float16),)
    return weights, tl.sum(every, 0), highest, exp2(maximum - highest, F.compiled)


@triton.jit
def page_step(record, rope_record, first, limit, queries, rope_operands, unit, inverse, factor, sums, F: tl.constexpr):
    """`sums` with the quantized page at `record`: its tokens from number `first` on and before `limit`."""
    maximum, weight, totals = sums
    scores, offset = latent_scores(record, queries, inverse, rope_scores(rope_record, rope_operands, F), F)
    weights, added, highest, alpha = softmax_step(scores, offset, first, limit, factor, unit, maximum, F)
    halves = half_pointer(record)
    summed = ()
    for c in tl.static_range(chunk_count(F)):
        channel, known = chunk(c, F)
        words = row_words(record, channel[:, None], known[:, None], tl.arange(0, page_rows(F))[None, :], F)
        total = tl.zeros([chunk_channels(F), block_heads(F)], tl.float32)
        for j in tl.static_range(row_fields(F)):
            total = tl.dot(field(words, j, F.bits, F), weights[j], total)
        scale = tl.load(halves + F.scale + channel, mask=known, other=0.0).to(tl.float32) * 2.0 ** (24 - WEIGHT_POWER)
        zero_point = tl.load(halves + F.zero_point + channel, mask=known, other=0.0).to(tl.float32)
        total = totals[c] * alpha[None, :] + total * scale[:, None]
        summed = summed + (total + zero_point[:, None] * added[None, :],)
    return highest, weight * alpha + added, summed


@triton.jit
def store_part(out, stats, slot, block, blocks, sums, F: tl.constexpr):
    """Write the sums of one slot."""
    maximum, weight, totals = sums
    place = (slot * blocks + block).to(tl.int64) * block_heads(F) + tl.arange(0, block_heads(F))
    for c in tl.static_range(chunk_count(F)):
        channel, known = chunk(c, F)
        where = out + place[None, :] * F.rank + channel[:, None]
        tl.store(where, totals[c], mask=tl.broadcast_to(known[:, None], where.shape))
    tl.store(stats + place * 2, maximum)
    tl.store(stats + place * 2 + 1, weight)


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
    DEPENDENT: tl.constexpr,
):
    """Partial attention of one work item for a block of heads; see `latent_decode`."""
    if DEPENDENT:
        # The merge may be set up as soon as every program has begun; it waits for all their results.
        tl.extra.cuda.gdc_launch_dependents()
    DTYPE: tl.constexpr = residual.dtype.element_ty
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    item = items + tl.program_id(0) * ITEM
    row = tl.load(item)
    described = rows + row * ROW
    member = block * block_heads(F) + tl.arange(0, block_heads(F))
    real = member < F.heads
    query = (queries + row.to(tl.int64) * query_row, member * query_head, real)
    rope_query = (rope_queries + row.to(tl.int64) * rope_row, member * rope_head, real)
    factor = scaling * LOG2_E

    # The residual window comes first: nothing that it needs has to stay in registers while pages are read.
    begin = tl.load(item + 5)
    if begin < tl.load(item + 6):
        # The plan's last end is open.
        stop = tl.minimum(tl.load(item + 6), tl.load(described + 7).to(tl.int32))
        sink_tokens = tl.load(described + 4)
        latents = residual + tl.load(described) * 8
        rope = residual + tl.load(described + 2) * 8
        # Both sides are quantized together, so that they lack the same tokens.
        skip = tl.load(described + 5)
        sums = no_sums(F)
        for start in tl.range(begin, stop, step_tokens(F), num_stages=1):
            token = start + tl.arange(0, step_tokens(F))
            place = buffer_token(token, sink_tokens, skip)
            sums = exact_step(latents, rope, place, token < stop, query, rope_query, factor, sums, F)
        store_part(out, stats, tl.load(item + 9), block, blocks, sums, F)

    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    if begin < end:
        hidden = tl.load(item + 16)
        limit = tl.load(item + 11)
        sums = no_sums(F)
        if F.bits == 16:
            STEPS: tl.constexpr = PAGE // step_tokens(F)
            for step in tl.range(begin * STEPS, end * STEPS, num_stages=F.stages):
                page = step // STEPS
                token = (step - page * STEPS) * step_tokens(F) + tl.arange(0, step_tokens(F))
                number = (page - begin) * PAGE + token
                latents = (key_base + tl.load(key_table + page) * 8).to(tl.pointer_type(DTYPE))
                rope = (value_base + tl.load(value_table + page) * 8).to(tl.pointer_type(DTYPE))
                seen = (number >= hidden) & (number < limit)
                sums = exact_step(latents, rope, token, seen, query, rope_query, factor, sums, F)
        else:
            prefetch(key_base, tl.load(key_table + begin), F.record, F)
            prefetch(value_base, tl.load(value_table + begin), F.rope_record, F)
            largest = tl.zeros([block_heads(F)], tl.float32)
            for c in tl.static_range(chunk_count(F)):
                channel, known = chunk(c, F)
                magnitudes = tl.abs(head_queries(query, channel, known).to(tl.float32))
                largest = tl.maximum(largest, tl.max(magnitudes, 0))
            channel = tl.arange(0, block_of(F.rope // 2))
            known = channel < F.rope // 2
            lower = head_queries(rope_query, channel, known).to(tl.float32)
            upper = head_queries(rope_query, F.rope // 2 + channel, known).to(tl.float32)
            unit = power_above(tl.maximum(largest, tl.max(tl.maximum(tl.abs(lower), tl.abs(upper)), 0)))
            inverse = 1.0 / unit
            lower = (lower * inverse[None, :]).to(tl.float16)
            upper = (upper * inverse[None, :]).to(tl.float16)
            rope_operands = lower, upper, tl.sum(lower.to(tl.float32) + upper.to(tl.float32), 0)
            for page in tl.range(begin, end, num_stages=1):
                following = tl.minimum(page + 1, end - 1)
                prefetch(key_base, tl.load(key_table + following), F.record, F)
                prefetch(value_base, tl.load(value_table + following), F.rope_record, F)
                record = key_base + tl.load(key_table + page) * 8
                rope_record = value_base + tl.load(value_table + page) * 8
                before = (page - begin) * PAGE
                sums = page_step(
                    record, rope_record, hidden - before, limit - before, query, rope_operands, unit, inverse, factor,
                    sums, F,
                )  # fmt: skip
        store_part(out, stats, tl.load(item + 7), block, blocks, sums, F)
