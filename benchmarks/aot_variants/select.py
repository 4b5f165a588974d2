"""Specialisations of the kernels of an eviction."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.select.triton import COPIED, FEW_TOKENS, STEP, TOKENS, keep_kernel, score_kernel

FLOATS = ("hidden_weight", "hidden_bias", "weight", "bias", "scores")


def variants(capability: int) -> Iterator[Variant]:
    """What the dispatch chooses for the usual models."""
    block = TOKENS if capability >= 90 else FEW_TOKENS
    for dtype, (heads, dim) in product(DTYPES.values(), ((3, 64), (8, 128), (4, 256))):
        types = dict.fromkeys(FLOATS, "*fp32") | {"origin": f"*{dtype}", "places": "*i64", "signs": f"*{dtype}"}
        axes = {"dtype": dtype, "head_size": dim}
        sizes = {"KEY_SIZE": dim, "VALUE_SIZE": dim}
        for rotated in (False, True):
            constants = {"HEADS": heads, "CHANNELS": 256, "ROTATED": rotated, "LARGEST": 80.0, "TOKENS": block}
            yield Variant.of(
                f"score-{dtype}-{dim}{'-rotated' * rotated}",
                score_kernel,
                dtype,
                sizes | constants | {"STEP": STEP},
                num_warps=8,
                num_stages=1,
                types=types,
                axes=axes | {"kernel": "score", "rotated": rotated},
                tensor_cores=True,
            )
        yield Variant.of(
            f"keep-{dtype}-{dim}",
            keep_kernel,
            dtype,
            sizes | {"TOKENS": COPIED},
            num_warps=4,
            types=types | {"index": "*i64"},
            axes=axes | {"kernel": "keep"},
        )
