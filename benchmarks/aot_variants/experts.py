"""Specialisations of the kernels of a mixture's experts."""

from __future__ import annotations

from collections.abc import Iterator

from aot_variants.variant import Variant
from kvconvert.kernels.experts.triton import (
    COMBINE_COLUMNS,
    SORT_CHUNK,
    combine_kernel,
    few_pairs_kernel,
    many_pairs_kernel,
    sort_by_expert_kernel,
)
from kvconvert.kernels.linear.packed_layout import TILE
from kvconvert.kernels.linear.triton.few_rows import few_rows_shapes
from kvconvert.kernels.linear.triton.prompt_shapes import prompt_shape


def variants(device_capability: int) -> Iterator[Variant]:
    """What the dispatch chooses for the usual mixtures on a device."""
    yield Variant.of("sort", sort_by_expert_kernel, "", {"CHUNK": SORT_CHUNK}, num_warps=4)
    for dtype in ("fp16", "bf16"):
        for scores in (dtype, "fp32", None):
            yield _combine(dtype, scores)
        for k_block, group_k_blocks in ((32, 1), (64, 1), (128, 1)):
            sizes = {"K_BLOCK": k_block, "BITS": 4, "GROUPS": 1, "GROUP_K_BLOCKS": group_k_blocks}
            sizes |= {"INLINE_ASM": True}
            for bias in (False, True):
                yield from _few(dtype, sizes, bias)
                yield from _many(dtype, sizes, bias, device_capability)


def _few(dtype: str, sizes: dict[str, int], bias: bool) -> Iterator[Variant]:
    for shape in dict.fromkeys(few_rows_shapes(sizes["K_BLOCK"]).values()):
        # Pairs by themselves are single rows, sorted ones eight at least.
        is_sorted = shape.rows > 2
        yield Variant.of(
            f"few_pairs-{dtype}-{sizes['K_BLOCK']}-{shape.rows}-{shape.tiles}t{shape.warps}w"
            + "-sorted" * is_sorted
            + "-bias" * bias,
            few_pairs_kernel,
            dtype,
            sizes
            | {"ROWS": shape.rows, "TILES": shape.tiles, "WARPS": shape.warps, "EVEN": True, "STAGES": shape.stages}
            | {"HAS_BIAS": bias, "SORTED": is_sorted},
            num_warps=shape.warps,
            num_stages=shape.stages,
            axes={"dtype": dtype, "k_block": sizes["K_BLOCK"], "rows": shape.rows, "bias": bias}
            | {"tiles": shape.tiles, "warps": shape.warps, "sorted": is_sorted},
            codes=TILE * shape.tiles * shape.warps * sizes["K_BLOCK"],
            tensor_cores=True,
            wide_loads=True,
            # A scale and a zero for only 32 codes.
            most_per_code=8.6 if sizes["K_BLOCK"] == 32 else 6.0,
        )


def _many(dtype: str, sizes: dict[str, int], bias: bool, capability: int) -> Iterator[Variant]:
    major_minor = (capability // 10, capability % 10)
    for shape in dict.fromkeys(prompt_shape(rows, major_minor, sizes["K_BLOCK"]) for rows in (128, 256)):
        yield Variant.of(
            f"many_pairs-{dtype}-{sizes['K_BLOCK']}-{shape.rows}{'-bias' * bias}",
            many_pairs_kernel,
            dtype,
            sizes | {"ROWS": shape.rows, "TILES": shape.tiles, "STAGES": shape.stages, "HAS_BIAS": bias},
            num_warps=shape.warps,
            num_stages=shape.stages,
            axes={"dtype": dtype, "k_block": sizes["K_BLOCK"], "rows": shape.rows, "bias": bias},
            codes=TILE * shape.tiles * sizes["K_BLOCK"],
            tensor_cores=True,
            wide_loads=True,
            # A scale and a zero for only 32 codes.
            most_per_code=8.6 if sizes["K_BLOCK"] == 32 else 6.2,
            spills="a few bytes in front of the loop" if capability >= 100 and dtype == "fp16" else "",
        )


def _combine(dtype: str, scores: str | None) -> Variant:
    return Variant.of(
        f"combine-{dtype}-{scores or 'none'}",
        combine_kernel,
        dtype,
        {"HAS_SCORES": scores is not None, "COLUMNS": COMBINE_COLUMNS},
        num_warps=4,
        types={"scores": f"*{scores or 'i64'}"},
        axes={"dtype": dtype, "scores": scores or "none"},
        wide_loads=True,
    )
