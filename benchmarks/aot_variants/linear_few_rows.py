"""Specialisations of the quantized Linear's kernel for few rows, at 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from aot_variants.variant import Variant
from kvconvert.kernels.linear.packed_layout import TILE
from kvconvert.kernels.linear.triton.few_rows import few_rows_kernel, few_rows_shapes

SPILLS = "two registers, on some architectures"


def signature(dtype: str) -> dict[str, str]:
    """Types of the arguments that the kernels with activations share."""
    pointers = {"x": f"*{dtype}", "lanes": "*i16", "grid": "*i32", "bias": f"*{dtype}", "y": f"*{dtype}"}
    return pointers | dict.fromkeys(("rows", "octets", "k_blocks"), "i32")


def variants(device_capability: int) -> Iterator[Variant]:
    """Every specialisation that the dispatch can choose, the same on all devices."""
    for dtype in ("fp16", "bf16"):
        for k_block, group_k_blocks in ((32, 1), (64, 1), (128, 1), (128, 2)):
            for shape in dict.fromkeys(few_rows_shapes(k_block).values()):
                for even, biased in product((True, False), (False, True)):
                    options = f"-{shape.tiles}t{shape.warps}w" + "-even" * even + "-bias" * biased
                    yield Variant(
                        name=f"few_rows-{dtype}-{k_block}x{group_k_blocks}-{shape.rows}{options}",
                        function=few_rows_kernel,
                        signature=signature(dtype),
                        constants={
                            "K_BLOCK": k_block,
                            "BITS": 4,
                            "GROUPS": 1,
                            "GROUP_K_BLOCKS": group_k_blocks,
                            "ROWS": shape.rows,
                            "TILES": shape.tiles,
                            "WARPS": shape.warps,
                            "EVEN": even,
                            "STAGES": shape.stages,
                            "HAS_BIAS": biased,
                            "INLINE_ASM": True,
                        },
                        num_warps=shape.warps,
                        num_stages=shape.stages,
                        axes={
                            "dtype": dtype,
                            "k_block": k_block,
                            "group_k_blocks": group_k_blocks,
                            "rows": shape.rows,
                            "tiles": shape.tiles,
                            "warps": shape.warps,
                            "even": even,
                            "bias": biased,
                        },
                        codes=TILE * shape.tiles * shape.warps * k_block,
                        tensor_cores=True,
                        wide_loads=True,
                        # A scale and a zero for only 32 codes.
                        most_per_code=8.6 if k_block == 32 else 6.0,
                        spills=SPILLS if dtype == "fp16" and k_block == 64 else "",
                    )
