"""What one forward pass does to the cache, planned once for all layers from lengths that the host knows.

The tables of a decoding step on a GPU are tensors whose addresses never change, so that CUDA graphs may hold them. The
host knows how many tokens each request has, and vLLM's block table, on the device, where they are. Before a step, one
copy and one launch write all that its layers read; no kernel depends on a number that the host would have to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from kvconvert.kernels.blocks import ROW, BlockGeometry, DecodePlaces, geometry_table, locate
from kvconvert.kernels.decode.plan import (
    Item,
    PageTables,
    ResidualWindows,
    WorkPlan,
    most_items,
    plan_arrays,
)
from kvconvert.kernels.device import upload
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.vllm.blocks import BlockLayout, LayerBlocks


class Request(NamedTuple):
    """One request's part of a forward pass.

    Attributes:
        row: the row of the block table.
        first: index of its first new token among those of the pass.
        stored: tokens stored before.
        length: new tokens, at least one.
        drafted: whether some of these may be taken back, and stay in full precision besides.
        continues: whether the next of the pass's requests are more tokens of this one, which see what these complete.
        recent: whether they see the recent tokens before them in full precision.
    """

    row: int
    first: int
    stored: int
    length: int
    drafted: bool = False
    continues: bool = False
    recent: bool = True

    @property
    def tokens(self) -> int:
        """Tokens once the pass is over."""
        return self.stored + self.length

    @property
    def settled(self) -> tuple[int, int]:
        """Pages that the tokens before the last one complete, from begin to end.

        A page that the last token completes is quantized when the request goes on: at once, or when its next pass
        begins (`StepPlan.pending`), which may be the second time that drafts have come to that token.
        """
        return self.stored // PAGE_SIZE, (self.tokens - (not self.continues)) // PAGE_SIZE


@dataclass(frozen=True)
class PendingBlocks:
    """Complete pages that are not quantized yet.

    Attributes:
        blocks: int64 [N], where they go.
        firsts: position of each page's first token.
        rows: the rows of the block table.
    """

    blocks: torch.Tensor
    firsts: list[int]
    rows: list[int]


class PendingTokens(NamedTuple):
    """Where the tokens of pending pages and sink tokens are, in layers with one layout of blocks: blocks and slots.

    Attributes:
        tokens: the blocks and slots of the pages' tokens, int64 [128 N] each.
        sinks: of sink tokens that go where they stay, and where that is; None for none.
    """

    tokens: tuple[torch.Tensor, torch.Tensor]
    sinks: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None


@dataclass(frozen=True)
class StepPlan:
    """A forward pass, the same for all layers whose windows and sink tokens are.

    Attributes:
        layout: of one such layer's blocks; what depends on the size of blocks is asked for by a layer's own layout.
        requests: in the order of their tokens.
        block_table: int32 [rows, entries] on the device.
        quantized_blocks: uint8 [blocks], 1 for those that hold a quantized page, so that pages of a prefix that a
            request was given are not quantized again; None where requests share none.
    """

    layout: BlockLayout
    requests: Sequence[Request]
    block_table: torch.Tensor
    quantized_blocks: torch.Tensor | None = None

    @cached_property
    def decodes(self) -> Sequence[Request]:
        """Requests with one new token that come before all others, as vLLM orders them."""
        others = (i for i, request in enumerate(self.requests) if request.length > 1 or request.drafted)
        count = next(others, len(self.requests))
        return self.requests[:count]

    @property
    def prompts(self) -> Sequence[Request]:
        """The others."""
        return self.requests[len(self.decodes) :]

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.block_table.device

    def pages(self, request: Request, begin: int, end: int) -> torch.Tensor:
        """Blocks of a request's pages begin..end-1, int64."""
        first = self.layout.first_page
        return self.block_table[request.row, first + begin : first + end].long()

    def places(self, layout: BlockLayout, request: Request, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and slots of a request's full-precision tokens at positions begin..end-1."""
        places = layout.places(torch.arange(begin, end, device=self.device))
        return self.block_table[request.row, places.entries].long(), places.slots

    def sinks(self, layout: BlockLayout, request: Request, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of its sink tokens."""
        places = layout.sinks(torch.arange(begin, end, device=self.device))
        return self.block_table[request.row, places.entries].long(), places.slots

    def quantized(self, request: Request) -> tuple[int, int]:
        """Number of key pages and of value pages that a request's tokens read in quantized form."""
        return self.layout.quantized(request.stored, request.recent)

    @cached_property
    def pending(self) -> PendingBlocks | None:
        """Pages that the last token stored before this pass has completed."""
        # The second part of a request begins where the first has completed a page, and quantized it.
        parts = zip((None, *self.requests), self.requests, strict=False)
        begins = [request.stored if before is None or not before.continues else 0 for before, request in parts]
        found = [index for index, stored in enumerate(begins) if stored and stored % PAGE_SIZE == 0]
        return self._pending([(self.requests[index].row, begins[index] // PAGE_SIZE - 1) for index in found])

    def _pending(self, pages: list[tuple[int, int]]) -> PendingBlocks | None:
        """These rows' pages, each a row and a number."""
        if not pages:
            return None
        rows, entries = zip(*((row, self.layout.first_page + number) for row, number in pages), strict=True)
        places = upload([*rows, *entries], self.device)
        blocks = self.block_table[places[: len(pages)], places[len(pages) :]].long()
        if self.quantized_blocks is not None:
            known = self.quantized_blocks[blocks] > 0
            if self.device.type == "cpu" and known.any():
                return self._pending([page for page, done in zip(pages, known.tolist(), strict=True) if not done])
            # A device need not tell: these go to block 0, which vLLM leaves to no request.
            blocks = blocks.masked_fill(known, 0)
        return PendingBlocks(blocks, [number * PAGE_SIZE for _, number in pages], list(rows))

    def pending_tokens(self, layout: BlockLayout, pages: PendingBlocks) -> PendingTokens:
        """Where the tokens of `pending` pages are in layers whose blocks have this layout."""
        known = self._pending_tokens.get(layout.tokens_per_block)
        if known is None:
            known = PendingTokens(self._page_tokens(layout, pages), self._pending_sinks(layout, pages))
            self._pending_tokens[layout.tokens_per_block] = known
        return known

    @cached_property
    def _pending_tokens(self) -> dict[int, PendingTokens]:
        return {}

    def _page_tokens(self, layout: BlockLayout, pages: PendingBlocks) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.tensor(pages.firsts)[:, None] + torch.arange(PAGE_SIZE)
        entries, slots = layout.places(positions.flatten())
        rows = torch.tensor(pages.rows).repeat_interleave(PAGE_SIZE)
        rows, entries, slots = upload(torch.stack([rows, entries, slots]), self.device)
        return self.block_table[rows, entries].long(), slots

    def _pending_sinks(
        self, layout: BlockLayout, found: PendingBlocks
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
        """Blocks and slots of the sink tokens of requests whose first page is pending, and where they go."""
        count = layout.sink_tokens
        if 0 not in found.firsts or not count:
            return None
        first = [page for page, position in enumerate(found.firsts) if not position]
        rows = torch.tensor([found.rows[page] for page in first]).repeat_interleave(count)
        within = torch.arange(count).repeat(len(first))
        places = *layout.places(within), *layout.sinks(within)
        page, rows, *places = upload(
            torch.stack([torch.tensor(first).repeat_interleave(count), rows, *places]), self.device
        ).unbind()
        blocks = [self.block_table[rows, entries].long() for entries in places[::2]]
        if self.quantized_blocks is not None:
            blocks[1] = blocks[1].masked_fill(found.blocks[page] == 0, 0)
        return (blocks[0], places[1]), (blocks[1], places[3])

    def note_quantized(self) -> None:
        """Remember, where requests share pages, which ones this pass begins and which it quantizes."""
        if self.quantized_blocks is None:
            return
        begun, done = [], []
        for request in self.requests:
            begun += [(request.row, n) for n in range(-(-request.stored // PAGE_SIZE), -(-request.tokens // PAGE_SIZE))]
            # Several drafts may have been accepted since the pass before.
            first = max(0, request.stored - 1 - self.layout.drafts) // PAGE_SIZE
            end = request.stored if request.drafted else request.tokens - 1
            done += [(request.row, n) for n in range(first, end // PAGE_SIZE)]
        for pages, value in ((begun, 0), (done, 1)):
            if pages:
                rows, numbers = upload(torch.tensor(pages).T, self.device)
                blocks = self.block_table[rows, self.layout.first_page + numbers].long()
                self.quantized_blocks.index_fill_(0, blocks, value)


def plan_step(
    layout: BlockLayout,
    starts: Sequence[int],
    lengths: Sequence[int],
    block_table: torch.Tensor,
    quantized_blocks: torch.Tensor | None = None,
    prompts: Sequence[bool] | None = None,
) -> StepPlan:
    """The plan of a pass.

    Drafts that complete a page are divided there: later ones see it quantized, as they would without drafts.

    Where requests share pages, what a prompt's chunk attends to must not depend on whether the tokens before it were
    found in the cache or computed: it reads all complete pages in quantized form, recent ones too.

    Args:
        layout: as in `StepPlan`.
        starts: where each request's tokens begin among those of the pass, and their number at the end.
        lengths: tokens of each request once the pass is over.
        block_table, quantized_blocks: as in `StepPlan`.
        prompts: which requests' tokens are of prompts, and no drafts, rows without tokens aside; None for all.
    """
    requests = []
    for row, (first, end, tokens) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        stored, length = tokens - end + first, end - first
        if not length:
            # CUDA graphs pad a batch with rows of no tokens, for which `prompts` has no entry.
            continue
        is_prompt = prompts is None or prompts[row]
        if not layout.drafts or not 1 < length <= 1 + layout.drafts or is_prompt:
            recent = quantized_blocks is None or not is_prompt
            requests.append(Request(row, first, stored, length, recent=recent))
            continue
        begin = stored
        for after in range(stored + 1, tokens + 1):
            if after == tokens or layout.completes(after):
                requests.append(Request(row, first + begin - stored, begin, after - begin, True, after < tokens))
                begin = after
    return StepPlan(layout, requests, block_table, quantized_blocks)


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
        layers: the cache's layers, all of the same heads, windows, and sink tokens.
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
        # Of each request of a step the quantized pages of both sides, and whether it takes part.
        self._known = np.zeros((3, 0), np.int64)
        # Of each its first page, pages quantized on both sides and on one, and room for the others.
        self._divided = np.zeros((4, 0), np.int64)
        self._work: dict[int, WorkPlan] = {}
        self._flat_work: dict[int, torch.Tensor] = {}

    def include(self, layers: Sequence[LayerBlocks]) -> None:
        """Describe these layers' blocks, too, from the next step on."""
        for blocks in layers:
            if blocks.geometry not in self._found:
                # The last entry of the pages' tables is loaded in advance and never followed.
                sizes = self.rows, self.capacity, self._pages + 1
                self._found[blocks.geometry] = DecodePlaces.empty(*sizes, self.device)
        self._geometries = geometry_table(self._found)

    def write(
        self, block_table: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], recent: Sequence[bool] = ()
    ) -> None:
        """Describe a step.

        Args:
            block_table: int32 [requests, entries] on the device.
            rows: the rows of the block table, one for each request with one new token; there may be none.
            tokens: the number of tokens of each once the step is over; 0 for rows that take no part.
            recent: `Request.recent` for each row; True for all by default.
        """
        count = len(rows)
        if not count:
            return
        lengths = np.zeros(self.rows, np.int64)
        lengths[:count] = tokens
        sees = np.ones(self.rows, bool)
        sees[: len(recent)] = recent
        keys, values = self.layout.quantized_pages(lengths - 1, sees)
        if np.maximum(keys, values).sum() > self._pages:
            # vLLM rehearses lengths that no cache holds, with one block for all; nothing reads what comes of it.
            self.write(block_table, rows, [0] * count)
            return
        known = np.stack([keys, values, lengths > 0])[:, :count]
        if not np.array_equal(known, self._known):
            # A request comes, goes, or has another page.
            self._known = known
            self._flat_host, self._about, self._windows = self._describe(keys, values, lengths > 0, count)
        self._about[0], self._about[5, :count] = lengths, rows
        # With the sink tokens, which are among the others before there is a page.
        self._windows[7] = np.maximum(self._windows[4] + lengths - self._about[3] * PAGE_SIZE, 0)
        _fill(self._flat, self._flat_host)
        geometry, found = next(iter(self._found.items()))
        about, kind = self._on_device.about, (self.head_sizes, self.dtype)
        locate(block_table, about, int(self._about[3].max()), geometry, self._geometries, *kind, found)

    def _describe(
        self, keys: np.ndarray, values: np.ndarray, exists: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A step's `_Rows` on the host without what changes with every token, and its first two parts, transposed.

        Args:
            keys, values: quantized pages of each row.
            exists: which rows take part.
            count: rows up to the last one that does.
        """
        both, pages = np.minimum(keys, values), np.maximum(keys, values)
        starts = np.cumsum(pages) - pages
        half, (heads, dim, value_dim) = pages - both, self.head_sizes
        flat = np.zeros(len(self._flat), np.int64)
        parts = np.split(flat, np.cumsum([self.rows * size for size in SIZES[:-1]]))
        about, windows, key_rows, first = (part.reshape(self.rows, -1).T for part in parts)
        about[1:5] = both, half, pages, starts
        # Of a token's record, in units of 8 numbers: keys of all heads, then values.
        windows[1:4] = np.array([[dim // 8], [heads * dim // 8], [value_dim // 8]])
        windows[4:7] = np.minimum(pages * PAGE_SIZE, self.layout.sink_tokens), half * PAGE_SIZE, half * PAGE_SIZE
        key_rows[:2] = starts, keys
        first[0] = np.where(exists, 0, -1)
        self._divided = np.stack([starts, both, half, np.where(exists, self.capacity, 0)])[:, :count]
        for programs in self._work:
            self._write_work(programs)
        return flat, about, windows

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
        return ResidualWindows(blocks.tokens, self._on_device.windows[:rows], places[:rows])

    def _empty_work(self, programs: int) -> WorkPlan:
        items, ends = most_items(self.rows, programs) * len(Item), self.rows + 1
        flat = torch.zeros(items + 2 * ends, dtype=torch.int32, device=self.device)
        parts = flat.split([items, ends, ends])
        self._flat_work[programs] = flat
        return WorkPlan(parts[0].view(-1, len(Item)), parts[1], parts[2], 0, 0)

    def _write_work(self, programs: int) -> None:
        """Divide a step's work anew, into the tensors that kernels know."""
        flat, hidden, (starts, both, half, residual) = self._flat_work[programs], self.layout.sink_tokens, self._divided
        ends, zeros, number = starts + both, np.zeros_like(both), np.arange(len(both))
        pages = np.column_stack([number, starts, ends, both * PAGE_SIZE, zeros, zeros, zeros + hidden])
        half_hidden = np.where(both, 0, hidden)
        # The same whatever the newest page holds, so that plans last: of tokens still to come an item finds none.
        rows = residual, half, ends, both * PAGE_SIZE, (both + half) * PAGE_SIZE, half_hidden
        plan = plan_arrays(pages, np.column_stack(rows), programs)
        whole = np.zeros(flat.shape[0], np.int32)
        whole[: plan.items.numel()] = plan.items.numpy().ravel()
        for place, ends in zip((-2, -1), (plan.item_rows.numpy(), plan.slot_rows.numpy()), strict=True):
            # Rows that take no part are empty.
            first = len(whole) + place * (self.rows + 1)
            whole[first : first + self.rows + 1] = ends[-1]
            whole[first : first + len(ends)] = ends
        _fill(flat, whole)


def _fill(target: torch.Tensor, data: np.ndarray) -> None:
    """Write integers of the host's without waiting for what the device is doing."""
    tensor = torch.from_numpy(data)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)
