"""Decoding over pages of latents (MLA), against bf16 latents in the same kernel and in PyTorch, in the same run.

    python benchmarks/gpu_latent.py [--json benchmarks/results/gpu_latent.json]

Takes a minute on one GPU. Latents have 512 channels and RoPE parts 64, as in DeepSeek's models; 16 heads are those of
DeepSeek-V2-Lite, 128 those of V3. All sides absorb W_UK into queries and W_UV into outputs, which is not timed. PyTorch
multiplies queries with contiguous bf16 latents, takes the softmax in float32 and multiplies its weights with the
latents. Times are medians of graph replays, with latents beyond the L2 cache in buffers that take turns.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_decode import fill
from gpu_timing import beyond_cache, copy_bandwidth, graph_time
from runner import machine, need_gpu, option_parser, save
from tables import table

from kvconvert.kernels.decode import PageTables, ResidualWindows
from kvconvert.kernels.decode.plan import Segment, SequencePlan, plan_work
from kvconvert.kernels.latent import latent_decode
from kvconvert.kernels.latent.triton.launch import programs_for
from kvconvert.kernels.pages import PAGE_SIZE, KeyFormat, LayerFormat, ValueFormat, empty_keys, empty_values

RANK, ROPE, RESIDUAL = 512, 64, 100
SCALING, DTYPE = 192**-0.5, torch.bfloat16
# Sequences and tokens of each.
SHAPES = ((1, 8_192), (1, 32_768), (1, 131_072), (16, 8_192))
HEADS = (16, 128)
BITS = (4, 2, 16)


@dataclass(frozen=True)
class Case:
    """A step of one layer: heads, sequences of so many tokens, and the bits of a latent's code."""

    heads: int
    batch: int
    tokens: int
    bits: int


class Layer:
    """Random pages and residual windows of one layer, laid out as the runtime lays them out."""

    def __init__(self, case: Case):
        bits = case.bits
        self.format = LayerFormat(
            KeyFormat(1, RANK, PAGE_SIZE, bits, PAGE_SIZE),
            ValueFormat(1, ROPE, PAGE_SIZE, 16 if bits == 16 else 8, ROPE),
        )
        pages, device = (case.tokens - RESIDUAL) // PAGE_SIZE, torch.device("cuda")
        count = case.batch * pages
        sides = (
            empty_keys(count, self.format.keys, DTYPE, device),
            empty_values(count, self.format.values, DTYPE, device),
        )
        for side in sides:
            for name, tensor in side.tensors():
                fill(name, tensor)
        order, last = torch.randperm(count, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        tables = [torch.cat([order * (side.buffer[0].nbytes // 16), last]) for side in sides]
        sequences = [
            SequencePlan((Segment(row * pages, (row + 1) * pages, pages * PAGE_SIZE),), PAGE_SIZE)
            for row in range(case.batch)
        ]
        plan = plan_work(sequences, programs_for(device, case.heads)).to(device)
        self.tables = PageTables(*(side.buffer for side in sides), *tables, plan)
        self.buffer = torch.randn(case.batch, PAGE_SIZE, RANK + ROPE, dtype=DTYPE, device=device)
        rows = torch.zeros(case.batch, 8, dtype=torch.int64)
        for row in range(case.batch):
            rows[row, 0] = row * PAGE_SIZE * (RANK + ROPE) // 8
            rows[row, 2] = rows[row, 0] + PAGE_SIZE * RANK // 8
            rows[row, 7] = RESIDUAL
        self.windows = ResidualWindows(self.buffer, rows.to(device))
        self.queries = torch.randn(case.batch, case.heads, RANK + ROPE, dtype=DTYPE, device=device)
        self.bytes = sum(side.nbytes for side in sides)

    def page_tables(self, programs: int) -> PageTables:
        """`StoredTokens.page_tables`."""
        return self.tables

    def residual_windows(self) -> ResidualWindows:
        """`StoredTokens.residual_windows`."""
        return self.windows

    def step(self) -> torch.Tensor:
        """One decode step of the layer."""
        return latent_decode(self.queries[..., :RANK], self.queries[..., RANK:], self, self.format, SCALING)


class PlainLatents:
    """The same step in PyTorch, over contiguous bf16 latents."""

    def __init__(self, case: Case):
        shape = {"dtype": DTYPE, "device": "cuda"}
        self.latents = torch.randn(case.batch, case.tokens, RANK, **shape)
        self.rope = torch.randn(case.batch, case.tokens, ROPE, **shape)
        self.queries = torch.randn(case.batch, case.heads, RANK + ROPE, **shape)
        self.bytes = self.latents.nbytes + self.rope.nbytes

    def step(self) -> torch.Tensor:
        """One decode step of the layer."""
        scores = self.queries[..., :RANK] @ self.latents.mT + self.queries[..., RANK:] @ self.rope.mT
        return torch.softmax(scores * SCALING, -1, dtype=torch.float32).to(DTYPE) @ self.latents


def time_of(make: Any) -> tuple[float, int]:
    """Seconds of a step, and the bytes that it reads."""
    layers = beyond_cache(make, lambda layer: layer.bytes, most=24)
    found = graph_time([layer.step for layer in layers]), layers[0].bytes
    del layers
    gc.collect()
    torch.cuda.empty_cache()
    return found


def measure() -> Iterator[dict[str, Any]]:
    """Every shape: our kernel at each width, and PyTorch."""
    bandwidth = copy_bandwidth()
    for heads in HEADS:
        for batch, tokens in SHAPES:
            row: dict[str, Any] = {"heads": heads, "batch": batch, "tokens": tokens}
            for bits in BITS:
                seconds, nbytes = time_of(partial(Layer, Case(heads, batch, tokens, bits)))
                row[f"us_{bits}"], row[f"of_copy_{bits}"] = seconds * 1e6, nbytes / seconds / bandwidth
            row["us_torch"] = time_of(partial(PlainLatents, Case(heads, batch, tokens, 16)))[0] * 1e6
            print(row, flush=True)
            yield row


def report(rows: list[dict[str, Any]]) -> str:
    """Microseconds, and how many times as fast 4 and 2 bits are as bf16 in the same kernel and in PyTorch."""
    head = ("heads", "sequences x tokens", "4 bits", "2 bits", "bf16, same kernel", "bf16, PyTorch", "4 bits", "2 bits")
    lines = []
    for row in rows:
        times = (row["us_4"], row["us_2"], row["us_16"], row["us_torch"])
        ratios = [f"{times[2] / t:.2f}x, {times[3] / t:.2f}x" for t in times[:2]]
        shape = f"{row['batch']} x {row['tokens']:,}"
        lines.append((row["heads"], shape, *(f"{t:.1f} us" for t in times), *ratios))
    return table(head, lines)


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    parser.add_argument("--json", type=Path, help="where results go")
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    rows = list(measure())
    save(args.json, {"machine": machine(), "rows": rows})
    print(report(rows))


if __name__ == "__main__":
    main()
