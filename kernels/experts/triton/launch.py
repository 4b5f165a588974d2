"""Launches of a mixture's experts: which kernel, and in which blocks of pairs, is chosen from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvconvert.kernels.device import capability, multiprocessors
from kvconvert.kernels.elementwise.reference import Gate
from kvconvert.kernels.elementwise.triton.gated import gated
from kvconvert.kernels.experts.triton.kernels import (
    combine_kernel,
    few_pairs_kernel,
    many_pairs_kernel,
    sort_by_expert_kernel,
)
from kvconvert.kernels.linear.packed_layout import TILE, PackedWeight
from kvconvert.kernels.linear.triton.few_rows import checked, few_rows_shape
from kvconvert.kernels.linear.triton.prompt_shapes import prompt_shape

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
        routing: of `route`.
        divisor: see `x`.
    """
    rows, experts = checked(x, weight), routing.experts
    outputs, k_blocks = weight.outputs // experts, weight.lanes.shape[1]
    tiles, pairs = outputs // TILE, routing.chosen.numel()
    y = rows.new_empty(pairs, outputs)
    sizes = weight.constants | {"HAS_BIAS": bias is not None, "INLINE_ASM": x.is_cuda}
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
    kind: Gate,
    per_token: int,
) -> Tensor:
    """Gate and up of every pair as one product, joined, down, and the sum of each token's pairs: [tokens, hidden]."""
    joined = expert_products(x, *gate_up, routing, per_token)
    active = gated(*joined.chunk(2, -1), kind)
    outputs = expert_products(active, *down, routing, 1)
    return combine(outputs, routing.chosen, scores, routing.experts, per_token)
