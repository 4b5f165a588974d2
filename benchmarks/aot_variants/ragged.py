"""Specialisations of the kernels of passes over several prompts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.pages import PAGE_SIZE, LayerFormat, PageFormat
from kvconvert.kernels.prompt.triton import attention_constants, attention_tiling, tile_of
from kvconvert.kernels.prompt.triton.kernels import attention_kernel
from kvconvert.kernels.ragged.triton import append_constants, append_kernel, copy_constants, copy_kernel, copy_warps

TABLES = dict.fromkeys(("buffers", "tokens", "copies", "tiles"), "*i64")


def variants(capability: int) -> Iterator[Variant]:
    """Every specialisation that the dispatch chooses for the usual models: 8 KV heads, pages of the usual size."""
    for name, (dim, value_dim) in product(
        DTYPES.values(), ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
    ):
        if name == "fp32":
            continue
        f = LayerFormat(
            PageFormat.keys(8, dim, PAGE_SIZE, 2, 128), PageFormat.values(8, value_dim, PAGE_SIZE, 2, value_dim)
        )
        types, axes = TABLES | {"base": f"*{name}"}, {"dtype": name, "head_size": dim}
        for rotations in product((False, True), repeat=2):
            yield Variant.of(
                f"append-{name}-{dim}-{'-'.join(map(str, rotations))}",
                append_kernel,
                name,
                append_constants(f, *rotations),
                num_warps=4,
                types=types,
                axes=axes | {"kernel": "append", "keys": rotations[0], "values": rotations[1]},
                tensor_cores=any(rotations),
            )
        copies = copy_constants(f)
        yield Variant.of(
            f"copy-{name}-{dim}", copy_kernel, name, copies, copy_warps(f), types=types, axes=axes | {"kernel": "copy"}
        )
        tiling = attention_tiling(capability, tile_of(dim), tile_of(value_dim), ragged=True)
        constants = attention_constants(dim, value_dim, tiling)
        for softcap, sinks, windowed in product((False, True), repeat=3):
            features = {"SOFTCAP": softcap, "SINK_LOGITS": sinks, "WINDOWED": windowed}
            yield Variant.of(
                f"attention-{name}-{dim}-" + "-".join(str(value) for value in features.values()),
                attention_kernel,
                name,
                constants | features | {"RAGGED": True, "INTERPRETED": False},
                tiling.num_warps,
                types=types | {"log_sum_exp": f"*{name}"} | ({} if sinks else {"sink_logits": f"*{name}"}),
                axes=axes | {"kernel": "attention"} | features,
                tensor_cores=True,
                # Tuned for Hopper, whose products take no registers for their right operand.
                spills="a few bytes outside of the loop" if capability < 90 else "",
                num_stages=tiling.num_stages,
            )
