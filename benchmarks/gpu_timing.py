"""Timing on a GPU: graphs of launches over rotating buffers, measured with CUDA events, and torch's attention so."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# The largest L2 among the GPUs meant; inputs of one round over the buffers should be well beyond it.
L2_BYTES = 64 << 20
LAUNCHES = 24
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def buffers_beyond_cache(nbytes: int, most: int = 64) -> int:
    """How many copies of inputs of `nbytes` one round needs, so that none is found in the cache again."""
    return max(2, min(most, -(-4 * L2_BYTES // max(1, nbytes))))


def beyond_cache(make: Callable[[], Any], nbytes: Callable[[Any], int], most: int = 64) -> list[Any]:
    """As many inputs as that, each made anew; `nbytes` tells the size of one."""
    first = make()
    return [first, *(make() for _ in range(buffers_beyond_cache(nbytes(first), most) - 1))]


def timed(launches: Callable[[], object]) -> float:
    """Seconds on the GPU of what a call launches."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launches()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def graph_time(launches: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Median seconds per launch.

    The launches, each over buffers of its own, are captured in a CUDA graph, several times over if they are few, and
    the graph is replayed `repeats` times: the host's launch overhead is out of the figure, gaps between kernels are in
    it, and the few microseconds that a replay takes to begin are shared by at least `LAUNCHES` launches.
    """
    rounds = -(-LAUNCHES // len(launches))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    for _ in range(2):
        graph.replay()
    return statistics.median(timed(graph.replay) for _ in range(repeats)) / (len(launches) * rounds)


def attention_launches(sets: Sequence[Sequence[torch.Tensor]], **how: Any) -> dict[str, list[Callable[[], object]]]:
    """torch's attention over sets of queries, keys and values [B, H, n, D], by the backends that have a kernel."""
    found = {}
    for name, backend in BACKENDS.items():
        launches = [partial(_attend, backend, how, *tensors) for tensors in sets]
        try:
            launches[0]()
        except RuntimeError as error:
            # A backend without a kernel for grouped queries says so; every other failure is one of the benchmark.
            if "No available kernel" not in str(error):
                raise
            continue
        found[name] = launches
    return found


def _attend(backend: SDPBackend, how: dict[str, Any], *tensors: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True, **how)


def copy_bandwidth(nbytes: int = 8 << 30) -> float:
    """Bytes per second of a device-to-device copy, read plus written."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return nbytes / statistics.median(timed(lambda: target.copy_(source)) for _ in range(7))


def matmul_rate(size: int = 8192) -> float:
    """Floating-point operations per second of a bf16 matrix product on random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / graph_time([lambda: torch.mm(a, b, out=out)], repeats=10)
