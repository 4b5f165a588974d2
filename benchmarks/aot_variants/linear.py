"""Specialisations of the quantized Linear's kernels, for single weights and for a mixture's experts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from aot_variants.variant import Variant
from kvconvert.kernels.experts import triton as experts
from kvconvert.kernels.linear.packed_layout import TILE, WeightLayout
from kvconvert.kernels.linear.triton.few_rows import FewRowsShape, few_rows_kernel, few_rows_shapes
from kvconvert.kernels.linear.triton.many_rows import (
    SUM_BLOCK,
    PromptShape,
    dequantize_kernel,
    k_blocks_per_program,
    prompt_kernel,
    prompt_shape,
    prompt_shapes,
    split_sum_kernel,
)

DTYPES = ("fp16", "bf16")
# Inputs of a k block, its groups and a group's k blocks at 4 bits; at others of groups of 128 inputs and of 32, and of
# 32 where the inputs fill no longer k blocks.
FOUR_BITS = ((32, 1, 1), (64, 1, 1), (128, 1, 1), (128, 1, 2))
OTHER_BITS = {
    2: ((256, 2, 1), (128, 4, 1), (64, 2, 1)),
    3: ((256, 2, 1), (256, 8, 1), (128, 4, 1)),
    8: ((128, 1, 1), (32, 1, 1)),
}
# What one program handles per code, beside converting it, is shared by fewer codes in small k blocks; at 4 bits a scale
# and a zero are for only 32 codes in the smallest.
PER_CODE = {32: 12.0, 64: 12.0, 128: 8.0, 256: 8.0}
FEW_PER_CODE, MANY_PER_CODE = ({32: 8.6, 64: most, 128: most} for most in (6.0, 6.2))
SOME_SPILL = "at most ten registers, on one architecture or another"
Sizes = dict[str, Any]


def _sizes(bits: int, k_block: int, groups: int, group_k_blocks: int) -> Sizes:
    return {"W": WeightLayout(k_block, bits, groups, group_k_blocks)}


def _product(
    name: str, function: Any, dtype: str, sizes: Sizes, shape: FewRowsShape | PromptShape, axes: dict[str, Any],
    constants: dict[str, Any], *, codes: int, most: float, spills: str, types: dict[str, str] | None = None,
) -> Variant:  # fmt: skip
    """A kernel that multiplies rows with a packed weight; `codes` are the warps among which a k block's are divided."""
    own: dict[str, Any] = {"S": shape}
    if isinstance(shape, PromptShape):
        own = {"ROWS": shape.rows, "TILES": shape.tiles, "STAGES": shape.stages}
    return Variant.of(
        name,
        function,
        dtype,
        sizes | own | constants,
        num_warps=shape.warps,
        num_stages=shape.stages,
        types=types,
        axes={"dtype": dtype, "k_block": sizes["W"].k_block, "rows": shape.rows} | axes,
        codes=TILE * shape.tiles * codes * sizes["W"].k_block,
        tensor_cores=True,
        wide_loads=True,
        most_per_code=most,
        spills=spills,
    )


def _few_shapes(k_block: int) -> Iterator[tuple[FewRowsShape, str, dict[str, int]]]:
    """Shapes of products of few rows, with their names and axes."""
    for shape in dict.fromkeys(few_rows_shapes(k_block).values()):
        yield shape, f"{shape.tiles}t{shape.warps}w", {"tiles": shape.tiles, "warps": shape.warps}


def few_rows(capability: int) -> Iterator[Variant]:
    """4 bits, few rows: every specialisation that the dispatch can choose, the same on all devices."""
    for dtype, (k_block, groups, blocks) in product(DTYPES, FOUR_BITS):
        for shape, size, axes in _few_shapes(k_block):
            for even, bias in product((True, False), (False, True)):
                yield _product(
                    f"few_rows-{dtype}-{k_block}x{blocks}-{shape.rows}-{size}{'-even' * even}{'-bias' * bias}",
                    few_rows_kernel, dtype, _sizes(4, k_block, groups, blocks), shape,
                    axes | {"group_k_blocks": blocks, "even": even, "bias": bias},
                    {"EVEN": even, "HAS_BIAS": bias, "INLINE_ASM": True}, codes=shape.warps,
                    most=FEW_PER_CODE[k_block],
                    spills="two registers, on some architectures" if dtype == "fp16" and k_block == 64 else "",
                )  # fmt: skip


