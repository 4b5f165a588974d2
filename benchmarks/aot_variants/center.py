"""Specialisations of the kernels for keys that lack a constant part: of pages' tokens, of a step's scores, of decoding.

Of the decode kernel only what the center adds to its presets is listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from aot_variants.decode import DTYPES, HEADS, POINTERS, Pages, page_variant, preset_layer, signature
from aot_variants.variant import Variant
from kvconvert.kernels.decode.triton import DecodeShape
from kvconvert.kernels.decode.triton.center import STAGES, center_constants, center_scores_kernel, center_warps
from kvconvert.kernels.decode.triton.kernel import decode_kernel
from kvconvert.kernels.decode.triton.launch import decode_shape
from kvconvert.kernels.pages import PAGE_SIZE, KeyCenter, LayerFormat, SideTensors
from kvconvert.kernels.pages.triton import center

# Of codes in lanes of different lengths.
FORMATS = (Pages("two bits", 2, 2, 128, 128), Pages("four bits", 4, 4, 128, 128))
PRESETS = ("kivi", "oscar-g128", "kitty")
DIMS = (80, 128, 256)
ROWS = ((1, 1), (4, 1), (4, 4))
# 16 bits of both kinds take the same way.
EITHER = ("bf16", "fp32")


def variants(capability: int) -> Iterator[Variant]:
    """The list of this module for one architecture."""
    for pages, dim, dtype, rows in product(FORMATS, DIMS, EITHER, ROWS):
        shape = _shape(pages.layer((dim, dim)).format, dtype, rows)
        rest = "*fp32" if shape.split_query else "*fp16"
        constants = {"F": shape, "BLOCK_BATCH": 32, "DEPENDENT": capability >= 90}
        constants |= center_constants(shape, capability // 10)
        types = POINTERS | {"queries": f"*{dtype}", "rest": rest, "steps": rest}
        crowded = dim > 128 or dtype == "fp32"
        yield Variant(
            f"scores-{pages.name}-{dim}-{dtype}-{rows[0]}x{rows[1]}",
            center_scores_kernel,
            signature(center_scores_kernel, constants, types),
            constants,
            center_warps(shape),
            num_stages=STAGES,
            axes={"kernel": "scores", "format": pages.name, "head_size": dim, "dtype": dtype}
            | {"rows": f"{rows[0]}x{rows[1]}"},
            tensor_cores=True,
            spills="heads of more than 128 channels, or queries of 32 bits" if crowded else "",
            most_local=0.35 if crowded else 0.05,
        )
    for dim, dtype in product(DIMS, DTYPES):
        constants = center.center_constants(HEADS, dim, PAGE_SIZE, 1) | {"FAST": dtype != "fp32"}
        yield Variant(
            f"pages-{dim}-{dtype}",
            center.center_kernel,
            signature(center.center_kernel, constants, POINTERS | {"tokens": f"*{dtype}", "matrices": "*fp16"}),
            constants,
            center.center_warps(PAGE_SIZE),
            num_stages=3,
            max_registers=None if dtype == "fp32" else center.FEW_REGISTERS,
            axes={"kernel": "pages", "head_size": dim, "dtype": dtype},
            tensor_cores=True,
            spills="sines and cosines of angles of any size",
            most_local=0.35,
        )
    for preset, dtype in product(PRESETS, EITHER):
        layer = preset_layer(preset, (128, 128))
        shape = _shape(layer.format, dtype, (4, 1))
        axes = {"format": preset, "head_size": 128, "dtype": dtype}
        name = f"{preset}-centered-{dtype}"
        yield page_variant("decode", decode_kernel, name, shape, dtype, axes, "", capability)


def _shape(format: LayerFormat, dtype: str, rows: tuple[int, int]) -> DecodeShape:
    """The decode kernel's specialisation for pages whose keys lack a constant part."""
    center = SideTensors(center=KeyCenter(torch.empty(0), torch.empty(0)))
    lacking = replace(format, key_tensors=center, sink_tokens=1)
    half_quantized, masked = format.half_quantized, rows[1] > 1
    return decode_shape(lacking, DTYPES[dtype], *rows, half_quantized=half_quantized, masked=masked)
