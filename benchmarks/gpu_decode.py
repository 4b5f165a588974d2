"""Decode attention on a GPU against flash attention over bf16. A section of benchmarks/gpu.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_timing import attention_launches, beyond_cache, buffers_beyond_cache, copy_bandwidth, graph_time

from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.decode import PageTables, ResidualWindows
from kvconvert.kernels.decode.plan import Segment, SequencePlan, plan_work
from kvconvert.kernels.decode.triton.launch import decode_attention, programs_for
from kvconvert.kernels.pages import PAGE_SIZE, LayerFormat, PageFormat, new_pages
from kvconvert.kernels.spans import SpanFormat

HEADS, GROUP, DIM = 8, 4, 128
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One row of the table: `bits` and groups of keys and values, and what the batch holds."""

    name: str
    batch: int
    tokens: int
    bits: int = 2
    key_group: int = 128
    value_group: int = 128
    norm: str = "joint"
    boosted: int = 0
    span: bool = False
    tau: float = 0.0
    residual: int = 64
    scale_bits: int = 16


CASES = (
    Case("oscar-g128 (norms), 1 x 131,072", 1, 131072),
    Case("oscar-g128 (norms), 32 x 8,192", 32, 8192),
    Case("oscar G = 32, 1 x 131,072", 1, 131072, key_group=32, value_group=32),
    Case("oscar G = 32, 32 x 8,192", 32, 8192, key_group=32, value_group=32),
    Case("kitty, 32 x 8,192", 32, 8192, norm="none", boosted=16),
    Case("oscar-g128 (norms), scales of 8 bits, 1 x 131,072", 1, 131072, scale_bits=8),
    Case("oscar-g128 (norms), scales of 8 bits, 32 x 8,192", 32, 8192, scale_bits=8),
    Case("1-bit pages, scales of 8 bits, 32 x 8,192", 32, 8192, bits=1, scale_bits=8),
    Case("4 bits G = 128, 32 x 8,192", 32, 8192, bits=4, norm="none"),
    Case("8 bits G = 128, 32 x 8,192", 32, 8192, bits=8, norm="none"),
    Case("1-bit pages, 32 x 8,192", 32, 8192, bits=1),
    Case("1-bit spans, 32 x 8,192", 32, 8192, bits=1, norm="none", span=True),
    Case("1-bit spans with tau, 32 x 8,192", 32, 8192, bits=1, norm="none", span=True, tau=0.5),
    Case("16 bits, our kernel, 32 x 8,192", 32, 8192, bits=16, norm="none"),
    Case("oscar-g128 (norms), 1 x 1,024", 1, 1024),
    Case("oscar-g128 (norms), 1 x 8,192", 1, 8192),
    Case("oscar-g128 (norms), 8 x 8,192", 8, 8192),
)


