"""Specialisations of the kernels for keys that lack a constant part: of pages' tokens, and of a step's scores."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from aot_variants.decode import DTYPES, HEADS, POINTERS, ROWS, Pages, centered
from aot_variants.variant import Variant
from kvconvert.kernels.decode.triton.center import STAGES, center_constants, center_scores_kernel, center_warps
from kvconvert.kernels.decode.triton.launch import decode_shape
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.kernels.pages.triton import center

# Of codes in lanes of different lengths.
FORMATS = (Pages("two bits", 2, 2, 128, 128), Pages("four bits", 4, 4, 128, 128))
DIMS = (64, 80, 128, 256)
SPILLS = "heads of more than 128 channels, or queries of 32 bits"


def variants(capability: int) -> Iterator[Variant]:
    """The list of this module for one architecture."""
    for pages, dim, dtype, rows in product(FORMATS, DIMS, DTYPES, ROWS):
        name, format = pages.name, pages.layer((dim, dim)).format
        shape = decode_shape(centered(format), None, DTYPES[dtype], *rows, masked=rows[1] > 1)
        rest = "*fp32" if shape.split_query else "*fp16"
        constants = {
            "F": shape,
            "BLOCK_BATCH": 32,
            "DEPENDENT": capability >= 90,
            **center_constants(shape, capability // 10),
        }
        axes = {"format": name, "head_size": dim, "dtype": dtype, "rows": f"{rows[0]}x{rows[1]}"}
        types = POINTERS | {"queries": f"*{dtype}", "rest": rest, "steps": rest}
        usual = (pages, dim, dtype, rows) == (FORMATS[0], 128, "bf16", (4, 1))
        yield Variant(
            f"scores-{name}-{dim}-{dtype}-{rows[0]}x{rows[1]}",
            center_scores_kernel,
            _signature(center_scores_kernel, constants, types),
            constants,
            center_warps(shape),
            num_stages=STAGES,
            axes={"kernel": "scores"} | ({"usual": "scores"} if usual else {}) | axes,
            tensor_cores=True,
            spills=SPILLS if dim > 128 or dtype == "fp32" else "",
            most_local=0.35 if dim > 128 or dtype == "fp32" else 0.05,
        )
    for dim, dtype, sign in product(DIMS, DTYPES, (-1, 1)):
        constants = center.center_constants(HEADS, dim, PAGE_SIZE, sign)
        yield Variant(
            f"pages-{dim}-{dtype}-{sign}",
            center.center_kernel,
            _signature(center.center_kernel, constants, POINTERS | {"tokens": f"*{dtype}", "matrices": "*fp16"}),
            constants,
            center.center_warps(PAGE_SIZE),
            num_stages=3,
            axes={"kernel": "pages", "head_size": dim, "dtype": dtype, "sign": sign},
            tensor_cores=True,
            # The sine of a large angle takes local memory.
            spills="sines and cosines of any angle",
            most_local=1.0,
        )


def _signature(function: Any, constants: dict[str, Any], types: dict[str, str]) -> dict[str, str]:
    return {name: types.get(name, "i32") for name in function.arg_names if name not in constants}
