"""Specialisations of the quantized Linear's kernels at 2, 3 and 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

from aot_variants.variant import Variant
from kvconvert.kernels.linear.packed_layout import TILE
from kvconvert.kernels.linear.triton.few_rows import few_rows_kernel, few_rows_shapes
from kvconvert.kernels.linear.triton.many_rows import dequantize_kernel, k_blocks_per_program, prompt_kernel
from kvconvert.kernels.linear.triton.prompt_shapes import prompt_shapes

# Bits with k blocks of groups of 128 inputs and of 32, and of 32 where the inputs fill no longer ones: K_BLOCK, GROUPS,
# GROUP_K_BLOCKS.
LAYOUTS = {
    2: ((256, 2, 1), (128, 4, 1), (64, 2, 1)),
    3: ((256, 2, 1), (256, 8, 1), (128, 4, 1)),
    8: ((128, 1, 1), (32, 1, 1)),
}
# What one program handles per code, beside converting it, is shared by fewer codes in small k blocks.
MOST_PER_CODE = {32: 12.0, 64: 12.0, 128: 8.0, 256: 8.0}
SPILLS = "at most ten registers, on one architecture or another"


def variants(device_capability: int) -> Iterator[Variant]:
    """What the dispatch chooses for groups of 128 and of 32 inputs on a device."""
    for bits, layouts in LAYOUTS.items():
        for k_block, groups, group_k_blocks in layouts:
            sizes = {"K_BLOCK": k_block, "BITS": bits, "GROUPS": groups, "GROUP_K_BLOCKS": group_k_blocks}
            axes = {"bits": bits, "groups": groups, "k_block": k_block}
            for dtype in ("fp16", "bf16"):
                yield from _few(dtype, sizes, axes)
                yield from _many(dtype, sizes, axes, device_capability)


def _layout(sizes: dict[str, int]) -> str:
    return str(sizes["K_BLOCK"]) + f"by{sizes['GROUPS']}" * (sizes["GROUPS"] > 1)


def _few(dtype: str, sizes: dict[str, int], axes: dict[str, int]) -> Iterator[Variant]:
    for shape in dict.fromkeys(few_rows_shapes(sizes["K_BLOCK"]).values()):
        yield Variant.of(
            f"few_rows-{axes['bits']}bit-{dtype}-{_layout(sizes)}-{shape.rows}-{shape.tiles}t{shape.warps}w",
            few_rows_kernel,
            dtype,
            sizes
            | {"ROWS": shape.rows, "TILES": shape.tiles, "WARPS": shape.warps, "EVEN": True, "STAGES": shape.stages}
            | {"HAS_BIAS": False, "INLINE_ASM": True},
            num_warps=shape.warps,
            num_stages=shape.stages,
            axes=axes | {"dtype": dtype, "rows": shape.rows, "tiles": shape.tiles},
            codes=TILE * shape.tiles * shape.warps * sizes["K_BLOCK"],
            tensor_cores=True,
            wide_loads=True,
            most_per_code=MOST_PER_CODE[sizes["K_BLOCK"]],
            spills=SPILLS,
        )


def _many(dtype: str, sizes: dict[str, int], axes: dict[str, int], capability: int) -> Iterator[Variant]:
    for shape in prompt_shapes((capability // 10, capability % 10), sizes["K_BLOCK"]):
        yield Variant.of(
            f"prompt-{axes['bits']}bit-{dtype}-{_layout(sizes)}-{shape.rows}",
            prompt_kernel,
            dtype,
            sizes | {"ROWS": shape.rows, "TILES": shape.tiles, "STAGES": shape.stages, "INLINE_ASM": True},
            num_warps=shape.warps,
            num_stages=shape.stages,
            axes=axes | {"dtype": dtype, "rows": shape.rows},
            codes=TILE * shape.tiles * sizes["K_BLOCK"],
            tensor_cores=True,
            wide_loads=True,
            most_per_code=MOST_PER_CODE[sizes["K_BLOCK"]],
            spills=SPILLS,
        )
    yield Variant.of(
        f"dequantize-{axes['bits']}bit-{dtype}-{_layout(sizes)}",
        dequantize_kernel,
        dtype,
        sizes | {"K_BLOCKS": k_blocks_per_program(sizes["K_BLOCK"])},
        num_warps=4,
        axes=axes | {"dtype": dtype},
        wide_loads=True,
    )
