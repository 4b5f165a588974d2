"""Decode steps of one layer on a GPU, one after another, with the page flushes that fall into them.

A step is what the runtime launches for one layer and one new token per sequence: tokens are rotated and stored, the
queries attend to everything stored, and where a sequence has 128 tokens behind its last page, these are quantized.
Steps that count as whole also have the layer's seven 4-bit Linears, with a row per sequence.

Every step is a CUDA graph, replayed between two events; the host waits for nothing until the last one has run. Tables
that the runtime writes on the host lie on the device here, and the flag that reports bad numbers is copied to the host
but not waited for. Flushed pages take the place of others, so that the cache keeps its length. Control loops have the
same steps without flushes, since a step also grows with the residual window of tokens that are not quantized yet.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product as product_of
from typing import Any

import torch
from gpu_decode import fill
from gpu_linear import product, random_weight
from gpu_quantize import FORMATS, append_table
from gpu_timing import beyond_cache
from page_writes import page_writes
from runner import checked

from kvconvert.kernels.attention.reference import attention_reference
from kvconvert.kernels.decode import PageTables, ResidualWindows
from kvconvert.kernels.decode.plan import Segment, SequencePlan, plan_work
from kvconvert.kernels.decode.triton.launch import decode_attention, programs_for
from kvconvert.kernels.linear.packed_layout import pack_weight
from kvconvert.kernels.pages import (
    PAGE_SIZE,
    LayerFormat,
    PageFormat,
    dequantize_pages,
    new_flag,
    new_pages,
    quantize_pages,
)
from kvconvert.kernels.pages.triton import launch as gpu
from kvconvert.kernels.rotate.triton.launch import rotate_and_append

HEADS, GROUP, DIM = 8, 4, 128
DTYPE = torch.bfloat16
# Inputs and outputs of the layer's Linears: query, key, value, output, gate, up and down projection.
LINEARS = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
CYCLES = 32
# Cycles of the GPU's clock, about 10 ms, in which the host gets ahead of it.
HEAD_START = 1 << 24


@dataclass(frozen=True)
class Scheme:
    """A preset's pages, rotation, sink tokens, and pages of values that stay in full precision behind those."""

    keys: PageFormat
    values: PageFormat
    rotates: bool
    sink_tokens: int = 0
    held: int = 0


SCHEMES = {
    "oscar": Scheme(*FORMATS["oscar"], rotates=True),
    "kitty": Scheme(*FORMATS["kitty"], rotates=False, sink_tokens=32, held=1),
}
SIZES = ((1, 131072, False), (32, 8192, False), (32, 8192, True))


