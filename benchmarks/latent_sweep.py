"""Forms of the latent decode kernel at 1 x 131,072, with and without its merge, for choosing one; about a minute.

python benchmarks/latent_sweep.py
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import gpu_latent
import torch
from gpu_latent import Case, Layer
from gpu_timing import beyond_cache, graph_time

from kvconvert.kernels.latent import triton as kernels


class Form(NamedTuple):
    """Constants of the kernel and of its launch."""

    warps: int = 8
    chunks: int = 4
    registers: int | None = None
    per: int = 1
    prefetch: bool = True
    tile: int = 32
    reload: bool = False


CODES = (
    Form(),
    Form(prefetch=False),
    Form(16),
    Form(16, 8),
    Form(registers=128, per=2),
    Form(registers=128, per=2, reload=True),
    Form(16, 8, reload=True),
    Form(per=2),
)
PLAIN = (Form(), Form(tile=64), Form(per=2), Form(per=2, tile=64))
FORMS = {(16, 4): CODES, (16, 2): CODES, (16, 16): PLAIN, (128, 4): (Form(), Form(per=2)), (128, 2): (Form(),)}


class Launched:
    """A kernel with other options, or none at all."""

    def __init__(self, kernel: Any, **options: Any):
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: Any) -> Any:
        if self.kernel is None:
            return lambda *args, **named: None
        return lambda *args, **named: self.kernel[grid](*args, **named, **self.options)


def main() -> None:
    """Time every form."""
    torch.manual_seed(0)
    begin, programs = time.time(), kernels.programs_for
    decode, merge = kernels.latent_decode_kernel, kernels.combine_kernel
    for (heads, bits), forms in FORMS.items():
        for form in forms:
            kernels.WARPS, kernels.CHUNKS, kernels.PREFETCH = form.warps, form.chunks, form.prefetch
            kernels.PAGE_TILE, kernels.RELOAD = form.tile, form.reload
            gpu_latent.programs_for = lambda device, n, per=form.per: per * programs(device, n)
            options = {"maxnreg": form.registers} if form.registers else {}
            kernels.latent_decode_kernel = Launched(decode, **options)
            layers = beyond_cache(lambda b=bits, n=heads: Layer(Case(n, 1, 131_072, b)), lambda x: x.bytes, most=6)
            times = []
            for last in (merge, Launched(None)):
                kernels.combine_kernel = last
                times.append(graph_time([layer.step for layer in layers]) * 1e6)
            del layers
            torch.cuda.empty_cache()
            print(
                f"{heads} heads, {bits} bits, {form}: {times[0]:.1f} us, {times[1]:.1f} without the merge", flush=True
            )
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
