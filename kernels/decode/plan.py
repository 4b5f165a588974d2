"""How one decode step is divided among programs, and what a cache has stored in the forms that attention reads.

A work item is a stretch of one sequence, of nearly equal cost: quantized pages, then half-quantized pages (one side
quantized, the other still in full precision), then tokens of the residual window. Each of the three that is not empty
gives one partial result, in a slot of its own; a sequence's slots are consecutive. Items depend on how many pages and
tokens there are, not on what they hold, so a plan serves many steps: the last item of a sequence takes whatever the
residual window has grown by.

The kernels follow tables of addresses; the tiled path is given tensors, a few pages at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvconvert.kernels.page_formats import PAGE_SIZE, Span, SpanFormat
from kvconvert.kernels.pages.center import KeyCenter
from kvconvert.kernels.pages.records import PageTensors
from kvconvert.kernels.ragged.tables import ranges

# Query rows (query heads of a KV head times queries) of one program: two blocks of a matrix product's columns.
MOST_ROWS = 16
# Full-precision tokens that cost as much as a page, and a half-quantized page's cost; both as timed on an H200.
RESIDUAL_TOKENS = 64
HALF_QUANTIZED_COST = 16
# How often programs are replaced by others where there are many sequences.
WAVES = 4
# Slots that a sequence may have in the merge's three forms.
MOST_SLOTS = (16, 64, 1 << 20)
# An end that no sequence reaches: the kernel stops at the residual window's own length.
OPEN_END = 1 << 30


class Segment(NamedTuple):
    """Consecutive entries of the page tables that one item may cover: a sequence's pages, or the blocks of one span.

    Attributes:
        begin, end: table entries.
        tokens: real tokens, at most 128 for each entry.
        scales: row of the shared scales, 0 where there are none or they are the layer's.
        first_token: number of the first token among the sequence's, as masks count them.
        hidden: first tokens that are not attended to here: sink tokens, which are in the residual window.
    """

    begin: int
    end: int
    tokens: int
    scales: int = 0
    first_token: int = 0
    hidden: int = 0


class SequencePlan(NamedTuple):
    """What one sequence has stored.

    Attributes:
        segments: its quantized pages or spans.
        residual: full-precision tokens to divide, sink tokens included; of those still to come an item finds none.
        half_quantized: number of half-quantized pages; half_quantized_begin: table entry of the first one, in the table
            of the quantized side.
        half_quantized_token, residual_token: numbers of the first token of half-quantized pages and of the residual
            window, as masks count them.
        half_quantized_hidden: as `Segment.hidden`, where the first page of all is half-quantized.
    """

    segments: tuple[Segment, ...]
    residual: int
    half_quantized: int = 0
    half_quantized_begin: int = 0
    half_quantized_token: int = 0
    residual_token: int = 0
    half_quantized_hidden: int = 0


class Item(IntEnum):
    """The columns of a work item.

    SEQUENCE; PAGES_FROM, PAGES_TO: table entries; HALF_FROM, HALF_TO: half-quantized pages, of which number 0 is entry
    HALF_ENTRY; RESIDUAL_FROM, RESIDUAL_TO: tokens of the residual window. Of each of the three parts the slot of its
    result, -1 for none, and the number of its first token in masks; of the pages also the row of their shared SCALES
    and the real TOKENS from the first one on, and of both kinds of pages the hidden tokens at their beginning.
    """

    SEQUENCE = 0
    PAGES_FROM = 1
    PAGES_TO = 2
    HALF_FROM = 3
    HALF_TO = 4
    RESIDUAL_FROM = 5
    RESIDUAL_TO = 6
    PAGES_SLOT = 7
    HALF_SLOT = 8
    RESIDUAL_SLOT = 9
    SCALES = 10
    TOKENS = 11
    PAGES_MASK = 12
    HALF_MASK = 13
    RESIDUAL_MASK = 14
    HALF_ENTRY = 15
    PAGES_HIDDEN = 16
    HALF_HIDDEN = 17


@dataclass(frozen=True)
class WorkPlan:
    """Work items of a batch, sequence after sequence.

    Attributes:
        items: int32 [W, len(Item)], with the columns of `Item`.
        item_rows, slot_rows: int32 [B + 1], where each sequence's items and slots begin.
        slots: their number; most_slots: the most that one sequence has.
    """

    items: torch.Tensor
    item_rows: torch.Tensor
    slot_rows: torch.Tensor
    slots: int
    most_slots: int

    def to(self, device: torch.device) -> WorkPlan:
        """The same on a device."""
        return WorkPlan(
            *(t.to(device) for t in (self.items, self.item_rows, self.slot_rows)), self.slots, self.most_slots
        )


def most_items(sequences: int, programs: int) -> int:
    """The most items that sequences with residual tokens are divided into; arguments as for `plan_work`."""
    if sequences > WAVES and WAVES * sequences > programs:
        # As many items as programs would leave one wave nearly empty, and some sequences half as much as others.
        programs *= WAVES
    return max(programs, sequences)


def plan_work(sequences: Sequence[SequencePlan], programs: int) -> WorkPlan:
    """Divide sequences into about `programs` items at most, at least one each.

    Args:
        sequences: what the batch holds.
        programs: how many items can run side by side for one KV head and block of queries.
    """
    segments = [(row, *part) for row, sequence in enumerate(sequences) for part in sequence.segments]
    rows = [sequence[1:] for sequence in sequences]
    return plan_arrays(np.array(segments, np.int64).reshape(-1, 7), np.array(rows, np.int64), programs)


def plan_arrays(segments: np.ndarray, rows: np.ndarray, programs: int) -> WorkPlan:
    """`plan_work` of arrays.

    Args:
        segments: int64 [S, 7], of each segment its sequence and the fields of `Segment`, sequence after sequence.
        rows: int64 [B, 6], of each sequence the fields of `SequencePlan` but for its segments.
        programs: as for `plan_work`.
    """
    owner, begin, end, tokens, scales, first_token, hidden = segments[segments[:, 1] < segments[:, 2]].T
    residual, half, half_begin, half_token, residual_token, half_hidden = rows.T
    # Tokens to come need an item, too.
    residual_units = -(-residual // RESIDUAL_TOKENS)
    stored = owner, end - begin, half, np.maximum(1, residual_units)
    units = np.bincount(owner, end - begin, len(rows)).astype(np.int64) + HALF_QUANTIZED_COST * half + residual_units
    most = most_items(len(rows), programs)
    low, high = 1, max(1, int(units.max()))
    while low < high:
        middle = (low + high) // 2
        if (-(-units // middle)).sum() <= most:
            high = middle
        else:
            low = middle + 1
    # Pages and half-quantized pages are not divided further, so that items may stay below what they can hold.
    while low < units.max() and sum(part.sum() for part in _counts(*stored, low)[:3]) > most:
        low += max(1, low // 8)
    pages, halves, rest, halves_beside, rest_beside = _counts(*stored, low)
    with_pages = np.bincount(owner, pages, len(rows)).astype(np.int64)
    counts = with_pages + halves + rest
    row, number = ranges(np.zeros_like(counts), counts)
    items = np.zeros((len(row), len(Item)), dtype=np.int32)
    items[:, Item.SEQUENCE] = row

    part, chunk = ranges(np.zeros_like(pages), pages)
    at = np.flatnonzero(number < with_pages[row])
    first, done = begin[part] + chunk * low, chunk * (low * PAGE_SIZE)
    items[at, Item.PAGES_FROM], items[at, Item.PAGES_TO] = first, np.minimum(first + low, end[part])
    items[at, Item.SCALES], items[at, Item.TOKENS] = scales[part], tokens[part] - done
    items[at, Item.PAGES_MASK], items[at, Item.PAGES_HIDDEN] = first_token[part] + done, hidden[part] * (chunk == 0)

    each = max(1, low // HALF_QUANTIZED_COST)
    first = halves_beside[row] + (number - with_pages[row]) * each
    first, last = (np.clip(page, 0, half[row]) for page in (first, first + each))
    there = first < last
    items[:, Item.HALF_FROM], items[:, Item.HALF_TO] = first * there, last * there
    items[:, Item.HALF_MASK] = (half_token[row] + first * PAGE_SIZE) * there
    items[:, Item.HALF_ENTRY] = half_begin[row] * there
    items[:, Item.HALF_HIDDEN] = half_hidden[row] * there * (first == 0)

    first = rest_beside[row] + (number - (with_pages + halves)[row]) * low
    first, last = (np.clip(unit, 0, stored[3][row]) for unit in (first, first + low))
    there = first < last
    items[:, Item.RESIDUAL_FROM] = first * RESIDUAL_TOKENS * there
    items[:, Item.RESIDUAL_TO] = np.minimum(last * RESIDUAL_TOKENS, residual[row]) * there
    items[np.cumsum(counts) - 1, Item.RESIDUAL_TO] = OPEN_END
    items[:, Item.RESIDUAL_MASK] = residual_token[row] * there
    return _with_slots(items, counts)


def _counts(
    owner: np.ndarray, pages: np.ndarray, half: np.ndarray, units: np.ndarray, most: int
) -> tuple[np.ndarray, ...]:
    """Into how many items of at most `most` units sequences are divided.

    Args:
        owner, pages: [S] of each segment its sequence and its pages.
        half, units: [B] half-quantized pages, and units of the residual window.
        most: units of an item, which has pages of one segment at most.

    Returns:
        [S] items of each segment; [B] further ones that begin with half-quantized pages, and with the residual window;
        [B] half-quantized pages, and units of the residual window, that share an item with what comes before them.
    """
    items, room = -(-pages // most), np.zeros_like(half)
    room[owner] = most * items - pages  # of the last segment
    beside = np.minimum(half, room // HALF_QUANTIZED_COST)
    each = max(1, most // HALF_QUANTIZED_COST)
    halves = -(-(half - beside) // each)
    last = np.where(halves > 0, half - beside - (halves - 1) * each, beside)
    room = np.maximum(0, np.where(halves > 0, most, room) - HALF_QUANTIZED_COST * last)
    rest_beside = np.minimum(units, room)
    return items, halves, -(-(units - rest_beside) // most), beside, rest_beside


def _with_slots(items: np.ndarray, counts: Sequence[int] | np.ndarray) -> WorkPlan:
    """The plan of items, given how many each sequence has."""
    begins = [Item.PAGES_FROM, Item.HALF_FROM, Item.RESIDUAL_FROM]
    present = items[:, begins] < items[:, [begin + 1 for begin in begins]]
    numbers = present.cumsum().reshape(present.shape)
    items[:, Item.PAGES_SLOT : Item.RESIDUAL_SLOT + 1] = np.where(present, numbers - 1, -1)
    item_rows = np.cumsum([0, *counts])
    slot_rows = np.concatenate([[0], numbers[:, 2]])[item_rows]
    return WorkPlan(
        torch.from_numpy(items),
        torch.from_numpy(item_rows.astype(np.int32)),
        torch.from_numpy(slot_rows.astype(np.int32)),
        int(slot_rows[-1]),
        int(np.diff(slot_rows).max()),
    )


class StoredTokens(Protocol):
    """One layer's stored tokens of a batch; each form is built when a path asks for it."""

    def page_tables(self, programs: int) -> PageTables:
        """Where pages and spans lie, with work for about `programs` programs."""

    def residual_windows(self) -> ResidualWindows:
        """Where full-precision tokens lie."""

    def visibility(self, queries: slice) -> Visibility | None:
        """Which tokens some of the queries see; None for all."""

    def page_tiles(self, num_query_heads: int, num_queries: int) -> Iterator[PageTile]:
        """All pages, in tiles for this number of query heads and queries."""

    def residual_tokens(self) -> Iterator[ResidualTokens]:
        """The full-precision tokens of all rows that have any, many rows at a time."""

    def spans(self) -> Iterator[SpanTokens]:
        """The spans of each row that has any."""


