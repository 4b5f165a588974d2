"""Specialisations of the decode kernel over latents, and of the one that writes their pages."""

from __future__ import annotations

from collections.abc import Iterator

from aot_variants.pages import key_variant
from aot_variants.variant import Variant
from kvconvert.kernels.latent.triton.kernel import latent_decode_kernel
from kvconvert.kernels.latent.triton.launch import WARPS, latent_shape
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
    for name in ("bf16", "fp16"):
        for rank, rope in SHAPES:
            for bits in (2, 4, 16):
                latents = KeyFormat(1, rank, PAGE_SIZE, bits, PAGE_SIZE)
                parts = ValueFormat(1, rope, PAGE_SIZE, 16 if bits == 16 else 8, rope)
                shape = latent_shape(LayerFormat(latents, parts), 16)
                constants = {"F": shape, "DEPENDENT": capability >= 90}
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
                    num_stages=3,
                    axes=axes,
                    tensor_cores=True,
                    wide_loads=rank % 128 == 0,
                    code_bytes=PAGE_SIZE * rank * bits // 8 * of_codes,
                    spills="a few registers outside of the products" if of_codes else "",
                )
