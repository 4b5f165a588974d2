"""The product with a quantized weight on a CPU, by two paths that agree up to the rounding of the input's dtype; and
with the unquantized weight of a 16-bit model where there are no instructions for its dtype.

- `int4pack`: torch's int4 matrix product, for bfloat16 and few rows, as in decoding. It wants its own weight layout,
  which holds codes of 2 and 3 bits exactly, in 4 bits each; 8 bits do not fit.
- `tiled`: dequantizes a few hundred output channels at a time into a buffer that stays in the cache, and multiplies.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvconvert.kernels.device import product_dtype
from kvconvert.kernels.linear.awq_format import (
    NIBBLE_CHANNEL,
    AwqWeight,
    pack_awq,
    unpack_awq,
    unpack_bits,
    unpack_channels,
)

# Up to this many rows a product with an unquantized weight reads it about once, which 16 bits make faster, not slower.
# Measured on an AVX2 processor: with 2 rows both take the same time, with 64 the product in bfloat16 six times as long.
FEW_ROWS = 2
# Measured on an AVX2 processor: for large weights torch's int4 product costs as much as dequantizing between 48
# and 64 rows, for small ones later.
INT4PACK_ROWS = 48
# What codes of fewer bits are raised by, so that 8 is in their middle and the offset, rounded to bfloat16, is small.
INT4PACK_SHIFT = {2: 6, 3: 4, 4: 0}
INT4PACK_GROUP_SIZES = (32, 64, 128, 256)
# Weights dequantized at a time. Measured: from 2^18 to 2^21 all are within a tenth, more leaves the cache. A tile has
# at least 128 channels all the same, because narrower ones read half cache lines of `qweight`.
TILE_WEIGHTS = 1 << 20
TILE_CHANNELS = 128
# Channels of the four bytes of an AWQ word, counted from the low end: the low nibbles', then the high nibbles'.
_BYTE_CHANNELS = (0, 4, 1, 5, 2, 6, 3, 7)


def takes_int4pack(rows: int, dtype: torch.dtype, out_features: int, group_size: int, bits: int = 4) -> bool:
    """Whether torch's int4 product is meant for this number of rows and dtype, and can have the weight."""
    fits = bits <= 4 and out_features % 16 == 0 and group_size in INT4PACK_GROUP_SIZES
    return dtype == torch.bfloat16 and rows <= INT4PACK_ROWS and fits and int4pack_block() is not None


