"""Stored weights: the quantizer, AWQ's "gemm" packing of 4 bits, and fake quantization of any width for searches.

A Linear of `in` inputs and `out` outputs in groups of g inputs is stored as (AWQ, arXiv 2306.00978; its file layout):

    qweight int32 [in, out / 8]    qzeros int32 [in / g, out / 8]    scales fp16 [in / g, out]    w = (q - z) scale

Nibble i of column c, counted from the low end, belongs to output channel 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]. Zeros z are
the integers 0 to 15 themselves. A group's range always includes 0, so that z needs no clamp.

Weights of 2, 3 and 8 bits have the same three tensors with the same meaning; only the packing of codes and zeros is
kvconvert's own. A row of `out` codes, `out` a multiple of 8, becomes out * bits / 8 bytes:

    8 bits   byte c is the code of output channel c
    2 bits   bits 2 j and 2 j + 1 of byte c belong to output channel 4 c + j
    3 bits   out / 4 bytes with the upper two bits of each code, as at 2 bits; behind them out / 8 bytes with the lowest
             bits, bit j of byte c being that of output channel 8 c + j

The first plane of 3 bits alone is thus a grid of 2 bits with twice the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.kernels.quantizer import GroupRangeError

PLANE_BITS = (2, 3, 8)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Pack integer codes [rows, out], each below 2^bits, into uint8 [rows, out * bits / 8]; `out` is a multiple of 8.

    Values of 2^bits and more would spill into their neighbours and are not looked for.
    """
    _check_plane_bits(bits)
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
    _check_plane_bits(bits)
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


def _check_plane_bits(bits: int) -> None:
    if bits not in PLANE_BITS:
        raise UsageError(f"kvconvert's own layout holds weights of 2, 3 or 8 bits, not {bits}.")


# Widths that a stored weight can have.
WEIGHT_BITS = (2, 3, 4, 8)
NIBBLE_CHANNEL = (0, 2, 4, 6, 1, 3, 5, 7)
SMALLEST_HALF = 2.0**-24


class AwqWeight(NamedTuple):
    """The three tensors of one Linear as they are stored, in AWQ's layout at 4 bits; see the module's docstring.

    At 2, 3 and 8 bits qweight is uint8 [in, out * bits / 8] and qzeros uint8 [in / g, out * bits / 8].
    """

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 4 if self.qzeros.dtype == torch.int32 else 8 * self.qzeros.shape[1] // self.scales.shape[1]


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack integer codes [rows, out] as they are stored: int32 [rows, out / 8] at 4 bits, else uint8."""
    if bits not in WEIGHT_BITS:
        raise UsageError(f"Weights are stored at 2, 3, 4 or 8 bits, not {bits}.")
    return pack_planes(codes, bits) if bits in PLANE_BITS else pack_awq(codes)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The exact inverse of `pack_bits`: uint8 codes [rows, out]."""
    return unpack_planes(packed, bits) if bits in PLANE_BITS else unpack_awq(packed)


