"""Triton kernels of the 4-bit Linear: few rows, prompts, and dequantization. 3 and 2 bits are not stored anywhere yet.

The weights' layout is that of kvconvert.kernels.gpu.linear_layout: each nibble of its lanes is a matrix operand.

Conversion. Two lanes at a time, by a shift and one three-input logical operation: for bf16 they become 16 + c (0x4180
over a mantissa whose top four bits are the code), for fp16 the subnormal c 2^-24 or 16 c 2^-24, which needs neither the
constant nor half of the shifts, and which tensor cores multiply exactly. The bias and the zero leave with a second
product: sum (c - z) x = sum (b + c) x - (b + z) sum x, whose last sum is a product with a matrix of ones, so that it
arrives where the accumulator is. No activation changes its dtype; an outlier of 1e5 in bf16 stays what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.kernels.gpu.linear_layout import DTYPES, TILE, PackedWeight

_OUTPUTS = tl.constexpr(TILE)
# What turns fp16's subnormals back into codes.
_UNIT = tl.constexpr(2.0**24)


@triton.jit
def _operand(lanes, NIBBLE: tl.constexpr, BF16: tl.constexpr, INLINE_ASM: tl.constexpr):
    """One nibble of each lane as a matrix operand: 16 + c in bf16; c 2^-24, odd nibbles 16 c 2^-24, in fp16."""
    if BF16:
        if INLINE_ASM:
            if NIBBLE == 0:
                operand = tl.inline_asm_elementwise(
                    "{.reg .b32 t; shl.b32 t, $1, 3; lop3.b32 $0, t, 0x00780078, 0x41804180, 0xEA;}",
                    "=r,r", [lanes], dtype=tl.bfloat16, is_pure=True, pack=2,
                )  # fmt: skip
            elif NIBBLE == 1:
                operand = tl.inline_asm_elementwise(
                    "{.reg .b32 t; shr.u32 t, $1, 1; lop3.b32 $0, t, 0x00780078, 0x41804180, 0xEA;}",
                    "=r,r", [lanes], dtype=tl.bfloat16, is_pure=True, pack=2,
                )  # fmt: skip
            elif NIBBLE == 2:
                operand = tl.inline_asm_elementwise(
                    "{.reg .b32 t; shr.u32 t, $1, 5; lop3.b32 $0, t, 0x00780078, 0x41804180, 0xEA;}",
                    "=r,r", [lanes], dtype=tl.bfloat16, is_pure=True, pack=2,
                )  # fmt: skip
            else:
                operand = tl.inline_asm_elementwise(
                    "{.reg .b32 t; shr.u32 t, $1, 9; lop3.b32 $0, t, 0x00780078, 0x41804180, 0xEA;}",
                    "=r,r", [lanes], dtype=tl.bfloat16, is_pure=True, pack=2,
                )  # fmt: skip
        else:
            code = (lanes.to(tl.int32) >> (4 * NIBBLE)) & 15
            operand = (0x4180 | (code << 3)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        if INLINE_ASM:
            if NIBBLE == 0:
                operand = tl.inline_asm_elementwise(
                    "and.b32 $0, $1, 0x000f000f;", "=r,r", [lanes], dtype=tl.float16, is_pure=True, pack=2
                )
            elif NIBBLE == 1:
                operand = tl.inline_asm_elementwise(
                    "and.b32 $0, $1, 0x00f000f0;", "=r,r", [lanes], dtype=tl.float16, is_pure=True, pack=2
                )
            elif NIBBLE == 2:
                operand = tl.inline_asm_elementwise(
                    "{.reg .b32 t; shr.u32 t, $1, 8; and.b32 $0, t, 0x000f000f;}",
                    "=r,r", [lanes], dtype=tl.float16, is_pure=True, pack=2,
                )  # fmt: skip
            else:
                operand = tl.inline_asm_elementwise(
                    "{.reg .b32 t; shr.u32 t, $1, 8; and.b32 $0, t, 0x00f000f0;}",
                    "=r,r", [lanes], dtype=tl.float16, is_pure=True, pack=2,
                )  # fmt: skip
        else:
            code = (lanes.to(tl.int32) >> (4 * NIBBLE)) & 15
            operand = (code << (4 * (NIBBLE % 2))).to(tl.int16).to(tl.float16, bitcast=True)
    return operand


@triton.jit
def _product(left, right, total, COMPILED: tl.constexpr):
    """total + left right in float32; Triton's interpreter knows no bfloat16 there."""
    if not COMPILED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total)


