"""Weights of 2, 3 and 8 bits in kvconvert's own layout: bytes along the output channels, beside AWQ's for 4 bits.

A row of `out` codes, `out` a multiple of 8, becomes out * bits / 8 bytes:

    8 bits   byte c is the code of output channel c
    2 bits   bits 2 j and 2 j + 1 of byte c belong to output channel 4 c + j
    3 bits   out / 4 bytes with the upper two bits of each code, as at 2 bits; behind them out / 8 bytes with the lowest
             bits, bit j of byte c being that of output channel 8 c + j

The first plane of 3 bits alone is thus a grid of 2 bits with twice the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.errors import UsageError

PLANE_BITS = (2, 3, 8)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Pack integer codes [rows, out], each below 2^bits, into uint8 [rows, out * bits / 8]; `out` is a multiple of 8.

    Values of 2^bits and more would spill into their neighbours and are not looked for.
    """
    _check(bits)
    if codes.shape[-1] % 8:
        raise UsageError(
            f"Output channels are packed by eight; {codes.shape[-1]} of them leave a part of a byte empty."
        )
    codes = codes.to(torch.uint8)
    if bits == 8:
        return codes.contiguous()
    if bits == 3:
        return torch.cat([_pack_fields(codes >> 1, 2), _pack_fields(codes & 1, 1)], -1)
    return _pack_fields(codes, bits)


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """The exact inverse of `pack_planes`: uint8 [rows, out * bits / 8] to uint8 codes [rows, out]."""
    _check(bits)
    if bits == 8:
        return packed
    if bits == 3:
        upper, lowest = packed.split((packed.shape[-1] // 3 * 2, packed.shape[-1] // 3), -1)
        return _unpack_fields(upper, 2).mul_(2).add_(_unpack_fields(lowest, 1))
    return _unpack_fields(packed, bits)


def _pack_fields(codes: Tensor, width: int) -> Tensor:
    fields = codes.unflatten(-1, (-1, 8 // width))
    packed = fields[..., 0].clone(memory_format=torch.contiguous_format)
    for field in range(1, 8 // width):
        packed |= fields[..., field] << (width * field)
    return packed


def _unpack_fields(packed: Tensor, width: int) -> Tensor:
    codes = packed.new_empty((*packed.shape, 8 // width))
    for field in range(8 // width):
        codes[..., field] = (packed >> (width * field)) & (2**width - 1)
    return codes.flatten(-2)


def _check(bits: int) -> None:
    if bits not in PLANE_BITS:
        raise UsageError(f"kvconvert's own layout holds weights of 2, 3 or 8 bits, not {bits}.")
