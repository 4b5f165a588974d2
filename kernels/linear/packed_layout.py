"""The weights' layout of the quantized Linear's Triton kernels: what tensor cores want, without needing Triton itself.

Stored words hold several outputs of one input each; tensor cores want neighbouring inputs of one output together. So a
weight is repacked, code by code and therefore exactly, into int16 lanes of 16 / bits codes:

    lanes int16 [tiles, k_blocks, 16, k_block * bits / 8]
    grid int32 [tiles, groups, 2, 16] = zero << 16 | fp16 bits of scale

A tile is 32 outputs, a k block `k_block` of the inputs, over which is summed, cut in parts of K inputs: 2 parts at 4
bits, 4 at 2 and 3 bits, 1 at 8 bits. Lane [t, s, m, k] holds the codes of the outputs 32 t + 16 c + m for the inputs
s k_block + p K + k, of two classes c of outputs and all parts p, as fields of `bits` bits: number 2 p + c from the low
end. Each field of a block of lanes is thus a matrix operand [16, K], and no code has to move to another thread.

At 3 bits a block has its upper two bits first, 16 K lanes as at 2 bits, and then 16 K bytes with the lowest bits: byte
[m, k] has that of part p and class c in bit (0, 1, 4, 5)[p] + 2 c, so that one shift brings both classes in place.

A k block lies within a group; but at 2 and 3 bits it may be two groups, whose parts are summed apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.kernels.linear.awq_format import AwqWeight, pack_bits, unpack_bits, unpack_channels

TILE = 32
# Most inputs of a k block within a group. At 8 bits it has as many bytes as at 4.
LONGEST_K_BLOCK = {2: 128, 3: 128, 4: 128, 8: 64}
PARTS = {2: 4, 3: 4, 4: 2, 8: 1}
# An operand of a matrix product has at least so many inputs.
LEAST_PART = 16
# Bits of the lowest bits' bytes that belong to each part's first class, at 3 bits.
LOWEST_BIT = (0, 1, 4, 5)
# Codes repacked at a time, which bounds the memory that repacking needs beside the weight.
CHUNK_CODES = 1 << 24


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the layout of this module.

    Attributes:
        lanes: int16 [tiles, k_blocks, 16, k_block * bits / 8].
        grid: int32 [tiles, groups, 2, 16].
        outputs: how many are not padding.
        bits: width of a code.
    """

    lanes: Tensor
    grid: Tensor
    outputs: int
    bits: int = 4

    @property
    def k_block(self) -> int:
        """Inputs per k block."""
        return self.lanes.shape[3] * 8 // self.bits

    @property
    def inputs(self) -> int:
        """Inputs of the Linear."""
        return self.lanes.shape[1] * self.k_block

    @property
    def group_size(self) -> int:
        """Inputs that share one scale and zero."""
        return self.inputs // self.grid.shape[1]

    @property
    def constants(self) -> dict[str, int]:
        """What kernels have to know of the layout: K_BLOCK, BITS, and how k blocks and groups divide each other."""
        return {
            "K_BLOCK": self.k_block,
            "BITS": self.bits,
            "GROUPS": max(1, self.k_block // self.group_size),
            "GROUP_K_BLOCKS": max(1, self.group_size // self.k_block),
        }


def k_block_for(group_size: int, bits: int, inputs: int) -> int | None:
    """Inputs of a k block; None where this layout does not exist.

    Groups have 32, 64 or a multiple of 128 inputs. Groups of 32 at 2 or 3 bits are taken in pairs, for which the number
    of inputs has to be a multiple of 64.
    """
    if group_size not in (32, 64) and (group_size < 1 or group_size % 128):
        return None
    k_block = max(min(group_size, LONGEST_K_BLOCK[bits]), LEAST_PART * PARTS[bits])
    return None if inputs % k_block else k_block


def has_layout(group_size: int, bits: int = 4, inputs: int = 0) -> bool:
    """Whether this layout exists for a weight: see `k_block_for`. Without `inputs`, for some number of them."""
    return k_block_for(group_size, bits, inputs) is not None


def pack_weight(weight: AwqWeight, chunk_codes: int = CHUNK_CODES, k_block: int | None = None) -> PackedWeight:
    """Repack stored tensors, about `chunk_codes` at a time; `unpack_codes` is the exact inverse for the codes.

    Args:
        weight: to be repacked.
        chunk_codes: bounds the memory that is needed.
        k_block: another length of k blocks than that of `k_block_for`: at most two groups.
    """
    groups, outputs = weight.scales.shape
    inputs, bits = weight.qweight.shape[0], weight.bits
    group_size = inputs // groups
    k_block = k_block or k_block_for(group_size, bits, inputs)
    if k_block is None:
        raise UsageError(
            f"The GPU layout has groups of 32, 64 or a multiple of 128 inputs, not {inputs} inputs of {bits} bits in "
            f"groups of {group_size}."
        )
    tiles = -(-outputs // TILE)
    lanes = weight.qweight.new_zeros(tiles, inputs // k_block, 16, k_block * bits // 8, dtype=torch.int16)
    step = max(1, chunk_codes // (inputs * TILE))
    for start in range(0, tiles, step):
        codes = _padded(unpack_channels(weight, start * TILE, min((start + step) * TILE, outputs)))
        # [k_blocks, parts, K, tiles, classes, 16] to [tiles, k_blocks, 16, K] for each part and class.
        codes = codes.view(inputs // k_block, PARTS[bits], -1, codes.shape[1] // TILE, 2, 16).permute(1, 4, 3, 0, 5, 2)
        lanes[start : start + step] = _lanes_of(codes, bits).view(-1, *lanes.shape[1:])
    zeros = _padded(unpack_bits(weight.qzeros, bits)).int()
    scales = _padded(weight.scales.view(torch.int16)).int() & 0xFFFF
    grid = (zeros << 16 | scales).view(groups, tiles, 2, 16).transpose(0, 1).contiguous()
    return PackedWeight(lanes, grid, outputs, bits)


def unpack_codes(lanes: Tensor, outputs: int, chunk_codes: int = CHUNK_CODES, bits: int = 4) -> Tensor:
    """The stored qweight from the lanes of `pack_weight`."""
    tiles, k_blocks, _, width = lanes.shape
    inputs = k_blocks * width * 8 // bits
    parts = []
    step = max(1, chunk_codes // (inputs * TILE))
    for start in range(0, tiles, step):
        # [parts, classes, tiles, k_blocks, 16, K] to [inputs, outputs].
        codes = _codes_in(lanes[start : start + step], bits).permute(3, 0, 5, 2, 1, 4).reshape(inputs, -1)
        parts.append(pack_bits(codes[:, : outputs - start * TILE], bits))
    if bits != 3 or len(parts) == 1:
        return torch.cat(parts, 1)
    # Each part has both planes.
    planes = [part.split((part.shape[1] // 3 * 2, part.shape[1] // 3), 1) for part in parts]
    return torch.cat([upper for upper, _ in planes] + [lowest for _, lowest in planes], 1)


def _lanes_of(codes: Tensor, bits: int) -> Tensor:
    """Lanes from codes uint8 [parts, classes, tiles, k_blocks, 16, K], block by block."""
    fields = (codes >> 1 if bits == 3 else codes).to(torch.int16)
    width = 2 if bits == 3 else bits
    lanes = torch.zeros_like(fields[0, 0])
    for number, field in enumerate(fields.flatten(0, 1)):
        lanes |= field << width * number
    lanes = lanes.flatten(2)
    if bits != 3:
        return lanes
    lowest = torch.zeros_like(codes[0, 0])
    for part, first in enumerate(LOWEST_BIT):
        lowest |= (codes[part, 0] & 1) << first | (codes[part, 1] & 1) << first + 2
    return torch.cat([lanes, lowest.flatten(2).view(torch.int16)], 2)


def _codes_in(lanes: Tensor, bits: int) -> Tensor:
    """The inverse of `_lanes_of` for lanes [tiles, k_blocks, 16, k_block * bits / 8]."""
    width, parts = (2 if bits == 3 else bits), PARTS[bits]
    block = lanes.flatten(2)
    if bits == 3:
        block, lowest = block.split((block.shape[2] // 3 * 2, block.shape[2] // 3), 2)
        lowest = lowest.contiguous().view(torch.uint8).unflatten(2, (16, -1))
    block = block.unflatten(2, (16, -1))
    fields = [block >> width * number & 2**width - 1 for number in range(2 * parts)]
    codes = torch.stack(fields).to(torch.uint8).unflatten(0, (parts, 2))
    if bits == 3:
        bit = torch.stack([lowest >> first + 2 * c & 1 for first in LOWEST_BIT for c in (0, 1)])
        codes = codes.mul_(2).add_(bit.unflatten(0, (parts, 2)))
    return codes


def _padded(rows: Tensor) -> Tensor:
    """Zeros appended to the last dimension up to a whole tile."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % TILE))
