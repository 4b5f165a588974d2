"""The random layer of benchmarks/gpu_history.py: pages out of order, and tokens in full precision around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvconvert.kernels.decode import PageTables, ResidualWindows, Visibility
from kvconvert.kernels.decode.plan import Segment, SequencePlan, plan_work
from kvconvert.kernels.decode.triton.launch import decode_attention, programs_for
from kvconvert.kernels.history import HistoryPart, history_attention
from kvconvert.kernels.pages import (
    PAGE_SIZE,
    KeyFormat,
    LayerFormat,
    PageAddresses,
    ValueFormat,
    dequantize_into,
    empty_keys,
    empty_values,
    new_flag,
    quantize_in_place,
    raise_if_flagged,
)

HEADS, GROUP, DIM = 8, 4, 128
DTYPE, SCALING = torch.bfloat16, DIM**-0.5
SINKS = 4
QUERIES_AT_ONCE = 256
FORMATS = {
    "oscar-g128": (
        KeyFormat(HEADS, DIM, PAGE_SIZE, 2, 128, token_norm="joint"),
        ValueFormat(HEADS, DIM, PAGE_SIZE, 2, 128),
    ),
    "kitty": (
        KeyFormat(HEADS, DIM, PAGE_SIZE, 2, 128, boosted=DIM // 8),
        ValueFormat(HEADS, DIM, PAGE_SIZE, 2, 128),
    ),
    "kivi": (KeyFormat(HEADS, DIM, PAGE_SIZE, 2, 32), ValueFormat(HEADS, DIM, PAGE_SIZE, 2, 32)),
}


class History:
    """Random tokens of one layer: quantized in pages out of order, and some in full precision before and after them."""

    def __init__(self, name: str, tokens: int, chunk: int):
        self.formats = FORMATS[name]
        self.pages = tokens // PAGE_SIZE - 1
        self.residual = tokens - self.pages * PAGE_SIZE
        self.chunk = chunk
        self.addresses, self.last, self.stored, buffers = [], [], [], []
        for f, empty in zip(self.formats, (empty_keys, empty_values), strict=True):
            channels = 1 + torch.rand(DIM, device="cuda")
            source = torch.randn(HEADS, self.pages * PAGE_SIZE, DIM, device="cuda").mul_(channels).to(DTYPE)
            pool, flag = empty(self.pages, f, DTYPE, torch.device("cuda")), new_flag(torch.device("cuda"))
            order = torch.randperm(self.pages).tolist()
            quantize_in_place([source], [pool.select(slice(i, i + 1)) for i in order], flag)
            raise_if_flagged(flag, HEADS)
            offsets = torch.tensor([*order, 0], device="cuda") * (pool.record.stride(0) // 8)
            self.stored.append(pool.select(torch.tensor(order[:8], device="cuda")))
            self.last.append(offsets)
            self.addresses.append(PageAddresses(f, pool.record, offsets[:-1]))
            buffers.append(torch.randn(HEADS, self.residual + chunk, DIM, device="cuda").mul_(channels).to(DTYPE))
        self.buffers = buffers
        self.queries = torch.randn(HEADS * GROUP, chunk, DIM, dtype=DTYPE, device="cuda")
        self.own = [buffer[:, self.residual :] for buffer in buffers]
        self.parts = [
            HistoryPart(SINKS, *(buffer[:, :SINKS] for buffer in buffers)),
            HistoryPart(self.pages * PAGE_SIZE, *self.addresses),
            HistoryPart(self.residual - SINKS, *(buffer[:, SINKS : self.residual] for buffer in buffers)),
        ]

    def attend(self, **options: Any) -> torch.Tensor:
        return history_attention(self.queries, self.parts, *self.own, SCALING, **options)

    def dense(self) -> list[torch.Tensor]:
        """Keys and values [H, n, D] of history and chunk in bf16, pages first."""
        found = []
        for pages, buffer in zip(self.addresses, self.buffers, strict=True):
            paged = self.pages * PAGE_SIZE
            every = torch.empty(HEADS, paged + buffer.shape[1], DIM, dtype=DTYPE, device="cuda")
            dequantize_into(every[:, :paged], pages)
            every[:, paged:] = buffer
            found.append(every)
        return found

    def stored_attention(self) -> Callable[[], list[torch.Tensor]]:
        """The same attention over pages as they are stored, some queries at a time."""
        paged, tokens = self.pages * PAGE_SIZE, self.residual + self.chunk
        rows = torch.zeros(1, 8, dtype=torch.int64, device="cuda")
        for side, buffer in enumerate(self.buffers):
            rows[0, 2 * side] = (buffer.data_ptr() - self.buffers[0].data_ptr()) // 16
            rows[0, 2 * side + 1] = buffer.stride(0) // 8
        rows[0, 7] = tokens
        windows, format = ResidualWindows(self.buffers[0], rows), LayerFormat(*self.formats)
        position = torch.arange(paged + tokens, device="cuda")
        steps = []
        for start in range(0, self.chunk, QUERIES_AT_ONCE):
            queries = self.queries[None, :, start : start + QUERIES_AT_ONCE]
            own = paged + self.residual + start + torch.arange(queries.shape[2], device="cuda").unsqueeze(1)
            mask = (position <= own).to(torch.uint8)[None, None]
            programs = programs_for(torch.device("cuda"), format, None, GROUP, queries.shape[2])
            plan = SequencePlan((Segment(0, self.pages, paged),), tokens, residual_token=paged)
            tables = PageTables(
                *(pages.base for pages in self.addresses), *self.last, plan_work([plan], programs).to(mask.device)
            )
            visibility = Visibility(mask, mask.stride(0), 0, mask.stride(2))
            steps.append((queries, tables, windows, format, SCALING, visibility))
        return lambda: [decode_attention(*step[:-1], visibility=step[-1]) for step in steps]
