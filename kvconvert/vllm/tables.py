"""The tables of a decoding step on a GPU, in tensors whose addresses never change, so that CUDA graphs may hold them.

The host knows how many tokens each request has, and vLLM's block table, on the device, where they are. Tables are
written before a step runs; no kernel of the step depends on a number that the host would have to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from kvconvert.kernels.decode.plan import Segment, SequencePlan, WorkPlan, most_items, plan_work
from kvconvert.kernels.decode.stored import PageTables, ResidualWindows
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.vllm.blocks import BlockLayout
from kvconvert.vllm.layer import LayerBlocks
from kvconvert.vllm.step import upload

# Numbers of a work item, see `kernels/decode/plan.py`.
ITEM = 18


class DecodeTables:
    """Where the tokens of requests with one new token lie.

    Args:
        layout: of every layer's blocks.
        rows: requests of a step at most.
        pages: of all requests together at most.
        device: of the cache.

    Attributes:
        tokens: int64 [rows], of each request once the step is over; 0 in rows that take no part.
        write_blocks, write_slots: int64 [rows], where the new token goes; in block 0, which vLLM leaves to no request,
            for rows that take no part.
        gather_blocks, gather_slots: int64 [rows, capacity], where the full-precision tokens of a request lie in the
            order in which kernels read them: sink tokens, tokens of half-quantized pages, the newest; repeated at the
            end.
        capacity: full-precision tokens of a request at most.
    """

    def __init__(self, layout: BlockLayout, rows: int, pages: int, device: torch.device):
        self.layout, self.rows, self.device = layout, rows, device
        self.capacity = layout.sink_tokens + max(layout.key_window, layout.value_window) + PAGE_SIZE
        on_device = {"dtype": torch.int64, "device": device}
        self.tokens = torch.zeros(rows, **on_device)
        self.write_blocks, self.write_slots = torch.zeros(2, rows, **on_device)
        self.gather_blocks, self.gather_slots = torch.zeros(2, rows, self.capacity, **on_device)
        # The last entry is loaded in advance and never followed.
        self._pages = torch.zeros(pages + 1, **on_device)
        self._offsets: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._windows: dict[tuple[int, int, int], torch.Tensor] = {}
        self._counts = torch.zeros(rows, 3, **on_device)
        self._key_rows = torch.zeros(rows, 3, **on_device)
        self._work: dict[int, WorkPlan] = {}
        self._plans: list[SequencePlan] = []
        self._order = torch.arange(self.capacity, device=device)

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
        padded = list(tokens) + [0] * (self.rows - count)
        quantized = [layout.quantized(max(0, n - 1)) for n in padded]
        both, pages = [min(q) for q in quantized], [max(q) for q in quantized]
        starts = [0, *accumulate(pages)]
        if starts[-1] >= len(self._pages):
            # vLLM rehearses lengths that no cache holds, with one block for all; nothing reads what comes of it.
            self.write(block_table, rows, [0] * count)
            return
        half = [p - b for p, b in zip(pages, both, strict=True)]
        host = torch.tensor([padded, both, half, [q[0] for q in quantized], pages, starts[:-1]])
        device = upload(host, self.device)
        self.tokens.copy_(device[0])
        table = block_table
        if list(rows) != list(range(len(block_table))):
            table = block_table[upload(torch.tensor(rows, dtype=torch.int64), self.device)]
        exists = device[0, :count].gt(0)
        table = table[:count].long() * exists.unsqueeze(1)
        last = (device[0] - 1).clamp(min=0)
        self._write_places(table, last, exists)
        self._write_gather(table, device, last)
        self._write_pages(table, device[4, :count, None], device[5, :count, None], max(pages))
        for record, offsets in self._offsets.items():
            self._write_offsets(*record, *offsets)
        for sizes, described in self._windows.items():
            self._write_window(sizes, described)
        self._key_rows[:, 1] = device[3]
        self._key_rows[:, 0] = device[5]
        about = list(zip(starts, both, pages, strict=False))[:count]
        plans = [self._plan(bool(n), *own) for n, own in zip(tokens, about, strict=True)]
        if plans != self._plans:
            self._plans = plans
            for programs in self._work:
                self._write_work(programs)

    def _write_pages(self, table: torch.Tensor, pages: torch.Tensor, starts: torch.Tensor, most: int) -> None:
        """The rows' pages one after another, so many of each [rows, 1], from entry `starts` [rows, 1] on."""
        number, first = torch.arange(most, device=self.device), self.layout.first_page
        # The last entry takes what is no page.
        at = torch.where(number < pages, starts + number, len(self._pages) - 1)
        self._pages[at] = table[:, first : first + most]

    def _write_places(self, table: torch.Tensor, last: torch.Tensor, exists: torch.Tensor) -> None:
        """Where new tokens, at positions `last` [rows], go."""
        count, places = len(table), self.layout.places(last)
        self.write_blocks.zero_()
        self.write_slots.zero_()
        found = table.gather(1, places.entries[:count, None].clamp(max=table.shape[1] - 1)).squeeze(1)
        self.write_blocks[:count] = found * exists
        self.write_slots[:count] = places.slots[:count] * exists

    def _write_gather(self, table: torch.Tensor, device: torch.Tensor, last: torch.Tensor) -> None:
        """Where full-precision tokens lie; `device` [4, rows] as in `write`."""
        count, layout = len(table), self.layout
        begin = device[1] * PAGE_SIZE
        half = device[2] * PAGE_SIZE
        # Before there is a page, sink tokens lie with the others.
        sinks = (begin + half).clamp(max=layout.sink_tokens)
        self._counts[:, 0] = sinks
        self._counts[:, 1] = half
        self._counts[:, 2] = (sinks + device[0] - begin - half).clamp(min=0)
        position = torch.minimum(begin[:, None] + self._order - sinks[:, None], last[:, None])
        is_sink = self._order < sinks[:, None]
        places, first = layout.places(position.clamp(min=0)), layout.sinks(self._order)
        entries = torch.where(is_sink, first.entries, places.entries)[:count]
        self.gather_blocks[:count] = table.gather(1, entries.clamp(max=table.shape[1] - 1))
        self.gather_blocks[count:] = 0
        self.gather_slots.copy_(torch.where(is_sink, first.slots, places.slots))

    def _plan(self, exists: bool, first: int, both: int, pages: int) -> SequencePlan:
        hidden = self.layout.sink_tokens
        segments = (Segment(first, first + both, both * PAGE_SIZE, hidden=hidden),) if both else ()
        # The same whatever the newest page holds, so that plans last: of tokens still to come an item finds none.
        residual = self.capacity if exists else 0
        begin = both * PAGE_SIZE
        return SequencePlan(
            segments, residual, pages - both, first + both, begin, pages * PAGE_SIZE, 0 if both else hidden
        )

    def page_tables(self, blocks: LayerBlocks, programs: int, rows: int) -> PageTables:
        """A layer's pages, for the first rows' kernels."""
        format, record = blocks.cache.format, (blocks.block_units, blocks.cache.layout.key_bytes // 16)
        if record not in self._offsets:
            self._offsets[record] = torch.zeros_like(self._pages), torch.zeros_like(self._pages)
            self._write_offsets(*record, *self._offsets[record])
        if programs not in self._work:
            self._work[programs] = self._empty_work(programs)
            self._write_work(programs)
        work = self._work[programs]
        most = most_items(rows, programs)
        # As many as rows of one length have; the merge takes more of fewer rows as well.
        slots = 2 * most // rows + 2
        work = WorkPlan(work.items[:most], work.item_rows, work.slot_rows, most + 2 * rows, slots)
        center = format.key_center
        return PageTables(
            blocks.words,
            blocks.words,
            *self._offsets[record],
            work,
            blocks.static_scales,
            format.boosted,
            center,
            None if center is None else self._key_rows[:rows],
        )

    def _write_offsets(self, block: int, key_record: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        torch.mul(self._pages, block, out=keys)
        torch.add(keys, key_record, out=values)

    def residual_windows(self, blocks: LayerBlocks, rows: int) -> ResidualWindows:
        """A layer's full-precision tokens of the first rows, gathered."""
        f = blocks.cache.format
        shapes = [(side.heads, side.head_dim) for side in (f.keys, f.values)]
        sizes = [heads * self.capacity * dim for heads, dim in shapes]
        memory = torch.empty(rows, sum(sizes), dtype=blocks.cache.dtype, device=self.device)
        found = blocks.tokens[self.gather_blocks[:rows], self.gather_slots[:rows]]
        sides = found.split([heads * dim for heads, dim in shapes], 2)
        for part, side, (heads, dim) in zip(memory.split(sizes, 1), sides, shapes, strict=True):
            part.view(rows, heads, self.capacity, dim).copy_(side.unflatten(2, (heads, dim)).transpose(1, 2))
        sizes = f.keys.heads, f.keys.head_dim, f.values.head_dim
        if sizes not in self._windows:
            self._windows[sizes] = torch.zeros(self.rows, 8, dtype=torch.int64, device=self.device)
            self._write_window(sizes, self._windows[sizes])
        return ResidualWindows(memory, self._windows[sizes][:rows])

    def _write_window(self, sizes: tuple[int, int, int], described: torch.Tensor) -> None:
        """The rows of `ResidualWindows`: keys and values of one row after another, of so many heads and channels."""
        heads, *dims = sizes
        key_head, value_head = (self.capacity * dim // 8 for dim in dims)
        described[:, 0] = torch.arange(self.rows, device=self.device) * (heads * (key_head + value_head))
        described[:, 1] = key_head
        described[:, 2] = described[:, 0] + heads * key_head
        described[:, 3] = value_head
        described[:, 4] = self._counts[:, 0]
        described[:, 5:7] = self._counts[:, 1:2]
        described[:, 7] = self._counts[:, 2]

    def _empty_work(self, programs: int) -> WorkPlan:
        items = torch.zeros(most_items(self.rows, programs), ITEM, dtype=torch.int32, device=self.device)
        ends = [torch.zeros(self.rows + 1, dtype=torch.int32, device=self.device) for _ in range(2)]
        return WorkPlan(items, *ends, 0, 0)

    def _write_work(self, programs: int) -> None:
        """Divide a step's work anew, into the tensors that kernels know."""
        target = self._work[programs]
        plan = plan_work(self._plans, programs)
        items = plan.items.new_zeros(target.items.shape)
        items[: len(plan.items)] = plan.items
        target.items.copy_(upload(items, self.device))
        for tensor, ends in ((target.item_rows, plan.item_rows), (target.slot_rows, plan.slot_rows)):
            # Rows that take no part are empty.
            whole = ends[-1].repeat(self.rows + 1)
            whole[: len(ends)] = ends
            tensor.copy_(upload(whole, self.device))
