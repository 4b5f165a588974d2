"""Specialisations of the kernels of packed states: sizes of heads, dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.states.triton import TILE, gated_delta_kernel


def variants(device_capability: int) -> Iterator[Variant]:
    """What the dispatch chooses for the usual heads, the same on all devices."""
    for dtype, size, by_channel in product(DTYPES.values(), (64, 128), (False, True)):
        types = {"query": f"*{dtype}", "key": f"*{dtype}", "value": f"*{dtype}", "beta": f"*{dtype}"}
        types |= {"decay": "*fp32", "packed": "*u8"}
        constants = {
            "HEADS": 32,
            "SHARED": 2,
            "KEY_DIM": size,
            "VALUE_DIM": size,
            "BY_CHANNEL": by_channel,
            "TILE": TILE,
        }
        axes = {"dtype": dtype, "size": size, "by_channel": by_channel}
        name = f"gated-delta-{dtype}-{size}{'-by-channel' * by_channel}"
        yield Variant.of(name, gated_delta_kernel, dtype, constants, 4, types=types, axes=axes)
