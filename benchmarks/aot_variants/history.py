"""Specialisations of the kernels that dequantize pages and merge partial results of attention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.chunked_prefill.triton import merge_constants, merge_kernel, merge_warps
from kvconvert.kernels.page_formats import PageLayout
from kvconvert.kernels.pages import PAGE_SIZE, PageFormat
from kvconvert.kernels.pages.triton.dequantize import (
    dequantize_kernel,
    read_pages_kernel,
    warps_for,
)


def variants(capability: int) -> Iterator[Variant]:
    """Specialisations that the dispatch chooses for the usual models: 8 KV heads, pages of the usual size."""
    for dtype, dim in product(DTYPES.values(), (48, 64, 80, 96, 128, 256)):
        for f in _formats(dim):
            for placed in (False, True):
                if f.bits == 16:
                    yield _variant("copy", read_pages_kernel, f, dtype, placed)
                else:
                    name = "keys" if f.is_key else "values"
                    yield _variant(name, dequantize_kernel, f, dtype, placed)
        if dtype == "fp32":
            continue
        # The first results are the dtype's, later sums float32; the last merge gives the dtype again.
        for first, output in ((dtype, "fp32"), ("fp32", "fp32"), ("fp32", dtype), (dtype, dtype)):
            constants = merge_constants(dim)
            yield Variant.of(
                f"merge-{first}-{dtype}-{output}-{dim}",
                merge_kernel,
                dtype,
                constants,
                merge_warps(constants),
                types={"first": f"*{first}", "second": f"*{dtype}", "output": f"*{output}"},
                axes={"kernel": "merge", "dtype": dtype, "head_size": dim, "first": first, "output": output},
            )


def _formats(dim: int) -> Iterator[PageFormat]:
    for bits, group in product((1, 2, 3, 4, 8), (16, 32, 128)):
        yield PageFormat.keys(8, dim, PAGE_SIZE, bits, group)
    for bits, group in product((1, 2, 3, 4, 8), sorted({g for g in (16, 32, 128) if dim % g == 0} | {dim})):
        yield PageFormat.values(8, dim, PAGE_SIZE, bits, group)
    for norm, group in product(("joint", "per_head"), (32, 128)):
        yield PageFormat.keys(8, dim, PAGE_SIZE, 2, group, norm)
    for bits, part, fixed in product((1, 2), (8, 4), (False, True)):
        yield PageFormat.keys(8, dim, PAGE_SIZE, bits, 128, boosted=dim // part, fixed_channels=fixed)
    for bits in (1, 2, 3, 4, 8):
        yield PageFormat.keys(8, dim, PAGE_SIZE, bits, PAGE_SIZE, static=True)
        yield PageFormat.values(8, dim, PAGE_SIZE, bits, dim, static=True)
    for bits in (1, 2, 3, 4):
        yield PageFormat.keys(8, dim, PAGE_SIZE, bits, 128, scale_bits=8)
        yield PageFormat.values(8, dim, PAGE_SIZE, bits, dim, scale_bits=8)
    yield PageFormat.keys(8, dim, PAGE_SIZE, 16, PAGE_SIZE)


def _variant(kernel: str, function: Any, f: PageFormat, dtype: str, placed: bool) -> Variant:
    layout = PageLayout.of(f)
    about = {"bits": f.bits, "group": f.group_size, "static": f.static, "placed": placed}
    about |= {"bytes": True} if f.scale_bits == 8 else {}
    if f.is_key and f.bits < 16:
        about |= {"norm": f.token_norm, "boosted": f.boosted * 100 // f.head_dim, "fixed": f.fixed_channels}
    return Variant.of(
        "-".join([kernel, dtype, str(f.head_dim), *(f"{name}_{value}" for name, value in about.items())]),
        function,
        dtype,
        {"F": layout, "PLACED": placed},
        warps_for(layout),
        types={"scales": "*i64", "boosted": "*i32", "places": "*i64"},
        axes={"kernel": kernel, "dtype": dtype, "head_size": f.head_dim} | about,
    )
