"""Timing on a GPU: graphs of launches over rotating buffers, measured with CUDA events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

# The largest L2 among the GPUs meant; inputs of one round over the buffers should be well beyond it.
L2_BYTES = 64 << 20
LAUNCHES = 24


def buffers_beyond_cache(nbytes: int, most: int = 64) -> int:
    """How many copies of inputs of `nbytes` one round needs, so that none is found in the cache again."""
    return max(2, min(most, -(-4 * L2_BYTES // max(1, nbytes))))


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
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times) / (len(launches) * rounds)


def copy_bandwidth(nbytes: int = 8 << 30) -> float:
    """Bytes per second of a device-to-device copy, read plus written."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return nbytes / statistics.median(times)


def matmul_rate(size: int = 8192) -> float:
    """Floating-point operations per second of a bf16 matrix product on random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / graph_time([lambda: torch.mm(a, b, out=out)], repeats=10)
