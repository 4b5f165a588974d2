"""A mixture's experts in Triton: rows sorted by expert, products with each expert's packed weight, and their sum.

A pair is one token with one of its experts; pair p of tokens with k experts each belongs to token p // k. Results of
products lie in order of pairs. Weights have the layout of kvconvert.kernels.linear.packed_layout, all experts' behind
each other. Nothing here is read by the host: which programs have work, and which expert's, is known on the device only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.device import capability, compiles, multiprocessors
from kvconvert.kernels.elementwise.reference import Gate
from kvconvert.kernels.elementwise.triton import gated
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.linear.packed_layout import TILE, PackedWeight
from kvconvert.kernels.linear.triton.few_rows import OUTPUTS, checked, few_rows_shape, warp_sums
from kvconvert.kernels.linear.triton.many_rows import prompt_shape, tile_sums


@kernel(do_not_specialize=["pairs"])
def sort_by_expert_kernel(chosen, order, starts, counts, pairs, CHUNK: tl.constexpr):
    """One program per expert: its pairs, in order, behind those of the experts before it.

    order int32 [pairs] is written from starts[expert] on, counts[expert] of them.
    """
    expert = tl.program_id(0)
    start = tl.zeros([CHUNK], tl.int32)
    count = tl.zeros([CHUNK], tl.int32)
    offset = tl.arange(0, CHUNK)
    for first in range(0, pairs, CHUNK):
        index = tl.load(chosen + first + offset, mask=first + offset < pairs, other=-1)
        start += ((index >= 0) & (index < expert)).to(tl.int32)
        count += (index == expert).to(tl.int32)
    begin = tl.sum(start, 0)
    tl.store(starts + expert, begin)
    tl.store(counts + expert, tl.sum(count, 0))
    for first in range(0, pairs, CHUNK):
        index = tl.load(chosen + first + offset, mask=first + offset < pairs, other=-1)
        own = (index == expert).to(tl.int32)
        place = begin + tl.cumsum(own, 0) - 1
        tl.store(order + place, first + offset, mask=own != 0)
        begin += tl.sum(own, 0)


@triton.jit
def _block_of(block, chosen, starts, counts, experts, blocks, ROWS: tl.constexpr, SORTED: tl.constexpr):
    """Expert, first place in the order, and number of pairs of a block; no pairs where the block has nothing to do."""
    if SORTED:
        expert = block // blocks
        first = block % blocks * ROWS
        left = tl.minimum(tl.load(counts + expert) - first, ROWS)
        first += tl.load(starts + expert)
    else:
        # A block per pair, in the order of pairs.
        expert = tl.load(chosen + block).to(tl.int32)
        first = block
        left = ((expert >= 0) & (expert < experts)).to(tl.int32)
    return expert, first, left


@kernel(do_not_specialize=["experts", "blocks", "divisor", "octets", "k_blocks"])
def few_pairs_kernel(
    x,
    lanes,
    grid,
    bias,
    y,
    chosen,
    order,
    starts,
    counts,
    experts,
    blocks,
    divisor,
    octets,
    k_blocks,
    W: tl.constexpr,
    S: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SORTED: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """`few_rows_kernel` with an expert's weight for up to S.rows of its pairs; the row of pair p in x is p // divisor.

    SORTED: `blocks` blocks of S.rows pairs for each expert, most of them empty; else a block for each pair.
    """
    BLOCK: tl.constexpr = S.tiles * 16
    expert, first_pair, left = _block_of(tl.program_id(1), chosen, starts, counts, experts, blocks, S.rows, SORTED)
    if left <= 0:
        return
    outputs = octets * 8
    program = tl.program_id(0)
    tiles = outputs // OUTPUTS
    inputs = k_blocks * W.k_block
    groups = k_blocks * W.groups // W.group_k_blocks
    expert_tile = expert.to(tl.int64) * tiles
    lane_block = lanes + expert_tile * (k_blocks * W.lanes)
    grid_block = grid + expert_tile * (groups * OUTPUTS)
    warp = tl.arange(0, S.warps)[:, None, None]
    line = tl.arange(0, BLOCK)[None, :, None]
    tile = program * S.tiles + line // 16
    column = tl.arange(0, W.part)[None, None, :]
    inner = tl.arange(0, W.part)[None, :, None]
    row = tl.arange(0, S.rows)[None, None, :]
    if SORTED:
        pair = tl.load(order + first_pair + row, mask=row < left, other=0)
    else:
        pair = first_pair + row * 0
    lane_pointers = lane_block + tile * (k_blocks * W.lanes) + line % 16 * W.part + column
    grid_pointers = grid_block + tile * (groups * OUTPUTS) + line % 16
    x_pointers = x + (pair // divisor).to(tl.int64) * inputs + inner
    low, high = warp_sums(
        lane_pointers, grid_pointers, x_pointers, tile < tiles, row < left, warp, k_blocks,
        W, S, EVEN, INLINE_ASM,
    )  # fmt: skip
    line = tl.arange(0, BLOCK)[:, None]
    row = tl.arange(0, S.rows)[None, :]
    if SORTED:
        pair = tl.load(order + first_pair + row, mask=row < left, other=0)
    else:
        pair = first_pair + row * 0
    output = (program * S.tiles + line // 16) * OUTPUTS + line % 16
    first_class, second_class = tl.sum(low, 0), tl.sum(high, 0)
    inside = output < outputs
    if HAS_BIAS:
        bias_pointers = bias + expert.to(tl.int64) * outputs + output
        first_class += tl.load(bias_pointers, mask=inside, other=0.0).to(tl.float32)
        second_class += tl.load(bias_pointers + 16, mask=inside, other=0.0).to(tl.float32)
    pointers = y + pair.to(tl.int64) * outputs + output
    tl.store(pointers, first_class.to(y.dtype.element_ty), mask=(row < left) & inside)
    tl.store(pointers + 16, second_class.to(y.dtype.element_ty), mask=(row < left) & inside)


@kernel(do_not_specialize=["blocks", "divisor", "octets", "k_blocks"])
def many_pairs_kernel(
    x,
    lanes,
    grid,
    bias,
    y,
    order,
    starts,
    counts,
    blocks,
    divisor,
    octets,
    k_blocks,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INLINE_ASM: tl.constexpr,
):
    """`prompt_kernel` with an expert's weight for up to ROWS of its pairs, sorted; see `few_pairs_kernel`."""
    BLOCK: tl.constexpr = TILES * 16
    outputs = octets * 8
    tiles = outputs // OUTPUTS
    tile_blocks = (tiles + TILES - 1) // TILES
    program = tl.program_id(0)
    # An expert's blocks of pairs follow each other, so that they find its weights in the cache.
    work = program // blocks
    expert = work // tile_blocks
    first_tile = work % tile_blocks * TILES
    _, first_pair, left = _block_of(expert * blocks + program % blocks, order, starts, counts, 0, blocks, ROWS, True)
    if left <= 0:
        return
    groups = k_blocks * W.groups // W.group_k_blocks
    inputs = k_blocks * W.k_block
    line = tl.arange(0, BLOCK)
    tile = tl.minimum(line // 16, tiles - first_tile - 1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, W.part)
    tile_offset = expert.to(tl.int64) * tiles + first_tile
    lane_block = lanes + tile_offset * (k_blocks * W.lanes)
    lane_offsets = (tile * (k_blocks * W.lanes) + line % 16 * W.part)[:, None] + column[None, :]
    grid_block = grid + tile_offset * (groups * OUTPUTS)
    grid_offsets = tile * (groups * OUTPUTS) + line % 16
    pair = tl.load(order + first_pair + tl.minimum(row, left - 1))
    x_offsets = (pair // divisor).to(tl.int64)[None, :] * inputs + column[:, None]
    low, high = tile_sums(
        lane_block, lane_offsets, grid_block, grid_offsets, x, x_offsets, k_blocks,
        W, ROWS, BLOCK, STAGES, INLINE_ASM,
    )  # fmt: skip
    line, row = tl.arange(0, BLOCK)[:, None], tl.arange(0, ROWS)[None, :]
    output = first_tile * OUTPUTS + line // 16 * OUTPUTS + line % 16
    if HAS_BIAS:
        bias_pointers = bias + expert.to(tl.int64) * outputs + output
        low += tl.load(bias_pointers, mask=output < outputs, other=0.0).to(tl.float32)
        high += tl.load(bias_pointers + 16, mask=output < outputs, other=0.0).to(tl.float32)
    low, high = low.to(y.dtype.element_ty), high.to(y.dtype.element_ty)
    pair = tl.load(order + first_pair + tl.minimum(row, left - 1))
    pointers = y + pair.to(tl.int64) * outputs + output
    inside = (row < left) & (output < outputs)
    tl.store(pointers, low, mask=inside)
    tl.store(pointers + 16, high, mask=inside)


@kernel(do_not_specialize=["experts", "per_token"])
def combine_kernel(
    pairs_y,
    chosen,
    scores,
    y,
    experts,
    per_token,
    columns,
    HAS_SCORES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = the sum over a token's pairs of score times output, for one token and COLUMNS columns; rounded as torch does.

    A pair without an expert has no output, and adds nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for position in range(per_token):
        pair = token * per_token + position
        expert = tl.load(chosen + pair)
        end = tl.where((expert >= 0) & (expert < experts), columns, 0)
        value = tl.load(pairs_y + pair * columns + column, mask=column < end, other=0.0).to(tl.float32)
        if HAS_SCORES:
            value *= tl.load(scores + pair).to(tl.float32)
            if scores.dtype.element_ty == y.dtype.element_ty:
                value = value.to(y.dtype.element_ty).to(tl.float32)
        total += value
    tl.store(y + token * columns + column, total.to(y.dtype.element_ty), mask=column < columns)


SORT_CHUNK = 1024
COMBINE_COLUMNS = 1024
# Pairs are sorted by expert once fewer experts than pairs by this factor are to be expected: until then, reading a
# weight twice costs less than sorting.
SORTED_FROM = 1.25
# Most pairs per expert, on average, that `few_pairs_kernel` takes.
FEW_PAIRS = 32


@dataclass(frozen=True)
class Routing:
    """Which pairs belong to which expert, on the device.

    Attributes:
        chosen: the expert of each pair, [pairs].
        order: int32 [pairs], pairs sorted by expert; None where each pair is computed by itself.
        starts, counts: int32 [experts], where in `order` an expert's pairs begin, and how many there are.
        experts: how many there are.
        most: pairs that one expert can have at most.
        mean: pairs per expert.
    """

    chosen: Tensor
    order: Tensor | None
    starts: Tensor
    counts: Tensor
    experts: int
    most: int
    mean: float


def route(chosen: Tensor, experts: int, most: int, mean: float) -> Routing:
    """Sort pairs by expert, if that pays.

    Args:
        chosen: the expert of each pair, [pairs], contiguous.
        experts: how many there are.
        most: pairs that one expert can have at most.
        mean: pairs per expert to expect.
    """
    pairs = chosen.numel()
    expected = experts * (1 - (1 - min(1.0, mean / most)) ** most)
    if most == 1 or mean * experts <= SORTED_FROM * expected:
        return Routing(chosen, None, chosen, chosen, experts, most, mean)
    order, starts, counts = (
        torch.empty(size, dtype=torch.int32, device=chosen.device) for size in (pairs, experts, experts)
    )
    sort_by_expert_kernel[(experts,)](chosen, order, starts, counts, pairs, CHUNK=SORT_CHUNK, num_warps=4)
    return Routing(chosen, order, starts, counts, experts, most, mean)


def expert_products(x: Tensor, weight: PackedWeight, bias: Tensor | None, routing: Routing, divisor: int) -> Tensor:
    """Each pair's row times its expert's weight plus bias: [pairs, outputs], undefined for pairs without an expert.

    Args:
        x: [rows, in] of fp16 or bf16; the row of pair p is p // divisor.
        weight: all experts' behind each other, each of the same number of outputs, a multiple of 32.
        bias: [experts * outputs], or None.
        routing: what `route` returned.
        divisor: see `x`.
    """
    rows, experts = checked(x, weight), routing.experts
    outputs, k_blocks = weight.outputs // experts, weight.lanes.shape[1]
    tiles, pairs = outputs // TILE, routing.chosen.numel()
    y = rows.new_empty(pairs, outputs)
    sizes = {"W": weight.layout, "HAS_BIAS": bias is not None, "INLINE_ASM": compiles(x.device)}
    bias = y if bias is None else bias
    # Twice the mean, since routers do not share tokens out evenly.
    usual = min(routing.most, max(1, int(2 * routing.mean)))
    is_sorted = routing.order is not None
    if is_sorted and routing.mean > FEW_PAIRS:
        shape = prompt_shape(int(routing.mean), capability(x.device), weight.k_block)
        blocks = triton.cdiv(routing.most, shape.rows)
        many_pairs_kernel[(experts * triton.cdiv(tiles, shape.tiles) * blocks,)](
            rows, weight.lanes, weight.grid, bias, y, routing.order, routing.starts, routing.counts,
            blocks, divisor, outputs // 8, k_blocks,
            ROWS=shape.rows, TILES=shape.tiles, STAGES=shape.stages, num_warps=shape.warps, num_stages=shape.stages,
            **sizes,
        )  # fmt: skip
        return y
    active = min(experts, pairs)
    # Sorted pairs are taken by eight at least: of smaller blocks more would be empty.
    shape = few_rows_shape(max(8, usual) if is_sorted else 1, tiles * active, weight, multiprocessors(x.device))
    blocks = triton.cdiv(routing.most, shape.rows)
    few_pairs_kernel[(triton.cdiv(tiles, shape.tiles), experts * blocks if is_sorted else pairs)](
        rows, weight.lanes, weight.grid, bias, y, routing.chosen, routing.order if is_sorted else routing.chosen,
        routing.starts, routing.counts, experts, blocks, divisor, outputs // 8, k_blocks,
        SORTED=is_sorted, **shape.launch(k_blocks), **sizes,
    )  # fmt: skip
    return y


def combine(pairs_y: Tensor, chosen: Tensor, scores: Tensor | None, experts: int, per_token: int) -> Tensor:
    """The sum of each token's pairs: [tokens, outputs]."""
    pairs, columns = pairs_y.shape
    y = pairs_y.new_empty(pairs // per_token, columns)
    combine_kernel[(len(y), triton.cdiv(columns, COMBINE_COLUMNS))](
        pairs_y, chosen, chosen if scores is None else scores, y, experts, per_token, columns,
        HAS_SCORES=scores is not None, COLUMNS=COMBINE_COLUMNS, num_warps=4,
    )  # fmt: skip
    return y


def routed_experts(
    x: Tensor,
    routing: Routing,
    scores: Tensor | None,
    gate_up: tuple[PackedWeight, Tensor | None],
    down: tuple[PackedWeight, Tensor | None],
    kind: Gate | Callable[[Tensor], Tensor],
    per_token: int,
) -> Tensor:
    """Gate and up of every pair as one product, joined, down, and the sum of each token's pairs: [tokens, hidden]."""
    joined = expert_products(x, *gate_up, routing, per_token)
    active = gated(*joined.chunk(2, -1), kind) if isinstance(kind, Gate) else kind(joined)
    outputs = expert_products(active, *down, routing, 1)
    return combine(outputs, routing.chosen, scores, routing.experts, per_token)
