"""Specialisations of the prompt's kernels: attention, its log-sum-exp alone, and sums and maxima of columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from aot_variants.variant import Variant
from kvconvert.kernels.prompt.triton import Tiling, attention_constants, attention_tiling, column_tiling, tile_of
from kvconvert.kernels.prompt.triton.kernels import attention_kernel, column_sums_kernel

# Head sizes of the usual models, of keys and of values.
HEAD_SIZES = ((48, 48), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))


def variants(device_capability: int) -> Iterator[Variant]:
    """Every specialisation that the dispatch can choose on a device for heads of the usual sizes."""
    for (size, value_size), dtype in product(HEAD_SIZES, ("fp16", "bf16")):
        for softcap, sink_logits, windowed in product((False, True), repeat=3):
            for values in (value_size, 0):
                yield _attention_variant(device_capability, dtype, size, values, softcap, sink_logits, windowed)
            if not sink_logits:
                yield _column_variant(device_capability, dtype, size, softcap, windowed)
            if not sink_logits and not windowed:
                yield _column_variant(device_capability, dtype, size, softcap, windowed, maxima=True)


def _attention_variant(
    device_capability: int, dtype: str, size: int, value_size: int, softcap: bool, sink_logits: bool, windowed: bool
) -> Variant:
    head_tile, value_tile = tile_of(size), tile_of(value_size)
    tiling = attention_tiling(device_capability, head_tile, value_tile)
    keys = _source(dtype, tiling.key_rows, head_tile, tiling)
    features = {"softcap": softcap, "sink_logits": sink_logits, "windowed": windowed}
    return _variant(
        "attention" if value_size else "log_sum_exp",
        attention_kernel,
        {
            "queries": _source(dtype, tiling.query_rows, head_tile, tiling),
            "keys": keys,
            "values": _source(dtype, tiling.key_rows, value_tile, tiling) if value_size else keys,
            "tiles": f"*{dtype}",
        }
        | ({} if sink_logits else {"sink_logits": f"*{dtype}"}),
        tiling,
        {"dtype": dtype, "head_size": size} | features,
        attention_constants(size, value_size, tiling) | {"SINK_LOGITS": sink_logits, "RAGGED": False},
    )


def _column_variant(
    device_capability: int, dtype: str, size: int, softcap: bool, windowed: bool, maxima: bool = False
) -> Variant:
    head_tile = tile_of(size)
    tiling = column_tiling(device_capability, head_tile)
    return _variant(
        "column_maxima" if maxima else "column_sums",
        column_sums_kernel,
        {
            "queries": _source(dtype, tiling.query_rows, head_tile, tiling),
            "keys": _source(dtype, tiling.key_rows, head_tile, tiling),
        },
        tiling,
        {"dtype": dtype, "head_size": size, "softcap": softcap, "windowed": windowed},
        {"HEAD_SIZE": size, "HEAD_TILE": head_tile, "MAXIMA": maxima},
    )


def _source(dtype: str, rows: int, tile: int, tiling: Tiling) -> str:
    """The type of what `_tiles` gives."""
    return f"tensordesc<{dtype}[1,{rows},{tile}]>" if tiling.descriptors else f"*{dtype}"


def _variant(
    operation: str, function: Any, types: dict[str, str], tiling: Tiling, axes: dict[str, Any], constants: dict
) -> Variant:
    constants = constants | {
        "QUERY_ROWS": tiling.query_rows,
        "KEY_ROWS": tiling.key_rows,
        "SOFTCAP": axes["softcap"],
        "WINDOWED": axes["windowed"],
        "DESCRIPTORS": tiling.descriptors,
        "IN_REGISTERS": tiling.in_registers,
        "INTERPRETED": False,
    }
    name = "-".join([operation, *(f"{axis}_{value}" for axis, value in axes.items())])
    return Variant.of(
        name,
        function,
        axes["dtype"],
        constants,
        tiling.num_warps,
        types=types,
        num_stages=tiling.num_stages,
        axes={"operation": operation} | axes,
        tensor_cores=True,
        # Tilings for Blackwell have not been tuned on one; on Hopper it is the largest heads.
        spills="a few bytes outside of the loop" if tiling.descriptors and not tiling.in_registers else "",
    )
