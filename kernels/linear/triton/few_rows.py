"""Few rows times a weight of 2, 3, 4 or 8 bits, in Triton.

The weight's layout is that of kvconvert.kernels.linear.packed_layout: each field of its lanes is a matrix operand.

Conversion, here at 4 bits; widths.py has the others. Two lanes at a time, by a shift and one three-input logical
operation. For bf16 a code becomes 128 + c (0x4300 over the lowest bits of the mantissa, which for one nibble needs no
shift) or 16 + c (0x4180 over its highest bits); for fp16 the subnormal c 2^-24 or 16 c 2^-24, which needs neither the
constant nor half of the shifts, and which tensor cores multiply exactly. Bias and zero leave with a second product: sum
(c - z) x = sum (b + c) x - (b + z) sum x, whose last sum is a product with a matrix of ones, so that it arrives where
the accumulator is. The scale multiplies each group's sum in float32. No activation changes its dtype: an outlier of 1e5
in bf16 stays what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.kernels.device import compiles, multiprocessors
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.linear.packed_layout import TILE, PackedWeight
from kvconvert.kernels.linear.triton import codes_sum, fields, multiply, multiply_codes, parts_of, product_exponent

OUTPUTS = tl.constexpr(TILE)
# What turns fp16's subnormals back into codes.
_UNIT = tl.constexpr(2.0**24)


@triton.constexpr_function
def _operand_assembly(nibble, bf16):
    """What makes $0 of the lanes $1, two at a time."""
    # In bf16 an odd nibble is brought to bit 3, in fp16 it stays at bit 4.
    place = nibble // 2 * 8 + (nibble % 2 if bf16 else 0)
    source, shift = ("t", f".reg .b32 t; shr.u32 t, $1, {place}; ") if place else ("$1", "")
    mask = 0xF << (0 if nibble % 2 == 0 else 3 if bf16 else 4)
    if bf16:
        exponent = 0x4180 if nibble % 2 else 0x4300
        return f"{{{shift}lop3.b32 $0, {source}, 0x{mask * 0x10001:08X}, 0x{exponent * 0x10001:08X}, 0xEA;}}"
    return f"{{{shift}and.b32 $0, {source}, 0x{mask * 0x10001:08X};}}"


@triton.jit
def code_operand(lanes, NIBBLE: tl.constexpr, BF16: tl.constexpr, INLINE_ASM: tl.constexpr):
    """One nibble of each lane as a matrix operand.

    Even nibbles become 128 + c in bf16, c 2^-24 in fp16; odd ones 16 + c and 16 c 2^-24.
    """
    if INLINE_ASM:
        operand = tl.inline_asm_elementwise(
            _operand_assembly(NIBBLE, BF16), "=r,r", [lanes],
            dtype=tl.bfloat16 if BF16 else tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        code = (lanes.to(tl.int32) >> (4 * NIBBLE)) & 15
        if BF16:
            bits = (0x4180 | (code << 3)) if NIBBLE % 2 else (0x4300 | code)
            operand = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            operand = (code << (4 * (NIBBLE % 2))).to(tl.int16).to(tl.float16, bitcast=True)
    return operand


@triton.jit
def scale_of(grid):
    """The float32 scale in a word of the grid."""
    return (grid & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _corrected(product, sums, grid, CLASS: tl.constexpr, BF16: tl.constexpr):
    """sum (c - z) scale x over a k block from the operand's product and the sums of x, in float32."""
    zero = (grid >> 16).to(tl.float32)
    if BF16:
        return scale_of(grid) * (product - (zero + (16.0 if CLASS else 128.0)) * sums)
    return scale_of(grid) * (product * (_UNIT / 16.0**CLASS) - zero * sums)


