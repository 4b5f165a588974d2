"""What the kernels that quantize pages share: the affine quantizer, reading of tokens, and the report of bad numbers.

The arithmetic is that of `kernels/quantizer.py`: codes computed from the stored float16 scale and offset, in
float32 rounded after every operation. Kernels that use it must be compiled without fusing products into sums.

Codes are packed into lanes as in `kernels/packing.py`. Those of 1 and of 3 bits are handled in halves of the rows
across the packed axis (channels of keys, tokens of values), whose numbers i share a field. At 3 bits one int32 word
holds a lane of the upper two bits and, 16 places above it, the same lane of the lowest bits, half of whose places are
still empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels import quantizer

LARGEST_HALF = tl.constexpr(65504.0)
# Added to a float32 in 0..255, it leaves the nearest whole number, ties to even, in the lowest bits; 16 zeros above.
ROUNDER = tl.constexpr(12582912.0)
OFFSET_PARTS = tl.constexpr(quantizer.OFFSET_PARTS)
LEAST_SCALE = tl.constexpr(quantizer.LEAST_SCALE)
OFFSET_UNIT = tl.constexpr(quantizer.OFFSET_UNIT)
SCALE_MASK = tl.constexpr(quantizer.SCALE_MASK)
COUNT_MASK = tl.constexpr(~quantizer.SCALE_MASK)
# Columns of a page table, see kernels/pages/triton/launch.py.
TABLE_COLUMNS = tl.constexpr(5)


@triton.jit
def flag_if(bad, flag, page, head, KIND: tl.constexpr, HEADS: tl.constexpr):
    """Leave the first offending (page, head) in `flag`; a norm (KIND 0) comes before a group (1)."""
    if bad:
        tl.atomic_min(flag, (page * HEADS + head) * 2 + KIND)


@triton.jit
def quotient(x, divisor, inverse):
    """x / divisor rounded once, given the divisor's correctly rounded inverse (Markstein 1990); 0 for an inverse of 0.

    One product and its correction take three instructions, a division about ten and a branch.
    """
    near = x * inverse
    return tl.fma(tl.fma(-near, divisor, x), inverse, near)


@triton.jit
def affine_grid(low, high, levels, inverse_levels, factor, shrink):
    """Float16 scale and offset of ranges, as `affine_grid` in kernels/quantizer.py computes them."""
    extent = high - low
    scale = quotient(extent * factor, levels, inverse_levels)
    return scale.to(tl.float16), (low + extent * shrink).to(tl.float16)


@triton.jit
def group_grid(low, high, levels, inverse_levels, factor, shrink, BYTES: tl.constexpr):
    """`affine_grid`, of 8 bits each if BYTES: `eight_bit_grid` in kernels/quantizer.py."""
    scale, offset = affine_grid(low, high, levels, inverse_levels, factor, shrink)
    if BYTES:
        least = tl.abs(offset.to(tl.float32)) * LEAST_SCALE
        wide = tl.maximum(scale.to(tl.float32), least).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        rounded = ((tl.minimum(wide, 0x7C00) + 64) >> 7) << 7
        scale = rounded.to(tl.int16).to(tl.float16, bitcast=True)
        offset = (offset_code(offset, scale) * (scale.to(tl.float32) / OFFSET_PARTS)).to(tl.float16)
    return scale, offset


@triton.jit
def offset_code(offset, scale):
    """The number of parts of a scale that is nearest to an offset, a whole float32 number, -127 to 127."""
    step = scale.to(tl.float32) / OFFSET_PARTS
    code = quotient(offset.to(tl.float32), step, reciprocal(step))
    return tl.minimum(tl.maximum(code + ROUNDER - ROUNDER, -127.0), 127.0)


@triton.jit
def store_grid(scales, offsets, scale, offset, there, BYTES: tl.constexpr):
    """Store float16 scales and offsets at pointers to 16-bit units, or if BYTES both of `group_grid` in one."""
    if BYTES:
        count = offset_code(offset, scale).to(tl.int32)
        unit = scale.to(tl.int16, bitcast=True).to(tl.int32) | tl.abs(count) | tl.where(count < 0, 0x8000, 0)
        tl.store(scales, unit.to(tl.int16), mask=there)
    else:
        tl.store(scales, scale.to(tl.int16, bitcast=True), mask=there)
        tl.store(offsets, offset.to(tl.int16, bitcast=True), mask=there)


@triton.jit
def _units(pointers, there):
    """What is stored where there is something, everywhere if that is None; 0 elsewhere."""
    if there is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=there, other=0)


@triton.jit
def load_scale(scales, there, BYTES: tl.constexpr):
    """Float16 scales at pointers to 16-bit units; 0 where there is none. If BYTES offsets share the units."""
    unit = _units(scales, there)
    if BYTES:
        unit = unit & SCALE_MASK
    return unit.to(tl.float16, bitcast=True)


@triton.jit
def load_counts(scales, offsets, there, BYTES: tl.constexpr):
    """Float16 scales and offsets, these if BYTES in units of OFFSET_UNIT times the scale; 0 where there is
    none."""
    unit = _units(scales, there)
    if BYTES:
        return (unit & SCALE_MASK).to(tl.float16, bitcast=True), (unit & COUNT_MASK).to(tl.float16, bitcast=True)
    else:
        return unit.to(tl.float16, bitcast=True), _units(offsets, there).to(tl.float16, bitcast=True)


@triton.jit
def load_grid(scales, offsets, there, BYTES: tl.constexpr):
    """Float32 scales and offsets that `store_grid` stored; 0 where there is none."""
    scale, offset = load_counts(scales, offsets, there, BYTES)
    scale, offset = scale.to(tl.float32), offset.to(tl.float32)
    if BYTES:
        offset *= scale * OFFSET_UNIT
    return scale, offset


@triton.jit
def storable(scale, offset):
    """Where both are finite, as float16 numbers have to be."""
    return (tl.abs(scale.to(tl.float32)) <= LARGEST_HALF) & (tl.abs(offset.to(tl.float32)) <= LARGEST_HALF)


@triton.jit
def reciprocal(x):
    """1 / x correctly rounded for float32 x of float16 precision, and 0 for 0.

    One Newton step errs by the square of the first guess's error, which no inverse of an 11-bit number is that close to
    a rounding boundary.
    """
    guess = 1.0 / tl.where(x > 0, x, 1.0)
    return tl.where(x > 0, tl.fma(tl.fma(-x, guess, 1.0), guess, guess), 0.0)


@triton.jit
def nearest_codes(x, scale, offset, levels):
    """Nearest codes in the lowest bits of an int32, whose bits 8 to 15 are zero and whose upper bits are not.

    A scale of 0 gives code 0.
    """
    step = scale.to(tl.float32)
    position = quotient(x - offset.to(tl.float32), step, reciprocal(step))
    return (tl.minimum(tl.maximum(position, 0.0), levels) + ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def read_tokens(tokens, token, hidden, channel, present, token_stride):
    """Channels of one head's tokens, or of the first token that is not hidden, in their dtype."""
    return tl.load(tokens + tl.maximum(token, hidden) * token_stride + channel, mask=present, other=0.0)


