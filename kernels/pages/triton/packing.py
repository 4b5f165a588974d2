"""Packing of codes into lanes, for every kernel that quantizes; the layout is that of `kernels/packing.py`."""

from __future__ import annotations

import triton
import triton.language as tl


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
    """Codes int32 [CHUNK tokens, CHANNELS] in their places in lanes, int32 [LANES, CHANNELS].

    Lanes of several chunks, and of both halves of pairs, are added up.

    Args:
        codes: numbers below 2^BITS.
        first_plane: the first token's, which is its number in the page divided by LANES.
        HALF: 1 for the upper numbers of pairs, which are the upper half of the channels at 1 bit; else 0.
    """
    WIDTH: tl.constexpr = 2 if BITS == 1 else BITS
    planes = tl.reshape(codes << HALF, [CHUNK // LANES, LANES, CHANNELS])
    shift = (first_plane + tl.arange(0, CHUNK // LANES)) * WIDTH
    return tl.sum(planes << shift[:, None, None], 0)