@triton.jit
def _scale(grid):
    return (grid & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _corrected(product, sums, grid, CLASS: tl.constexpr, BF16: tl.constexpr):
    """sum (c - z) scale x over a span from the operand's product and the sums of x, in float32."""
    zero = (grid >> 16).to(tl.float32)
    if BF16:
        return _scale(grid) * (product - (zero + 16.0) * sums)
    return _scale(grid) * (product * (_UNIT / 16.0**CLASS) - zero * sums)


@triton.jit(do_not_specialize=["rows", "outputs", "spans"])
def _few_rows_kernel(
    x,
    lanes,
    grid,
    y,
    rows,
    outputs,
    spans,
    SPAN: tl.constexpr,
    GROUP_SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """y[:rows] = x W^T for 32 TILES outputs per program; every warp has spans of its own, added up at the end.

    The product has a batch dimension, which Triton deals out to the warps: so the inputs are split within a program,
    where the order of the sum is fixed and no second launch is needed.
    """
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    HALF: tl.constexpr = SPAN // 2
    BLOCK: tl.constexpr = TILES * 16
    program = tl.program_id(0)
    tiles = (outputs + _OUTPUTS - 1) // _OUTPUTS
    warp = tl.arange(0, WARPS)[:, None, None]
    line = tl.arange(0, BLOCK)[None, :, None]
    tile = program * TILES + line // 16
    column = tl.arange(0, HALF)[None, None, :]
    inner = tl.arange(0, HALF)[None, :, None]
    row = tl.arange(0, ROWS)[None, None, :]
    ones = tl.full([WARPS, BLOCK, HALF], 1.0, x.dtype.element_ty)
    none = tl.zeros([WARPS, BLOCK, ROWS], tl.float32)
    low, high = none, none
    inputs = spans * SPAN
    groups = spans // GROUP_SPANS
    lane_pointers = lanes + (tile * spans + warp) * (16 * HALF) + line % 16 * HALF + column
    x_pointers = x + row * inputs + warp * SPAN + inner
    for step in tl.range(0, tl.cdiv(spans, WARPS), num_stages=STAGES):
        span = step * WARPS + warp
        grid_pointers = grid + (tile * groups + span // GROUP_SPANS) * _OUTPUTS + line % 16
        x_mask = row < rows
        mask = tile < tiles
        if not EVEN:
            mask &= span < spans
            x_mask &= span < spans
        packed = tl.load(lane_pointers + step * (WARPS * 16 * HALF), mask=mask, other=0)
        grid_low = tl.load(grid_pointers, mask=mask, other=0)
        grid_high = tl.load(grid_pointers + 16, mask=mask, other=0)
        first = tl.load(x_pointers + step * (WARPS * SPAN), mask=x_mask, other=0.0)
        second = tl.load(x_pointers + (step * (WARPS * SPAN) + HALF), mask=x_mask, other=0.0)
        sums = _product(ones, second, _product(ones, first, none, INLINE_ASM), INLINE_ASM)
        product = _product(_operand(packed, 0, BF16, INLINE_ASM), first, none, INLINE_ASM)
        product = _product(_operand(packed, 2, BF16, INLINE_ASM), second, product, INLINE_ASM)
        low += _corrected(product, sums, grid_low, 0, BF16)
        product = _product(_operand(packed, 1, BF16, INLINE_ASM), first, none, INLINE_ASM)
        product = _product(_operand(packed, 3, BF16, INLINE_ASM), second, product, INLINE_ASM)
        high += _corrected(product, sums, grid_high, 1, BF16)
    line = tl.arange(0, BLOCK)[:, None]
    row = tl.arange(0, ROWS)[None, :]
    output = (program * TILES + line // 16) * _OUTPUTS + line % 16
    pointers = y + row * outputs + output
    tl.store(pointers, tl.sum(low, 0).to(y.dtype.element_ty), mask=(row < rows) & (output < outputs))
    tl.store(pointers + 16, tl.sum(high, 0).to(y.dtype.element_ty), mask=(row < rows) & (output + 16 < outputs))


@triton.jit
def _weights(lanes, grid, NIBBLE: tl.constexpr, BF16: tl.constexpr, INLINE_ASM: tl.constexpr):
    """(c - z) scale of one nibble of each lane, rounded once or nearly so to the activations' dtype.

    c - z is exact in either dtype. bf16 has too few bits for the scale, which is therefore multiplied in two parts.
    """
    scale, zero = _scale(grid), (grid >> 16).to(tl.float32)
    if not INLINE_ASM:
        code = ((lanes.to(tl.int32) >> (4 * NIBBLE)) & 15).to(tl.float32)
        values = ((code - zero) * scale).to(tl.bfloat16 if BF16 else tl.float16)
    elif BF16:
        coarse = scale.to(tl.bfloat16)
        fine = (scale - coarse.to(tl.float32)).to(tl.bfloat16)
        zeros = (-16.0 - zero).to(tl.bfloat16)
        values = tl.inline_asm_elementwise(
            "{.reg .b32 d, one, none; mov.b32 one, 0x3F803F80; mov.b32 none, 0x80008000; "
            "fma.rn.bf16x2 d, $1, one, $2; fma.rn.bf16x2 none, d, $4, none; fma.rn.bf16x2 $0, d, $3, none;}",
            "=r,r,r,r,r", [_operand(lanes, NIBBLE, BF16, True), zeros, coarse, fine],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        half = scale.to(tl.float16)
        # 1024 + c or 1024 + 16 c, brought to c - z by one fused operation.
        zeros = (-64.0 - zero).to(tl.float16) if NIBBLE % 2 else (-1024.0 - zero).to(tl.float16)
        if NIBBLE == 0:
            values = tl.inline_asm_elementwise(
                "{.reg .b32 t, factor; lop3.b32 t, $1, 0x000f000f, 0x64006400, 0xEA; "
                "mov.b32 factor, 0x3C003C00; fma.rn.f16x2 t, t, factor, $2; mul.rn.f16x2 $0, t, $3;}",
                "=r,r,r,r", [lanes, zeros, half], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        elif NIBBLE == 1:
            values = tl.inline_asm_elementwise(
                "{.reg .b32 t, factor; lop3.b32 t, $1, 0x00f000f0, 0x64006400, 0xEA; "
                "mov.b32 factor, 0x2C002C00; fma.rn.f16x2 t, t, factor, $2; mul.rn.f16x2 $0, t, $3;}",
                "=r,r,r,r", [lanes, zeros, half], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        elif NIBBLE == 2:
            values = tl.inline_asm_elementwise(
                "{.reg .b32 t, factor; shr.u32 t, $1, 8; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xEA; "
                "mov.b32 factor, 0x3C003C00; fma.rn.f16x2 t, t, factor, $2; mul.rn.f16x2 $0, t, $3;}",
                "=r,r,r,r", [lanes, zeros, half], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            values = tl.inline_asm_elementwise(
                "{.reg .b32 t, factor; shr.u32 t, $1, 8; lop3.b32 t, t, 0x00f000f0, 0x64006400, 0xEA; "
                "mov.b32 factor, 0x2C002C00; fma.rn.f16x2 t, t, factor, $2; mul.rn.f16x2 $0, t, $3;}",
                "=r,r,r,r", [lanes, zeros, half], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    return values


@triton.jit(do_not_specialize=["rows", "outputs", "spans"])
def _prompt_kernel(
    x,
    lanes,
    grid,
    y,
    rows,
    outputs,
    spans,
    SPAN: tl.constexpr,
    GROUP_SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """y = x W^T for ROWS rows and 32 TILES outputs per program, the weights becoming the product's left operand."""
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    HALF: tl.constexpr = SPAN // 2
    BLOCK: tl.constexpr = TILES * 16
    row_blocks = (rows + ROWS - 1) // ROWS
    program = tl.program_id(0)
    first_row = program % row_blocks * ROWS
    first_tile = program // row_blocks * TILES
    tiles = (outputs + _OUTPUTS - 1) // _OUTPUTS
    groups = spans // GROUP_SPANS
    inputs = spans * SPAN
    line = tl.arange(0, BLOCK)
    # The last block reads its neighbours' tiles again where it has none of its own; what comes of them is not stored.
    tile = tl.minimum(first_tile + line // 16, tiles - 1)
    row = tl.arange(0, ROWS)
    low = tl.zeros([BLOCK, ROWS], tl.float32)
    high = tl.zeros([BLOCK, ROWS], tl.float32)
    column = tl.arange(0, HALF)
    lane_pointers = lanes + (tile * (spans * 16) + line % 16)[:, None] * HALF + column[None, :]
    x_rows = tl.minimum(first_row + row, rows - 1)
    x_pointers = x + x_rows.to(tl.int64)[None, :] * inputs + column[:, None]
    for span in tl.range(0, spans, num_stages=STAGES):
        grid_pointers = grid + (tile * groups + span // GROUP_SPANS) * _OUTPUTS + line % 16
        packed = tl.load(lane_pointers + span * (16 * HALF))
        grid_low = tl.load(grid_pointers)[:, None]
        grid_high = tl.load(grid_pointers + 16)[:, None]
        first = tl.load(x_pointers + span * SPAN)
        second = tl.load(x_pointers + (span * SPAN + HALF))
        low = _product(_weights(packed, grid_low, 0, BF16, INLINE_ASM), first, low, INLINE_ASM)
        high = _product(_weights(packed, grid_high, 1, BF16, INLINE_ASM), first, high, INLINE_ASM)
        low = _product(_weights(packed, grid_low, 2, BF16, INLINE_ASM), second, low, INLINE_ASM)
        high = _product(_weights(packed, grid_high, 3, BF16, INLINE_ASM), second, high, INLINE_ASM)
    output = ((first_tile + line // 16) * _OUTPUTS + line % 16)[:, None]
    row = (first_row + row)[None, :]
    pointers = y + row.to(tl.int64) * outputs + output
    tl.store(pointers, low.to(y.dtype.element_ty), mask=(row < rows) & (output < outputs))
    tl.store(pointers + 16, high.to(y.dtype.element_ty), mask=(row < rows) & (output + 16 < outputs))


@triton.jit(do_not_specialize=["first_tile", "tiles", "spans"])
def _dequantize_kernel(
    lanes,
    grid,
    weights,
    first_tile,
    tiles,
    spans,
    SPAN: tl.constexpr,
    GROUP_SPANS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Outputs of one tile and SPANS spans of inputs, dequantized to weights [outputs, inputs] in the dtype of these."""
    HALF: tl.constexpr = SPAN // 2
    program = tl.program_id(0)
    tile, step = program % tiles, program // tiles
    span = step * SPANS + tl.arange(0, SPANS)[None, :, None]
    line, column = tl.arange(0, 16)[:, None, None], tl.arange(0, HALF)[None, None, :]
    block = (first_tile + tile).to(tl.int64) * spans + span
    mask = span < spans
    packed = tl.load(lanes + block * (16 * HALF) + line * HALF + column, mask=mask, other=0).to(tl.int32)
    group = (first_tile + tile) * (spans // GROUP_SPANS) + span // GROUP_SPANS
    target = weights + (tile * _OUTPUTS + line).to(tl.int64) * (spans * SPAN) + span * SPAN + column
    for nibble in tl.static_range(4):
        pair = tl.load(grid + group * _OUTPUTS + nibble % 2 * 16 + line, mask=mask, other=0)
        codes = ((packed >> (4 * nibble)) & 15).to(tl.float32)
        values = (codes - (pair >> 16).to(tl.float32)) * _scale(pair)
        pointers = target + nibble % 2 * 16 * (spans * SPAN).to(tl.int64) + nibble // 2 * HALF
        tl.store(pointers, values.to(weights.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class FewRowsShape:
    """How `few_rows` runs: rows and tiles per program, warps, and loads in flight (pipeline stages)."""

    rows: int
    tiles: int
    warps: int
    stages: int


@dataclass(frozen=True)
class PromptShape:
    """How `prompt` runs: rows and tiles per program, warps, and loads in flight (pipeline stages)."""

    rows: int
    tiles: int
    warps: int
    stages: int


def few_rows(x: Tensor, weight: PackedWeight, shape: FewRowsShape | None = None) -> Tensor:
    """x W^T for x [rows, in] of fp16 or bf16 with up to 64 rows: [rows, out] in its dtype, sums in float32."""
    rows, shape = _checked(x, weight), shape or few_rows_shape(x.shape[0], weight)
    if x.shape[0] > shape.rows:
        raise UsageError(f"{x.shape[0]} rows do not fit the {shape.rows} of a program; call the prompt kernel.")
    y = rows.new_empty(rows.shape[0], weight.outputs)
    tiles, spans = weight.lanes.shape[:2]
    _few_rows_kernel[(triton.cdiv(tiles, shape.tiles),)](
        rows, weight.lanes, weight.grid, y, rows.shape[0], weight.outputs, spans,
        SPAN=weight.span, GROUP_SPANS=weight.group_size // weight.span, ROWS=shape.rows, TILES=shape.tiles,
        WARPS=shape.warps, EVEN=spans % shape.warps == 0, STAGES=shape.stages, INLINE_ASM=x.is_cuda,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return y


def prompt(x: Tensor, weight: PackedWeight, shape: PromptShape | None = None) -> Tensor:
    """x W^T for x [rows, in] of fp16 or bf16: [rows, out], weights dequantized on the way to the tensor cores."""
    rows, shape = _checked(x, weight), shape or prompt_shape(x.shape[0], weight)
    y = rows.new_empty(rows.shape[0], weight.outputs)
    tiles, spans = weight.lanes.shape[:2]
    _prompt_kernel[(triton.cdiv(tiles, shape.tiles) * triton.cdiv(rows.shape[0], shape.rows),)](
        rows, weight.lanes, weight.grid, y, rows.shape[0], weight.outputs, spans,
        SPAN=weight.span, GROUP_SPANS=weight.group_size // weight.span, ROWS=shape.rows, TILES=shape.tiles,
        STAGES=shape.stages, INLINE_ASM=x.is_cuda, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return y


def dequantize(weight: PackedWeight, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
    """Outputs from tile `start` to tile `stop` of the weight, [outputs, in], computed in float32 and rounded once."""
    tiles, spans = weight.lanes.shape[:2]
    stop = tiles if stop is None else stop
    values = torch.empty((stop - start) * TILE, weight.inputs, dtype=dtype, device=weight.lanes.device)
    count = max(1, 512 // weight.span)
    _dequantize_kernel[((stop - start) * triton.cdiv(spans, count),)](
        weight.lanes, weight.grid, values, start, stop - start, spans,
        SPAN=weight.span, GROUP_SPANS=weight.group_size // weight.span, SPANS=count, num_warps=4,
    )  # fmt: skip
    return values[: min(stop * TILE, weight.outputs) - start * TILE]


def unpacked(x: Tensor, weight: PackedWeight, chunk: int = 1 << 24) -> Tensor:
    """x W^T by torch's matrix product over a few outputs at a time, `chunk` weights being dequantized for each."""
    rows = _checked(x, weight)
    y = rows.new_empty(rows.shape[0], weight.outputs)
    step = max(1, chunk // (weight.inputs * TILE))
    for start in range(0, weight.lanes.shape[0], step):
        values = dequantize(weight, x.dtype, start, min(start + step, weight.lanes.shape[0]))
        y[:, start * TILE : start * TILE + values.shape[0]] = rows @ values.T
    return y


def few_rows_shape(rows: int, weight: PackedWeight) -> FewRowsShape:
    """What measured best for so many rows of this weight."""
    return FewRowsShape(8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64, 1, 8, 3)


def prompt_shape(rows: int, weight: PackedWeight) -> PromptShape:
    """What measured best for so many rows of this weight."""
    return PromptShape(64, 4, 4, 4) if rows <= 64 else PromptShape(128, 8, 8, 3)


def _checked(x: Tensor, weight: PackedWeight) -> Tensor:
    """The rows, contiguous and aligned for 16-byte loads."""
    if x.dtype not in DTYPES:
        raise UsageError(f"The 4-bit kernels take fp16 and bf16 activations, not {x.dtype}; use w4a16_reference.")
    if x.dim() != 2 or x.shape[1] != weight.inputs:
        raise UsageError(f"The 4-bit kernels take [rows, {weight.inputs}], not {list(x.shape)}.")
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
