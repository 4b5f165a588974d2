"""Specialisations of the elementwise kernels: gates, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import triton

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.elementwise.triton import COLUMNS, HEADS, gated_kernel, rms_norm_kernel, rotary_kernel, shape

GATES = (("silu", False), ("silu", True), ("gelu_tanh", False), ("gelu", False))
ROTARY_SIZES = ((64, 0), (128, 0), (256, 0), (64, 64))


def variants(device_capability: int) -> Iterator[Variant]:
    """The variants that the dispatch chooses for the usual models, the same on all devices."""
    for dtype in DTYPES.values():
        for activation, clamped in GATES:
            yield Variant.of(
                f"gated-{dtype}-{activation}{'-clamped' * clamped}",
                gated_kernel,
                dtype,
                {"ACTIVATION": activation, "CLAMPED": clamped, "COLUMNS": COLUMNS},
                num_warps=4,
                axes={"dtype": dtype, "activation": activation, "clamped": clamped},
                wide_loads=True,
            )
        for columns, rounded in product((128, 1024, 4096, 8192), (True, False)):
            for residual in (False, True) if columns > 128 else (False,):
                yield _norm(dtype, columns, rounded, residual)
        for size, rest in ROTARY_SIZES:
            yield Variant.of(
                f"rotary-{dtype}-{size}+{rest}",
                rotary_kernel,
                dtype,
                {"HEADS": HEADS, "HALF": triton.next_power_of_2(size // 2), "REST": rest},
                num_warps=4,
                axes={"dtype": dtype, "size": size, "rest": rest},
            )


def _norm(dtype: str, columns: int, rounded: bool, residual: bool) -> Variant:
    block, rows, warps = shape(columns)
    return Variant.of(
        f"norm-{dtype}-{columns}{'-rounded' * rounded}{'-residual' * residual}",
        rms_norm_kernel,
        dtype,
        {
            "ROWS": rows,
            "COLUMNS": block,
            "HAS_WEIGHT": True,
            "HAS_RESIDUAL": residual,
            "HAS_GATE": columns == 128,
            "ROUNDED": rounded,
        },
        num_warps=warps,
        axes={"dtype": dtype, "columns": columns, "rounded": rounded, "residual": residual},
        wide_loads=True,
        spills="two registers of the widest rows" if (dtype, columns, residual) == ("fp32", 8192, True) else "",
    )
