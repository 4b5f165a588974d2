"""Specialisations of the rotation's kernels."""

from __future__ import annotations

from collections.abc import Iterator

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.rotate.triton import FEW_ROWS, MANY_ROWS, rotate_and_append_kernel, rotate_kernel


def variants(capability: int) -> Iterator[Variant]:
    """Every specialisation that the dispatch chooses for the usual models."""
    for dtype, name in DTYPES.items():
        for dim in (64, 80, 96, 128, 256):
            for rows in (FEW_ROWS, MANY_ROWS[dtype]):
                shared = {"SIZE": dim, "ROWS": rows}
                axes = {"dtype": name, "head_size": dim, "rows": rows}
                for inverse in (False, True):
                    yield _rotate_variant(name, shared, axes, inverse)
                for rotate_values in (False, True):
                    yield _append_variant(name, shared, axes, rotate_values, capability >= 90)


def _rotate_variant(name: str, shared: dict[str, int], axes: dict[str, object], inverse: bool) -> Variant:
    return Variant.of(
        f"rotate-{name}-{shared['SIZE']}-{shared['ROWS']}{'-inverse' * inverse}",
        rotate_kernel,
        name,
        shared | {"INVERSE": inverse},
        num_warps=4,
        types={"matrix": f"*{name}"},
        axes=axes | {"inverse": inverse},
        tensor_cores=True,
        spills="two registers outside of the loop" if name == "fp32" and shared["SIZE"] == 64 else "",
    )


def _append_variant(
    name: str, shared: dict[str, int], axes: dict[str, object], rotate_values: bool, dependent: bool
) -> Variant:
    return Variant.of(
        f"append-{name}-{shared['SIZE']}-{shared['ROWS']}{'-values' * rotate_values}",
        rotate_and_append_kernel,
        name,
        shared
        | {
            "QUERY_HEADS": 32,
            "HEADS": 8,
            "VALUE_SIZE": shared["SIZE"],
            "ROTATE_KEYS": True,
            "ROTATE_VALUES": rotate_values,
            "ROWS_ARE_HEADS": shared["ROWS"] == FEW_ROWS,
            "DEPENDENT": dependent,
        },
        num_warps=4,
        axes=axes | {"rotate_values": rotate_values},
        tensor_cores=True,
    )