def many_rows(capability: int) -> Iterator[Variant]:
    """4 bits, many rows: the fused product, sums of splits, dequantization."""
    for dtype in DTYPES:
        for k_block, groups, blocks in FOUR_BITS:
            sizes, axes = _sizes(4, k_block, groups, blocks), {"group_k_blocks": blocks}
            for shape, split in product(prompt_shapes((capability // 10, capability % 10), k_block), (False, True)):
                yield _product(
                    f"prompt-{dtype}-{k_block}x{blocks}-{shape.rows}{'-split' * split}", prompt_kernel, dtype, sizes,
                    shape, axes | {"split": split}, {"INLINE_ASM": True}, codes=1, most=MANY_PER_CODE[k_block],
                    spills=_before_loop(capability, dtype), types={"y": "*fp32"} if split else None,
                )  # fmt: skip
            yield _dequantize(f"dequantize-{dtype}-{k_block}x{blocks}", dtype, sizes, axes)
        for bias in (False, True):
            name, constants = f"split_sum-{dtype}{'-bias' * bias}", {"HAS_BIAS": bias, "BLOCK": SUM_BLOCK}
            axes = {"dtype": dtype, "bias": bias}
            yield Variant.of(name, split_sum_kernel, dtype, constants, num_warps=4, axes=axes, wide_loads=True)


def _before_loop(capability: int, dtype: str) -> str:
    return "a few bytes in front of the loop" if capability >= 100 and dtype == "fp16" else ""


def _dequantize(name: str, dtype: str, sizes: Sizes, axes: dict[str, Any]) -> Variant:
    constants = sizes | {"K_BLOCKS": k_blocks_per_program(sizes["W"].k_block)}
    axes = axes | {"dtype": dtype, "k_block": sizes["W"].k_block}
    return Variant.of(name, dequantize_kernel, dtype, constants, num_warps=4, axes=axes, wide_loads=True)


def other_widths(capability: int) -> Iterator[Variant]:
    """2, 3 and 8 bits: what the dispatch chooses for groups of 128 and of 32 inputs on a device."""
    every = ((bits, layout) for bits, layouts in OTHER_BITS.items() for layout in layouts)
    for (bits, (k_block, groups, blocks)), dtype in product(every, DTYPES):
        sizes, axes = _sizes(bits, k_block, groups, blocks), {"bits": bits, "groups": groups}
        name, most = f"{bits}bit-{dtype}-{k_block}{f'by{groups}' * (groups > 1)}", PER_CODE[k_block]
        for shape, size, _ in _few_shapes(k_block):
            constants = {"EVEN": True, "HAS_BIAS": False, "INLINE_ASM": True}
            yield _product(
                f"few_rows-{name}-{shape.rows}-{size}", few_rows_kernel, dtype, sizes, shape,
                axes | {"tiles": shape.tiles}, constants, codes=shape.warps, most=most, spills=SOME_SPILL,
            )  # fmt: skip
        for shape in prompt_shapes((capability // 10, capability % 10), k_block):
            yield _product(
                f"prompt-{name}-{shape.rows}", prompt_kernel, dtype, sizes, shape, axes, {"INLINE_ASM": True},
                codes=1, most=most, spills=SOME_SPILL,
            )  # fmt: skip
        yield _dequantize(f"dequantize-{name}", dtype, sizes, axes)


def mixtures(capability: int) -> Iterator[Variant]:
    """The variants that the dispatch chooses for the usual mixtures of experts on a device, at 4 bits."""
    yield Variant.of("sort", experts.sort_by_expert_kernel, "", {"CHUNK": experts.SORT_CHUNK}, num_warps=4)
    for dtype in DTYPES:
        for scores in (dtype, "fp32", None):
            yield Variant.of(
                f"combine-{dtype}-{scores or 'none'}",
                experts.combine_kernel,
                dtype,
                {"HAS_SCORES": scores is not None, "COLUMNS": experts.COMBINE_COLUMNS},
                num_warps=4,
                types={"scores": f"*{scores or 'i64'}"},
                axes={"dtype": dtype, "scores": scores or "none"},
                wide_loads=True,
            )
        for (k_block, *groups), bias in product(FOUR_BITS[:3], (False, True)):
            sizes, biased = _sizes(4, k_block, *groups) | {"INLINE_ASM": True}, "-bias" * bias
            for shape, size, axes in _few_shapes(k_block):
                # Pairs by themselves are single rows, sorted ones eight at least.
                is_sorted = shape.rows > 2
                yield _product(
                    f"few_pairs-{dtype}-{k_block}-{shape.rows}-{size}{'-sorted' * is_sorted}{biased}",
                    experts.few_pairs_kernel, dtype, sizes, shape, axes | {"bias": bias, "sorted": is_sorted},
                    {"EVEN": True, "HAS_BIAS": bias, "SORTED": is_sorted}, codes=shape.warps,
                    most=FEW_PER_CODE[k_block], spills="",
                )  # fmt: skip
            major_minor = (capability // 10, capability % 10)
            for shape in dict.fromkeys(prompt_shape(rows, major_minor, k_block) for rows in (128, 256)):
                yield _product(
                    f"many_pairs-{dtype}-{k_block}-{shape.rows}{biased}", experts.many_pairs_kernel, dtype, sizes,
                    shape, {"bias": bias}, {"HAS_BIAS": bias}, codes=1, most=MANY_PER_CODE[k_block],
                    spills=_before_loop(capability, dtype),
                )  # fmt: skip


GROUPS = {
    "linear_few_rows": few_rows,
    "linear_many_rows": many_rows,
    "linear_widths": other_widths,
    "experts": mixtures,
}
