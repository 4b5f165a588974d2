"""Pieces of the decode kernel: codes to fp16, the scores of a page, the weighted values of a page.

Codes never become numbers by conversion. A field of up to 8 bits, cut out of its 16-bit lane by one AND, IS an fp16
number: a subnormal one, code times a power of two times 2^-24, which tensor cores multiply exactly. The power of two
and the 2^24 go into a factor of the result. Fields above an fp16 mantissa's ten bits are moved down first, one shift
for all of them. So a pair of codes costs one instruction, and there is no bias to subtract. Codes of 3 bits, whose
lowest bits lie in a plane of their own, are first put together in fields of 4 bits, eight codes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.decode.triton import (
    block_of,
    code_rows,
    field_bits,
    first_group,
    is_low,
    key_channels,
    last_group,
    plane_mask,
    plane_weight,
    query_columns,
    query_rows,
    shift_count,
    stored_rows,
    value_lanes,
)
from kvconvert.kernels.page_formats import PAGE_SIZE
from kvconvert.kernels.pages.triton import OFFSET_UNIT, in_bytes, load_counts, load_scale

PAGE: tl.constexpr = tl.constexpr(PAGE_SIZE)


@triton.jit
def exp2(x, INLINE_ASM: tl.constexpr):
    """2^x in fp32: the hardware's own instruction, without the care for results that are subnormal."""
    if INLINE_ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def shift_lanes(words, COUNT: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Lanes moved down by COUNT bits. Neighbours may spill into upper bits, which no field read there has."""
    if INLINE_ASM:
        count = tl.full(words.shape, COUNT, tl.uint16)
        return tl.inline_asm_elementwise(
            "{ .reg .b32 n; and.b32 n, $2, 0xffff; shr.u32 $0, $1, n; }",
            "=r,r,r",
            [words, count],
            dtype=tl.uint16,
            is_pure=True,
            pack=2,
        )
    else:
        return words >> COUNT


@triton.jit
def raise_lanes(words, INLINE_ASM: tl.constexpr):
    """Lanes moved up by one bit. Neighbours may spill into the lowest bit."""
    if INLINE_ASM:
        return tl.inline_asm_elementwise("shl.b32 $0, $1, 1;", "=r,r", [words], dtype=tl.uint16, is_pure=True, pack=2)
    else:
        return words << 1


@triton.jit
def choose_bits(first, second, MASK: tl.constexpr, INLINE_ASM: tl.constexpr):
    """The bits of `first` where MASK has ones, those of `second` where it has zeros."""
    mask = tl.full(first.shape, MASK, tl.uint16)
    if INLINE_ASM:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xE4;", "=r,r,r,r", [first, second, mask], dtype=tl.uint16, is_pure=True, pack=2
        )
    else:
        return (first & mask) | (second & ~mask)


@triton.jit
def joined_words(upper, lowest, HALF: tl.constexpr, ODD: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Codes of 3 bits in fields of 4: those of the even or odd planes, of one half of the rows.

    `upper` are lanes of their upper two bits, `lowest` lanes of pairs of lowest bits. What is beside a code in its
    field is for the field's mask to remove.
    """
    if ODD:
        return choose_bits(upper, shift_lanes(lowest, 1 + HALF, INLINE_ASM), 0xCCCC, INLINE_ASM)
    else:
        below = lowest
        if HALF == 1:
            below = shift_lanes(lowest, 1, INLINE_ASM)
        return choose_bits(raise_lanes(upper, INLINE_ASM), below, 0x6666, INLINE_ASM)


@triton.jit
def code_words(pointers, mask, ROWS: tl.constexpr, BITS: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Lanes of ROWS rows at `pointers`, as they are and moved; at 3 bits of the upper bits of each half of the rows,
    ROWS each, and of the lowest bits.
    """
    words = tl.load(pointers, mask=mask, other=0)
    if BITS == 3:
        upper_half = tl.load(pointers + ROWS, mask=mask, other=0)
        return words, upper_half, tl.load(pointers + 2 * ROWS, mask=mask, other=0)
    else:
        return words, shift_lanes(words, shift_count(BITS), INLINE_ASM)


@triton.jit
def plane(words, J: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, INLINE_ASM: tl.constexpr):
    """Field J of `code_words`, as the fp16 number it spells, for one half of the rows where codes are in pairs."""
    if BITS == 3:
        source = joined_words(words[HALF], words[2], HALF, J % 2, INLINE_ASM)
        if not is_low(J, BITS):
            source = shift_lanes(source, shift_count(BITS), INLINE_ASM)
    else:
        source = words[0 if is_low(J, BITS) else 1]
    mask = tl.full(source.shape, plane_mask(J, HALF, BITS), tl.uint16)
    if INLINE_ASM:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [source, mask], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return (source & mask).to(tl.float16, bitcast=True)


@triton.jit
def plane_product(words, lower, upper, total, J: tl.constexpr, BITS: tl.constexpr, INLINE_ASM: tl.constexpr):
    """`total` plus the codes of plane J [M, K] times `lower` [K, N], without the plane's weight.

    Where codes are in pairs, at 1 and 3 bits, these are those of the lower half of the rows, and those of the upper
    half are multiplied with `upper`, at 1 bit half of what is meant, as their codes count twice.
    """
    total = tl.dot(plane(words, J, 0, BITS, INLINE_ASM), lower, total)
    if BITS == 1 or BITS == 3:
        total = tl.dot(plane(words, J, 1, BITS, INLINE_ASM), upper, total)
    return total


@triton.jit
def three_bit_products(words, lower, upper, totals, INLINE_ASM: tl.constexpr):
    """`plane_product` of all eight planes with one pair of operands, in an order that holds few words at a time."""
    for half in tl.static_range(2):
        if half == 0:
            operand = lower
        else:
            operand = upper
        even = ()
        for pair in tl.static_range(4):
            even = even + (tl.dot(plane(words, 2 * pair, half, 3, INLINE_ASM), operand, totals[2 * pair]),)
        joined = ()
        for pair in tl.static_range(4):
            odd = tl.dot(plane(words, 2 * pair + 1, half, 3, INLINE_ASM), operand, totals[2 * pair + 1])
            joined = joined + (even[pair], odd)
        totals = joined
    return totals


@triton.jit
def join_planes(parts, COUNT: tl.constexpr):
    """COUNT tensors [M, N] as one [M, N, COUNT]."""
    M: tl.constexpr = parts[0].shape[0]
    N: tl.constexpr = parts[0].shape[1]
    if COUNT == 1:
        return tl.reshape(parts[0], [M, N, 1])
    elif COUNT == 2:
        return tl.join(parts[0], parts[1])
    elif COUNT == 4:
        return tl.reshape(tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3])), [M, N, 4])
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        return tl.reshape(tl.join(even, odd), [M, N, 8])


@triton.jit
def half_pointer(units):
    """A pointer to 16-bit units as one to fp16 numbers."""
    return units.to(tl.pointer_type(tl.float16))


@triton.jit
def scaled_query(query, scale, F: tl.constexpr):
    """Queries [K, N] times key scales [K] as fp16.

    `query` holds every query in the first of its columns and zeros in the others, in fp16, so that one rounding is
    lost, which has as many bits as a bf16 or fp16 query itself or more. Where F.split_query, it is fp32 and stands in
    the first two columns: the second takes what rounding the first has left.
    """
    if F.split_query:
        column = tl.arange(0, query_rows(F) * query_columns(F)) % query_columns(F)
        exact = query * scale.to(tl.float32)[:, None]
        high = exact.to(tl.float16)
        low = (exact - high.to(tl.float32)).to(tl.float16)
        return tl.where((column == 1)[None, :], low, high)
    else:
        return query * scale[:, None]


@triton.jit
def add_columns(x, F: tl.constexpr):
    """[M, rows * columns, P] to [M, rows, P]: the columns of each query together."""
    COLUMNS: tl.constexpr = query_columns(F)
    if COLUMNS == 1:
        return x
    else:
        parts = tl.reshape(x, [x.shape[0], query_rows(F), COLUMNS, x.shape[2]])
        if COLUMNS == 2:
            first, second = tl.split(tl.permute(parts, (0, 1, 3, 2)))
            if F.split_query:
                return first + second
            else:
                return first
        else:
            return tl.sum(parts, 2)


@triton.jit
def group_operands(
    scales, offsets, operands, boost, boost_channel, GROUP: tl.constexpr, LANES: tl.constexpr, F: tl.constexpr
):
    """Scaled queries for the codes of one group of tokens, for the upper halves of pairs, for boosted channels; and
    the products of queries with the offsets, [LANES, N], equal in all rows.
    """
    channel, real = key_channels(F)
    BYTES: tl.constexpr = in_bytes(F.keys.scale, F.keys.offset)
    scale_row = scales + GROUP * F.keys.head_dim
    offset_row = offsets + GROUP * F.keys.head_dim
    scale, offset = load_counts(scale_row + channel, offset_row + channel, real, BYTES)
    if F.keys.bits == 1:
        # Codes of the second half are the upper of two bits, which count twice.
        second = tl.arange(0, channel.shape[0]) >= channel.shape[0] // 2
        scale = tl.where(second, scale * 0.5, scale)
        if BYTES:
            offset = tl.where(second, offset * 2.0, offset)
    scaled = scaled_query(operands[0], scale, F)
    none = tl.zeros([LANES, scaled.shape[1]], tl.float32)
    # Offsets that are in units of their scale are multiplied with the scaled query.
    offset_rows = tl.broadcast_to(offset[None, :], [LANES, channel.shape[0]])
    constant = tl.dot(offset_rows, scaled if BYTES else operands[1], none)
    if BYTES:
        constant *= OFFSET_UNIT
    if F.keys.bits == 1 or F.keys.bits == 3:
        lower, upper = halves(scaled)
    else:
        lower = scaled
        upper = scaled
    boost_lower = lower
    if F.keys.boosted > 0:
        # The upper bits count 2^bits times as much as the lower ones.
        WEIGHT: tl.constexpr = 1 << F.keys.bits
        scale = load_scale(scale_row + boost_channel, boost_channel >= 0, BYTES)
        boost_lower = scaled_query(boost, scale * WEIGHT, F)
    return lower, upper, boost_lower, constant


@triton.jit
def halves(x):
    """The first and the second half of the rows of [K, N]."""
    return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))


@triton.jit
def page_scores(page, norms, scales, offsets, operands, boost, boost_channel, F: tl.constexpr):
    """Products of queries with the 128 keys of a page: fp32 [lanes, rows, planes], token = plane * lanes + lane.

    Args:
        page: pointer to the head's part of the page.
        norms, scales, offsets: pointers to the token norms [128] and to the groups' scales and offsets [groups, D].
        operands: queries of the channels of the code rows, see `scaled_query`, and the same as fp16 in all cases, for
            the product with the offsets.
        boost, boost_channel: queries of the boosted channels [boosted, N], and their numbers; unused without boost.
    """
    PLANES: tl.constexpr = 16 // field_bits(F.keys.bits)
    LANES: tl.constexpr = PAGE // PLANES
    ROWS: tl.constexpr = code_rows(F.keys.bits, F.keys.head_dim)
    GROUPS: tl.constexpr = max(F.keys.groups, 1)
    STEPS: tl.constexpr = max(GROUPS // PLANES, 1)
    lane = tl.arange(0, LANES)
    channel = tl.arange(0, block_of(ROWS))
    real = channel < ROWS
    here = page + lane[:, None] * stored_rows(F.keys.bits, F.keys.head_dim) + channel[None, :]
    words = code_words(here, real[None, :], ROWS, F.keys.bits, F.inline_asm)
    if F.keys.boosted > 0:
        boosted = tl.arange(0, block_of(F.keys.high_rows))
        here = page + F.keys.high + lane[:, None] * F.keys.high_rows + boosted[None, :]
        high = code_words(here, (boosted < F.keys.high_rows)[None, :], F.keys.high_rows, F.keys.bits, F.inline_asm)
    products = ()
    # One group serves several planes, or several groups share a plane.
    for step in tl.static_range(max(GROUPS, PLANES)):
        if step % max(PLANES // GROUPS, 1) == 0:
            lower, upper, boost_lower, constant = group_operands(
                scales, offsets, operands, boost, boost_channel, step * GROUPS // max(GROUPS, PLANES), LANES, F
            )
        none = tl.zeros([LANES, lower.shape[1]], tl.float32)
        if F.keys.bits == 3 and GROUPS == 1:
            if step == 0:
                every = three_bit_products(words, lower, upper, (none,) * PLANES, F.inline_asm)
            product = every[step]
        else:
            product = plane_product(words, lower, upper, none, step // STEPS, F.keys.bits, F.inline_asm)
        if F.keys.boosted > 0:
            product = tl.dot(plane(high, step // STEPS, 0, F.keys.bits, F.inline_asm), boost_lower, product)
        product = product * plane_weight(step // STEPS, F.keys.bits) + constant
        if STEPS == 1:
            products = products + (product,)
        else:
            if step % STEPS == 0:
                total = product
            else:
                total = tl.where((lane // (LANES // STEPS) == step % STEPS)[:, None], product, total)
            if step % STEPS == STEPS - 1:
                products = products + (total,)
    x = add_columns(join_planes(products, PLANES), F)
    if F.keys.norm > 0:
        token = page_tokens(LANES)
        x = x * tl.load(half_pointer(norms) + token).to(tl.float32)[:, None, :]
    return x


@triton.jit
def page_tokens(LANES: tl.constexpr):
    """Number within the page of each token of [lanes, planes]."""
    return tl.arange(0, LANES)[:, None] + LANES * tl.arange(0, PAGE // LANES)[None, :]


@triton.jit
def token_places(token, known, places, DIM: tl.constexpr, DTYPE: tl.constexpr, F: tl.constexpr):
    """Where full-precision tokens of these numbers begin, in elements: side by side, or where `places` say."""
    if F.placed:
        return tl.load(places + token, mask=known, other=0) * (128 // DTYPE.primitive_bitwidth)
    else:
        return token * DIM


@triton.jit
def residual_scores(keys, place, known, query, F: tl.constexpr):
    """Products of queries [D, N] with full-precision keys, fp32 [tokens, rows, 1].

    `place` [tokens] leads from `keys` to each of these keys, in elements; where `known` is False there is none.
    """
    channel = tl.arange(0, block_of(F.keys.head_dim))
    mask = known[:, None] & (channel < F.keys.head_dim)[None, :]
    tile = tl.load(keys + place[:, None] + channel[None, :], mask=mask, other=0.0)
    if F.inline_asm:
        x = tl.dot(tile, query, input_precision="ieee")
    else:
        # The interpreter's products take bf16 numbers for integers.
        x = tl.dot(tile.to(tl.float32), query.to(tl.float32))
    return add_columns(tl.reshape(x, [x.shape[0], x.shape[1], 1]), F)


@triton.jit
def in_token_order(p):
    """[lanes, rows, planes] to [tokens, rows]."""
    LANES: tl.constexpr = p.shape[0]
    ROWS: tl.constexpr = p.shape[1]
    PLANES: tl.constexpr = p.shape[2]
    return tl.reshape(tl.permute(p, (2, 0, 1)), [PLANES * LANES, ROWS])


@triton.jit
def spread_columns(p, F: tl.constexpr):
    """[M, rows] to [M, rows * columns]: every column of a query gets its number; the first one's result is used."""
    COLUMNS: tl.constexpr = query_columns(F)
    if COLUMNS == 1:
        return p
    else:
        wide = tl.broadcast_to(p[:, :, None], [p.shape[0], p.shape[1], COLUMNS])
        return tl.reshape(wide, [p.shape[0], p.shape[1] * COLUMNS])


@triton.jit
def add_residual_values(values, place, known, p, alpha, total, F: tl.constexpr):
    """`total` [E, N] times alpha [rows] plus full-precision values weighted by p [tokens, rows]."""
    channel = tl.arange(0, block_of(F.values.head_dim))
    mask = known[:, None] & (channel < F.values.head_dim)[None, :]
    tile = tl.load(values + place[:, None] + channel[None, :], mask=mask, other=0.0)
    total = total * spread_columns(alpha[None, :], F)
    weights = spread_columns(p.to(tile.dtype), F)
    if F.inline_asm:
        return tl.dot(tl.trans(tile), weights, total, input_precision="ieee")
    else:
        return tl.dot(tl.trans(tile.to(tl.float32)), weights.to(tl.float32), total)


@triton.jit
def token_halves(x):
    """The first and the second half of the tokens of [tokens, rows]."""
    return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))


