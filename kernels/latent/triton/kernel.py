"""The split-KV decode kernel over pages of latents: every head attends to the same latents, which are keys and values.

Registers decide its form. A program of eight warps serves sixteen heads of one work item (`kernels/decode/plan.py`).
For these the sums of 512 channels are 8,192 numbers, and neither they nor the queries fit the registers of a warp.
So a latent's channels are divided among the warps, as chunks of a batched product: each has its chunk of the queries
and of the sums, reads a page's codes of its channels, and uses them twice,

    scores[chunk]  = (queries * scale)[chunk] codes[chunk]^T        summed over the chunks, [tokens, heads]
    output[chunk] += scale[chunk] * (p codes[chunk]) + sum(p) * zero_point[chunk]

with the page's scales, one for a channel, in the queries and in the sums, so that codes stay the subnormal fp16 numbers
that an AND cuts out of their words (`kernels/decode/triton/tiles.py`). RoPE parts have 8 bits and a scale per token;
their channels are divided in the same way and their scores join those of the chunks.

Scores are kept times log2(e), so that exponentials are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.decode.triton.kernel import ITEM, LOWEST, ROW, buffer_token
from kvconvert.kernels.decode.triton.queries import power_above
from kvconvert.kernels.decode.triton.scores import LOG2_E
from kvconvert.kernels.decode.triton.shape import block_of, plane_position, plane_weight, shift_count
from kvconvert.kernels.decode.triton.tiles import PAGE, exp2, half_pointer, plane, shift_lanes
from kvconvert.kernels.latent.triton.shape import chunk_channels, power_of_two, rope_channels
from kvconvert.kernels.launches.triton import kernel

# Query heads of one program: the rows of a matrix instruction.
HEADS = tl.constexpr(16)
# Weights are raised by this power of two, less the position of their codes, so that fp16 holds small ones.
WEIGHT_POWER = tl.constexpr(14)


@triton.jit
def sum_chunks(x, CHUNKS: tl.constexpr):
    """The sum of [CHUNKS, M, N] over its first axis, [M, N].

    Halves are added in registers, to which a split moves them: a sum over warps would leave every warp with all of it.
    """
    if CHUNKS == 1:
        return tl.reshape(x, [x.shape[1], x.shape[2]])
    else:
        pairs = tl.reshape(x, [2, CHUNKS // 2, x.shape[1], x.shape[2]])
        first, second = tl.split(tl.permute(pairs, (1, 2, 3, 0)))
        return sum_chunks(first + second, CHUNKS // 2)


@triton.jit
def one_after_another(parts, COUNT: tl.constexpr):
    """COUNT tensors [W, M, N] as [W, COUNT M, N]."""
    if COUNT == 1:
        return parts[0]
    else:
        joined = ()
        for i in tl.static_range(COUNT // 2):
            pair = tl.permute(tl.join(parts[2 * i], parts[2 * i + 1]), (0, 3, 1, 2))
            joined = joined + (tl.reshape(pair, [pair.shape[0], 2 * pair.shape[2], pair.shape[3]]),)
        return one_after_another(joined, COUNT // 2)


@triton.jit
def product(left, right, total, F: tl.constexpr):
    """`total` plus a batched product. A float32 is the sum of three tf32 numbers."""
    if F.compiled:
        return tl.dot(left, right, total, input_precision="tf32x3")
    else:
        # The interpreter's products take bf16 numbers for integers.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)


@triton.jit
def halves(x, F: tl.constexpr):
    """fp16 numbers and, for float32 queries, what rounding leaves of them; else the first twice."""
    high = x.to(tl.float16)
    low = high
    if F.exact_query:
        low = (x - high.to(tl.float32)).to(tl.float16)
    return high, low


@triton.jit
def code_product(left, right, total, F: tl.constexpr):
    """`total` plus the product of both `halves` of the left factor with fp16 numbers."""
    total = tl.dot(left[0], right, total)
    if F.exact_query:
        total = tl.dot(left[1], right, total)
    return total


@triton.jit
def planes_of(pointers, mask, BITS: tl.constexpr, F: tl.constexpr):
    """The fields of words at `pointers`, as the fp16 numbers they spell."""
    words = tl.load(pointers, mask=mask, other=0)
    both = words, shift_lanes(words, shift_count(BITS), F.compiled)
    found = ()
    for j in tl.static_range(16 // BITS):
        found = found + (plane(both, j, 0, BITS, F.compiled),)
    return found


@triton.jit
def prefetch(begin, UNITS: tl.constexpr, F: tl.constexpr):
    """Ask for a record of so many 2-byte units, which is aligned to 16 bytes, to be in the L2 cache soon."""
    if F.compiled:
        LINE: tl.constexpr = 64
        line = tl.arange(0, power_of_two(UNITS // LINE + 1))
        # The last line may begin before the record's end and end behind it.
        address = (begin + tl.minimum(line * LINE, UNITS - 1)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def weight_powers(token, BITS: tl.constexpr):
    """What weights of a page's tokens are multiplied with for `product` with codes in their fields."""
    LANES: tl.constexpr = PAGE * BITS // 16
    power = tl.full(token.shape, 2.0**WEIGHT_POWER, tl.float32)
    for j in tl.static_range(1, 16 // BITS):
        power = tl.where(token // LANES == j, 2.0 ** (WEIGHT_POWER - plane_position(j, BITS)), power)
    return power


@triton.jit
def sum_of_rope(queries, inverse, real, F: tl.constexpr):
    """The sum of each head's RoPE channels, as they are multiplied: fp32 [heads].

    A page's scores take the layout of this load, for it is added to them: a row of tokens to half a warp.
    """
    SIZE: tl.constexpr = max(PAGE, block_of(F.rope))
    channel = tl.arange(0, SIZE)[None, :]
    part = tl.load(queries + channel, mask=real & (channel < F.rope), other=0.0).to(tl.float32) * inverse
    if not F.exact_query:
        part = part.to(tl.float16).to(tl.float32)
    return tl.sum(part, 1)


@triton.jit
def exact_step(latents, rope, token, known, query, rope_query, factor, maximum, weight, total, hidden, F: tl.constexpr):
    """Full-precision tokens `token` [T]: weights of those that are `known` and not before `hidden`, and their sums."""
    C: tl.constexpr = chunk_channels(F)
    CHUNKS: tl.constexpr = F.chunks
    K: tl.constexpr = rope_channels(F)
    chunk = tl.arange(0, CHUNKS)[:, None, None]
    channel = chunk * C + tl.arange(0, C)[None, None, :]
    row = token[None, :, None]
    tile = tl.load(latents + row * F.rank + channel, mask=known[None, :, None] & (channel < F.rank), other=0.0)
    channel = chunk * K + tl.arange(0, K)[None, None, :]
    rope_tile = tl.load(rope + row * F.rope + channel, mask=known[None, :, None] & (channel < F.rope), other=0.0)
    scores = tl.zeros([CHUNKS, HEADS, token.shape[0]], tl.float32)
    scores = product(query, tl.permute(tile, (0, 2, 1)), scores, F)
    scores = product(rope_query, tl.permute(rope_tile, (0, 2, 1)), scores, F)
    x = sum_chunks(tl.permute(scores, (0, 2, 1)), CHUNKS) * factor[None, :]
    x = tl.where((known & (token >= hidden))[:, None], x, float("-inf"))
    highest = tl.maximum(maximum, tl.max(x, 0))
    alpha = exp2(maximum - highest, F.compiled)
    p = exp2(x - highest[None, :], F.compiled)
    weight = weight * alpha + tl.sum(p, 0)
    p = tl.broadcast_to(tl.permute(p, (1, 0))[None, :, :], [CHUNKS, HEADS, token.shape[0]])
    total = product(p.to(tile.dtype), tile, total * alpha[None, :, None], F)
    return highest, weight, total


@triton.jit
def store_part(out, stats, slot, block, blocks, maximum, weight, total, F: tl.constexpr):
    """Write the sums [chunks, heads, channels], the maximum and the sum of weights [heads] of one slot."""
    C: tl.constexpr = chunk_channels(F)
    CHUNKS: tl.constexpr = F.chunks
    member = tl.arange(0, HEADS)
    place = (slot * blocks + block).to(tl.int64) * HEADS
    channel = tl.arange(0, CHUNKS)[:, None, None] * C + tl.arange(0, C)[None, None, :]
    where = out + (place + member)[None, :, None] * F.rank + channel
    tl.store(where, total, mask=(channel < F.rank) & (member[None, :, None] < HEADS))
    tl.store(stats + (place + member) * 2, maximum)
    tl.store(stats + (place + member) * 2 + 1, weight)


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
    """Partial attention of one work item for a block of heads; see `latent_decode`."""
    if DEPENDENT:
        # The merge may be set up as soon as every program has begun; it waits for all their results.
        tl.extra.cuda.gdc_launch_dependents()
    DTYPE: tl.constexpr = residual.dtype.element_ty
    C: tl.constexpr = chunk_channels(F)
    CHUNKS: tl.constexpr = F.chunks
    K: tl.constexpr = rope_channels(F)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    item = items + tl.program_id(0) * ITEM
    row = tl.load(item)
    described = rows + row * ROW
    chunk = tl.arange(0, CHUNKS)[:, None, None]
    member = block * HEADS + tl.arange(0, HEADS)
    real = (member < F.heads)[None, :, None]
    channel = chunk * C + tl.arange(0, C)[None, None, :]
    rope_channel = chunk * K + tl.arange(0, K)[None, None, :]
    queries += row.to(tl.int64) * query_row + member[None, :, None] * query_head
    rope_rows = rope_queries + row.to(tl.int64) * rope_row + member[:, None] * rope_head
    rope_queries += row.to(tl.int64) * rope_row + member[None, :, None] * rope_head

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
        query = tl.load(queries + channel, mask=real & (channel < F.rank), other=0.0)
        rope_query = tl.load(rope_queries + rope_channel, mask=real & (rope_channel < F.rope), other=0.0)
        factor = tl.full([HEADS], scaling * LOG2_E, tl.float32)
        maximum = tl.full([HEADS], LOWEST, tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        total = tl.zeros([CHUNKS, HEADS, C], tl.float32)
        for start in tl.range(begin, stop, TILE):
            token = start + tl.arange(0, TILE)
            place = buffer_token(token, sink_tokens, skip)
            maximum, weight, total = exact_step(
                latents, rope, place, token < stop, query, rope_query, factor, maximum, weight, total, 0, F
            )
        store_part(out, stats, tl.load(item + 9), block, blocks, maximum, weight, total, F)

    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    if begin < end:
        hidden = tl.load(item + 16)
        limit = tl.load(item + 11)
        maximum = tl.full([HEADS], LOWEST, tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        total = tl.zeros([CHUNKS, HEADS, C], tl.float32)
        query = tl.load(queries + channel, mask=real & (channel < F.rank), other=0.0)
        rope_query = tl.load(rope_queries + rope_channel, mask=real & (rope_channel < F.rope), other=0.0)
        if F.bits == 16:
            STEPS: tl.constexpr = PAGE // TILE
            factor = tl.full([HEADS], scaling * LOG2_E, tl.float32)
            for step in tl.range(begin * STEPS, end * STEPS):
                step -= begin * STEPS
                page = begin + step // STEPS
                token = step % STEPS * TILE + tl.arange(0, TILE)
                latents = (key_base + tl.load(key_table + page) * 8).to(tl.pointer_type(DTYPE))
                rope = (value_base + tl.load(value_table + page) * 8).to(tl.pointer_type(DTYPE))
                maximum, weight, total = exact_step(
                    latents, rope, token, (page - begin) * PAGE + token < limit, query, rope_query, factor, maximum,
                    weight, total, tl.where(page == begin, hidden, 0), F,
                )  # fmt: skip
        else:
            PLANES: tl.constexpr = 16 // F.bits
            LANES: tl.constexpr = PAGE // PLANES
            # RoPE parts are packed along their channels: a word holds channels c and c + rope / 2.
            LANES_OF_ROPE: tl.constexpr = K // 2
            lane = chunk * LANES_OF_ROPE + tl.arange(0, LANES_OF_ROPE)[None, :, None]
            token = tl.arange(0, PAGE)
            code_place = tl.arange(0, LANES)[None, :, None] * F.rank + channel
            rope_place = lane * PAGE + token[None, None, :]
            powers = weight_powers(token, F.bits)

            largest = tl.maximum(tl.max(tl.abs(query.to(tl.float32))), tl.max(tl.abs(rope_query.to(tl.float32))))
            unit = power_above(largest)
            factor = unit * (scaling * LOG2_E)
            inverse = 1.0 / unit
            query = query.to(tl.float32) * inverse
            if not F.exact_query:
                query = query.to(tl.float16)
            bias_query = halves(query.to(tl.float32), F)
            # The channels of a chunk in the order of the fields: the lower ones of its words, then the upper ones.
            field = tl.arange(0, K)[None, None, :]
            place = chunk * LANES_OF_ROPE + field % LANES_OF_ROPE
            in_fields = place + field // LANES_OF_ROPE * (F.rope // 2)
            rope_query = tl.load(rope_queries + in_fields, mask=real & (place < F.rope // 2), other=0.0)
            rope_fields = halves(rope_query.to(tl.float32) * inverse, F)
            rope_sum = sum_of_rope(rope_rows, inverse, (member < F.heads)[:, None], F)

            # Loads in advance into shared memory would take more registers than the L2 cache's latency is worth.
            for page in tl.range(begin, end, num_stages=1):
                record = key_base + tl.load(key_table + page) * 8
                rope_record = value_base + tl.load(value_table + page) * 8
                following = tl.minimum(page + 1, end - 1)
                prefetch(key_base + tl.load(key_table + following) * 8, F.record, F)
                prefetch(value_base + tl.load(value_table + following) * 8, F.rope_record, F)
                mask = tl.broadcast_to(channel < F.rank, code_place.shape)
                planes = planes_of(record + code_place, mask, F.bits, F)
                rope_mask = tl.broadcast_to(lane < F.rope // 2, rope_place.shape)
                rope_planes = planes_of(rope_record + rope_place, rope_mask, 8, F)
                scales = half_pointer(record) + channel
                scale = tl.load(scales + F.scale, mask=channel < F.rank, other=0.0)
                zero_point = tl.load(scales + F.zero_point, mask=channel < F.rank, other=0.0)
                rope_scale = tl.load(half_pointer(rope_record) + F.rope_scale + token).to(tl.float32)
                rope_zero_point = tl.load(half_pointer(rope_record) + F.rope_zero_point + token).to(tl.float32)

                if F.exact_query:
                    scaled = halves(query * scale.to(tl.float32), F)
                else:
                    scaled = query * scale, query
                none = tl.zeros([CHUNKS, HEADS, LANES], tl.float32)
                zero_points = tl.broadcast_to(tl.permute(zero_point, (0, 2, 1)), [CHUNKS, C, LANES])
                offset = code_product(bias_query, zero_points, none, F)
                parts = ()
                for j in tl.static_range(PLANES):
                    part = code_product(scaled, tl.permute(planes[j], (0, 2, 1)), none, F)
                    part = part * plane_weight(j, F.bits) + offset
                    parts = parts + (tl.permute(part, (0, 2, 1)),)
                scores = tl.permute(one_after_another(parts, PLANES), (0, 2, 1))
                codes = one_after_another(rope_planes, 2)
                none = tl.zeros([CHUNKS, HEADS, PAGE], tl.float32)
                rope_scores = code_product(rope_fields, codes, none, F)
                scores += rope_scores * (rope_scale * plane_weight(0, 8))[None, None, :]
                x = sum_chunks(scores, CHUNKS)
                x = (x + rope_sum[:, None] * rope_zero_point[None, :]) * factor
                number = (page - begin) * PAGE + token
                x = tl.where(((number >= hidden) & (number < limit))[None, :], x, float("-inf"))

                highest = tl.maximum(maximum, tl.max(x, 1))
                alpha = exp2(maximum - highest, F.compiled)
                p = exp2(x - highest[:, None], F.compiled)
                added = tl.sum(p, 1)
                maximum = highest
                weight = weight * alpha + added
                raised = p * powers[None, :]
                weights = ()
                for part in tl.static_range(2):
                    weights = weights + (tl.broadcast_to(halves(raised, F)[part][None, :, :], [CHUNKS, HEADS, PAGE]),)
                none = tl.zeros([CHUNKS, HEADS, C], tl.float32)
                sums = code_product(weights, one_after_another(planes, PLANES), none, F)
                sums = sums * (scale.to(tl.float32) * 2.0 ** (24 - WEIGHT_POWER))
                total = total * alpha[None, :, None] + sums + added[None, :, None] * zero_point.to(tl.float32)
        store_part(out, stats, tl.load(item + 7), block, blocks, maximum, weight, total, F)
