"""Specialisations of the head of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from aot_variants.variant import Variant
from kvconvert.kernels.vocabulary.triton import MOST_ROWS, STEP, TOKENS, logits_kernel


def variants(capability: int) -> Iterator[Variant]:
    """What the dispatch chooses for the usual models, the same on all devices."""
    for dtype, channels, rows in product(("fp16", "bf16"), (576, 1536, 4096), (16, 32, MOST_ROWS)):
        yield Variant.of(
            f"logits-{dtype}-{channels}-{rows}",
            logits_kernel,
            dtype,
            {"SIZE": channels, "ROWS": rows, "TOKENS": TOKENS, "STEP": STEP, "COMPILED": True},
            num_warps=4,
            types={"x": f"*{dtype}", "codes": "*i8", "scales": "*fp32", "logits": f"*{dtype}"},
            axes={"dtype": dtype, "channels": channels, "rows": rows},
            codes=TOKENS * STEP,
            most_per_code=6.0 if rows == 16 else 12.0,  # loads of as many activations are among them
            tensor_cores=True,
            wide_loads=True,
        )
