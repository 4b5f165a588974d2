"""The weights' layout of the quantized Linear's Triton kernels: what tensor cores want, without needing Triton itself.

Stored words hold several outputs of one input each; tensor cores want neighbouring inputs of one output together. So a
weight is repacked, code by code and therefore exactly, into int16 lanes of 16 / bits codes:

    lanes int16 [tiles, k_blocks, 16, k_block * bits / 8]
    grid int32 [tiles, groups, 2, 16] = zero << 16 | fp16 bits of scale

A tile is 32 outputs, a k block `k_block` of the inputs, over which is summed, cut in parts of K inputs: 2 parts at 4
bits, 4 at 2 bits, 8 at 3 bits, 1 at 8 bits. At 2, 4 and 8 bits lane [t, s, m, k] holds the codes of the outputs
32 t + 16 c + m for the inputs s k_block + p K + k, of two classes c of outputs and all parts p, as fields of `bits`
bits: number 2 p + c from the low end. Each field of a block of lanes is thus a matrix operand [16, K], and no code has
to move to another thread.

At 3 bits a block is three such matrices of lanes [16, K], one behind the other, which have five fields each: those of
parts 0 to 2 and 3 to 5 in bits 0 to 5 and 6 to 11 of the three, those of parts 6 and 7 in bits 12 to 14. The sixteenth,
of part 7 and the second class, has a bit in bit 15 of each matrix. With one shift a part's fields are in place, as at 2
bits.

A k block lies within a group, or is several of them, whose parts are summed apart. Inputs that do not fill the last one
are padded with zeros, the activations too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.kernels.linear.awq_format import AwqWeight, pack_bits, unpack_bits, unpack_channels

TILE = 32
# Most inputs of a k block.
LONGEST_K_BLOCK = {2: 256, 3: 256, 4: 128, 8: 128}
PARTS = {2: 4, 3: 8, 4: 2, 8: 1}
# The fewest inputs of an operand of a matrix product.
LEAST_PART = 16
# Codes repacked at a time, which bounds the memory that repacking needs beside the weight.
CHUNK_CODES = 1 << 24


def _places(bits: int, part: int, number: int) -> list[tuple[int, int, int, int]]:
    if bits != 3:
        return [(0, bits * (2 * part + number), 0, bits)]
    if part < 6:
        return [(part % 3, 6 * (part // 3) + 3 * number, 0, 3)]
    if (part, number) == (7, 1):
        return [(matrix, 15, matrix, 1) for matrix in range(3)]
    return [(2 * part - 12 + number, 12, 0, 3)]


# Where codes lie, by width, part and class: matrix of a block, first bit there, first bit of the code, how many bits.
PLACES = {
    bits: [[_places(bits, part, number) for number in (0, 1)] for part in range(parts)] for bits, parts in PARTS.items()
}


@dataclass(frozen=True)
class WeightLayout:
    """What kernels are specialized on.

    Attributes:
        k_block: inputs of a k block.
        bits: width of a code.
        groups, group_k_blocks: groups of a k block, and k blocks of a group, one of which is 1.
    """

    k_block: int
    bits: int
    groups: int
    group_k_blocks: int

    @property
    def part(self) -> int:
        """Inputs of a part of a k block, whose codes share lanes with those of others."""
        return self.k_block // PARTS[self.bits]

    @property
    def lanes(self) -> int:
        """Lanes of a k block and tile."""
        return 2 * self.bits * self.k_block


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the layout of this module.

    Attributes:
        lanes: int16 [tiles, k_blocks, 16, k_block * bits / 8].
        grid: int32 [tiles, groups, 2, 16].
        inputs, outputs: how many are not padding.
        bits: width of a code.
        values: [outputs, inputs] in 16 bits, what it stands for, kept beside it for products that would dequantize it;
            None where they do.
    """

    lanes: Tensor
    grid: Tensor
    inputs: int
    outputs: int
    bits: int = 4
    values: Tensor | None = None

    @property
    def k_block(self) -> int:
        """Inputs per k block."""
        return self.lanes.shape[3] * 8 // self.bits

    @property
    def padded_inputs(self) -> int:
        """Inputs of all k blocks."""
        return self.lanes.shape[1] * self.k_block

    @property
    def group_size(self) -> int:
        """Inputs that share one scale and zero."""
        return self.padded_inputs // self.grid.shape[1]

    @cached_property
    def layout(self) -> WeightLayout:
        """What kernels have to know of the layout."""
        groups, k_blocks = self.k_block // self.group_size, self.group_size // self.k_block
        return WeightLayout(self.k_block, self.bits, max(1, groups), max(1, k_blocks))


def k_block_for(group_size: int, bits: int, inputs: int) -> int:
    """Inputs of a k block: of those lengths whose padding is least, the longest. `has_layout` says of which groups.

    A k block of 4 or 8 bits lies within a group; of 2 and 3 bits each part does.
    """
    parts = PARTS[bits] if bits < 4 else 1
    lengths = [1 << power for power in range(4, 9)]
    found = [
        length
        for length in lengths
        if LEAST_PART * PARTS[bits] <= length <= min(LONGEST_K_BLOCK[bits], group_size * parts)
        and (length % group_size == 0 or group_size % length == 0)
    ]
    return min(found, key=lambda length: (-inputs % length, -length))


