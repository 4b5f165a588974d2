"""The weights' layout of the 4-bit Linear's Triton kernels: what tensor cores want, without needing Triton itself.

AWQ's words hold eight outputs of one input each; tensor cores want neighbouring inputs of one output together. So a
weight is repacked, nibble by nibble and therefore exactly, into int16 lanes of four codes:

    lanes int16 [tiles, k_blocks, 16, k_block / 2]
    grid int32 [tiles, groups, 2, 16] = zero << 16 | fp16 bits of scale

A tile is 32 outputs, a k block min(group_size, 128) of the inputs, over which is summed. Nibble 2 h + c of lane
[t, s, m, k] is the code of output 32 t + 16 c + m for input s k_block + h k_block / 2 + k. Each nibble of a block of
lanes is thus a matrix operand [16, k_block / 2], of two classes c of outputs and two halves h of the inputs, and no
code has to move to another thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.kernels.linear.awq_format import AwqWeight, pack_awq, unpack_awq

TILE = 32
LONGEST_K_BLOCK = 128
# Codes repacked at a time, which bounds the memory that repacking needs beside the weight.
CHUNK_CODES = 1 << 24


@dataclass(frozen=True)
class PackedWeight:
    """A 4-bit weight in the layout of this module.

    Attributes:
        lanes: int16 [tiles, k_blocks, 16, k_block / 2].
        grid: int32 [tiles, groups, 2, 16].
        outputs: how many are not padding.
    """

    lanes: Tensor
    grid: Tensor
    outputs: int

    @property
    def k_block(self) -> int:
        """Inputs per k block."""
        return 2 * self.lanes.shape[3]

    @property
    def inputs(self) -> int:
        """Inputs of the Linear."""
        return self.lanes.shape[1] * self.k_block

    @property
    def group_size(self) -> int:
        """Inputs that share one scale and zero."""
        return self.inputs // self.grid.shape[1]


def has_layout(group_size: int) -> bool:
    """Whether this layout exists for groups of so many inputs: 32, 64 and multiples of 128."""
    return group_size in (32, 64) or (group_size > 0 and group_size % LONGEST_K_BLOCK == 0)


def pack_weight(weight: AwqWeight, chunk_codes: int = CHUNK_CODES) -> PackedWeight:
    """Repack AWQ's tensors, about `chunk_codes` at a time; `unpack_codes` is the exact inverse for the codes."""
    inputs, outputs = weight.qweight.shape[0], weight.scales.shape[1]
    groups = weight.scales.shape[0]
    if not has_layout(inputs // groups):
        raise UsageError(f"The GPU layout has groups of 32, 64 or a multiple of 128 inputs, not of {inputs // groups}.")
    k_block = min(inputs // groups, LONGEST_K_BLOCK)
    tiles = -(-outputs // TILE)
    lanes = weight.qweight.new_zeros(tiles, inputs // k_block, 16, k_block // 2, dtype=torch.int16)
    step = max(1, chunk_codes // (inputs * TILE))
    for start in range(0, tiles, step):
        words = weight.qweight[:, start * (TILE // 8) : (start + step) * (TILE // 8)]
        codes = _padded(unpack_awq(words)).to(torch.int16)
        # [k_blocks, halves, k_block / 2, tiles, classes, 16] to
        # [tiles, k_blocks, 16, k_block / 2] for each half and class.
        codes = codes.view(inputs // k_block, 2, k_block // 2, -1, 2, 16).permute(1, 4, 3, 0, 5, 2)
        lanes[start : start + step] = codes[0, 0] | codes[0, 1] << 4 | codes[1, 0] << 8 | codes[1, 1] << 12
    zeros = _padded(unpack_awq(weight.qzeros)).int()
    scales = _padded(weight.scales.view(torch.int16)).int() & 0xFFFF
    grid = (zeros << 16 | scales).view(groups, tiles, 2, 16).transpose(0, 1).contiguous()
    return PackedWeight(lanes, grid, outputs)


def unpack_codes(lanes: Tensor, outputs: int, chunk_codes: int = CHUNK_CODES) -> Tensor:
    """AWQ's qweight int32 [in, out / 8] from the lanes of `pack_weight`."""
    tiles, k_blocks, _, half = lanes.shape
    qweight = lanes.new_empty(k_blocks * 2 * half, outputs // 8, dtype=torch.int32)
    step = max(1, chunk_codes // (k_blocks * 2 * half * TILE))
    for start in range(0, tiles, step):
        part = lanes[start : start + step]
        codes = torch.stack([part >> 4 * nibble & 15 for nibble in range(4)]).unflatten(0, (2, 2))
        codes = codes.permute(3, 0, 5, 2, 1, 4).reshape(k_blocks * 2 * half, -1)
        qweight[:, start * (TILE // 8) : (start + step) * (TILE // 8)] = pack_awq(codes[:, : outputs - start * TILE])
    return qweight


def _padded(rows: Tensor) -> Tensor:
    """Zeros appended to the last dimension up to a whole tile."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % TILE))
