"""Specialisations of the decode kernel over latents, and of the one that writes their pages."""

from __future__ import annotations

from collections.abc import Iterator

from aot_variants.pages import key_variant
from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.latent import MOST_FLOAT32_CHANNELS
from kvconvert.kernels.latent.triton.kernel import latent_decode_kernel
from kvconvert.kernels.latent.triton.launch import WARPS, latent_shape, steps_of
from kvconvert.kernels.pages import PAGE_SIZE, KeyFormat, LayerFormat, ValueFormat

USUAL = (512, 64)
SHAPES = (USUAL, (256, 32), (320, 64), (128, 16), (48, 16))
TYPES = {"out": "*fp32", "stats": "*fp32", "items": "*i32"}
TYPES |= dict.fromkeys(("key_table", "value_table", "rows"), "*i64")
TYPES |= dict.fromkeys(("key_base", "value_base"), "*i16")


def variants(capability: int) -> Iterator[Variant]:
    """Every width, dtype and size."""
    for bits in (2, 4):
        yield key_variant("bf16", KeyFormat(1, USUAL[0], PAGE_SIZE, bits, PAGE_SIZE))
    for dtype, name in DTYPES.items():
        for rank, rope in SHAPES:
            for bits in (2, 4, 16):
                if name == "fp32" and rank > MOST_FLOAT32_CHANNELS:
                    continue
                latents = KeyFormat(1, rank, PAGE_SIZE, bits, PAGE_SIZE)
                parts = ValueFormat(1, rope, PAGE_SIZE, 16 if bits == 16 else 8, rope)
                steps = steps_of(dtype)
                stages = steps.pop("num_stages")
                shape = latent_shape(LayerFormat(latents, parts), 16, dtype)
                constants = steps | {"F": shape, "DEPENDENT": capability >= 90}
                axes = {"dtype": name, "rank": rank, "bits": bits}
                if name == "bf16" and (rank, rope) == USUAL:
                    axes["usual"] = bits
                of_codes = bits < 16
                yield Variant.of(
                    f"latent-{name}-{rank}-{bits}",
                    latent_decode_kernel,
                    name,
                    constants,
                    WARPS,
                    types=TYPES | {"rope_queries": f"*{name}"},
                    num_stages=stages,
                    axes=axes,
                    tensor_cores=True,
                    wide_loads=rank % 128 == 0,
                    codes=PAGE_SIZE * rank * of_codes,
                    code_bytes=PAGE_SIZE * rank * bits // 8 * of_codes,
                    # Two products of 16 heads and their scores, which small latents share among fewer codes.
                    most_per_code=6.0 if rank == USUAL[0] else 40.0,
                    spills="a few registers outside of the products" if name == "fp32" else "",
                )
