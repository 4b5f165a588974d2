"""Specialisations of the decode kernel over latents, and of the one that writes their pages."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from aot_variants.pages import page_variant
from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.latent.triton.kernel import latent_decode_kernel
from kvconvert.kernels.latent.triton.launch import MANY_HEADS, launch_options, shape_for
from kvconvert.kernels.pages import PAGE_SIZE, LayerFormat, PageFormat

USUAL = (512, 64)
SHAPES = (USUAL, (256, 32), (320, 64), (128, 16), (48, 16))
HEADS = (16, 128)
TYPES = {"out": "*fp32", "stats": "*fp32", "items": "*i32"}
TYPES |= dict.fromkeys(("key_table", "value_table", "rows"), "*i64")
TYPES |= dict.fromkeys(("key_base", "value_base"), "*i16")


def variants(capability: int) -> Iterator[Variant]:
    """Every width, dtype, size and number of heads."""
    for bits in (2, 4):
        yield page_variant("bf16", latent_format(USUAL[0], bits))
    for dtype in (torch.float16, torch.bfloat16):
        for heads in HEADS:
            for rank, rope in SHAPES:
                for bits in (2, 4, 16):
                    yield latent_variant(DTYPES[dtype], heads, rank, rope, bits, capability)


def latent_format(rank: int, bits: int) -> PageFormat:
    """Latents as pages hold them."""
    return PageFormat.keys(1, rank, PAGE_SIZE, bits, PAGE_SIZE, by_token=bits < 16)


def latent_variant(name: str, heads: int, rank: int, rope: int, bits: int, capability: int) -> Variant:
    """The decode kernel."""
    parts = PageFormat.values(1, rope, PAGE_SIZE, 16 if bits == 16 else 8, rope)
    many = heads >= MANY_HEADS and capability >= 90
    shape = shape_for(LayerFormat(latent_format(rank, bits), parts), heads, many)
    options = launch_options(shape)
    axes = {"dtype": name, "heads": heads, "rank": rank, "bits": bits}
    if name == "bf16" and (rank, rope) == USUAL:
        axes["usual"] = (heads, bits)
    spills = "the sums of a block of heads take most registers"
    # A step of dequantized latents is of a part of a page.
    tokens = options["TILE"] if shape.dequantizes else PAGE_SIZE
    of_codes = bits < 16
    return Variant.of(
        f"latent-{name}-{heads}-{rank}-{bits}",
        latent_decode_kernel,
        name,
        {"F": shape, "TILE": options["TILE"], "DEPENDENT": capability >= 90},
        options["num_warps"],
        types=TYPES | {"rope_queries": f"*{name}"},
        num_stages=options["num_stages"],
        max_registers=options.get("maxnreg"),
        axes=axes,
        tensor_cores=True,
        wide_loads=rank % 128 == 0,
        codes=tokens * rank * of_codes,
        code_bytes=tokens * rank * bits // 8 * of_codes,
        # Two products of a block of heads, their scores and, of many heads, what is dequantized; small latents share
        # them among fewer codes.
        most_per_code=(14.0 if shape.dequantizes else 6.0) if rank == USUAL[0] else 90.0,
        spills=spills,
    )
