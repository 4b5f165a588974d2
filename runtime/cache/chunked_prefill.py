"""Attention of a prompt chunk over what is stored before it, which is dequantized once for all of its queries."""

from __future__ import annotations

from functools import cached_property

import torch

from kvconvert.kernels import device
from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.chunked_prefill import (
    FEWEST_CENTERED,
    FEWEST_QUERIES,
    PageReader,
    StoredPart,
    chunk_attention,
    stored_parts,
    unsupported,
)
from kvconvert.kernels.pages import PAGE_SIZE, PageAddresses, PageFormat
from kvconvert.runtime.cache.forward_pass import PassTokens
from kvconvert.runtime.cache.group_tables import GroupTables
from kvconvert.runtime.cache.store import LayerStore


class ChunkedPrefill:
    """What one row stores, attended to by many queries at once.

    Args:
        store: the store of one layer.
        row: the row of the batch.
        chunk: the tokens of the forward pass.
        scoring: the layer's scoring, without its window.
    """

    def __init__(self, store: LayerStore, row: int, chunk: PassTokens, scoring: Scoring):
        self.store, self.row, self.chunk, self.sequence = store, row, chunk, store.sequences[row]
        self.window = None if chunk.is_causal else store.group.sliding_window
        self.scoring = scoring._replace(window=self.window)

    def is_served(self, queries: torch.Tensor) -> bool:
        """Whether the row's queries, of [B, Hq, T, D], are attended to here and not with pages as they are stored.

        Where kernels run, many queries that are not count as a fallback; for few queries the other path is faster.
        """
        fewest = FEWEST_QUERIES["cuda" if device.compiles(queries.device) else "cpu"]
        if device.compiles(queries.device) and self.store.format.key_tensors.center is not None:
            fewest = min(fewest, FEWEST_CENTERED)
        if queries.shape[2] <= fewest:
            return False
        reason = self._unsupported(queries)
        if reason is not None and device.runs_triton(queries.device):
            self.store.fall_back("attention of prompts over stored tokens", reason)
        return reason is None

    def _unsupported(self, queries: torch.Tensor) -> str | None:
        """Why the row's queries, of [B, Hq, T, D], cannot be attended to here; None if they can."""
        store, sequence, chunk = self.store, self.sequence, self.chunk
        reason = unsupported(queries, store.format, store.dtype, self.scoring)
        if reason is not None:
            return reason
        if sequence.spans and store.format.span.shifts:
            return "the scores of its spans are shifted by the extremes of all of them"
        if sequence.spans and not device.runs_triton(store.device):
            return "blocks of spans are dequantized by kernels alone"
        if chunk.is_causal:
            return None
        if any(other.kept or other.spans for other in store.sequences):
            return "the tokens within its sliding window are not consecutive"
        if self.window is None or not self._sees_window():
            return "its mask is neither causal nor the layer's sliding window"
        # Once pages were dropped, sink tokens are outside.
        first = sequence.page_position(0)
        positions, count = sequence.positions, len(sequence.positions)
        if count > first and positions.position(count - 1) - positions.position(first) != count - 1 - first:
            return "there is padding within its sliding window"
        return None

    def _sees_window(self) -> bool:
        """Whether the mask of all rows is causal within the window, for all tokens that are there."""
        store = self.store

        def positions() -> list[torch.Tensor]:
            found = []
            for sequence in store.sequences:
                kept = sequence.page_position(0)
                parts = [(0, min(kept, sequence.sink_tokens)), (kept, len(sequence.positions))]
                found.append(torch.cat([sequence.positions.slice(*part, store.device) for part in parts]))
            return found

        stored = tuple((len(sequence.positions), sequence.dropped) for sequence in store.sequences)
        return self.chunk.is_window(self.window, stored, positions)

    def attend(self, queries: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of queries [Hq, T, D], at the last T positions, into `output` [Hq, T, E], except at padding.

        `is_served` is true of them.
        """
        sequence = self.sequence
        own, at = self.newest(queries.shape[1], queries.device)
        if not own:
            return
        tensors = self.store.rows[self.row]
        keys = tensors.keys.tokens(sequence.keys.buffered - own, sequence.keys.buffered)
        values = tensors.values.tokens(sequence.values.buffered - own, sequence.values.buffered)
        attended = chunk_attention(queries[:, at], self.parts(own), keys, values, self.scoring)
        output[:, at] = attended.to(output.dtype)

    def newest(self, length: int, on: torch.device) -> tuple[int, slice | torch.Tensor]:
        """How many of the newest `length` positions are tokens of the row, and which, the others being padding."""
        positions, first = self.sequence.positions, self.store.logical - length
        own = len(positions) - positions.before(first)
        every = slice(None)
        return own, every if own == length else positions.slice(len(positions) - own, len(positions), on) - first

    def parts(self, own: int, addressed: bool | None = None) -> list[StoredPart]:
        """Everything stored before the row's newest `own` tokens, in the order of positions; spans come last.

        Pages come by their `addressed` places, by default where kernels run, or are read as tensors.
        """
        store, row, sequence = self.store, self.row, self.sequence
        sides = (sequence.keys, store.rows[row].keys), (sequence.values, store.rows[row].values)
        exact = [
            buffer.tokens(sequence.buffer_index(side, len(side.pages)), side.buffered - own) for side, buffer in sides
        ]
        keys, values = (buffer.tokens(0, sequence.hidden(0)) for _, buffer in sides)
        addressed = device.runs_triton(store.device) if addressed is None else addressed
        counts = len(sequence.keys.pages), len(sequence.values.pages)
        position, sinks = sequence.page_position(0), (keys, values) if keys.shape[1] else None
        pages = self._addressed_pages if addressed else self._read_pages
        found = stored_parts(counts, pages, exact, store.format.key_tensors.center, position, sinks)
        if not addressed or store.format.span is None:  # `is_served` refuses rows with spans where no kernel runs
            return found
        tables, _ = self._tables
        spans = tables.plans[row].segments
        addresses = [self._addresses(*store.format.stored, slice(s.begin, s.end), s.scales) for s in spans]
        return found + [StoredPart(span.tokens, *sides) for span, sides in zip(spans, addresses, strict=True)]

    @cached_property
    def _tables(self) -> tuple[GroupTables, int]:
        return self.store.group.registry.chunk_tables(self.store)

    def _read_pages(self, begin: int, end: int) -> list[PageReader]:
        """Keys and values of pages begin..end-1 as tensors, for devices without kernels, and for latents."""
        store, sequence = self.store, self.sequence
        sides = (store.key_pages, sequence.keys, True), (store.value_pages, sequence.values, False)
        return [
            PageReader(lambda part, p=pool, n=side.pages[begin:end]: p.read(n[part]), *store.format.side(is_key))
            for pool, side, is_key in sides
        ]

    def _addressed_pages(self, begin: int, end: int) -> list[PageAddresses]:
        """The same for kernels; a side that has no such page gets an address not to be used."""
        tables, _ = self._tables
        plan = tables.plans[self.row]
        # A row's pages come first in the tables, those quantized on one side after the others.
        first = plan.half_quantized_begin - plan.half_quantized_token // PAGE_SIZE
        return self._addresses(self.store.format.keys, self.store.format.values, slice(first + begin, first + end), 0)

    def _addresses(self, keys: PageFormat, values: PageFormat, entries: slice, scales: int) -> list[PageAddresses]:
        """Pages, or blocks of a span, at some entries of the tables."""
        tables, layer = self._tables
        shared = [
            tables.shared[layer][scales, 2 * number : 2 * number + 2] if f.static else None
            for number, f in enumerate((keys, values))
        ]
        return [
            PageAddresses(keys, tables.base, tables.keys[layer][entries], shared[0], tables.boosted[layer]),
            PageAddresses(values, tables.base, tables.values[layer][entries], shared[1]),
        ]
