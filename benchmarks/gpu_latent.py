"""Decoding over pages of latents (MLA), against bf16 latents in the same kernel and in PyTorch, and against pages that
PyTorch dequantizes, in the same run.

    python benchmarks/gpu_latent.py [--json benchmarks/results/gpu_latent.json]

Takes some minutes on one GPU. Latents have 512 channels and RoPE parts 64, as in DeepSeek's models; 16 heads are those
of DeepSeek-V2-Lite, 128 those of V3. All sides absorb W_UK into queries and W_UV into outputs, which is not timed.
PyTorch multiplies queries with contiguous bf16 latents, takes the softmax in float32 and multiplies its weights with
the latents. Dequantized pages are what `generate` attends to where the kernel does not serve. Times are medians of
graph replays, with latents beyond the L2 cache in buffers that take turns.
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

from kvconvert.kernels.chunked_prefill import PageReader, StoredPart
from kvconvert.kernels.decode import PageTables, ResidualWindows
from kvconvert.kernels.decode.plan import Segment, SequencePlan, plan_work
from kvconvert.kernels.latent import latent_attention, latent_decode
from kvconvert.kernels.latent.triton.launch import latent_shape, programs_for
from kvconvert.kernels.pages import PAGE_SIZE, LayerFormat, PageFormat, new_pages
from kvconvert.tables import markdown_table as table

RANK, ROPE, RESIDUAL = 512, 64, 100
SCALING, DTYPE = 192**-0.5, torch.bfloat16
# Sequences and tokens of each.
SHAPES = ((1, 8_192), (1, 131_072), (16, 8_192))
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
            PageFormat.keys(1, RANK, PAGE_SIZE, bits, PAGE_SIZE, by_token=bits < 16),
            PageFormat.values(1, ROPE, PAGE_SIZE, 16 if bits == 16 else 8, ROPE),
        )
        pages, device = (case.tokens - RESIDUAL) // PAGE_SIZE, torch.device("cuda")
        count = case.batch * pages
        sides = (
            new_pages(count, self.format.keys, DTYPE, device),
            new_pages(count, self.format.values, DTYPE, device),
        )
        for side in sides:
            for name, tensor in side.tensors():
                fill(name, tensor)
        order, last = torch.randperm(count, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        self.sides, self.order = sides, order.view(case.batch, pages)
        tables = [torch.cat([order * (side.buffer[0].nbytes // 16), last]) for side in sides]
        sequences = [
            SequencePlan((Segment(row * pages, (row + 1) * pages, pages * PAGE_SIZE),), PAGE_SIZE)
            for row in range(case.batch)
        ]
        plan = plan_work(sequences, programs_for(device, latent_shape(self.format, case.heads, device))).to(device)
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

    def dequantized_step(self) -> None:
        """The same over pages dequantized in PyTorch, sequence by sequence."""
        for row, numbers in enumerate(self.order):
            paged = [
                PageReader(lambda part, side=side, n=numbers: side.select(n[part]), side.format) for side in self.sides
            ]
            window = self.buffer[row].flatten().split([PAGE_SIZE * RANK, PAGE_SIZE * ROPE])
            exact = [part.view(1, PAGE_SIZE, -1)[:, :RESIDUAL] for part in window]
            parts = StoredPart(len(numbers) * PAGE_SIZE, *paged), StoredPart(RESIDUAL, *exact)
            latent_attention(*self.queries[row].unsqueeze(1).split([RANK, ROPE], -1), parts, SCALING)


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


def times_of(make: Any) -> tuple[float, float | None, int]:
    """Seconds of a step and, of pages of codes, of one over what PyTorch dequantizes; bytes that a step reads."""
    layers = beyond_cache(make, lambda layer: layer.bytes, most=24)
    seconds, dequantized, nbytes = graph_time([layer.step for layer in layers]), None, layers[0].bytes
    if isinstance(layers[0], Layer) and layers[0].format.keys.bits < 16:
        dequantized = graph_time([layers[0].dequantized_step], repeats=1)
    del layers
    gc.collect()
    torch.cuda.empty_cache()
    return seconds, dequantized, nbytes


def measure() -> Iterator[dict[str, Any]]:
    """Every shape: our kernel at each width, PyTorch over bf16 latents, and over pages that it dequantizes."""
    bandwidth = copy_bandwidth()
    for heads in HEADS:
        for batch, tokens in SHAPES:
            row: dict[str, Any] = {"heads": heads, "batch": batch, "tokens": tokens}
            for bits in BITS:
                seconds, dequantized, nbytes = times_of(partial(Layer, Case(heads, batch, tokens, bits)))
                row[f"us_{bits}"], row[f"of_copy_{bits}"] = seconds * 1e6, nbytes / seconds / bandwidth
                if dequantized is not None:
                    row[f"us_dequantized_{bits}"] = dequantized * 1e6
            row["us_torch"] = times_of(partial(PlainLatents, Case(heads, batch, tokens, 16)))[0] * 1e6
            print(row, flush=True)
            yield row


def report(rows: list[dict[str, Any]]) -> str:
    """Microseconds of all sides."""
    columns = {
        "4 bits": "us_4",
        "2 bits": "us_2",
        "bf16, same kernel": "us_16",
        "bf16, PyTorch": "us_torch",
        "4 bits, dequantized": "us_dequantized_4",
    }
    lines = [
        (f"{row['heads']}, {row['batch']} x {row['tokens']:,}", *(f"{row[key]:.1f} us" for key in columns.values()))
        for row in rows
    ]
    return table(("heads, sequences x tokens", *columns), lines)


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
