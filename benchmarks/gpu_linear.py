"""The 4-bit Linear's kernels on a GPU against torch's bf16 matrix product.

A section of benchmarks/gpu.py. Bytes are those of the packed weight, which every call reads once; several copies of it
take turns, so that none is still in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_timing import buffers_beyond_cache, copy_bandwidth, graph_time
from torch import Tensor

from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.kernels.linear.awq_format import AwqWeight
from kvconvert.kernels.linear.packed_layout import PackedWeight, pack_weight
from kvconvert.kernels.linear.triton.few_rows import few_rows
from kvconvert.kernels.linear.triton.many_rows import dequantize, prompt, unpacked

# Inputs and outputs.
SHAPES = [(4096, 14336), (14336, 4096), (4096, 4096), (4096, 1024)]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
GROUP_SIZE = 128


def random_weight(inputs: int, outputs: int, group_size: int, device: torch.device, seed: int = 0) -> AwqWeight:
    """Any bits are codes and zeros."""
    generator = torch.Generator(device).manual_seed(seed)

    def words(rows: int) -> Tensor:
        shape = (rows, outputs // 8)
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device, generator=generator)

    scales = torch.rand(inputs // group_size, outputs, device=device, generator=generator)
    return AwqWeight(words(inputs), words(inputs // group_size), (scales * 0.01 + 0.001).half())


def product(x: Tensor, packed: PackedWeight) -> Tensor:
    """Multiply by the path that `QuantizedLinear` takes for this number of rows."""
    module = QuantizedLinear(packed.inputs, packed.outputs, packed.group_size, device="meta")
    kernels = {"few rows": few_rows, "fused": prompt, "unpacked": unpacked}
    return kernels[module.path(len(x), x.dtype, x.device)](x, packed)


def copies_of(packed: PackedWeight, most: int = 64) -> list[PackedWeight]:
    """The weight as often as it takes for none to be in the cache."""
    count = buffers_beyond_cache(packed.lanes.nbytes + packed.grid.nbytes, most)
    again = (replace(packed, lanes=packed.lanes.clone(), grid=packed.grid.clone()) for _ in range(count - 1))
    return [packed, *again]


def dense_copies(packed: PackedWeight, most: int = 64) -> list[Tensor]:
    """The same of the weight in bf16."""
    dense = dequantize(packed, torch.bfloat16)
    return [dense, *(dense.clone() for _ in range(buffers_beyond_cache(dense.nbytes, most) - 1))]


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """Time over torch's bf16 product on the same inputs, by rows, and the weight's bytes over the copy bandwidth."""
    copying = copy_bandwidth()
    for inputs, outputs in SHAPES:
        packed = copies_of(pack_weight(random_weight(inputs, outputs, GROUP_SIZE, device)))
        nbytes, dense = packed[0].lanes.nbytes + packed[0].grid.nbytes, dense_copies(packed[0])
        for rows in ROWS if outputs == 14336 else ROWS[::2]:
            x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
            copies = 2 if rows >= 512 else None
            ours = graph_time([partial(product, x, one) for one in packed[:copies]], repeats=10)
            peer = graph_time([partial(torch.mm, x, one.T) for one in dense[:copies]], repeats=10)
            yield {
                "case": f"W4A16, {inputs} x {outputs}, {rows} rows",
                "ours_us": ours * 1e6,
                "peer_us": peer * 1e6,
                "ratio": peer / ours,
                "bytes": nbytes,
                "bandwidth_of_copy": nbytes / ours / copying,
            }