def has_layout(group_size: int) -> bool:
    """Whether this layout exists: groups have 32, 64 or a multiple of 128 inputs."""
    return group_size in (32, 64) or (group_size > 0 and group_size % 128 == 0)


def pack_weight(weight: AwqWeight, chunk_codes: int = CHUNK_CODES, k_block: int | None = None) -> PackedWeight:
    """Repack stored tensors, about `chunk_codes` at a time; `unpack_codes` is the exact inverse for the codes.

    Args:
        weight: to be repacked.
        chunk_codes: bounds the memory that is needed.
        k_block: another length of k blocks than that of `k_block_for`.
    """
    groups, outputs = weight.scales.shape
    inputs, bits = weight.qweight.shape[0], weight.bits
    group_size = inputs // groups
    if not has_layout(group_size):
        raise UsageError(
            f"The GPU layout has groups of 32, 64 or a multiple of 128 inputs, not {inputs:,} inputs in groups of "
            f"{group_size}."
        )
    k_block = k_block or k_block_for(group_size, bits, inputs)
    tiles, k_blocks = -(-outputs // TILE), -(-inputs // k_block)
    lanes = weight.qweight.new_zeros(tiles, k_blocks, 16, k_block * bits // 8, dtype=torch.int16)
    step = max(1, chunk_codes // (inputs * TILE))
    for start in range(0, tiles, step):
        codes = _padded(unpack_channels(weight, start * TILE, min((start + step) * TILE, outputs)), k_blocks * k_block)
        # [k_blocks, parts, K, tiles, classes, 16] to [tiles, k_blocks, 16, K] for each part and class.
        codes = codes.reshape(k_blocks, PARTS[bits], -1, codes.shape[1] // TILE, 2, 16).permute(1, 4, 3, 0, 5, 2)
        lanes[start : start + step] = _lanes_of(codes, bits).view(-1, *lanes.shape[1:])
    zeros, scales = unpack_bits(weight.qzeros, bits).int(), weight.scales.view(torch.int16).int() & 0xFFFF
    grid = _padded(zeros << 16 | scales, k_blocks * k_block // group_size)
    return PackedWeight(lanes, grid.view(-1, tiles, 2, 16).transpose(0, 1).contiguous(), inputs, outputs, bits)


def unpack_codes(packed: PackedWeight, chunk_codes: int = CHUNK_CODES) -> Tensor:
    """The stored qweight of a weight from `pack_weight`."""
    bits, parts = packed.bits, []
    step = max(1, chunk_codes // (packed.padded_inputs * TILE))
    for start in range(0, len(packed.lanes), step):
        # [parts, classes, tiles, k_blocks, 16, K] to [inputs, outputs].
        codes = _codes_in(packed.lanes[start : start + step], bits).permute(3, 0, 5, 2, 1, 4)
        codes = codes.reshape(packed.padded_inputs, -1)[: packed.inputs, : packed.outputs - start * TILE]
        parts.append(pack_bits(codes, bits))
    if bits != 3 or len(parts) == 1:
        return torch.cat(parts, 1)
    # Each part has both planes.
    planes = [part.split((part.shape[1] // 3 * 2, part.shape[1] // 3), 1) for part in parts]
    return torch.cat([upper for upper, _ in planes] + [lowest for _, lowest in planes], 1)


def _lanes_of(codes: Tensor, bits: int) -> Tensor:
    """Lanes from codes uint8 [parts, classes, tiles, k_blocks, 16, K], block by block."""
    lanes = codes.new_zeros(3 if bits == 3 else 1, *codes.shape[2:], dtype=torch.int16)
    for part, number in product(range(PARTS[bits]), range(2)):
        for matrix, first, code_bit, count in PLACES[bits][part][number]:
            lanes[matrix] |= (codes[part, number].to(torch.int16) >> code_bit & 2**count - 1) << first
    # The matrices of a block lie behind each other.
    return lanes.permute(1, 2, 0, 3, 4).contiguous()


def _codes_in(lanes: Tensor, bits: int) -> Tensor:
    """The inverse of `_lanes_of` for lanes [tiles, k_blocks, 16, k_block * bits / 8]."""
    matrices = lanes.flatten(2).unflatten(2, (3 if bits == 3 else 1, 16, -1)).permute(2, 0, 1, 3, 4)
    codes = lanes.new_zeros(PARTS[bits], 2, *matrices.shape[1:], dtype=torch.uint8)
    for part, number in product(range(PARTS[bits]), range(2)):
        for matrix, first, code_bit, count in PLACES[bits][part][number]:
            codes[part, number] |= ((matrices[matrix] >> first & 2**count - 1) << code_bit).to(torch.uint8)
    return codes


def _padded(table: Tensor, rows: int) -> Tensor:
    """[n, outputs] padded with zeros to this number of rows and to whole tiles."""
    return torch.nn.functional.pad(table, (0, -table.shape[1] % TILE, 0, rows - len(table)))
