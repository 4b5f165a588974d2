"""Specialisations of the kernels that choose tokens: dtypes of logits, sizes of vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import triton

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.sampling.triton import (
    LINES,
    PART,
    TILE,
    draw_kernel,
    extremes_kernel,
    masses_kernel,
    search_kernel,
)

TYPES = {
    **dict.fromkeys(("temperature", "top_p", "scores"), "*fp32"),
    **dict.fromkeys(("top_k", "seeds", "counters", "masses", "sums", "bounds", "tokens"), "*i64"),
    **dict.fromkeys(("counted", "count_bounds", "weighed", "weight_bounds"), "*i64"),
}


def variants(device_capability: int) -> Iterator[Variant]:
    """What the dispatch chooses for the usual vocabularies, the same on all devices."""
    for (torch_dtype, dtype), vocabulary in product(DTYPES.items(), (32_000, 248_320)):
        own = TYPES | {"logits": f"*{dtype}"}
        axes = {"dtype": dtype, "vocabulary": vocabulary}
        tile = {"LINES": LINES, "WIDTH": 16 // torch_dtype.itemsize, "PART": PART}
        parts = {"PARTS": triton.next_power_of_2(triton.cdiv(vocabulary, PART))}
        each = {
            "extremes": (extremes_kernel, tile),
            "counts": (search_kernel, {**tile, **parts, "BY_WEIGHT": False}),
            "weights": (search_kernel, {**tile, **parts, "BY_WEIGHT": True}),
            "masses": (masses_kernel, {**tile, **parts}),
            "draw": (draw_kernel, {"RESTRICT": True, "TILE": TILE, "PART": PART, **parts}),
            "draw-all": (draw_kernel, {"RESTRICT": False, "TILE": TILE, "PART": PART, **parts}),
        }
        for name, (function, constants) in each.items():
            about = f"{name}-{dtype}-{vocabulary}"
            yield Variant.of(about, function, dtype, constants, num_warps=4, types=own, axes={**axes, "kernel": name})
