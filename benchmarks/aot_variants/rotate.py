"""Specialisations of the rotation's kernels."""

from __future__ import annotations

from collections.abc import Iterator

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.rotate.triton.kernels import rotate_and_append_kernel, rotate_kernel
from kvconvert.kernels.rotate.triton.launch import FEW_ROWS, MANY_ROWS, columns_for, inner_for, tile_of


def variants(capability: int) -> Iterator[Variant]:
    """Every specialisation that the dispatch chooses for the usual models."""
    for dtype, name in DTYPES.items():
        for dim in (64, 80, 96, 128, 256):
            for rows in (FEW_ROWS, MANY_ROWS[dtype]):
                parts = {"COLUMNS": columns_for(dim, dtype), "INNER": inner_for(dim, dtype)}
                shared = {"SIZE": dim, "TILE": tile_of(dim), "ROWS": rows} | parts
                axes = {"dtype": name, "head_size": dim, "rows": rows}
                for inverse in (False, True):
                    yield _rotate_variant(name, shared, axes, inverse)
                for rotate_values in (False, True):
                    yield _append_variant(name, shared, axes, rotate_values)


def _rotate_variant(name: str, shared: dict[str, int], axes: dict[str, object], inverse: bool) -> Variant:
    strides = [f"{side}{stride}_stride" for side in ("", "target_") for stride in ("outer", "inner", "row")]
    return Variant(
        f"rotate-{name}-{shared['SIZE']}-{shared['ROWS']}{'-inverse' * inverse}",
        rotate_kernel,
        dict.fromkeys(("source", "target", "matrix"), f"*{name}")
        | {"normaliser": "fp32"}
        | dict.fromkeys(("inner", "rows", *strides), "i32"),
        shared | {"INVERSE": inverse},
        num_warps=4,
        num_stages=3,
        axes=axes | {"inverse": inverse},
        tensor_cores=True,
        spills="two registers outside of the loop" if name == "fp32" and shared["SIZE"] == 64 else "",
    )


def _append_variant(name: str, shared: dict[str, int], axes: dict[str, object], rotate_values: bool) -> Variant:
    pointers = ("queries", "output", "keys", "values", "key_base", "value_base", "key_matrix", "value_matrix")
    sides = ("query", "output", "key", "value")
    strides = [f"{side}{stride}" for side in sides for stride in ("_batch_stride", "_head_stride", "_stride")]
    return Variant(
        f"append-{name}-{shared['SIZE']}-{shared['ROWS']}{'-values' * rotate_values}",
        rotate_and_append_kernel,
        dict.fromkeys(pointers, f"*{name}")
        | dict.fromkeys(("table", "first_tokens"), "*i64")
        | dict.fromkeys(("key_normaliser", "value_normaliser"), "fp32")
        | dict.fromkeys(("batch", "tokens", *strides), "i32"),
        shared
        | {
            "QUERY_HEADS": 32,
            "HEADS": 8,
            "VALUE_SIZE": shared["SIZE"],
            "VALUE_TILE": shared["TILE"],
            "VALUE_COLUMNS": shared["COLUMNS"],
            "VALUE_INNER": shared["INNER"],
            "ROTATE_KEYS": True,
            "ROTATE_VALUES": rotate_values,
            "ROWS_ARE_HEADS": shared["ROWS"] == FEW_ROWS,
        },
        num_warps=4,
        num_stages=3,
        axes=axes | {"rotate_values": rotate_values},
        tensor_cores=True,
    )
