"""Specialisations of the kernels of short convolutions: weights of a channel, tokens kept, dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import triton

from aot_variants.variant import DTYPES, Variant
from kvconvert.kernels.convolution.triton import CHANNELS, TOKENS, convolve_kernel, step_kernel


def variants(device_capability: int) -> Iterator[Variant]:
    """The variants that the dispatch chooses for the usual layers, the same on all devices."""
    types = {"states": "*{}", "after": "*{}", "ends": "*i32", "owners": "*i32"}
    for dtype, (taps, bias, silu) in product(DTYPES.values(), ((4, False, True), (4, True, True), (3, False, False))):
        own = {name: kind.format(dtype) for name, kind in types.items()}
        name = f"{dtype}-{taps}{'-bias' * bias}{'-silu' * silu}"
        axes = {"dtype": dtype, "taps": taps, "bias": bias, "silu": silu}
        constants = {"TAPS": taps, "KEPT": taps, "KEPT_TILE": triton.next_power_of_2(taps)}
        constants |= {"HAS_BIAS": bias, "SILU": silu}
        whole = constants | {"TOKENS": TOKENS, "CHANNELS": CHANNELS}
        yield Variant.of(f"convolve-{name}", convolve_kernel, dtype, whole, num_warps=8, types=own, axes=axes)
        step = constants | {"CHANNELS": CHANNELS}
        yield Variant.of(f"step-{name}", step_kernel, dtype, step, num_warps=4, types=own, axes=axes)