@triton.constexpr_function
def in_bytes(scale, offset):
    """Whether groups' scales and offsets have 8 bits each, from where they lie: they then share units."""
    return scale == offset and scale >= 0


@triton.constexpr_function
def halves_of(bits):
    """Into how many parts the rows across the packed axis are divided: those that share a field."""
    return 2 if bits in (1, 3) else 1


@triton.constexpr_function
def channel_parts(bits, by_token):
    """Into how many parts a key's channels are divided, of which words hold one code each or fields one bit each."""
    return 16 // bits if by_token else halves_of(bits)


@triton.constexpr_function
def padded(size):
    """The power of two that holds a size."""
    return triton.next_power_of_2(size)


@triton.constexpr_function
def tile_of(dim, bits):
    """Channels of a tile: a power of two, of which matrix instructions want 16 in each half of `halves_of`."""
    return max(16 * halves_of(bits), triton.next_power_of_2(dim))


@triton.constexpr_function
def slots_of(boosted):
    """Places for the numbers of boosted channels."""
    return max(16, triton.next_power_of_2(boosted))


@triton.constexpr_function
def field_width(bits):
    """`field_bits` of `kernels/packing.py`."""
    return {1: 2, 3: 2}.get(bits, bits)


@triton.jit
def fields_of(codes, HALF: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 below 2^BITS of one half of the rows, in their places in a lane's first field."""
    if BITS == 3:
        return ((codes >> 1) & 3) | ((codes & 1) << (16 + HALF))
    else:
        return codes << HALF


@triton.jit
def store_words(target, words, second, there, ROWS: tl.constexpr, BITS: tl.constexpr):
    """Store finished words as int16 lanes.

    Args:
        target: pointers to the places of `words`, the rows being consecutive.
        words: int32, of all rows, or at 3 bits of the first half, whose other half are `second`; `second` is unused
            at other widths.
        there: where there is a row.
        ROWS: their number, of one half at 3 bits.
    """
    tl.store(target, words.to(tl.int16), mask=there)
    if BITS == 3:
        tl.store(target + ROWS, second.to(tl.int16), mask=there)
        tl.store(target + 2 * ROWS, ((words >> 16) | (second >> 16)).to(tl.int16), mask=there)