class Layer:
    """Random pages and residual windows of one layer, laid out as the runtime lays them out."""

    def __init__(self, case: Case):
        static = case.span
        more = {"static": static, "scale_bits": case.scale_bits}
        keys = PageFormat.keys(
            HEADS, DIM, PAGE_SIZE, case.bits, case.key_group, case.norm, boosted=case.boosted, **more
        )
        values = PageFormat.values(HEADS, DIM, PAGE_SIZE, case.bits, case.value_group, **more)
        span = SpanFormat(case.bits, case.bits, tau1=case.tau, tau2=case.tau * 2) if case.span else None
        self.case, self.format = case, LayerFormat(keys, values, span=span, sink_tokens=not case.span)
        pages = (case.tokens - case.residual) // PAGE_SIZE if not case.span else case.tokens // PAGE_SIZE
        count = case.batch * pages
        self.keys = new_pages(count, keys, DTYPE, torch.device("cuda"))
        self.values = new_pages(count, values, DTYPE, torch.device("cuda"))
        for tensors in (self.keys, self.values):
            for name, tensor in tensors.tensors():
                fill(name, tensor)
        key_pool = self.keys.codes if case.bits == 16 else self.keys.record
        value_pool = self.values.codes if case.bits == 16 else self.values.record
        self.bytes = count * (key_pool[0].nbytes + value_pool[0].nbytes) + case.batch * case.residual * 4 * HEADS * DIM
        order = torch.randperm(count, device="cuda")
        last = torch.zeros(1, dtype=torch.int64, device="cuda")
        tables = [torch.cat([order * (pool[0].nbytes // 16), last]) for pool in (key_pool, value_pool)]
        # As the runtime divides work: for the residual window that there will be when the next page is complete.
        residual = -(-case.residual // PAGE_SIZE) * PAGE_SIZE
        sequences = [
            SequencePlan((Segment(row * pages, (row + 1) * pages, pages * PAGE_SIZE),), residual)
            for row in range(case.batch)
        ]
        programs = programs_for(torch.device("cuda"), self.format, GROUP, 1)
        plan = plan_work(sequences, programs).to(torch.device("cuda"))
        self.scales = torch.rand(4, HEADS, DIM, dtype=torch.float16, device="cuda") + 0.5
        shared = None
        if case.span:
            bases = (key_pool, key_pool, value_pool, value_pool)
            offsets = [(s.data_ptr() - b.data_ptr()) // 16 for s, b in zip(self.scales, bases, strict=True)]
            shared = torch.tensor([offsets], device="cuda")
        self.tables = PageTables(key_pool, value_pool, *tables, plan, shared)
        self.buffer = torch.randn(2, case.batch, HEADS, PAGE_SIZE, DIM, dtype=DTYPE, device="cuda")
        rows = torch.zeros(case.batch, 8, dtype=torch.int64)
        for row in range(case.batch):
            for side in range(2):
                rows[row, 2 * side] = (side * case.batch + row) * HEADS * PAGE_SIZE * DIM // 8
                rows[row, 2 * side + 1] = PAGE_SIZE * DIM // 8
            rows[row, 7] = case.residual
        self.windows = ResidualWindows(self.buffer, rows.cuda())
        self.queries = torch.randn(case.batch, HEADS * GROUP, 1, DIM, dtype=DTYPE, device="cuda")

    def step(self) -> torch.Tensor:
        """One decode step of the layer."""
        return decode_attention(self.queries, self.tables, self.windows, self.format, Scoring(DIM**-0.5))


def fill(name: str, tensor: torch.Tensor) -> None:
    """Random contents of one of a page's tensors."""
    if name == "channels":
        tensor.copy_(torch.arange(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device).expand(tensor.shape))
    elif name == "grid":
        # Scales from 0.5 to 1.9 and any zero points.
        tensor.copy_((torch.randint_like(tensor, -128, 128) << 8) | torch.randint_like(tensor, 0x70, 0x80))
    elif tensor.dtype == torch.int16:
        tensor.random_(-(1 << 15), 1 << 15)
    elif name in ("scale", "norm"):
        tensor.uniform_(0.5, 1.5)
    else:
        tensor.normal_()


def peer_times(batch: int, tokens: int) -> dict[str, float]:
    """Seconds of one decode step by each of torch's attention backends over bf16 keys and values."""
    queries = torch.randn(batch, HEADS * GROUP, 1, DIM, dtype=DTYPE, device="cuda")
    sets = [
        (queries, *(torch.randn(batch, HEADS, tokens, DIM, dtype=DTYPE, device="cuda") for _ in range(2)))
        for _ in range(buffers_beyond_cache(4 * batch * HEADS * tokens * DIM, most=16))
    ]
    return {name: graph_time(launches) for name, launches in attention_launches(sets).items()}


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """Every case against the fastest of torch's backends in this run."""
    bandwidth, peers = copy_bandwidth(), {}
    for case in CASES:
        shape = (case.batch, case.tokens)
        peers[shape] = peers.get(shape) or peer_times(*shape)
        layers = beyond_cache(lambda case=case: Layer(case), lambda layer: layer.bytes, most=24)
        seconds, nbytes = graph_time([layer.step for layer in layers]), layers[0].bytes
        fastest = min(peers[shape], key=peers[shape].get)
        yield {
            "case": case.name,
            "ours_us": seconds * 1e6,
            "peer": fastest,
            "peers_us": {name: t * 1e6 for name, t in peers[shape].items()},
            "ratio": peers[shape][fastest] / seconds,
            "bytes": nbytes,
            "of_copy_bandwidth": nbytes / seconds / bandwidth,
        }
        del layers
        gc.collect()
        torch.cuda.empty_cache()
