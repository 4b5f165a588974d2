"""Specialisations of the kernel that rounds a block of a weight's columns."""

from __future__ import annotations

from collections.abc import Iterator

from aot_variants.variant import Variant
from kvconvert.kernels.compensation.triton import COLUMNS, OUTPUTS, round_columns_kernel


def variants(capability: int) -> Iterator[Variant]:
    """One for each width of weights, the same on all devices."""
    pointers = dict.fromkeys(("columns", "scale", "zero", "factor", "errors"), "*fp32")
    for bits in (2, 3, 4, 8):
        yield Variant.of(
            f"round-columns-{bits}",
            round_columns_kernel,
            "fp32",
            {"LEVELS": 2**bits - 1, "OUTPUTS": OUTPUTS, "COLUMNS": COLUMNS},
            num_warps=OUTPUTS // 32,
            types=pointers,
            axes={"bits": bits},
        )