class SteppedLayer:
    """One layer's cache of a batch, 128 of whose steps make a cycle.

    Rows complete their pages all in the same step or, `staggered`, one after another at equal distances.
    """

    def __init__(self, scheme: Scheme, batch: int, tokens: int, staggered: bool, device: torch.device):
        self.scheme, self.batch, self.device = scheme, batch, device
        self.format = LayerFormat(scheme.keys, scheme.values)
        self.pages = (tokens - scheme.sink_tokens) // PAGE_SIZE - scheme.held
        self.phases = [row * PAGE_SIZE // batch if staggered else 0 for row in range(batch)]
        self.stored = self.pages + scheme.held  # key pages of a row
        self.key_pages = new_pages(batch * self.stored, scheme.keys, DTYPE, device)
        self.value_pages = new_pages(batch * self.pages, scheme.values, DTYPE, device)
        for pages in (self.key_pages, self.value_pages):
            for name, tensor in pages.tensors():
                fill(name, tensor)
        key_room, value_room = (
            -(-(scheme.sink_tokens + (1 + held) * PAGE_SIZE) // PAGE_SIZE) * PAGE_SIZE for held in (0, scheme.held)
        )
        self.keys, self.values = (
            torch.randn(batch, HEADS, room, DIM, device=device).to(DTYPE) for room in (key_room, value_room)
        )
        self.base = torch.zeros(16, dtype=DTYPE, device=device)
        self.new = [torch.randn(batch, n, 1, DIM, device=device).to(DTYPE) for n in (HEADS * GROUP, HEADS, HEADS)]
        self.nbytes = self.key_pages.buffer.nbytes + self.value_pages.buffer.nbytes
        # New values go as far behind the keys' place as there are values in full precision before them.
        shifted = [row[:, scheme.held * PAGE_SIZE :] for row in self.values]
        self.append_table = append_table(list(self.keys), self.base, shifted, self.base)
        self.first = [self._tensor([scheme.sink_tokens + n for n in self.before(step)]) for step in range(PAGE_SIZE)]
        self.windows = [
            ResidualWindows(self.base, self._tensor(self._residual_rows(step))) for step in range(PAGE_SIZE)
        ]
        self._page_tables()
        self.flag = new_flag(device)
        self._flush_tables = {step: self._flush_table(self.due(step)) for step in range(PAGE_SIZE) if self.due(step)}
        self.report = torch.empty_like(self.flag, device="cpu", pin_memory=device.type == "cuda")

    def before(self, step: int) -> list[int]:
        """Tokens of each row behind its last page and its sink tokens, before the step's own token."""
        return [(step + phase) % PAGE_SIZE for phase in self.phases]

    def due(self, step: int) -> list[int]:
        """Rows whose page the step's token completes."""
        return [row for row, count in enumerate(self.before(step)) if count == PAGE_SIZE - 1]

    def _tensor(self, entries: list) -> torch.Tensor:
        return torch.tensor(entries, dtype=torch.int64).to(self.device)

    def _address(self, tensor: torch.Tensor) -> int:
        return (tensor.data_ptr() - self.base.data_ptr()) // tensor.element_size()

    def _residual_rows(self, step: int) -> list[list[int]]:
        scheme = self.scheme
        return [
            [
                self._address(keys) // 8,
                keys.stride(0) // 8,
                self._address(values) // 8,
                values.stride(0) // 8,
                scheme.sink_tokens,
                0,
                scheme.held * PAGE_SIZE,
                scheme.sink_tokens + count + 1,
            ]
            for keys, values, count in zip(self.keys, self.values, self.before(step), strict=True)
        ]

    def _page_tables(self) -> None:
        """Tables of the pages, and how the work is divided."""
        key_record, value_record = self.key_pages.record, self.value_pages.record
        places = torch.randperm(self.batch * self.stored).view(self.batch, self.stored)
        self.key_places = places
        self.value_places = torch.randperm(self.batch * self.pages).view(self.batch, self.pages)
        held = torch.zeros(self.batch, self.scheme.held, dtype=torch.int64)
        tables = []
        for chosen, record in ((places, key_record), (torch.cat([self.value_places, held], 1), value_record)):
            units = chosen.flatten() * (record.stride(0) * record.element_size() // 16)
            tables.append(torch.cat([units, units[-1:]]).to(self.device))
        programs = programs_for(self.device, self.format, None, GROUP, 1)
        # Work is divided for the residual windows that there will be when pages are complete.
        plan = plan_work(self._sequences(), programs).to(self.device)
        self.tables = PageTables(key_record, value_record, *tables, plan)

    def _sequences(self) -> list[SequencePlan]:
        held, full, residual = self.scheme.held, self.pages * PAGE_SIZE, self.scheme.sink_tokens + PAGE_SIZE
        return [
            SequencePlan(
                (Segment(row * self.stored, row * self.stored + self.pages, full),),
                residual,
                held,
                row * self.stored + self.pages,
                full,
                full + held * PAGE_SIZE,
            )
            for row in range(self.batch)
        ]

    def _flush_table(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the due rows' pages are and where they go: over the oldest page of the row."""
        start = self.scheme.sink_tokens
        tables = []
        for tokens, pages, places in (
            (self.keys, self.key_pages, self.key_places),
            (self.values, self.value_pages, self.value_places),
        ):
            due = [tokens[row][:, start : start + PAGE_SIZE] for row in rows]
            oldest = [pages.select(slice(place, place + 1)) for place in places[rows, 0].tolist()]
            tables.append(gpu.page_launch(page_writes(due, oldest), tokens[0], pages, self.flag).table)
        return tuple(tables)

    def step(self, step: int, linears: Linears | None = None, flushes: bool = True) -> torch.Tensor:
        """What the runtime launches in one step of the cycle; the attention's output [B, Hq, 1, D]."""
        _, output = self.attend(step)
        if flushes and self.due(step):
            self.flush(step)
        if linears is not None:
            linears.run()
        return output

    def attend(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens and attend; queries as they attend, and the output."""
        queries = rotate_and_append(
            *self.new, self.base, self.base, self.append_table, self.first[step], self.scheme.rotates, False
        )
        half_quantized = 1 if self.scheme.held else 0
        window = self.windows[step]
        return queries, decode_attention(
            queries, self.tables, window, self.format, DIM**-0.5, half_quantized=half_quantized, hides=True
        )

    def flush(self, step: int) -> None:
        """As the runtime flushes: pages of both sides, their flag, and what moves up in the buffers."""
        scheme, (key_table, value_table) = self.scheme, self._flush_tables[step]
        keys = gpu.PageLaunch(self.keys, DIM, key_table, self.key_pages.buffer, self.flag)
        values = gpu.PageLaunch(self.values, DIM, value_table, self.value_pages.buffer, self.flag)
        gpu.quantize_pages(keys, scheme.keys)
        gpu.quantize_pages(values, scheme.values)
        self.report.copy_(self.flag, non_blocking=True)
        if scheme.held:
            start, stop = scheme.sink_tokens, scheme.sink_tokens + scheme.held * PAGE_SIZE
            due = [self.values[row] for row in self.due(step)]
            targets = [head for row in due for head in row[:, start:stop].unbind(0)]
            torch._foreach_copy_(
                targets, [head for row in due for head in row[:, start + PAGE_SIZE : stop + PAGE_SIZE].unbind(0)]
            )


class Linears:
    """The Linears of one layer, each with rows of its own."""

    def __init__(self, rows: int, device: torch.device):
        self.weights = [pack_weight(random_weight(*shape, 128, device)) for shape in LINEARS]
        self.inputs = {shape[0]: torch.randn(rows, shape[0], device=device).to(DTYPE) for shape in LINEARS}

    def run(self) -> None:
        """One product each."""
        for weight in self.weights:
            product(self.inputs[weight.inputs], weight)


def check(device: torch.device) -> list[dict[str, Any]]:
    """Steps against float64 attention over what is stored, and flushed pages against the reference."""
    rows = []
    torch.manual_seed(0)
    for name, scheme in SCHEMES.items():
        for staggered in (False, True):
            layer = SteppedLayer(scheme, 2, 3 * PAGE_SIZE + scheme.sink_tokens, staggered, device)
            # What other steps would have stored is random, too.
            for step in (0, 63, 64, PAGE_SIZE - 1):
                queries, output = layer.attend(step)
                case, error = f"{name}, step {step}{', staggered' * staggered}", 0.0
                for row in range(layer.batch):
                    wanted = attention_reference(queries[row].cpu(), *_stored(layer, row, step), None, DIM**-0.5).output
                    found = output[row].double().cpu()
                    error = max(error, float((found - wanted).abs().max() / wanted.square().mean().sqrt()))
                rows.append(checked("decode step", case, error, 5e-2))
                if layer.due(step):
                    rows += _check_flush(layer, step, case)
    return rows


def _stored(layer: SteppedLayer, row: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [H, n, D] of a row: pages, half-quantized pages, sink tokens and the residual window."""
    scheme, end = layer.scheme, layer.scheme.sink_tokens + layer.before(step)[row] + 1
    keys = dequantize_pages(layer.key_pages).cpu()[layer.key_places[row]]
    values = dequantize_pages(layer.value_pages).cpu()[layer.value_places[row]]
    held = scheme.held * PAGE_SIZE
    key_rows, value_rows = layer.keys[row].float().cpu(), layer.values[row].float().cpu()
    parts = (
        [keys.transpose(0, 1).flatten(1, 2), key_rows[:, :end]],
        [
            values.transpose(0, 1).flatten(1, 2),
            value_rows[:, scheme.sink_tokens : scheme.sink_tokens + held],
            value_rows[:, : scheme.sink_tokens],
            value_rows[:, scheme.sink_tokens + held : end + held],
        ],
    )
    return tuple(torch.cat(part, 1) for part in parts)


def _check_flush(layer: SteppedLayer, step: int, case: str) -> list[dict[str, Any]]:
    """Flush, and compare the pages with the reference on a CPU, and what moved up with what it was."""
    scheme, start = layer.scheme, layer.scheme.sink_tokens
    keys, values = layer.keys.cpu().clone(), layer.values.cpu().clone()
    layer.flush(step)
    rows = []
    for row in layer.due(step):
        place, case_of_row = int(layer.key_places[row, 0]), f"{case}, row {row}"
        page = layer.key_pages.select(slice(place, place + 1))
        wanted = quantize_pages(keys[row : row + 1, :, start : start + PAGE_SIZE], scheme.keys)
        found, wanted = dequantize_pages(page).cpu(), dequantize_pages(wanted)
        rows.append(checked("flush, keys", case_of_row, float((found - wanted).norm() / wanted.norm()), 1e-2))
        place = int(layer.value_places[row, 0])
        page = layer.value_pages.select(slice(place, place + 1))
        wanted = quantize_pages(values[row : row + 1, :, start : start + PAGE_SIZE], scheme.values)
        found, wanted = dequantize_pages(page).cpu(), dequantize_pages(wanted)
        rows.append(checked("flush, values", case_of_row, float((found - wanted).norm() / wanted.norm()), 1e-3))
        stop = start + scheme.held * PAGE_SIZE
        moved_up = values[row, :, start + PAGE_SIZE : stop + PAGE_SIZE]
        moved = torch.equal(layer.values[row, :, start:stop].cpu(), moved_up)
        rows.append(checked("flush, what moves up", case_of_row, float(not moved), 0.5))
    return rows


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """Every scheme and size, with and without the Linears, with flushes and without."""
    for (name, scheme), (batch, tokens, staggered) in product_of(SCHEMES.items(), SIZES):
        make = partial(SteppedLayer, scheme, batch, tokens, staggered, device)
        layers, linears = beyond_cache(make, lambda layer: layer.nbytes), Linears(batch, device)
        for whole in (False, True):
            case = _case(name, batch, tokens, staggered, whole)
            yield {"case": case, **_compare(layers, linears if whole else None)}
        del layers, linears
        gc.collect()
        torch.cuda.empty_cache()


def _case(name: str, batch: int, tokens: int, staggered: bool, whole: bool) -> str:
    rows = "" if batch == 1 else ", one row after another" if staggered else ", all rows at once"
    return f"{name}, {batch} x {tokens:,}{rows}, {'with Linears' if whole else 'attention alone'}"


def _compare(layers: list[SteppedLayer], linears: Linears | None) -> dict[str, Any]:
    first = layers[0]
    due = [step for step in range(PAGE_SIZE) if first.due(step)]
    with_flushes, without = (step_graphs(layers, linears, flushes) for flushes in (True, False))
    times = step_times(with_flushes)
    control = step_times(without)
    flush = statistics.median(times[i] for i in range(len(times)) if i % PAGE_SIZE in due)
    flush -= statistics.median(control[i] for i in range(len(control)) if i % PAGE_SIZE in due)
    return {
        "steps": len(times),
        "flush_steps": len(due) / PAGE_SIZE,
        "us": _summary(times),
        "us_without_flushes": _summary(control),
        "flush_us": flush,
        "us_after_flush": statistics.median(times[i] for i in range(len(times)) if (i - 1) % PAGE_SIZE in due),
        "p99_over_median": _summary(times)["p99"] / _summary(times)["median"] - 1,
    }


def _summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return {"median": statistics.median(ordered), "mean": statistics.mean(ordered), "p99": p99, "max": ordered[-1]}


def step_graphs(layers: list[SteppedLayer], linears: Linears | None, flushes: bool) -> list[Callable[[], None]]:
    """Replays of the cycle's steps, each captured over the next of the layers."""
    # Memory of the intermediate results is shared: one step's are not needed in the next.
    pool, stream, graphs = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), []
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for step in (0, PAGE_SIZE - 1):
            layers[0].step(step, linears, flushes)
        torch.cuda.synchronize()
        for step in range(PAGE_SIZE):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            layers[step % len(layers)].step(step, linears, flushes)
            graph.capture_end()
            graphs.append(graph.replay)
    torch.cuda.synchronize()
    return graphs


def step_times(graphs: list[Callable[[], None]]) -> list[float]:
    """Microseconds of each step of some cycles after one that is not counted."""
    steps = (CYCLES + 1) * len(graphs)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda._sleep(HEAD_START)
    events[0].record()
    for i in range(steps):
        graphs[i % len(graphs)]()
        events[i + 1].record()
    torch.cuda.synchronize()
    return [events[i].elapsed_time(events[i + 1]) * 1e3 for i in range(len(graphs), steps)]