@dataclass(frozen=True)
class PageTables:
    """Where the pages of a batch lie, for the kernels; see `kernels/decode/plan.py` for `plan`.

    Attributes:
        key_base, value_base: any tensors of 2-byte elements, 16-byte aligned, from which offsets count.
        keys, values: int64 [n + 1] offsets of pages or span blocks in units of 16 bytes. Entry i of both is of the same
            tokens; where only one side of a half-quantized page is quantized, the other's entry is any valid one, as is
            the last entry, which is loaded in advance and never followed.
        plan: the work items.
        shared: int64 [S, 4] offsets, in the same units, of key scale and offset [H, D] relative to `key_base`, and
            of value scale and offset [H, E] relative to `value_base`; None where pages have scales of their own.
        boosted: integers [H, n], the channels with more bits where these are fixed for the layer, else None.
        center: what key pages leave out; None for whole keys.
        key_rows: int64 [B, 3], of each sequence's key pages the first entry, their number, and the position of the
            first one's first token; None without a center.
    """

    key_base: torch.Tensor
    value_base: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    plan: WorkPlan
    shared: torch.Tensor | None = None
    boosted: torch.Tensor | None = None
    center: KeyCenter | None = None
    key_rows: torch.Tensor | None = None


@dataclass(frozen=True)
class ResidualWindows:
    """The full-precision tokens of a batch, for the kernels.

    Attributes:
        base: any tensor of the keys' dtype, 16-byte aligned, from which offsets count.
        rows: int64 [B, 8] for each sequence: offset of its key buffer [H, capacity, D] from `base` and the stride of
            its heads, the same two of values, all in units of 8 elements; sink tokens; how much further on than in the
            residual window its other tokens lie in the key and in the value buffer, because of half-quantized pages
            between; tokens of the residual window. Sink tokens are fewer than a page's.
        places: int64 [B, capacity], how far from there each token of a buffer lies, in units of 16 bytes, where they do
            not lie side by side; None where they do.
    """

    base: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor | None = None