def pack_awq(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [rows, out], integers 0 to 15, into int32 [rows, out / 8]; `out` is a multiple of 8."""
    if codes.shape[-1] % 8:
        raise UsageError(f"AWQ packs output channels by eight; {codes.shape[-1]} of them leave a part of a word empty.")
    nibbles = codes.unflatten(-1, (-1, 8)).to(torch.int32)
    words = nibbles[..., NIBBLE_CHANNEL[0]].clone(memory_format=torch.contiguous_format)
    for nibble in range(1, 8):
        words |= nibbles[..., NIBBLE_CHANNEL[nibble]] << (4 * nibble)
    return words


def unpack_awq(words: Tensor) -> Tensor:
    """The exact inverse of `pack_awq`: int32 [rows, out / 8] to uint8 codes [rows, out]."""
    codes = words.new_empty((*words.shape, 8), dtype=torch.uint8)
    for nibble in range(8):
        codes[..., NIBBLE_CHANNEL[nibble]] = ((words >> (4 * nibble)) & 15).to(torch.uint8)
    return codes.flatten(-2)


def unpack_channels(weight: AwqWeight, start: int, stop: int) -> Tensor:
    """Codes uint8 [in, stop - start] of some output channels, `start` and `stop` multiples of 8."""
    bits, outputs = weight.bits, weight.scales.shape[1]
    if bits == 4:
        return unpack_awq(weight.qweight[:, start // 8 : stop // 8])
    if bits != 3:
        return unpack_planes(weight.qweight[:, start * bits // 8 : stop * bits // 8], bits)
    upper, lowest = weight.qweight.split((outputs // 4, outputs // 8), 1)
    return unpack_planes(torch.cat([upper[:, start // 4 : stop // 4], lowest[:, start // 8 : stop // 8]], 1), bits)


def quantize_weight(weight: Tensor, bits: int, group_size: int, clip: Tensor | None = None) -> AwqWeight:
    """Round a Linear's weight to the nearest code per group of inputs, packed as it is stored.

    An all-zero group gets scale 1 and q = z = 0, because a scale of 0 would be indistinguishable from a damaged file.

    Args:
        weight: [out, in], any float dtype; `out` a multiple of 8, `in` of `group_size`.
        bits: 2, 3, 4 or 8.
        group_size: inputs that share one scale and zero.
        clip: optional [out, in / group_size]: weights are first clamped to [-clip, clip].

    Raises:
        GroupRangeError: NaN, infinity, or a scale beyond fp16; its index is (output, group).
    """
    if bits not in WEIGHT_BITS:
        raise UsageError(f"Weights are stored at 2, 3, 4 or 8 bits, not {bits}.")
    groups = clipped_groups(weight, group_size, clip)
    scale, zero = group_grid(groups, bits)
    values = groups.div(scale).round_().add_(zero).clamp_(0, 2**bits - 1).flatten(1)
    return AwqWeight(
        qweight=pack_bits(values.to(torch.int32).T, bits),
        qzeros=pack_bits(zero.squeeze(-1).to(torch.int32).T, bits),
        scales=scale.squeeze(-1).T.to(torch.float16).contiguous(),
    )


def dequantize_weight(packed: AwqWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [out, in] that the packed tensors stand for: (q - z) scale in float32, rounded once to `dtype`."""
    codes, zeros = unpack_bits(packed.qweight, packed.bits), unpack_bits(packed.qzeros, packed.bits)
    groups = codes.unflatten(0, (zeros.shape[0], -1)).to(torch.float32)
    values = groups.sub_(zeros.float().unsqueeze(1)).mul_(packed.scales.float().unsqueeze(1))
    return values.flatten(0, 1).T.to(dtype).contiguous()


def fake_quantize_weight(weight: Tensor, bits: int, group_size: int, clip: Tensor | None = None) -> Tensor:
    """What the weight becomes when quantized and read back, without packing; made for searches, so any width.

    At a width that can be stored this equals `dequantize_weight(quantize_weight(...))` exactly, in float32.

    Args:
        weight: [..., in], any float dtype; `in` a multiple of `group_size`.
        bits: 2 to 8, or 16, at which the weight stays as it is.
        group_size: inputs that share one scale and zero.
        clip: optional [..., in / group_size]: weights are first clamped to [-clip, clip].

    Returns:
        a new tensor of the same shape and dtype.
    """
    if bits == 16:
        return weight.clone()
    if not 2 <= bits <= 8:
        raise UsageError(f"Weights cannot be quantized to {bits} bits; choose 2 to 8.")
    groups = clipped_groups(weight, group_size, clip)
    scale, zero = group_grid(groups, bits)
    values = groups.div(scale).round_().add_(zero).clamp_(0, 2**bits - 1).sub_(zero).mul_(scale)
    return values.flatten(-2).to(weight.dtype)


def clipped_groups(weight: Tensor, group_size: int, clip: Tensor | None) -> Tensor:
    """A weight [..., in] in float32 by groups of inputs, [..., in / group_size, group_size], within +- clip."""
    if group_size < 1 or weight.shape[-1] % group_size:
        raise UsageError(
            f"A group size of {group_size} does not divide the {weight.shape[-1]:,} inputs of this weight."
        )
    groups = weight.to(torch.float32).unflatten(-1, (-1, group_size))
    if clip is None:
        return groups
    bound = clip.to(torch.float32).unsqueeze(-1)
    return groups.clamp(min=-bound, max=bound)


def group_grid(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale (as stored in fp16, widened to float32) and zero of each group: two float32 tensors [..., groups, 1].

    Raises:
        GroupRangeError: NaN, infinity, or a scale beyond fp16; its index is (output, group).
    """
    low = groups.amin(-1, keepdim=True).clamp_(max=0)
    high = groups.amax(-1, keepdim=True).clamp_(min=0)
    extent = high - low
    scale = (extent / (2**bits - 1)).clamp_(min=SMALLEST_HALF).masked_fill_(extent == 0, 1.0).half().float()
    if not scale.isfinite().all():
        index = tuple(int(i) for i in (~scale.squeeze(-1).isfinite()).nonzero()[0])
        reason = (
            "holds NaN or infinity"
            if not groups[index].isfinite().all()
            else "spans more than fp16 scales can describe"
        )
        raise GroupRangeError(
            f"Weight group {index} (output, group) {reason}; repair the source model or keep this module unquantized.",
            index,
        )
    zero = (-low / scale).round_().clamp_(0, 2**bits - 1)
    return scale, zero
