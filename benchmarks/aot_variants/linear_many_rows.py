"""Specialisations of the 4-bit Linear's kernels for many rows: the fused product, sums of splits, dequantization."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from aot_variants.variant import Variant
from kvconvert.kernels.linear.packed_layout import TILE
from kvconvert.kernels.linear.triton.many_rows import (
    SUM_BLOCK,
    dequantize_kernel,
    k_blocks_per_program,
    prompt_kernel,
    split_sum_kernel,
)
from kvconvert.kernels.linear.triton.prompt_shapes import prompt_shapes


def variants(device_capability: int) -> Iterator[Variant]:
    """Every specialisation that the dispatch can choose on a device."""
    major_minor = (device_capability // 10, device_capability % 10)
    for dtype in ("fp16", "bf16"):
        for k_block, group_k_blocks in ((32, 1), (64, 1), (128, 1), (128, 2)):
            axes = {"dtype": dtype, "k_block": k_block, "group_k_blocks": group_k_blocks}
            sizes = {"K_BLOCK": k_block, "BITS": 4, "GROUPS": 1, "GROUP_K_BLOCKS": group_k_blocks}
            for shape, split in product(prompt_shapes(major_minor, k_block), (False, True)):
                yield Variant.of(
                    f"prompt-{dtype}-{k_block}x{group_k_blocks}-{shape.rows}" + "-split" * split,
                    prompt_kernel,
                    dtype,
                    sizes | {"ROWS": shape.rows, "TILES": shape.tiles, "STAGES": shape.stages, "INLINE_ASM": True},
                    num_warps=shape.warps,
                    types={"y": "*fp32"} if split else {},
                    num_stages=shape.stages,
                    axes=axes | {"rows": shape.rows, "split": split},
                    codes=TILE * shape.tiles * k_block,
                    tensor_cores=True,
                    wide_loads=True,
                    # A scale and a zero for only 32 codes.
                    most_per_code=8.6 if k_block == 32 else 6.2,
                    spills="a few bytes in front of the loop" if device_capability >= 100 and dtype == "fp16" else "",
                )
            yield Variant.of(
                f"dequantize-{dtype}-{k_block}x{group_k_blocks}",
                dequantize_kernel,
                dtype,
                sizes | {"K_BLOCKS": k_blocks_per_program(k_block)},
                num_warps=4,
                axes=axes,
                wide_loads=True,
            )
        for biased in (False, True):
            yield Variant.of(
                f"split_sum-{dtype}" + "-bias" * biased,
                split_sum_kernel,
                dtype,
                {"HAS_BIAS": biased, "BLOCK": SUM_BLOCK},
                num_warps=4,
                axes={"dtype": dtype, "bias": biased},
                wide_loads=True,
            )