@dataclass(frozen=True)
class Visibility:
    """Which tokens queries see: uint8, addressed as base + sequence * row + head * head_stride + query * query_stride
    + token, tokens numbered [pages | half-quantized pages | residual window | spans] as `SequencePlan` says.
    """

    mask: torch.Tensor
    row: int
    head: int
    query: int


@dataclass(frozen=True)
class PageTile:
    """Some pages of some sequences.

    Keys and values of the same tokens; either may still be in full precision where their windows differ.

    Attributes:
        keys: N key pages, in parts or as one, or full-precision keys [N, H, P, D].
        values: N value pages, in parts or as one, or full-precision values [N, H, P, E].
        rows: int64 [N], the batch row that each page belongs to; may be None where there is one.
        visible: bool [N, H or 1, T, P], which tokens each of the T queries may see; None when all may see all.
        positions: int64 [N], of each page's first token, where key pages lack a constant part; else None.
        hidden: (number of a page, how many of its first tokens) that no query attends to here.
    """

    keys: Sequence[PageTensors] | PageTensors | torch.Tensor
    values: Sequence[PageTensors] | PageTensors | torch.Tensor
    rows: torch.Tensor | None
    visible: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    hidden: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class ResidualTokens:
    """Full-precision tokens of some sequences.

    Attributes:
        rows: int64 [N], their batch rows; None where these are all rows in order.
        keys: [N, H, n, D]; values: [N, H, n, E]; n is the longest, and shorter sequences end in anything finite.
        visible: bool [N, H or 1, T, n], false where a sequence has no token; None when every query may see all n.
    """

    rows: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor | None = None


@dataclass(frozen=True)
class SpanTokens:
    """All spans of one sequence, whose scores are shifted together (CalibQuant).

    Attributes:
        row: the batch row.
        spans: in order; format: of all of them.
        visible: bool [1, T, n] over the tokens of all spans; None when all queries may see all.
        clamped_rows: int64 scalar, to which the number of rows is added whose different scores the shift made equal.
    """

    row: int
    spans: list[Span]
    format: SpanFormat
    visible: torch.Tensor | None = None
    clamped_rows: torch.Tensor | None = None
