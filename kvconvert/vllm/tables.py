"""The tables of a decoding step on a GPU, in tensors whose addresses never change, so that CUDA graphs may hold them.

The host knows how many tokens each request has, and vLLM's block table, on the device, where they are. Before a step,
one copy and one launch write all that its layers read; no kernel depends on a number that the host would have to wait
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvconvert.kernels.blocks import ROW, BlockGeometry, DecodePlaces, locate
from kvconvert.kernels.decode.plan import (
    Item,
    PageTables,
    ResidualWindows,
    Segment,
    SequencePlan,
    WorkPlan,
    most_items,
    plan_rows,
    plan_work,
)
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.vllm.layer import LayerBlocks

# Partial results of a request whose merge takes one step, where requests have few of them on average and where they
# have many; it takes more steps of more.
FEW_SLOTS, SLOTS = 16, 64


# Numbers of a request in each part of `_Rows`.
SIZES = ROW, 8, 3, 1


class _Rows(NamedTuple):
    """What the host says of each request, int64, one copy for all.

    Attributes:
        about: [rows, 6], see `locate`.
        windows: [rows, 8], see `ResidualWindows`.
        keys: [rows, 3], `PageTables.key_rows`.
        first: [rows], 0 for a request whose new token is stored, -1 for none.
    """

    about: torch.Tensor
    windows: torch.Tensor
    keys: torch.Tensor
    first: torch.Tensor


class DecodeTables:
    """Where the tokens of requests with one new token lie.

    Args:
        layers: of the cache, all of the same heads, windows, and sink tokens.
        rows: requests of a step at most.
        pages: of all requests together at most.

    Attributes:
        rows: requests of a step at most.
        capacity: full-precision tokens of a request at most.
    """

    def __init__(self, layers: Sequence[LayerBlocks], rows: int, pages: int):
        self.rows, self.layout, first = rows, layers[0].layout, layers[0]
        self.device, self.dtype, f = first.words.device, first.dtype, first.format
        self.capacity = self.layout.sink_tokens + max(self.layout.key_window, self.layout.value_window) + PAGE_SIZE
        self.head_sizes = f.keys.heads, f.keys.head_dim, f.values.head_dim
        self._flat = torch.zeros(rows * sum(SIZES), dtype=torch.int64, device=self.device)
        parts = self._flat.split([rows * size for size in SIZES])
        self._on_device = _Rows(*(part.view(rows, -1) for part in parts[:3]), parts[3])
        self._found: dict[BlockGeometry, DecodePlaces] = {}
        self._pages = pages
        self.include(layers)
        # Of each request of a step its first page, pages quantized on both sides and on one, and room for the others.
        self._divided = np.zeros((4, 0), np.int64)
        self._work: dict[int, WorkPlan] = {}
        self._flat_work: dict[int, torch.Tensor] = {}

    def include(self, layers: Sequence[LayerBlocks]) -> None:
        """Describe these layers' blocks, too, from the next step on."""
        for blocks in layers:
            if blocks.geometry not in self._found:
                self._found[blocks.geometry] = self._empty_places(self._pages)

    def _empty_places(self, pages: int) -> DecodePlaces:
        # The last entry of the pages' tables is loaded in advance and never followed.
        shapes = (self.rows, self.capacity), (self.rows, 4), (pages + 1,), (pages + 1,)
        return DecodePlaces(*(torch.zeros(shape, dtype=torch.int64, device=self.device) for shape in shapes))

    def write(self, block_table: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Describe a step.

        Args:
            block_table: int32 [requests, entries] on the device.
            rows: of the block table, one for each request with one new token; without any there is nothing to do.
            tokens: of each once the step is over; 0 for rows that take no part.
        """
        layout, count = self.layout, len(rows)
        if not count:
            return
        lengths = np.zeros(self.rows, np.int64)
        lengths[:count] = tokens
        keys, values = layout.quantized_pages(lengths - 1)
        both, pages = np.minimum(keys, values), np.maximum(keys, values)
        starts = np.cumsum(pages) - pages
        if pages.sum() > self._pages:
            # vLLM rehearses lengths that no cache holds, with one block for all; nothing reads what comes of it.
            self.write(block_table, rows, [0] * count)
            return
        half, (heads, dim, value_dim) = pages - both, self.head_sizes
        # Before there is a page, sink tokens lie with the others.
        sinks = np.minimum(pages * PAGE_SIZE, layout.sink_tokens)
        flat = np.zeros(len(self._flat), np.int64)
        parts = np.split(flat, np.cumsum([self.rows * size for size in SIZES[:-1]]))
        about, windows, key_rows, first = (part.reshape(self.rows, -1).T for part in parts)
        about[:5] = lengths, both, half, pages, starts
        about[5, :count] = rows
        # Of a token's record, in units of 8 numbers: keys of all heads, then values.
        windows[1:4] = np.array([[dim // 8], [heads * dim // 8], [value_dim // 8]])
        windows[4:7] = sinks, half * PAGE_SIZE, half * PAGE_SIZE
        windows[7] = np.maximum(sinks + lengths - pages * PAGE_SIZE, 0)
        key_rows[:2] = starts, keys
        first[0] = np.where(lengths, 0, -1)
        _fill(self._flat, flat)
        most = int(pages.max())
        for geometry, found in self._found.items():
            locate(block_table, self._on_device.about, most, geometry, self.head_sizes, self.dtype, found)
        # Work is divided anew where a request comes, goes, or has another page.
        divided = np.stack([starts, both, half, np.where(lengths, self.capacity, 0)])[:, :count]
        if not np.array_equal(divided, self._divided):
            self._divided = divided
            for programs in self._work:
                self._write_work(programs)

    def targets(self, blocks: LayerBlocks, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a layer's new keys and values of the first rows go, as `rotate_and_append` takes it."""
        return self._found[blocks.geometry].targets[:rows], self._on_device.first[:rows]

    def page_tables(self, blocks: LayerBlocks, programs: int, rows: int) -> PageTables:
        """A layer's pages, for the first rows' kernels."""
        format, found = blocks.format, self._found[blocks.geometry]
        if programs not in self._work:
            self._work[programs] = self._empty_work(programs)
            self._write_work(programs)
        work = self._work[programs]
        most = most_items(rows, programs)
        slots = FEW_SLOTS if most <= FEW_SLOTS * rows else SLOTS
        work = WorkPlan(work.items[:most], work.item_rows, work.slot_rows, most + 2 * rows, slots)
        center = format.key_tensors.center
        return PageTables(
            blocks.words,
            blocks.words,
            found.key_pages,
            found.value_pages,
            work,
            blocks.static_scales,
            format.key_tensors.boosted,
            center,
            None if center is None else self._on_device.keys[:rows],
        )

    def residual_windows(self, blocks: LayerBlocks, rows: int) -> ResidualWindows:
        """A layer's full-precision tokens of the first rows, in their blocks."""
        places = self._found[blocks.geometry].places
        return ResidualWindows(blocks.words.view(self.dtype), self._on_device.windows[:rows], places[:rows])

    def _empty_work(self, programs: int) -> WorkPlan:
        items, ends = most_items(self.rows, programs) * len(Item), self.rows + 1
        flat = torch.zeros(items + 2 * ends, dtype=torch.int32, device=self.device)
        parts = flat.split([items, ends, ends])
        self._flat_work[programs] = flat
        return WorkPlan(parts[0].view(-1, len(Item)), parts[1], parts[2], 0, 0)

    def _write_work(self, programs: int) -> None:
        """Divide a step's work anew, into the tensors that kernels know."""
        starts, both, half, residual = self._divided
        hidden, flat = self.layout.sink_tokens, self._flat_work[programs]
        if half.any():
            plan = plan_work([self._plan(*row) for row in self._divided.T.tolist()], programs)
        else:
            # The same whatever the newest page holds, so that plans last: of tokens still to come an item finds none.
            plan = plan_rows(starts, both, residual, hidden, programs)
        whole = np.zeros(flat.shape[0], np.int32)
        whole[: plan.items.numel()] = plan.items.numpy().ravel()
        for place, ends in zip((-2, -1), (plan.item_rows.numpy(), plan.slot_rows.numpy()), strict=True):
            # Rows that take no part are empty.
            first = len(whole) + place * (self.rows + 1)
            whole[first : first + self.rows + 1] = ends[-1]
            whole[first : first + len(ends)] = ends
        _fill(flat, whole)

    def _plan(self, first: int, both: int, half: int, residual: int) -> SequencePlan:
        """A request some of whose pages are quantized on one side alone."""
        hidden, begin, pages = self.layout.sink_tokens, both * PAGE_SIZE, both + half
        segments = (Segment(first, first + both, begin, hidden=hidden),) if both else ()
        return SequencePlan(segments, residual, half, first + both, begin, pages * PAGE_SIZE, 0 if both else hidden)


def _fill(target: torch.Tensor, data: np.ndarray) -> None:
    """Write integers of the host's without waiting for what the device is doing."""
    tensor = torch.from_numpy(data)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)