@triton.jit
def warp_sums(
    lane_pointers,
    grid_pointers,
    x_pointers,
    tile_mask,
    row_mask,
    warp,
    k_blocks,
    W: tl.constexpr,
    S: tl.constexpr,
    EVEN: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """Each warp's sums over its own inputs, of the outputs' two classes: two of [S.warps, BLOCK, S.rows] in float32.

    Pointers are those of the first k block; masks say which lines of tiles and which rows there are.
    """
    DTYPE: tl.constexpr = x_pointers.dtype.element_ty
    BLOCK: tl.constexpr = S.tiles * 16
    BF16: tl.constexpr = x_pointers.dtype.element_ty == tl.bfloat16
    GROUPS: tl.constexpr = W.groups
    GROUP_PARTS: tl.constexpr = parts_of(W.bits) // GROUPS
    ones = tl.full([S.warps, BLOCK, W.part], 1.0, DTYPE)
    # To functions of Triton 3.6 a field of a record is no constant, and a name is.
    WARPS: tl.constexpr = S.warps
    ROWS: tl.constexpr = S.rows
    none = tl.zeros([WARPS, BLOCK, ROWS], tl.float32)
    low, high = none, none
    for step in tl.range(0, tl.cdiv(k_blocks, WARPS), num_stages=S.stages):
        k_block = step * S.warps + warp
        x_mask = row_mask
        mask = tile_mask
        if not EVEN:
            mask &= k_block < k_blocks
            x_mask &= k_block < k_blocks
        packed = tl.load(lane_pointers + k_block * W.lanes, mask=mask, other=0)
        if W.bits == 4:
            grid_low = tl.load(grid_pointers + k_block // W.group_k_blocks * OUTPUTS, mask=mask, other=0)
            grid_high = tl.load(grid_pointers + (k_block // W.group_k_blocks * OUTPUTS + 16), mask=mask, other=0)
            first = tl.load(x_pointers + k_block * W.k_block, mask=x_mask, other=0.0)
            second = tl.load(x_pointers + (k_block * W.k_block + W.part), mask=x_mask, other=0.0)
            sums = multiply(ones, second, multiply(ones, first, none, INLINE_ASM), INLINE_ASM)
            product = multiply(code_operand(packed, 0, BF16, INLINE_ASM), first, none, INLINE_ASM)
            product = multiply(code_operand(packed, 2, BF16, INLINE_ASM), second, product, INLINE_ASM)
            low += _corrected(product, sums, grid_low, 0, BF16)
            product = multiply(code_operand(packed, 1, BF16, INLINE_ASM), first, none, INLINE_ASM)
            product = multiply(code_operand(packed, 3, BF16, INLINE_ASM), second, product, INLINE_ASM)
            high += _corrected(product, sums, grid_high, 1, BF16)
        else:
            second_lanes, third_lanes = packed, packed
            if W.bits == 3:
                second_lanes = tl.load(lane_pointers + (k_block * W.lanes + 16 * W.part), mask=mask, other=0)
                third_lanes = tl.load(lane_pointers + (k_block * W.lanes + 32 * W.part), mask=mask, other=0)
            for group in tl.static_range(GROUPS):
                offset = (k_block // W.group_k_blocks * W.groups + group) * OUTPUTS
                grid_low = tl.load(grid_pointers + offset, mask=mask, other=0)
                grid_high = tl.load(grid_pointers + (offset + 16), mask=mask, other=0)
                sums, low_product, high_product = none, none, none
                for part in tl.static_range(group * GROUP_PARTS, (group + 1) * GROUP_PARTS):
                    inputs = tl.load(x_pointers + (k_block * W.k_block + part * W.part), mask=x_mask, other=0.0)
                    first, second = fields(
                        packed, second_lanes, third_lanes, part, W.bits, product_exponent(W.bits, BF16), INLINE_ASM
                    )
                    sums = multiply(ones, inputs, sums, INLINE_ASM)
                    low_product = multiply_codes(first, inputs, low_product, W.bits, INLINE_ASM)
                    high_product = multiply_codes(second, inputs, high_product, W.bits, INLINE_ASM)
                zero_low, zero_high = (grid_low >> 16).to(tl.float32), (grid_high >> 16).to(tl.float32)
                low += scale_of(grid_low) * codes_sum(low_product, sums, zero_low, W.bits, 0, BF16)
                high += scale_of(grid_high) * codes_sum(high_product, sums, zero_high, W.bits, 1, BF16)
    return low, high


@kernel(do_not_specialize=["rows", "octets", "k_blocks"])
def few_rows_kernel(
    x,
    lanes,
    grid,
    bias,
    y,
    rows,
    octets,
    k_blocks,
    W: tl.constexpr,
    S: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """y = x W^T + bias for S.rows rows and 32 S.tiles outputs per program; every warp sums over inputs of its own.

    The product has a batch dimension, which Triton deals out to the warps: so the inputs are split within a program,
    where the order of the sum is fixed and no second launch is needed.
    """
    BLOCK: tl.constexpr = S.tiles * 16
    # So that the compiler sees that rows of y start at multiples of 16 bytes.
    outputs = octets * 8
    program = tl.program_id(0)
    tiles = (outputs + OUTPUTS - 1) // OUTPUTS
    warp = tl.arange(0, S.warps)[:, None, None]
    line = tl.arange(0, BLOCK)[None, :, None]
    tile = program * S.tiles + line // 16
    column = tl.arange(0, W.part)[None, None, :]
    inner = tl.arange(0, W.part)[None, :, None]
    first_row = tl.program_id(1) * S.rows
    row = first_row + tl.arange(0, S.rows)[None, None, :]
    inputs = k_blocks * W.k_block
    groups = k_blocks * W.groups // W.group_k_blocks
    lane_pointers = lanes + tile * (k_blocks * W.lanes) + line % 16 * W.part + column
    grid_pointers = grid + tile * (groups * OUTPUTS) + line % 16
    x_pointers = x + row * inputs + inner
    low, high = warp_sums(
        lane_pointers, grid_pointers, x_pointers, tile < tiles, row < rows, warp, k_blocks,
        W, S, EVEN, INLINE_ASM,
    )  # fmt: skip
    line = tl.arange(0, BLOCK)[:, None]
    row = first_row + tl.arange(0, S.rows)[None, :]
    output = (program * S.tiles + line // 16) * OUTPUTS + line % 16
    pointers = y + row * outputs + output
    first_class, second_class = tl.sum(low, 0), tl.sum(high, 0)
    if HAS_BIAS:
        first_class += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
        second_class += tl.load(bias + output + 16, mask=output + 16 < outputs, other=0.0).to(tl.float32)
    tl.store(pointers, first_class.to(y.dtype.element_ty), mask=(row < rows) & (output < outputs))
    tl.store(pointers + 16, second_class.to(y.dtype.element_ty), mask=(row < rows) & (output + 16 < outputs))


@dataclass(frozen=True)
class FewRowsShape:
    """How `few_rows` runs: rows and tiles per program, warps, and loads in flight (pipeline stages)."""

    rows: int
    tiles: int
    warps: int
    stages: int

    def launch(self, k_blocks: int) -> dict[str, Any]:
        """The kernels' constants and options."""
        even = k_blocks % self.warps == 0
        return {"S": self, "EVEN": even, "num_warps": self.warps, "num_stages": self.stages}


# By most rows, fewest tiles of a weight per multiprocessor, and fewest k blocks; the first that fits is taken. What one
# or two rows need beside the weight is a fourth of what eight need, and counts.
FEW_ROWS_SHAPES = {
    (2, 3, 0): FewRowsShape(2, 2, 2, 3),
    (2, 0, 96): FewRowsShape(2, 1, 8, 4),
    (2, 0, 0): FewRowsShape(2, 1, 4, 4),
    (8, 3, 0): FewRowsShape(8, 2, 2, 3),
    (8, 0, 0): FewRowsShape(8, 1, 4, 4),
    (16, 3, 0): FewRowsShape(16, 2, 2, 3),
    (16, 0, 0): FewRowsShape(16, 1, 4, 3),
    (32, 3, 0): FewRowsShape(32, 1, 2, 3),
    (32, 0, 0): FewRowsShape(32, 1, 4, 3),
}
# The same for k blocks of 256 inputs.
WIDE_FEW_ROWS_SHAPES = {
    (2, 3, 0): FewRowsShape(2, 2, 1, 3),
    (2, 1, 0): FewRowsShape(2, 2, 4, 3),
    (2, 0, 0): FewRowsShape(2, 1, 4, 4),
    (8, 3, 0): FewRowsShape(8, 2, 2, 3),
    (8, 1, 0): FewRowsShape(8, 1, 2, 3),
    (8, 0, 0): FewRowsShape(8, 1, 4, 3),
    (16, 3, 0): FewRowsShape(16, 2, 2, 3),
    (16, 1, 0): FewRowsShape(16, 1, 2, 3),
    (16, 0, 0): FewRowsShape(16, 1, 4, 3),
    (32, 0, 0): FewRowsShape(32, 1, 2, 2),
}


def few_rows(x: Tensor, weight: PackedWeight, shape: FewRowsShape | None = None, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias for x [rows, in] of fp16 or bf16: [rows, out] in its dtype, sums in float32; bias [out]."""
    rows, (tiles, k_blocks) = checked(x, weight), weight.lanes.shape[:2]
    shape = shape or few_rows_shape(len(rows), tiles, weight, multiprocessors(x.device))
    y = rows.new_empty(len(rows), weight.outputs)
    few_rows_kernel[(triton.cdiv(tiles, shape.tiles), triton.cdiv(rows.shape[0], shape.rows))](
        rows, weight.lanes, weight.grid, y if bias is None else bias, y, rows.shape[0], weight.outputs // 8, k_blocks,
        W=weight.layout, **shape.launch(k_blocks), HAS_BIAS=bias is not None, INLINE_ASM=compiles(x.device),
    )  # fmt: skip
    return y


def few_rows_shapes(k_block: int) -> dict[tuple[int, int, int], FewRowsShape]:
    """All shapes for k blocks of this number of inputs."""
    return WIDE_FEW_ROWS_SHAPES if k_block > 128 else FEW_ROWS_SHAPES


def few_rows_shape(rows: int, tiles: int, weight: PackedWeight, multiprocessors: int) -> FewRowsShape:
    """What measured best on an H200 for these numbers of rows and tiles of a weight; benchmarks/KERNELS.md."""
    rows, k_blocks = min(rows, 32), weight.lanes.shape[1]
    return next(
        shape
        for (most, least_tiles, least_k_blocks), shape in few_rows_shapes(weight.k_block).items()
        if rows <= most and tiles >= least_tiles * multiprocessors and k_blocks >= least_k_blocks
    )


def checked(x: Tensor, weight: PackedWeight) -> Tensor:
    """The rows [n, padded inputs], contiguous and aligned for 16-byte loads."""
    if x.dim() != 2 or x.shape[1] != weight.inputs:
        raise UsageError(f"The kernels of this weight take [rows, {weight.inputs}], not {list(x.shape)}.")
    if weight.inputs < weight.padded_inputs:
        return torch.nn.functional.pad(x, (0, weight.padded_inputs - weight.inputs))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
