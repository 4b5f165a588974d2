"""Codes packed into 16-bit lanes, plane-interleaved.

A lane holds n = 16 / w bit-fields of w bits. With N fields along the packed axis there are L = N / n lanes, and field j
of lane l (bits j w to j w + w - 1, counted from the low end) is number j L + l: plane j is a contiguous block of the
axis. Unpacking is therefore one shift and mask per plane and no shuffling.

A code of 2, 4 or 8 bits is a field. Codes of 1 bit come in pairs that make a field of 2: of the M codes along another
axis, the one that a product contracts, bit 0 belongs to number i and bit 1 to number i + M / 2. A page of 128 tokens
then has 16 lanes at 1 bit as at 2, which fill a tensor core's tile.

Codes of 3 bits lie in two planes of equally many lanes, which follow one another along that other axis: M words of
their upper two bits, as codes of 2 bits are packed, then M / 2 words of their lowest bits, as codes of 1 bit are. The
first plane alone is thus a grid of 2 bits with twice the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.kernels.code_bits import field_bits, fields_per_lane, packed_rows


def pack_codes(codes: Tensor, bits: int, dim: int, across: int) -> Tensor:
    """Pack uint8 codes, each below 2^bits, along `dim` into int16 lanes.

    Args:
        codes: uint8; `codes.shape[dim]` is a multiple of `fields_per_lane(bits)`. Values of 2^bits and more would spill
            into their neighbours and are not looked for.
        bits: width of a code: 1, 2, 3, 4 or 8.
        dim: the packed axis.
        across: the other axis, along which codes of 1 bit are paired; an odd number is completed by zeros.

    Returns:
        int16, contiguous, in the shape of `codes`, `dim` shortened by a factor `fields_per_lane(bits)` and `across` of
        the length that `packed_rows` says.
    """
    if bits == 3:
        return torch.cat([pack_codes(codes >> 1, 2, dim, across), pack_codes(codes & 1, 1, dim, across)], across)
    planes, width = fields_per_lane(bits), field_bits(bits)
    dim, across = dim % codes.ndim, across % codes.ndim
    if codes.shape[dim] % planes:
        raise UsageError(
            f"{codes.shape[dim]} codes of {bits} bits do not fill 16-bit lanes; a multiple of {planes} would."
        )
    if width != bits:
        half = packed_rows(codes.shape[across], bits)
        first, second = codes.narrow(across, 0, half), codes.narrow(across, half, codes.shape[across] - half)
        codes = first.clone()
        codes.narrow(across, 0, second.shape[across]).bitwise_or_(second << bits)
    blocks = codes.unflatten(dim, (planes, codes.shape[dim] // planes))
    words = blocks.select(dim, 0).to(torch.int16, memory_format=torch.contiguous_format)
    for plane in range(1, planes):
        words |= blocks.select(dim, plane).to(torch.int16) << (plane * width)
    return words


def unpack_codes(words: Tensor, bits: int, dim: int, length: int, across: int) -> Tensor:
    """The inverse of `pack_codes`: uint8 codes, `length` of them along `dim`.

    Args:
        words: int16 lanes.
        bits: width of a code: 1, 2, 3, 4 or 8.
        dim: the packed axis.
        length: number of codes along `dim`; has to be what the lanes hold.
        across: the axis along which codes of 1 bit are paired. At 1 bit it comes back doubled, including the zero that
            completed an odd number.
    """
    if bits == 3:
        rows = words.shape[across] * 2 // 3
        upper = unpack_codes(words.narrow(across, 0, rows), 2, dim, length, across)
        lowest = unpack_codes(words.narrow(across, rows, words.shape[across] - rows), 1, dim, length, across)
        return upper.mul_(2).add_(lowest.narrow(across, 0, rows))
    planes, width = fields_per_lane(bits), field_bits(bits)
    dim, across = dim % words.ndim, across % words.ndim
    lanes = words.shape[dim]
    if length != lanes * planes:
        raise UsageError(f"{lanes} lanes hold {lanes * planes} codes of {bits} bits along axis {dim}, not {length}.")
    parts = range(width // bits)
    rows = words.shape[across]
    shape = list(words.shape)
    shape[across] *= len(parts)
    codes = words.new_empty((*shape[:dim], planes, *shape[dim:]), dtype=torch.uint8)
    for plane in range(planes):
        target = codes.select(dim, plane)
        for part in parts:
            # The shift is arithmetic; the mask removes the sign it drags in.
            fields = (words >> (plane * width + part * bits)) & (2**bits - 1)
            target.narrow(across, part * rows, rows).copy_(fields)
    return codes.flatten(dim, dim + 1)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last dimension.

    Args:
        codes: integers [..., n] from 0 to 2^bits - 1, n a multiple of 32 / bits.
        bits: 4 or 8.

    Returns:
        int32 [..., n bits / 32]; code i of a word lies in its bits `bits` i to `bits` (i + 1) - 1.
    """
    fields = codes.unflatten(-1, (-1, 32 // bits)).to(torch.int32)
    words = torch.zeros_like(fields[..., 0])
    for field in range(fields.shape[-1]):
        words |= fields[..., field] << (bits * field)
    return words


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The exact inverse of `pack_words`: int32 [..., m] to uint8 codes [..., m 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1).bitwise_right_shift(shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)