@triton.jit
def add_residual_page(values, places, token, p, alpha, total, DTYPE: tl.constexpr, F: tl.constexpr):
    """`add_residual_values` of 128 tokens from number `token` on, 32 at a time, which keeps to a warp's registers."""
    QUARTER: tl.constexpr = PAGE // 4
    known = tl.arange(0, QUARTER) < QUARTER
    first, second = token_halves(p)
    for half in tl.static_range(2):
        if half == 0:
            low, high = token_halves(first)
        else:
            low, high = token_halves(second)
        here = token + half * 2 * QUARTER + tl.arange(0, QUARTER)
        place = token_places(here, known, places, F.values.head_dim, DTYPE, F)
        total = add_residual_values(values, place, known, low, alpha, total, F)
        alpha = tl.full(alpha.shape, 1.0, tl.float32)
        place = token_places(here + QUARTER, known, places, F.values.head_dim, DTYPE, F)
        total = add_residual_values(values, place, known, high, alpha, total, F)
    return total


@triton.jit
def add_page_values(page, scales, offsets, p, alpha, totals, constants, F: tl.constexpr):
    """Code sums of a page by plane, times alpha plus this page's; the same of the sums that offsets are added
    to.

    Args:
        page: pointer to the head's part of the page; scales, offsets: to those of its tokens [groups, 128].
        p: weights, [lanes, rows, planes] in the order of the KEY page. alpha: [rows].
        totals: per plane fp32 [value lanes, N]; constants: per group fp32 [key lanes, rows], to be summed over the
            lanes, in units of OFFSET_UNIT where scales have 8 bits.
    """
    TOKENS: tl.constexpr = code_rows(F.values.bits, PAGE)
    LANES: tl.constexpr = value_lanes(F)
    BYTES: tl.constexpr = in_bytes(F.values.scale, F.values.offset)
    GROUPS: tl.constexpr = max(F.values.groups, 1)
    GROUP_SIZE: tl.constexpr = F.values.head_dim // GROUPS
    BLOCK: tl.constexpr = block_of(LANES)
    lane = tl.arange(0, BLOCK)
    row = tl.arange(0, TOKENS)
    here = page + lane[:, None] * stored_rows(F.values.bits, PAGE) + row[None, :]
    words = code_words(here, (lane < LANES)[:, None], TOKENS, F.values.bits, F.inline_asm)
    token = page_tokens(p.shape[0])
    lowers = ()
    uppers = ()
    sums = ()
    for group in tl.static_range(GROUPS):
        if F.values.groups > 0:
            place = group * PAGE + token
            scale, offset = load_counts(scales + place, offsets + place, None, BYTES)
            scaled = p * scale.to(tl.float32)[:, None, :]
            base = scaled if BYTES else p
            constant = tl.sum(base * offset.to(tl.float32)[:, None, :], 2)
            sums = sums + (constants[group] * alpha[None, :] + constant,)
        else:
            scaled = p
            sums = sums + (constants[group],)
        if F.values.bits == 1:
            # As in `group_operands`.
            scaled = tl.where(token[:, None, :] >= PAGE // 2, scaled * 0.5, scaled)
        weights = spread_columns(in_token_order(scaled.to(tl.float16)), F)
        if TOKENS < PAGE:
            low, high = halves(weights)
            lowers = lowers + (low,)
            uppers = uppers + (high,)
        else:
            lowers = lowers + (weights,)
            uppers = uppers + (weights,)
    factor = spread_columns(alpha[None, :], F)
    if F.values.bits == 3 and GROUPS == 1:
        scaled = ()
        for j in tl.static_range(16 // field_bits(F.values.bits)):
            scaled = scaled + (totals[j] * factor,)
        return three_bit_products(words, lowers[0], uppers[0], scaled, F.inline_asm), sums
    results = ()
    for j in tl.static_range(16 // field_bits(F.values.bits)):
        total = totals[j] * factor
        for group in tl.static_range(first_group(j, LANES, GROUP_SIZE), last_group(j, LANES, GROUP_SIZE) + 1):
            more = plane_product(words, lowers[group], uppers[group], total, j, F.values.bits, F.inline_asm)
            if first_group(j, LANES, GROUP_SIZE) == last_group(j, LANES, GROUP_SIZE):
                total = more
            else:
                total = tl.where(((j * LANES + lane) // GROUP_SIZE == group)[:, None], more, total)
        results = results + (total,)
    return results, sums