def pack_int4(weight: AwqWeight) -> tuple[Tensor, Tensor]:
    """Codes and grid in torch's layout: uint8 [out, in / 2] and bfloat16 [groups, out, 2]."""
    scales, zeros = weight.scales.float(), unpack_bits(weight.qzeros, weight.bits).float()
    # That product computes w = (q - 8) scale + offset.
    shift = INT4PACK_SHIFT[weight.bits]
    grid = torch.stack((scales, (8 - shift - zeros) * scales), -1).to(torch.bfloat16)
    words, block = weight.qweight, int4pack_block()
    if weight.bits != 4:
        words = pack_awq(unpack_bits(words, weight.bits) + shift)
    whole = words.shape[1] * 8 // block * block
    step = -(-_channels_at_once(words.shape[0], TILE_WEIGHTS) // block) * block
    chunks = [_packed_blocks(part, block) for part in words[:, : whole // 8].split(step // 8, dim=1)]
    if whole < words.shape[1] * 8:
        codes = unpack_awq(words[:, whole // 8 :]).T.contiguous().int()
        chunks.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
    return torch.cat(chunks), grid


def _packed_blocks(words: Tensor, block: int) -> Tensor:
    """AWQ's words int32 [in, out / 8] of whole blocks in torch's layout, uint8 [out, in / 2]; see `unpack_int4pack`.

    Eight bytes of a block at a time: each nibble of a word is shifted to the byte of its channel, the lower half for
    channels of the block's first half, the upper one for the others.
    """
    inputs = words.shape[0]
    halves = words.unflatten(1, (-1, 2, block // 16))
    packed = torch.zeros(*halves[:, :, 0].shape, dtype=torch.int64)
    for half in (0, 1):
        source = halves[:, :, half].long()
        for nibble, channel in enumerate(NIBBLE_CHANNEL):
            code = source & (15 << 4 * nibble)
            left = 8 * channel + 4 * half - 4 * nibble
            packed |= code << left if left >= 0 else code >> -left
    return packed.transpose(0, 1).contiguous().view(torch.uint8).view(words.shape[1] * 8, inputs // 2)


def int4pack_product(rows: Tensor, packed: Tensor, grid: Tensor, group_size: int) -> Tensor:
    """`x W` of bfloat16 rows [R, in] by torch's int4 product: [R, out]."""
    return torch._weight_int4pack_mm_for_cpu(rows.contiguous(), packed, group_size, grid)


def tiled_product(
    rows: Tensor,
    qweight: Tensor | None,
    packed: Tensor | None,
    qzeros: Tensor,
    scales: Tensor,
    tile_weights: int = TILE_WEIGHTS,
) -> Tensor:
    """`x W` by tiles of output channels, which come out in the order their nibbles lie in ("lanes").

    Args:
        rows: [R, in], any float dtype.
        qweight: as in `AwqWeight`; None where `packed` holds the codes.
        packed: in torch's layout, see `unpack_int4pack`.
        qzeros, scales: as in `AwqWeight`.
        tile_weights: weights dequantized at a time.

    Returns:
        [R, out] in the dtype of `rows`.
    """
    inputs, groups, outputs = rows.shape[1], *scales.shape
    if packed is None and qzeros.dtype == torch.uint8:
        return _planes_product(rows, AwqWeight(qweight, qzeros, scales), tile_weights)
    tiling = _tiling(inputs, outputs, None if packed is None else int4pack_block(), tile_weights)
    scales = scales.index_select(1, tiling.channel).float()
    if qzeros.dtype == torch.int32:
        zero_bytes = qzeros.view(torch.uint8)
        zeros = torch.cat((zero_bytes & 15, zero_bytes >> 4), 1).index_select(1, tiling.zero)
    else:
        bits = 8 * qzeros.shape[1] // outputs
        zeros = unpack_bits(qzeros, bits).add_(INT4PACK_SHIFT[bits]).index_select(1, tiling.channel)
    compute = product_dtype(rows.dtype)
    rows_in, products = rows.to(compute), []
    buffer = torch.empty(inputs * max(stop - start for start, stop in tiling.tiles), dtype=torch.float32)
    for start, stop in tiling.tiles:
        half = (stop - start) // 2
        if packed is None:
            codes = qweight.view(torch.uint8)[:, start // 2 : stop // 2]
        else:
            codes = _int4pack_bytes(packed, start, stop)
        values = buffer[: inputs * 2 * half].view(inputs, 2 * half)
        for plane, first in ((codes & 15, 0), (codes >> 4, half)):
            # q - z in bytes, wrapping around: a quarter of the traffic of subtracting floats.
            plane.view(groups, -1, half).sub_(zeros[:, None, start + first : start + first + half])
            values[:, first : first + half] = plane.view(torch.int8)
        values.view(groups, -1, 2 * half).mul_(scales[:, None, start:stop])
        products.append(rows_in @ values.to(compute))
    y = products[0] if len(products) == 1 else torch.cat(products, 1)
    return y.index_select(1, tiling.lane).to(rows.dtype)


def _planes_product(rows: Tensor, weight: AwqWeight, tile_weights: int) -> Tensor:
    """`x W` of a weight of 2, 3 or 8 bits by tiles of output channels; see `tiled_product`."""
    inputs, groups, outputs = rows.shape[1], *weight.scales.shape
    zeros, scales = unpack_bits(weight.qzeros, weight.bits)[:, None], weight.scales.float()[:, None]
    compute = product_dtype(rows.dtype)
    rows_in, products = rows.to(compute), []
    step = _channels_at_once(inputs, tile_weights)
    for start in range(0, outputs, step):
        stop = min(start + step, outputs)
        codes = unpack_channels(weight, start, stop).view(groups, -1, stop - start)
        if weight.bits == 8:
            values = codes.float().sub_(zeros[..., start:stop])
        else:
            # In bytes, wrapping around, as at 4 bits.
            values = (codes - zeros[..., start:stop]).view(torch.int8).float()
        values.mul_(scales[..., start:stop])
        products.append(rows_in @ values.view(inputs, -1).to(compute))
    return torch.cat(products, 1).to(rows.dtype)


def _channels_at_once(in_features: int, weights: int) -> int:
    """Output channels that are dequantized at a time, for about this number of weights."""
    return max(TILE_CHANNELS, weights // in_features // TILE_CHANNELS * TILE_CHANNELS)


class _Tiling(NamedTuple):
    """How the tiles of one shape and layout enumerate output channels; a lane is a column of a tile.

    tiles: (start, stop) lanes of each tile, the first half of them low nibbles, the second high ones.
    channel: int64 [out], the channel of each lane. lane: its inverse. zero: [out], where a lane's zero is in the low
    nibbles of `qzeros`' bytes followed by the high ones.
    """

    tiles: tuple[tuple[int, int], ...]
    channel: Tensor
    lane: Tensor
    zero: Tensor


@lru_cache(maxsize=256)
def _tiling(in_features: int, out_features: int, block: int | None, tile_weights: int) -> _Tiling:
    """For AWQ's layout (`block` None) or torch's, whose blocks of that many channels split into halves."""
    whole = out_features if block is None else out_features // block * block
    step = _channels_at_once(in_features, tile_weights)
    tiles = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    if whole < out_features:
        tiles.append((whole, out_features))
    with torch.inference_mode(False), torch.device("cpu"):
        parts = []
        for start, stop in tiles:
            channels = torch.arange(start, stop)
            if block is None:
                parts += [channels.view(-1, 8)[:, list(_BYTE_CHANNELS[half : half + 4])].flatten() for half in (0, 4)]
            elif start < whole:
                parts += [channels.view(-1, 2, block // 2)[:, half].flatten() for half in (0, 1)]
            else:
                parts += [channels[half::2] for half in (0, 1)]
        channel = torch.cat(parts)
        words = torch.arange(out_features).view(-1, 8)
        zero_channel = torch.cat([words[:, list(_BYTE_CHANNELS[half : half + 4])].flatten() for half in (0, 4)])
        return _Tiling(tuple(tiles), channel, channel.argsort(), zero_channel.argsort()[channel])


def _int4pack_bytes(packed: Tensor, start: int, stop: int) -> Tensor:
    """Bytes of the channels from `start` to `stop`, blocks or the incomplete last one, as [in, (stop - start) / 2]."""
    half_inputs, block = packed.shape[1], int4pack_block()
    flat = packed.view(-1)[start * half_inputs : stop * half_inputs]
    if (stop - start) % block:
        return flat.view(2 * half_inputs, -1)
    return flat.view(-1, 2 * half_inputs, block // 2).transpose(0, 1).reshape(2 * half_inputs, -1)


def unpack_int4pack(packed: Tensor, block: int | None = None) -> Tensor:
    """Invert torch's `_convert_weight_to_int4pack_for_cpu`: uint8 [out, in / 2] to codes [out, in].

    Blocks of `block` channels (default: this processor's) hold for each input one byte per channel of their first
    half, whose high nibble is the channel half a block further; an incomplete last block pairs neighbouring channels
    instead.
    """
    block = block or int4pack_block()
    out_features, in_features = packed.shape[0], 2 * packed.shape[1]
    whole = out_features // block * block
    body, rest = packed.view(-1).split((whole * in_features // 2, (out_features - whole) * in_features // 2))
    codes = packed.new_empty(out_features, in_features)
    bytes_ = body.view(-1, in_features, block // 2).transpose(1, 2)
    halves = codes[:whole].view(-1, 2, block // 2, in_features)
    halves[:, 0], halves[:, 1] = bytes_ & 15, bytes_ >> 4
    if whole < out_features:
        pairs = rest.view(in_features, -1).T
        codes[whole::2], codes[whole + 1 :: 2] = pairs & 15, pairs >> 4
    return codes


@lru_cache(maxsize=1)
def int4pack_block() -> int | None:
    """Channels per block of torch's int4 layout on this processor, None where that layout is not one we can turn back.

    Known are AVX-512 (64) and AVX2 (32); a small conversion proves it, since torch does not document the layout.
    """
    block = {"AVX512": 64, "AVX2": 32}.get(torch.backends.cpu.get_cpu_capability())
    if block is None:
        return None
    with torch.inference_mode(False), torch.device("cpu"):
        codes = torch.arange(112 * 64).mul(7).remainder(31).remainder(16).view(112, 64)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        return block if torch.equal(unpack_int4pack(packed, block).long(), codes) else None


class DenseLinear(nn.Linear):
    """An `nn.Linear` whose products of many rows are computed in float32 where a CPU multiplies 16-bit numbers slowly.

    The weight stays 16-bit; a few hundred of its rows are widened at a time. Sums are float32, results have the dtype
    of the input. With gradients, on other devices and in other dtypes it is `nn.Linear`.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> DenseLinear:
        """A module with the parameters of `linear` themselves, not copies."""
        module = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        module.weight, module.bias = linear.weight, linear.bias
        return module.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rows = input.reshape(-1, self.in_features)
        slow = input.device.type == "cpu" and product_dtype(input.dtype) != input.dtype == self.weight.dtype
        recorded = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if not slow or recorded or len(rows) <= FEW_ROWS:
            return super().forward(input)
        return tiled_dense_product(rows, self.weight, self.bias).view(*input.shape[:-1], self.out_features)


def tiled_dense_product(rows: Tensor, weight: Tensor, bias: Tensor | None, tile_weights: int = TILE_WEIGHTS) -> Tensor:
    """`x W^T + b` of rows [R, in] with a weight [out, in], computed in float32: [R, out] in the rows' dtype."""
    outputs, inputs = weight.shape
    step = max(1, min(outputs, tile_weights // inputs))
    wide, widened = rows.float(), torch.empty(step, inputs, dtype=torch.float32)
    y = rows.new_empty(len(rows), outputs)
    for start in range(0, outputs, step):
        part = weight[start : start + step]
        product = wide @ widened[: len(part)].copy_(part).T
        if bias is not None:
            product += bias[start : start + step].float()
        y[:, start : start + step] = product
    return y
