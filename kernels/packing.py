"""Codes packed into 16-bit lanes, plane-interleaved.

With n = 16 / b codes of b bits per lane, N codes along the packed axis become L = N / n lanes. Bit-field j of lane l
(bits j b to j b + b - 1, counted from the low end) holds code j L + l: plane j is a contiguous block of the axis.
Unpacking is therefore one shift and mask per plane and no shuffling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.errors import UsageError

LANE_BITS = 16


def codes_per_lane(bits: int) -> int:
    """How many codes of this width (1, 2, 4 or 8) share one 16-bit lane."""
    if bits not in (1, 2, 4, 8):
        raise UsageError(f"Codes of {bits} bits cannot be packed; choose 1, 2, 4 or 8.")
    return LANE_BITS // bits


def pack_codes(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Pack uint8 codes, each below 2^bits, along `dim` into int16 lanes.

    Args:
        codes: uint8; `codes.shape[dim]` is a multiple of 16 / bits. Values of 2^bits and more would spill into their
            neighbours and are not looked for.
        bits: width of a code: 1, 2, 4 or 8.
        dim: the packed axis.

    Returns:
        int16 in the shape of `codes`, `dim` shortened by a factor 16 / bits.
    """
    planes = codes_per_lane(bits)
    dim = dim % codes.ndim
    if codes.shape[dim] % planes:
        raise UsageError(
            f"{codes.shape[dim]} codes of {bits} bits do not fill 16-bit lanes; a multiple of {planes} would."
        )
    blocks = codes.unflatten(dim, (planes, codes.shape[dim] // planes))
    words = blocks.select(dim, 0).to(torch.int16)
    for plane in range(1, planes):
        words |= blocks.select(dim, plane).to(torch.int16) << (plane * bits)
    return words


def unpack_codes(words: Tensor, bits: int, dim: int, length: int) -> Tensor:
    """The exact inverse of `pack_codes`: uint8 codes, `length` of them along `dim`.

    Args:
        words: int16 lanes.
        bits: width of a code: 1, 2, 4 or 8.
        dim: the packed axis.
        length: number of codes along `dim`; has to be what the lanes hold.
    """
    planes = codes_per_lane(bits)
    dim = dim % words.ndim
    lanes = words.shape[dim]
    if length != lanes * planes:
        raise UsageError(f"{lanes} lanes hold {lanes * planes} codes of {bits} bits along axis {dim}, not {length}.")
    codes = words.new_empty((*words.shape[:dim], planes, *words.shape[dim:]), dtype=torch.uint8)
    for plane in range(planes):
        # The shift is arithmetic; the mask removes the sign it drags in.
        codes.select(dim, plane).copy_((words >> (plane * bits)) & (2**bits - 1))
    return codes.flatten(dim, dim + 1)
