"""Packing of codes into lanes, for every kernel that quantizes; the layout is that of `kernels/packing.py`.

Codes of 1 and of 3 bits are handled in halves of the rows across the packed axis (channels of keys, tokens of values),
whose numbers i share a field. At 3 bits one int32 word holds a lane of the upper two bits and, 16 places above it, the
same lane of the lowest bits, half of whose places are still empty.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def halves_of(bits):
    """Into how many parts the rows across the packed axis are divided: those that share a field."""
    return 2 if bits in (1, 3) else 1


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
def packed_codes(
    codes,
    first_plane,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Codes int32 [CHUNK tokens, CHANNELS] of one half of the channels in their places in words int32 [LANES,
    CHANNELS]. Words of several chunks are added up, and at 1 bit those of both halves.

    Args:
        codes: numbers below 2^BITS.
        first_plane: the first token's, which is its number in the page divided by LANES.
    """
    planes = tl.reshape(fields_of(codes, HALF, BITS), [CHUNK // LANES, LANES, CHANNELS])
    shift = (first_plane + tl.arange(0, CHUNK // LANES)) * field_width(BITS)
    return tl.sum(planes << shift[:, None, None], 0)


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
