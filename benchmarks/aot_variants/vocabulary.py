"""Specialisations of the head of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from aot_variants.variant import Variant
from kvconvert.kernels.vocabulary.triton import MOST_ROWS, logits_kernel, tile


def variants(capability: int) -> Iterator[Variant]:
    """What the dispatch chooses for the usual models, the same on all devices."""
    for dtype, channels, rows in product(("fp16", "bf16"), (576, 1536, 4096), (16, 32, 64, MOST_ROWS)):
        tokens, step, warps = tile(rows)
        yield Variant.of(
            f"logits-{dtype}-{channels}-{rows}",
            logits_kernel,
            dtype,
            {"SIZE": channels, "ROWS": rows, "TOKENS": tokens, "STEP": step, "COMPILED": True},
            num_warps=warps,
            types={"x": f"*{dtype}", "codes": "*i8", "scales": "*fp32", "logits": f"*{dtype}"},
            axes={"dtype": dtype, "channels": channels, "rows": rows},
            codes=tokens * step,
            most_per_code={16: 6.0, MOST_ROWS: 24.0}.get(rows, 12.0),  # loads of as many activations are among them
            tensor_cores=True,
            wide_loads=True,
        )
