"""Specialisations of the kernels that quantize pages and spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from aot_variants.variant import Variant
from kvconvert.kernels.page_formats import PageLayout
from kvconvert.kernels.pages import PAGE_SIZE, PageFormat
from kvconvert.kernels.pages.triton import tile_of
from kvconvert.kernels.pages.triton.feedback import CHANNEL_BLOCK, feedback_warps, key_feedback_kernel
from kvconvert.kernels.pages.triton.launch import (
    NORM_TOKENS,
    norm_constants,
    page_constants,
    page_warps,
    warps_for,
)
from kvconvert.kernels.pages.triton.quantize import copy_page_kernel, norm_kernel, page_kernel
from kvconvert.kernels.spans.triton import RANGE_TOKENS, SPAN_PARTS, channel_range_kernel, channel_scale_kernel


def variants(capability: int) -> Iterator[Variant]:
    """Specialisations that the dispatch chooses for the usual models: 8 KV heads, pages of the usual size."""
    for dtype, dim in (*product(("bf16",), (64, 80, 128, 256)), ("fp16", 128), ("fp32", 128)):
        for bits, group in product((1, 2, 3, 4, 8), (16, 32, 128)):
            yield page_variant(dtype, PageFormat.keys(8, dim, PAGE_SIZE, bits, group))
        for bits, group in product((1, 2, 3, 4, 8), sorted({g for g in (16, 32, 128) if dim % g == 0} | {dim})):
            yield page_variant(dtype, PageFormat.values(8, dim, PAGE_SIZE, bits, group))
        for bits in (1, 2, 3, 4):
            yield page_variant(dtype, PageFormat.keys(8, dim, PAGE_SIZE, bits, 128, scale_bits=8))
            yield page_variant(dtype, PageFormat.values(8, dim, PAGE_SIZE, bits, dim, scale_bits=8))
        for group, norm in product((32, 128), ("joint", "per_head")):
            yield page_variant(dtype, PageFormat.keys(8, dim, PAGE_SIZE, 2, group, token_norm=norm))
        for bits, boosted, select in product((1, 2), (dim // 8, dim // 4), ("dynamic", "calibrated")):
            yield page_variant(
                dtype,
                PageFormat.keys(8, dim, PAGE_SIZE, bits, 128, boosted=boosted, fixed_channels=select == "calibrated"),
            )
        for bits, partial in product((1, 2, 3, 4, 8), (False, True)):
            yield page_variant(dtype, PageFormat.keys(8, dim, PAGE_SIZE, bits, 128, static=True), partial)
            yield page_variant(dtype, PageFormat.values(8, dim, PAGE_SIZE, bits, dim, static=True), partial)
        yield from _feedback_variants(dtype, dim)
        tile, name = tile_of(dim, 2), f"{dtype}-{dim}"
        shape = {"HEADS": 8, "HEAD_SIZE": dim, "TILE": tile}
        for measure, norm in (("l2", "joint"), ("mean_abs", "joint"), ("l2", "per_head")):
            constants = norm_constants(PageFormat.keys(8, dim, PAGE_SIZE, 2, 128, norm, measure))
            variant = f"norm-{name}-{measure}-{norm}"
            yield _variant(variant, norm_kernel, dtype, constants, warps_for(NORM_TOKENS * tile))
        layout = PageLayout.of(PageFormat.keys(8, dim, PAGE_SIZE, 16, PAGE_SIZE))
        yield _variant(f"copy-{name}", copy_page_kernel, dtype, {"F": layout}, warps_for(PAGE_SIZE * tile))
        yield _variant(
            f"range-{name}", channel_range_kernel, dtype, shape | {"ROWS": RANGE_TOKENS}, warps_for(RANGE_TOKENS * tile)
        )
        for bits in (1, 2, 3, 4, 8):
            constants = shape | {"BITS": bits, "PART_TILE": SPAN_PARTS}
            yield _variant(f"scale-{name}-{bits}", channel_scale_kernel, dtype, constants, 4)


def page_variant(dtype: str, f: PageFormat, partial: bool = False) -> Variant:
    """Pages of a format; `partial` ones may have fewer tokens."""
    constants = page_constants(f, partial)
    select = f"{'calibrated' if f.fixed_channels else 'dynamic'}{f.boosted}" if f.boosted else ""
    treatment = f"-{f.token_norm}{select}" if f.is_key else ""
    name = f"{'keys' if f.is_key else 'values'}-{dtype}-{f.head_dim}-{f.bits}-{f.group_size}{treatment}{_kind(f)}"
    variant = _variant(name + "-partial" * partial, page_kernel, dtype, constants, page_warps(constants))
    if dtype == "fp32" and f.boosted and not f.fixed_channels:
        return replace(variant, spills="8 bytes of stack are reserved and never accessed")
    return variant


def _kind(f: PageFormat) -> str:
    return "-static" if f.static else "-bytes" if f.scale_bits == 8 else ""


def _feedback_variants(dtype: str, dim: int) -> Iterator[Variant]:
    for bits, norm in product((1, 2, 3, 4, 8), ("none", "joint", "per_head")):
        yield _feedback_variant(dtype, PageFormat.keys(8, dim, PAGE_SIZE, bits, 32 if norm == "none" else 128, norm))
    for bits, select in product((1, 2), ("dynamic", "calibrated")):
        fixed = select == "calibrated"
        yield _feedback_variant(
            dtype, PageFormat.keys(8, dim, PAGE_SIZE, bits, 128, boosted=dim // 8, fixed_channels=fixed)
        )
    for bits in (1, 2, 3, 4, 8):
        yield _feedback_variant(dtype, PageFormat.keys(8, dim, PAGE_SIZE, bits, 128, static=True), partial=True)
    for bits in (1, 2, 3, 4):
        yield _feedback_variant(dtype, PageFormat.keys(8, dim, PAGE_SIZE, bits, 128, scale_bits=8))


def _feedback_variant(dtype: str, f: PageFormat, partial: bool = False) -> Variant:
    constants = {"F": (layout := PageLayout.of(f)), "BLOCK": CHANNEL_BLOCK, "PARTIAL": partial}
    select = f"{'calibrated' if f.fixed_channels else 'dynamic'}{f.boosted}" if f.boosted else ""
    name = f"feedback-{dtype}-{f.head_dim}-{f.bits}-{f.group_size}-{f.token_norm}{select}{_kind(f)}"
    variant = _variant(name + "-partial" * partial, key_feedback_kernel, dtype, constants, feedback_warps(layout))
    # A thread holds all channels of a token, of which 256 are more than it has registers. Of 80, padded to 128, it has
    # to keep the borders, too.
    most_local = 0.5 if f.head_dim > 128 else 0.1 if tile_of(f.head_dim, f.bits) > f.head_dim else 0.05
    return replace(variant, spills="a token's channels fill the registers", most_local=most_local)


def _variant(name: str, function: Any, dtype: str, constants: dict[str, Any], num_warps: int) -> Variant:
    axes = {"kernel": name.partition("-")[0], "dtype": dtype} | {
        key: constants[key] for key in ("HEAD_SIZE", "BITS") if key in constants
    }
    if layout := constants.get("F"):
        fields = "head_dim", "bits", "group_size", "norm", "boosted", "static"
        axes |= {field: getattr(layout, field) for field in fields[: 1 if layout.bits == 16 else None]}
    axes |= {"bytes": True} if "-bytes" in name else {}
    few = axes.get("bits", axes.get("BITS")) == 1 or function is channel_range_kernel
    return Variant.of(
        name,
        function,
        dtype,
        constants,
        num_warps,
        types={"tokens": f"*{dtype}", "boosted": "*i64", "scales": "*fp16", "offsets": "*fp16"},
        axes=axes,
        spills="at most six registers, on some architectures" if few else "",
    )
