"""Specialisations of the 4-bit Linear's kernels for many rows: the fused product, and dequantization."""

from __future__ import annotations

from collections.abc import Iterator

from aot_variants.linear_few_rows import signature
from aot_variants.variant import Variant
from kvconvert.kernels.linear.packed_layout import TILE
from kvconvert.kernels.linear.triton.many_rows import (
    dequantize_kernel,
    k_blocks_per_program,
    prompt_kernel,
    prompt_shape,
)


def variants(device_capability: int) -> Iterator[Variant]:
    """Every specialisation that the dispatch can choose on a device."""
    major_minor = (device_capability // 10, device_capability % 10)
    for dtype in ("fp16", "bf16"):
        for k_block, group_k_blocks in ((32, 1), (64, 1), (128, 1), (128, 2)):
            axes = {"dtype": dtype, "k_block": k_block, "group_k_blocks": group_k_blocks}
            sizes = {"K_BLOCK": k_block, "GROUP_K_BLOCKS": group_k_blocks}
            for shape in dict.fromkeys(prompt_shape(rows, major_minor) for rows in (128, 256)):
                yield Variant(
                    name=f"prompt-{dtype}-{k_block}x{group_k_blocks}-{shape.rows}",
                    function=prompt_kernel,
                    signature=signature(dtype) | {"split_k_blocks": "i32"},
                    constants=sizes
                    | {"ROWS": shape.rows, "TILES": shape.tiles, "STAGES": shape.stages, "INLINE_ASM": True},
                    num_warps=shape.warps,
                    num_stages=shape.stages,
                    axes=axes | {"rows": shape.rows},
                    codes=TILE * shape.tiles * k_block,
                    tensor_cores=True,
                    wide_loads=True,
                    # A scale and a zero for only 32 codes.
                    most_per_code=8.6 if k_block == 32 else 6.2,
                    spills="a few bytes in front of the loop" if device_capability >= 100 and dtype == "fp16" else "",
                )
            yield Variant(
                name=f"dequantize-{dtype}-{k_block}x{group_k_blocks}",
                function=dequantize_kernel,
                signature={
                    "lanes": "*i16",
                    "grid": "*i32",
                    "weights": f"*{dtype}",
                    "first_tile": "i32",
                    "tiles": "i32",
                    "k_blocks": "i32",
                },
                constants=sizes | {"K_BLOCKS": k_blocks_per_program(k_block)},
                num_warps=4,
                num_stages=3,
                axes=axes,
                wide_loads=True,
            )
