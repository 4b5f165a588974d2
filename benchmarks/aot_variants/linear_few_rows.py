"""Specialisations of the quantized Linear's kernel for few rows, at 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from aot_variants.variant import Variant
from kvconvert.kernels.linear.packed_layout import TILE
from kvconvert.kernels.linear.triton.few_rows import few_rows_kernel, few_rows_shapes

SPILLS = "two registers, on some architectures"


def variants(device_capability: int) -> Iterator[Variant]:
    """Every specialisation that the dispatch can choose, the same on all devices."""
    for dtype, (k_block, group_k_blocks) in product(("fp16", "bf16"), ((32, 1), (64, 1), (128, 1), (128, 2))):
        sizes = {"K_BLOCK": k_block, "BITS": 4, "GROUPS": 1, "GROUP_K_BLOCKS": group_k_blocks, "INLINE_ASM": True}
        axes = {"dtype": dtype, "k_block": k_block, "group_k_blocks": group_k_blocks}
        for shape in dict.fromkeys(few_rows_shapes(k_block).values()):
            for even, biased in product((True, False), (False, True)):
                options = f"-{shape.tiles}t{shape.warps}w" + "-even" * even + "-bias" * biased
                yield Variant.of(
                    f"few_rows-{dtype}-{k_block}x{group_k_blocks}-{shape.rows}{options}",
                    few_rows_kernel,
                    dtype,
                    sizes
                    | {"ROWS": shape.rows, "TILES": shape.tiles, "WARPS": shape.warps, "STAGES": shape.stages}
                    | {"EVEN": even, "HAS_BIAS": biased},
                    num_warps=shape.warps,
                    num_stages=shape.stages,
                    axes=axes
                    | {"rows": shape.rows, "tiles": shape.tiles, "warps": shape.warps, "even": even, "bias": biased},
                    codes=TILE * shape.tiles * shape.warps * k_block,
                    tensor_cores=True,
                    wide_loads=True,
                    # A scale and a zero for only 32 codes.
                    most_per_code=8.6 if k_block == 32 else 6.0,
                    spills=SPILLS if dtype == "fp16" and k_block == 64 else "",
                )
