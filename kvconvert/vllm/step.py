"""What one forward pass does to the cache, planned once for all layers from lengths that the host knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from kvconvert.kernels.device import upload
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.vllm.blocks import BlockLayout


class Request(NamedTuple):
    """One request's part of a forward pass.

    Attributes:
        row: of the block table.
        first: index of its first new token among those of the pass.
        stored: tokens stored before.
        length: new tokens, at least one.
        drafted: whether some of these may be taken back, and stay in full precision besides.
        continues: whether the next of the pass's requests are more tokens of this one, which see what these complete.
    """

    row: int
    first: int
    stored: int
    length: int
    drafted: bool = False
    continues: bool = False

    @property
    def tokens(self) -> int:
        """Tokens once the pass is over."""
        return self.stored + self.length


@dataclass(frozen=True)
class PendingBlocks:
    """Complete pages of one side that are still in full precision.

    Attributes:
        blocks: int64 [N], where they go.
        firsts: position of each page's first token.
        rows: of the block table.
    """

    blocks: torch.Tensor
    firsts: list[int]
    rows: list[int]


class PendingTokens(NamedTuple):
    """Where the tokens of pending pages and sink tokens are, in layers with one layout of blocks: blocks and slots.

    Attributes:
        sides: of the tokens of keys' and of values' pages, int64 [128 N] each; the same object where both are.
        sinks: of sink tokens that go where they stay, and where that is; None for none.
    """

    sides: tuple[tuple[torch.Tensor, torch.Tensor] | None, tuple[torch.Tensor, torch.Tensor] | None]
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

    def settled(self, request: Request) -> Iterator[tuple[bool, int, int]]:
        """Of keys (True) and values: the pages that the tokens before a pass's last one complete, from begin to end.

        A page that the last token completes is quantized when the request goes on: at once, or when its next pass
        begins (`pending`), which may be the second time that drafts have come to that token.
        """
        ends = request.stored, request.tokens - (not request.continues)
        sides = zip((True, False), *map(self.layout.quantized, ends), strict=True)
        return ((is_key, begin, end) for is_key, begin, end in sides if begin < end)

    @cached_property
    def pending(self) -> tuple[PendingBlocks | None, PendingBlocks | None]:
        """Pages of keys and of values that the last token stored before this pass has completed."""
        found: list[list[tuple[int, int]]] = [[], []]
        # The second part of a request begins where the first has completed a page, and quantized it.
        parts = zip((None, *self.requests), self.requests, strict=False)
        begins = [request.stored if before is None or not before.continues else 0 for before, request in parts]
        stored = np.array(begins, np.int64)
        ends = [stored % PAGE_SIZE == w % PAGE_SIZE for w in (self.layout.key_window, self.layout.value_window)]
        for index in np.flatnonzero((stored > 0) & (ends[0] | ends[1])).tolist():
            request = self.requests[index]
            before, now = map(self.layout.quantized, (request.stored - 1, request.stored))
            for pages, begin, end in zip(found, before, now, strict=True):
                if begin < end:
                    pages.append((request.row, begin))
        keys = self._pending(found[0])
        return keys, keys if found[0] == found[1] else self._pending(found[1])

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

    def pending_tokens(self, layout: BlockLayout) -> PendingTokens:
        """Where the tokens of pending pages are in layers whose blocks have this layout."""
        known = self._pending_tokens.get(layout.tokens_per_block)
        if known is None:
            keys, values = self.pending
            of_keys = None if keys is None else self._page_tokens(layout, keys)
            of_values = of_keys if keys is values else None if values is None else self._page_tokens(layout, values)
            known = PendingTokens((of_keys, of_values), self._pending_sinks(layout))
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
        self, layout: BlockLayout
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
        """Blocks and slots of the sink tokens of requests whose first page is pending on a side, and where they go."""
        count = layout.sink_tokens
        found = next((pages for pages in self.pending if pages is not None and 0 in pages.firsts), None)
        if found is None or not count:
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

    Args:
        layout: as in `StepPlan`.
        starts: where each request's tokens begin among those of the pass, and their number at the end.
        lengths: tokens of each request once the pass is over.
        block_table, quantized_blocks: as in `StepPlan`.
        prompts: which requests' tokens are of prompts, and no drafts; None for all.
    """
    requests = []
    for row, (first, end, tokens) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        stored, length = tokens - end + first, end - first
        if not layout.drafts or not 1 < length <= 1 + layout.drafts or prompts is None or prompts[row]:
            requests += [Request(row, first, stored, length)] if length else []
            continue
        begin = stored
        for after in range(stored + 1, tokens + 1):
            if after == tokens or layout.completes(after):
                requests.append(Request(row, first + begin - stored, begin, after - begin, True, after < tokens))
                begin = after
    return StepPlan(layout, requests, block_table, quantized_blocks)
