"""Specialisations of the elementwise kernels: gates, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Iterator

import triton

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.elementwise.triton.gated import COLUMNS, gated_kernel
from kvconvert.kernels.elementwise.triton.norm import rms_norm_kernel, shape
from kvconvert.kernels.elementwise.triton.rotary import HEADS, rotary_kernel


def variants(device_capability: int) -> Iterator[Variant]:
    """What the dispatch chooses for the usual models, the same on all devices."""
    for name in DTYPES.values():
        for activation, clamped in (("silu", False), ("silu", True), ("gelu_tanh", False), ("gelu", False)):
            yield _gated(name, activation, clamped)
        for columns in (128, 1024, 4096, 8192):
            for rounded in (True, False):
                for residual in (False, True) if columns > 128 else (False,):
                    yield _norm(name, columns, rounded, residual)
        for size, rest in ((64, 0), (128, 0), (256, 0), (64, 64)):
            yield _rotary(name, size, rest)


def _gated(dtype: str, activation: str, clamped: bool) -> Variant:
    return Variant(
        name=f"gated-{dtype}-{activation}{'-clamped' * clamped}",
        function=gated_kernel,
        signature=dict.fromkeys(("gate", "up", "y"), f"*{dtype}")
        | dict.fromkeys(("columns", "gate_stride", "up_stride"), "i32")
        | dict.fromkeys(("alpha", "limit", "offset"), "fp32"),
        constants={"ACTIVATION": activation, "CLAMPED": clamped, "COLUMNS": COLUMNS},
        num_warps=4,
        num_stages=3,
        axes={"dtype": dtype, "activation": activation, "clamped": clamped},
        wide_loads=True,
    )


def _norm(dtype: str, columns: int, rounded: bool, residual: bool) -> Variant:
    block, rows, warps = shape(columns)
    sizes = ("rows", "inner", "columns", "outer_stride", "middle_stride", "inner_stride", "middle")
    return Variant(
        name=f"norm-{dtype}-{columns}{'-rounded' * rounded}{'-residual' * residual}",
        function=rms_norm_kernel,
        signature=dict.fromkeys(("x", "residual", "weight", "total", "y"), f"*{dtype}")
        | dict.fromkeys(sizes, "i32")
        | {"eps": "fp32", "offset": "fp32"},
        constants={"ROWS": rows, "COLUMNS": block, "HAS_WEIGHT": True, "HAS_RESIDUAL": residual, "ROUNDED": rounded},
        num_warps=warps,
        num_stages=3,
        axes={"dtype": dtype, "columns": columns, "rounded": rounded, "residual": residual},
        wide_loads=True,
        spills="two registers of the widest rows" if (dtype, columns, residual) == ("fp32", 8192, True) else "",
    )


def _rotary(dtype: str, size: int, rest: int) -> Variant:
    sizes = ("tokens", "q_heads", "k_heads", "size", "head_size")
    sides = [f"{side}_{stride}_stride" for side in "qk" for stride in ("batch", "head", "token")]
    tables = [f"{table}_{stride}_stride" for table in ("cos", "sin") for stride in ("batch", "token")]
    return Variant(
        name=f"rotary-{dtype}-{size}+{rest}",
        function=rotary_kernel,
        signature=dict.fromkeys(("q", "k", "cos", "sin", "q_output", "k_output"), f"*{dtype}")
        | dict.fromkeys((*sizes, *sides, *tables), "i32"),
        constants={"HEADS": HEADS, "HALF": triton.next_power_of_2(size // 2), "REST": rest},
        num_warps=4,
        num_stages=3,
        axes={"dtype": dtype, "size": size, "rest": rest},
    )
