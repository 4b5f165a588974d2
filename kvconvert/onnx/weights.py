"""Quantized weights as ONNX Runtime's MatMulNBits takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvconvert.errors import UnsupportedModelError
from kvconvert.kernels.linear.awq_format import AwqWeight, unpack_awq


class MatMulNBitsWeight(NamedTuple):
    """The three tensors of one Linear: w[n, k] = (B - zero_points) scales, of block k // block_size.

    B is uint8 [out, blocks, block_size / 2], two codes of successive inputs in a byte, the first in its lower half;
    scales float32 [out, blocks]; zero_points uint8 [out, ceil(blocks / 2)], packed alike.
    """

    b: Tensor
    scales: Tensor
    zero_points: Tensor


def repack(weight: AwqWeight, name: str) -> MatMulNBitsWeight:
    """The same codes, zeros and scales in the layout of MatMulNBits: no number changes.

    Args:
        weight: in AWQ's layout.
        name: of the Linear, for the message.

    Raises:
        UnsupportedModelError: a group size that MatMulNBits does not have.
    """
    codes, zeros = unpack_awq(weight.qweight), unpack_awq(weight.qzeros)
    groups = zeros.shape[0]
    group_size = codes.shape[0] // groups
    if group_size < 16 or group_size & (group_size - 1):
        raise UnsupportedModelError(
            f"{name} has groups of {group_size} inputs, and ONNX Runtime's MatMulNBits takes powers of two from 16 on; "
            "calibrate with such a group_size."
        )
    return MatMulNBitsWeight(
        b=_pairs(codes.T).unflatten(1, (groups, group_size // 2)).contiguous(),
        scales=weight.scales.T.to(torch.float32).contiguous(),
        zero_points=_pairs(torch.nn.functional.pad(zeros.T, (0, groups % 2))),
    )


def _pairs(codes: Tensor) -> Tensor:
    """uint8 codes [rows, n] below 16, n even, as bytes [rows, n / 2]."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
