"""Quantized weights as ONNX Runtime's MatMulNBits takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvconvert.errors import UnsupportedModelError
from kvconvert.kernels.linear.awq_format import AwqWeight, unpack_bits


class MatMulNBitsWeight(NamedTuple):
    """The three tensors of one Linear: w[n, k] = (B - zero_points) scales, of block k // block_size.

    B is uint8 [out, blocks, block_size bits / 8], 8 / bits codes of successive inputs in a byte, the first lowest;
    scales float32 [out, blocks]; zero_points uint8 [out, ceil(blocks bits / 8)], packed alike.
    """

    b: Tensor
    scales: Tensor
    zero_points: Tensor


def stored_bits(weight: AwqWeight) -> int:
    """Width of a code in the graph: ONNX Runtime 1.32 has 2, 4 and 8 bits, so that codes of 3 bits take 4."""
    return 4 if weight.bits == 3 else weight.bits


def repack(weight: AwqWeight, name: str) -> MatMulNBitsWeight:
    """The same codes, zeros and scales in the layout of MatMulNBits: no number changes.

    Args:
        weight: in the bundle's layout.
        name: of the Linear, for the message.

    Raises:
        UnsupportedModelError: a group size that MatMulNBits does not have.
    """
    codes, zeros = unpack_bits(weight.qweight, weight.bits), unpack_bits(weight.qzeros, weight.bits)
    bits = stored_bits(weight)
    groups = zeros.shape[0]
    group_size = codes.shape[0] // groups
    if group_size < 16 or group_size & (group_size - 1):
        raise UnsupportedModelError(
            f"{name} has groups of {group_size} inputs, and ONNX Runtime's MatMulNBits takes powers of two from 16 on; "
            "calibrate with such a group_size."
        )
    return MatMulNBitsWeight(
        b=_bytes(codes.T, bits).unflatten(1, (groups, -1)).contiguous(),
        scales=weight.scales.T.to(torch.float32).contiguous(),
        zero_points=_bytes(torch.nn.functional.pad(zeros.T, (0, -groups % (8 // bits))), bits),
    )


def _bytes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [rows, n] of 2, 4 or 8 bits, n a multiple of 8 / bits, as bytes [rows, n bits / 8]."""
    in_byte = 8 // bits
    packed = codes[:, 0::in_byte].clone()
    for place in range(1, in_byte):
        packed |= codes[:, place::in_byte] << (bits * place)
    return packed
