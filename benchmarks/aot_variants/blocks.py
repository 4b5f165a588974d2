"""Specialisations of the kernels over vLLM's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.blocks import BlockGeometry
from kvconvert.kernels.blocks.triton import copy_constants, copy_tokens_kernel, locate_constants, locate_kernel

TABLES = dict.fromkeys(("rows", "geometries", "found", "places", "records"), "*i64")


def variants(capability: int) -> Iterator[Variant]:
    """Every specialisation for 8 KV heads, pages of 2 bits, and windows of a page or none."""
    for (dtype, name), dim, window in product(DTYPES.items(), (64, 80, 128, 256), (0, 128)):
        geometry = BlockGeometry(1, -(-(128 + window) // 19), 19, 4, 38 * dim, dim * dtype.itemsize, 19 * dim)
        yield Variant.of(
            f"locate-{name}-{dim}-{window}",
            locate_kernel,
            name,
            locate_constants(geometry, (8, dim, dim), dtype, 132 + window),
            num_warps=4,
            types=TABLES | {"block_table": "*i32"},
            axes={"kernel": "locate", "dtype": name, "size": dim, "window": window},
        )
    for (dtype, name), dim, to_blocks in product(DTYPES.items(), (64, 80, 128, 256), (False, True)):
        yield Variant.of(
            f"copy-{name}-{dim}-{to_blocks}",
            copy_tokens_kernel,
            name,
            copy_constants((8, dim, dim), dtype, to_blocks),
            num_warps=4,
            types=TABLES | {"words": f"*{name}"},
            axes={"kernel": "copy", "dtype": name, "size": dim, "to_blocks": to_blocks},
        )
