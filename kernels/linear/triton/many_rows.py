"""A prompt's many rows times a weight of 2 to 8 bits: dequantized on the way to tensor cores, or for torch's product.

The layout is that of kvconvert.kernels.linear.packed_layout. The weights are the product's left operand, so that each
of them is dequantized by one thread of a program, in registers, for all of the program's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.device import capability, compiles, multiprocessors
from kvconvert.kernels.launches import skips_launches
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.linear.packed_layout import TILE, PackedWeight
from kvconvert.kernels.linear.triton import fields, multiply, parts_of, second_bit, value_exponent, values_of
from kvconvert.kernels.linear.triton.few_rows import OUTPUTS, checked, code_operand, scale_of


@triton.constexpr_function
def _half_assembly(nibble):
    """$0 = ((1024 + c, or 1024 + 16 c) factor + $2) $3 in fp16 of a nibble c of the lanes $1, two at a time."""
    shift = "shr.u32 t, $1, 8; " if nibble > 1 else ""
    mask, factor = ("0x00f000f0", "0x2C002C00") if nibble % 2 else ("0x000f000f", "0x3C003C00")
    return (
        f"{{.reg .b32 t, factor; {shift}lop3.b32 t, {'t' if shift else '$1'}, {mask}, 0x64006400, 0xEA; "
        f"mov.b32 factor, {factor}; fma.rn.f16x2 t, t, factor, $2; mul.rn.f16x2 $0, t, $3;}}"
    )


@triton.jit
def _weights(lanes, grid, NIBBLE: tl.constexpr, BF16: tl.constexpr, INLINE_ASM: tl.constexpr):
    """(c - z) scale of one nibble of each lane, rounded once or nearly so to the activations' dtype.

    c - z is exact in either dtype. bf16 has too few bits for the scale, which is therefore multiplied in two parts.
    """
    scale, zero = scale_of(grid), (grid >> 16).to(tl.float32)
    if not INLINE_ASM:
        code = ((lanes.to(tl.int32) >> (4 * NIBBLE)) & 15).to(tl.float32)
        values = ((code - zero) * scale).to(tl.bfloat16 if BF16 else tl.float16)
    elif BF16:
        coarse = scale.to(tl.bfloat16)
        fine = (scale - coarse.to(tl.float32)).to(tl.bfloat16)
        zeros = ((-16.0 if NIBBLE % 2 else -128.0) - zero).to(tl.bfloat16)
        values = tl.inline_asm_elementwise(
            "{.reg .b32 d, one, none; mov.b32 one, 0x3F803F80; mov.b32 none, 0x80008000; "
            "fma.rn.bf16x2 d, $1, one, $2; fma.rn.bf16x2 none, d, $4, none; fma.rn.bf16x2 $0, d, $3, none;}",
            "=r,r,r,r,r", [code_operand(lanes, NIBBLE, BF16, True), zeros, coarse, fine],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        half = scale.to(tl.float16)
        # 1024 + c or 1024 + 16 c, brought to c - z by one fused operation.
        zeros = (-64.0 - zero).to(tl.float16) if NIBBLE % 2 else (-1024.0 - zero).to(tl.float16)
        values = tl.inline_asm_elementwise(
            _half_assembly(NIBBLE), "=r,r,r,r", [lanes, zeros, half], dtype=tl.float16, is_pure=True, pack=2
        )
    return values


@triton.jit
def _values(field, grid, BITS: tl.constexpr, CLASS: tl.constexpr, BF16: tl.constexpr, INLINE_ASM: tl.constexpr):
    """The weights of one part and class at 2, 3 or 8 bits; see `values_of`."""
    return values_of(field, scale_of(grid), (grid >> 16).to(tl.float32), BITS, CLASS, BF16, INLINE_ASM)


@triton.jit
def tile_sums(
    lane_block,
    lane_offsets,
    grid_block,
    grid_offsets,
    x_block,
    x_offsets,
    k_blocks,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """Sums over all inputs of the outputs' two classes, two of [BLOCK, ROWS] in float32; offsets of the first block."""
    BF16: tl.constexpr = x_block.dtype.element_ty == tl.bfloat16
    GROUPS: tl.constexpr = W.groups
    GROUP_PARTS: tl.constexpr = parts_of(W.bits) // GROUPS
    low = tl.zeros([BLOCK, ROWS], tl.float32)
    high = tl.zeros([BLOCK, ROWS], tl.float32)
    for k_block in tl.range(0, k_blocks, num_stages=STAGES):
        packed = tl.load(lane_block + k_block * W.lanes + lane_offsets)
        if W.bits == 4:
            grid_low = tl.load(grid_block + k_block // W.group_k_blocks * OUTPUTS + grid_offsets)[:, None]
            grid_high = tl.load(grid_block + (k_block // W.group_k_blocks * OUTPUTS + 16) + grid_offsets)[:, None]
            first = tl.load(x_block + k_block * W.k_block + x_offsets)
            second = tl.load(x_block + (k_block * W.k_block + W.part) + x_offsets)
            low = multiply(_weights(packed, grid_low, 0, BF16, INLINE_ASM), first, low, INLINE_ASM)
            high = multiply(_weights(packed, grid_high, 1, BF16, INLINE_ASM), first, high, INLINE_ASM)
            low = multiply(_weights(packed, grid_low, 2, BF16, INLINE_ASM), second, low, INLINE_ASM)
            high = multiply(_weights(packed, grid_high, 3, BF16, INLINE_ASM), second, high, INLINE_ASM)
        else:
            second_lanes, third_lanes = packed, packed
            if W.bits == 3:
                second_lanes = tl.load(lane_block + (k_block * W.lanes + 16 * W.part) + lane_offsets)
                third_lanes = tl.load(lane_block + (k_block * W.lanes + 32 * W.part) + lane_offsets)
            for group in tl.static_range(GROUPS):
                grid_pointers = grid_block + (k_block // W.group_k_blocks * W.groups + group) * OUTPUTS + grid_offsets
                grid_low = tl.load(grid_pointers)[:, None]
                grid_high = tl.load(grid_pointers + 16)[:, None]
                for part in tl.static_range(group * GROUP_PARTS, (group + 1) * GROUP_PARTS):
                    inputs = tl.load(x_block + (k_block * W.k_block + part * W.part) + x_offsets)
                    first, second = fields(
                        packed, second_lanes, third_lanes, part, W.bits, value_exponent(W.bits, BF16), INLINE_ASM
                    )
                    low = multiply(_values(first, grid_low, W.bits, 0, BF16, INLINE_ASM), inputs, low, INLINE_ASM)
                    high = multiply(_values(second, grid_high, W.bits, 1, BF16, INLINE_ASM), inputs, high, INLINE_ASM)
    return low, high


@kernel(do_not_specialize=["rows", "octets", "k_blocks", "split_k_blocks"])
def prompt_kernel(
    x,
    lanes,
    grid,
    y,
    rows,
    octets,
    k_blocks,
    split_k_blocks,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """y = x W^T for ROWS rows and 32 TILES outputs per program, the weights becoming the product's left operand.

    The second coordinate of a program says which `split_k_blocks` of the inputs it sums over; y is [splits, rows, out],
    in float32 where there are several splits. A split begins with a group of inputs.
    """
    BLOCK: tl.constexpr = TILES * 16
    outputs = octets * 8
    row_blocks = (rows + ROWS - 1) // ROWS
    program = tl.program_id(0)
    first_row = program % row_blocks * ROWS
    first_tile = program // row_blocks * TILES
    tiles = (outputs + OUTPUTS - 1) // OUTPUTS
    groups = k_blocks * W.groups // W.group_k_blocks
    inputs = k_blocks * W.k_block
    split = tl.program_id(1)
    first_k_block = split * split_k_blocks
    line = tl.arange(0, BLOCK)
    # The last block reads its neighbours' tiles again where it has none of its own; what comes of them is not stored.
    tile = tl.minimum(line // 16, tiles - first_tile - 1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, W.part)
    lane_block = lanes + (first_tile.to(tl.int64) * k_blocks + first_k_block) * W.lanes
    lane_offsets = (tile * (k_blocks * W.lanes) + line % 16 * W.part)[:, None] + column[None, :]
    grid_block = grid + (first_tile * groups + first_k_block * W.groups // W.group_k_blocks) * OUTPUTS
    grid_offsets = tile * (groups * OUTPUTS) + line % 16
    x_block = x + first_row.to(tl.int64) * inputs + first_k_block * W.k_block
    x_offsets = tl.minimum(row, rows - first_row - 1)[None, :] * inputs + column[:, None]
    low, high = tile_sums(
        lane_block, lane_offsets, grid_block, grid_offsets, x_block, x_offsets,
        tl.minimum(split_k_blocks, k_blocks - first_k_block),
        W, ROWS, BLOCK, STAGES, INLINE_ASM,
    )  # fmt: skip
    low, high = low.to(y.dtype.element_ty), high.to(y.dtype.element_ty)
    y_block = y + (split * rows + first_row).to(tl.int64) * outputs + first_tile * OUTPUTS
    line, row = tl.arange(0, BLOCK)[:, None], tl.arange(0, ROWS)[None, :]
    output = line // 16 * OUTPUTS + line % 16
    offsets, rest = row * outputs + output, outputs - first_tile * OUTPUTS
    inside = row < rows - first_row
    tl.store(y_block + offsets, low, mask=inside & (output < rest))
    tl.store(y_block + 16 + offsets, high, mask=inside & (output + 16 < rest))


@kernel(do_not_specialize=["count", "octets", "splits"])
def split_sum_kernel(partial, bias, y, count, octets, splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """y = bias + the sum over the splits of partial [splits, 8 count], from the first to the last, in float32."""
    outputs = octets * 8
    size = count * 8
    start = tl.program_id(0) * BLOCK
    offset = start + tl.arange(0, BLOCK)
    inside = offset < size
    total = tl.zeros([BLOCK], tl.float32)
    block = partial
    for _ in range(splits):
        total += tl.load(block + offset, mask=inside, other=0.0)
        block += size
    if HAS_BIAS:
        total += tl.load(bias + offset % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + offset, total.to(y.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["first_tile", "tiles", "k_blocks"])
def dequantize_kernel(lanes, grid, weights, first_tile, tiles, k_blocks, W: tl.constexpr, K_BLOCKS: tl.constexpr):
    """Outputs of one tile and K_BLOCKS k blocks of inputs, dequantized to `weights` [outputs, inputs]."""
    program = tl.program_id(0)
    tile, step = program % tiles, program // tiles
    k_block = step * K_BLOCKS + tl.arange(0, K_BLOCKS)[None, :, None]
    line, column = tl.arange(0, 16)[:, None, None], tl.arange(0, W.part)[None, None, :]
    block = (first_tile + tile).to(tl.int64) * k_blocks + k_block
    mask = k_block < k_blocks
    pointers = lanes + block * W.lanes + line * W.part + column
    packed = tl.load(pointers, mask=mask, other=0)
    second_lanes, third_lanes = packed, packed
    if W.bits == 3:
        second_lanes = tl.load(pointers + 16 * W.part, mask=mask, other=0)
        third_lanes = tl.load(pointers + 32 * W.part, mask=mask, other=0)
    groups = k_blocks * W.groups // W.group_k_blocks
    first_group = (first_tile + tile) * groups + k_block // W.group_k_blocks * W.groups
    target = weights + (tile * OUTPUTS + line).to(tl.int64) * (k_blocks * W.k_block) + k_block * W.k_block + column
    for field in tl.static_range(2 * parts_of(W.bits)):
        group = first_group + field // 2 * W.groups // parts_of(W.bits)
        pair = tl.load(grid + group * OUTPUTS + field % 2 * 16 + line, mask=mask, other=0)
        if W.bits == 3:
            both = fields(packed, second_lanes, third_lanes, field // 2, W.bits, "none", False)
            codes = both[field % 2].to(tl.int32) >> (field % 2 * second_bit(W.bits))
        else:
            codes = (packed.to(tl.int32) >> (W.bits * field)) & ((1 << W.bits) - 1)
        values = (codes.to(tl.float32) - (pair >> 16).to(tl.float32)) * scale_of(pair)
        pointers = target + field % 2 * 16 * (k_blocks * W.k_block).to(tl.int64) + field // 2 * W.part
        tl.store(pointers, values.to(weights.dtype.element_ty), mask=mask)


SUM_BLOCK = 1024


def prompt(x: Tensor, weight: PackedWeight, shape: PromptShape | None = None, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias for x [rows, in] of fp16 or bf16: [rows, out], weights dequantized on the way to the tensor cores.

    Where the shape splits the inputs, partial sums [splits, rows, out] in float32 are added by a second launch, always
    in the same order. Without a shape, `split_shape` chooses it.
    """
    rows = checked(x, weight)
    tiles, k_blocks = weight.lanes.shape[:2]
    # Splits begin with a group, and with a k block.
    group_k_blocks = weight.layout.group_k_blocks
    if shape is None:
        gpu = multiprocessors(x.device), capability(x.device)
        groups = k_blocks // group_k_blocks, group_k_blocks * weight.k_block
        shape = split_shape(len(x), tiles, *groups, *gpu, k_block=weight.k_block, bits=weight.bits)
    split_k_blocks = triton.cdiv(k_blocks // group_k_blocks, shape.splits) * group_k_blocks
    splits = triton.cdiv(k_blocks, split_k_blocks)
    y = rows.new_empty(rows.shape[0], weight.outputs)
    sums = y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device)
    blocks = triton.cdiv(tiles, shape.tiles) * triton.cdiv(rows.shape[0], shape.rows)
    prompt_kernel[(blocks, splits)](
        rows, weight.lanes, weight.grid, sums, rows.shape[0], weight.outputs // 8, k_blocks, split_k_blocks,
        W=weight.layout, ROWS=shape.rows, TILES=shape.tiles,
        STAGES=shape.stages, INLINE_ASM=compiles(x.device), num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if splits == 1:
        return y if bias is None else y.add_(bias.to(y.dtype))
    split_sum_kernel[(triton.cdiv(y.numel(), SUM_BLOCK),)](
        sums, y if bias is None else bias, y, y.numel() // 8, weight.outputs // 8, splits,
        HAS_BIAS=bias is not None, BLOCK=SUM_BLOCK, num_warps=4,
    )  # fmt: skip
    return y


def dequantize(weight: PackedWeight, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
    """Outputs from tile `start` to tile `stop` of the weight, [outputs, in], computed in float32 and rounded once."""
    tiles, k_blocks = weight.lanes.shape[:2]
    stop = tiles if stop is None else stop
    values = torch.empty((stop - start) * TILE, weight.padded_inputs, dtype=dtype, device=weight.lanes.device)
    count = k_blocks_per_program(weight.k_block)
    dequantize_kernel[((stop - start) * triton.cdiv(k_blocks, count),)](
        weight.lanes, weight.grid, values, start, stop - start, k_blocks,
        W=weight.layout, K_BLOCKS=count, num_warps=4,
    )  # fmt: skip
    return values[: min(stop * TILE, weight.outputs) - start * TILE, : weight.inputs]


def unpacked(x: Tensor, weight: PackedWeight, chunk: int = 1 << 26) -> Tensor:
    """x W^T by torch's matrix product over as many outputs at a time as have at most `chunk` weights, dequantized."""
    rows = checked(x, weight)[:, : weight.inputs]
    tiles = weight.lanes.shape[0]
    if skips_launches():
        dequantize(weight, x.dtype, 0, 1)
        return rows.new_empty(rows.shape[0], weight.outputs)
    step = max(1, chunk // (weight.inputs * TILE))
    if step >= tiles:
        return rows @ _kept_values(weight, x.dtype, 0, tiles).T
    y = rows.new_empty(rows.shape[0], weight.outputs)
    for start in range(0, tiles, step):
        values = _kept_values(weight, x.dtype, start, min(start + step, tiles))
        torch.mm(rows, values.T, out=y[:, start * TILE : start * TILE + values.shape[0]])
    return y


def _kept_values(weight: PackedWeight, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """`dequantize`, or what is kept of it, which lies in memory as what is computed does."""
    if weight.values is None or weight.values.dtype != dtype:
        return dequantize(weight, dtype, start, stop)
    return weight.values[start * TILE : stop * TILE]


def k_blocks_per_program(k_block: int) -> int:
    """K blocks per program of the dequantization."""
    return 512 // k_block


@dataclass(frozen=True)
class PromptShape:
    """How `prompt` runs: rows and tiles per program, warps, loads in flight (pipeline stages), splits of the inputs."""

    rows: int
    tiles: int
    warps: int
    stages: int
    splits: int = 1


SHORT, MIDDLE, LONG = PromptShape(32, 4, 4, 3), PromptShape(64, 4, 4, 3), PromptShape(128, 8, 8, 3)
# For k blocks of 256 inputs, the first of them where there are neither registers nor shared memory for the others.
WIDE_SMALL, WIDE_MIDDLE, WIDE_LONG = PromptShape(64, 4, 4, 2), PromptShape(64, 8, 8, 3), PromptShape(128, 8, 8, 2)
# Microseconds in which all programs that run at a time get 128 inputs further, and for each number of a split's partial
# sums, from the times of benchmarks/linear_shapes.py on an H100; of k blocks of 256 inputs on an H200.
STEP_INPUTS = 128
STEP_TIME = {SHORT: 1.6, MIDDLE: 1.6, LONG: 1.85, WIDE_SMALL: 1.6, WIDE_MIDDLE: 1.45, WIDE_LONG: 2.4}
PARTIAL_TIME = 4e-6
# Shorter splits do not pay for filling the pipeline and for the second launch.
LEAST_SPLIT_INPUTS = 512


def prompt_shape(rows: int, device_capability: tuple[int, int], k_block: int) -> PromptShape:
    """What measured best on an H200 for this number of rows without splits: benchmarks/gpu_linear.py; for experts."""
    shapes = prompt_shapes(device_capability, k_block)[1:]
    return shapes[-1] if rows > 128 else shapes[0]


def split_shape(
    rows: int,
    tiles: int,
    groups: int,
    group_size: int,
    multiprocessors: int,
    device_capability: tuple[int, int],
    *,
    k_block: int = 128,
    bits: int = 4,
) -> PromptShape:
    """The shape and the splits of the inputs that should take least time for this number of rows.

    A weight of few outputs makes too few programs for a GPU: its inputs are then split among as many programs as run at
    a time. Splits are whole groups, all but the last of one length and none empty. Of two shapes the one is taken whose
    waves of programs take less time, partial sums included; these are at most 17 MB on 132 multiprocessors.

    Args:
        rows: rows of the activations, at least 1.
        tiles: tiles of 32 outputs.
        groups, group_size: the groups of the inputs and the size of one.
        multiprocessors, device_capability: the GPU's.
        k_block, bits: the layout's; groups are no shorter than k blocks.
    """
    short, middle, *longer = prompt_shapes(device_capability, k_block)
    if rows <= middle.rows:
        shapes = (short,) if rows <= short.rows else (middle,)
    else:
        shapes = (middle, *longer)
    best, least = middle, float("inf")
    for shape in shapes:
        programs = -(-tiles // shape.tiles) * -(-rows // shape.rows)
        at_a_time = multiprocessors * programs_at_a_time(shape, device_capability, bits)
        most = min(at_a_time // programs, groups * group_size // LEAST_SPLIT_INPUTS)
        split_groups = -(-groups // max(1, most))
        splits = -(-groups // split_groups)
        waves = -(-programs * splits // at_a_time)
        time = waves * split_groups * group_size / STEP_INPUTS * STEP_TIME[shape]
        if splits > 1:
            time += splits * rows * tiles * TILE * PARTIAL_TIME
        if time < least:
            best, least = replace(shape, splits=splits), time
    return best


def prompt_shapes(device_capability: tuple[int, int], k_block: int) -> tuple[PromptShape, ...]:
    """All shapes that run on a GPU with k blocks of this size, from few rows to many, apart from splits."""
    large = _takes_long(device_capability)
    if k_block > STEP_INPUTS:
        return (SHORT, WIDE_MIDDLE, WIDE_LONG) if large else (SHORT, WIDE_SMALL)
    return (SHORT, MIDDLE, LONG) if large else (SHORT, MIDDLE)


def programs_at_a_time(shape: PromptShape, device_capability: tuple[int, int], bits: int = 4) -> int:
    """How many programs of a shape a multiprocessor is to run at a time: what registers and shared memory hold.

    More of SHORT would fit, but that is no faster. Data-center GPUs have 164 KB of shared memory and more, in which
    three of MIDDLE fit, or two at 8 bits; others have 100 KB, of which MIDDLE takes half.
    """
    if shape.warps == LONG.warps:
        return 1
    if shape.stages == WIDE_SMALL.stages or (shape.rows == MIDDLE.rows and bits == 8):
        return 2
    return 3 if device_capability == (8, 0) or _takes_long(device_capability) else 2


def _takes_long(device_capability: tuple[int, int]) -> bool:
    """Whether there are registers and shared memory for LONG: on data-center GPUs since Hopper."""
    return (9, 0) <= device_capability < (12, 0)
