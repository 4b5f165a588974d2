"""Small kernels that do what compiled kernels must not, for tests of the tool that finds it.

Their loops follow a chain of numbers in memory to its end at 0, so that the assembler cannot unroll them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from aot_variants.variant import Variant

POPULATION_COUNTS = 40


@triton.jit
def spilling_kernel(source, target, SIZE: tl.constexpr):
    """Holds many rows at once between two passes, so that few registers do not suffice."""
    offsets = tl.arange(0, SIZE)
    values = tl.load(source + offsets)
    total = tl.sum(values, 0)
    tl.store(target + offsets, values * total)


@triton.jit
def narrow_kernel(source, target, chain, stride, SIZE: tl.constexpr):
    """Reads 2 bytes at a time, because a stride is unknown."""
    offsets = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.int32)
    step = tl.load(chain)
    while step != 0:
        total += tl.load(source + step * 8 + offsets * stride)
        step = tl.load(chain + step)
    tl.store(target + offsets, total)


@triton.jit
def wide_kernel(source, target, chain, SIZE: tl.constexpr):
    """Reads 16 bytes at a time; has no matrix product."""
    offsets = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.int32)
    step = tl.load(chain)
    while step != 0:
        total += tl.load(source + step * SIZE + offsets)
        step = tl.load(chain + step)
    tl.store(target + offsets, total)


@triton.jit
def counted_kernel(source, target, chain, STEPS: tl.constexpr, SIZE: tl.constexpr):
    """A main loop of so many population counts, behind a longer piece of straight code."""
    offsets = tl.arange(0, SIZE)
    total = tl.load(source + offsets)
    for _ in tl.static_range(3 * STEPS):
        total = tl.inline_asm_elementwise("brev.b32 $0, $1;", "=r,r", [total], dtype=tl.int32, is_pure=False, pack=1)
    step = tl.load(chain)
    while step != 0:
        for _ in tl.static_range(STEPS):
            total = tl.inline_asm_elementwise(
                "popc.b32 $0, $1;", "=r,r", [total + step], dtype=tl.int32, is_pure=False, pack=1
            )
        step = tl.load(chain + step)
    tl.store(target + offsets, total)


@triton.jit
def roomy_kernel(left, right, target, count, SIZE: tl.constexpr):
    """A pipelined matrix product whose tiles take more shared memory than some GPUs have."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for step in range(count):
        place = step * SIZE * SIZE + row * SIZE + column
        total = tl.dot(tl.load(left + place), tl.load(right + place), total)
    tl.store(target + row * SIZE + column, total)


def variants(capability: int) -> Iterator[Variant]:
    """Each for the architectures that its test looks at."""

    def variant(name: str, function: Any, types: dict[str, str], constants: dict[str, int], **more: Any) -> Variant:
        return Variant(
            name, function, types, constants, **({"num_warps": 1, "num_stages": 3, "axes": {"toy": name}} | more)
        )

    words = {"source": "*i32", "target": "*i32", "chain": "*i32"}
    counted = {"STEPS": POPULATION_COUNTS, "SIZE": 32}
    yield variant("counted", counted_kernel, words, counted, codes=32, most_per_code=POPULATION_COUNTS / 2)
    if capability in (89, 90):
        matrices = {"left": "*fp16", "right": "*fp16", "target": "*fp32", "count": "i32"}
        yield variant(
            "max_capacity", roomy_kernel, matrices, {"SIZE": 128}, num_warps=8, num_stages=3, tensor_cores=True
        )
    if capability == 90:
        floats = {"source": "*fp32", "target": "*fp32"}
        yield variant("spilling", spilling_kernel, floats, {"SIZE": 4096}, max_registers=64)
        excused = {"max_registers": 64, "spills": "on purpose"}
        yield variant("excused", spilling_kernel, floats, {"SIZE": 4096}, **excused, most_local=1.0)
        yield variant("too-much", spilling_kernel, floats, {"SIZE": 4096}, **excused)
        yield variant("no-tensor-cores", wide_kernel, words, {"SIZE": 256}, tensor_cores=True)
    if capability == 80:
        lanes = {"source": "*i16", "target": "*i32", "chain": "*i32", "stride": "i32"}
        yield variant("narrow", narrow_kernel, lanes, {"SIZE": 256}, wide_loads=True)
        yield variant("wide", wide_kernel, words, {"SIZE": 256}, wide_loads=True, code_bytes=1024)
        yield variant("wide-few", wide_kernel, words, {"SIZE": 256}, wide_loads=True, code_bytes=2048)
