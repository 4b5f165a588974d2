"""The tables of a packed pass over prompts (`kernels/ragged/tables.py`), written on the host for a group of layers."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import numpy as np
import torch

from kvconvert.kernels.pages import PAGE_SIZE, PageAddresses
from kvconvert.kernels.pages.records import static_offsets
from kvconvert.kernels.ragged.tables import (
    COPIED_TOKENS,
    TILE_QUERIES,
    PackedSequences,
    RaggedTables,
    flattened,
    ranges,
    unflattened,
)
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import Group

# Pages that tables of fixed addresses have room for, of all prompts in a pass: 32,768 tokens. Longer histories have
# tables of their own sizes.
ROOM_PAGES = 256


@dataclass(frozen=True)
class TableCapacity:
    """What tables of fixed addresses have room for.

    Attributes:
        tokens: the number of tokens of the pass.
        sequences: the number of sequences that have chunks in it.
        pages: the number of pages of all sequences, on either side.
        copies, tiles: see `RaggedTables`.
        workspace_tokens: tokens that the workspace has room for.
    """

    tokens: int
    sequences: int
    pages: int
    copies: int
    tiles: int
    workspace_tokens: int

    @classmethod
    def of(cls, tokens: int, pages: int = ROOM_PAGES) -> TableCapacity:
        """The capacity for passes of this many tokens after `pages` pages: few sequences in short ones."""
        sequences = max(4, min(32, tokens // 64))
        stretches = tokens // COPIED_TOKENS + 4 * sequences
        capacity = pages * PAGE_SIZE + tokens + 2 * PAGE_SIZE * sequences
        return cls(tokens, sequences, pages, 2 * stretches, tokens // TILE_QUERIES + sequences, capacity)

    def takes(self, stored: Sequence_[int]) -> bool:
        """Whether sequences with these numbers of stored tokens fit if layers keep all tokens."""
        return len(stored) <= self.sequences and sum(tokens // PAGE_SIZE for tokens in stored) <= self.pages


@dataclass(frozen=True)
class ChunkRow:
    """New tokens of one sequence in a group's layers: its row, the first one's number in the pass, and how many."""

    group: Group
    row: int
    first: int
    count: int

    @property
    def sequence(self) -> Sequence:
        """With its new tokens."""
        return self.group.forward_pass.appended[self.row]


class GroupWriter:
    """The tables of one group of layers, one after another in a line of int64.

    Args:
        group: of a cache whose tables' registry and layers those of all parts share.
        parts: the pass's new tokens of each sequence.
        tokens: of the pass, those of others included.
        limits: what the tables have room for; None for as much as there is.

    Attributes:
        fits: whether it all fits the limits.
    """

    def __init__(self, group: Group, parts: list[ChunkRow], tokens: int, limits: TableCapacity | None):
        self.group, self.stores, self.parts = group, group.stores, parts
        self.base = self.group.registry.base(self.stores[0].device)
        sequences = [part.sequence for part in parts]
        positions = [sequence.page_position(0, PAGE_SIZE) for sequence in sequences]
        about = [
            (part.first, part.count, len(sequence) - position, 0, len(sequence.keys.pages), len(sequence.values.pages))
            for part, sequence, position in zip(parts, sequences, positions, strict=True)
        ]
        packed = PackedSequences(*np.array(about, np.int64).T, np.array(positions))
        # Sequences begin at multiples of 8 tokens.
        ends = np.cumsum([0, *(-(-packed.totals // 8) * 8)])
        packed = packed._replace(begins=ends[:-1])
        self.capacity = int(ends[-1]) if limits is None else limits.workspace_tokens
        self.fits = int(ends[-1]) <= self.capacity
        newest = np.array([(s.keys.buffered, s.values.buffered) for s in sequences]).T - packed.lengths
        lines = {
            "buffers": self._buffers(),
            "tokens": packed.new_tokens(tokens if limits is None else limits.tokens, *newest),
            "keys": self._offsets([n for s in sequences for n in s.keys.pages], True),
            "values": self._offsets([n for s in sequences for n in s.values.pages], False),
            "shared": np.array([static_offsets(store.format, self.base) or [0] * 4 for store in self.stores]),
            "copies": self._copies(sequences, packed.begins),
            **packed.lines(self.capacity, self.stores[0].format.keys.head_dim),
        }
        if limits is not None:
            lines = {name: self._padded(name, line, limits) for name, line in lines.items()}
        self.shapes = {name: line.shape for name, line in lines.items()}
        self.flat = flattened(lines)

    def _padded(self, name: str, line: np.ndarray, limits: TableCapacity) -> np.ndarray:
        """A table with entries that do nothing up to its room."""
        axis = 1 if name in ("buffers", "keys", "values") else 0
        room = {"buffers": limits.sequences, "copies": limits.copies, "tiles": limits.tiles}.get(name, limits.pages)
        if name in ("tokens", "shared"):
            return line
        self.fits &= line.shape[axis] <= room
        if not self.fits:
            return line
        padded = np.full((*line.shape[:axis], room, *line.shape[axis + 1 :]), -("places" in name), np.int64)
        # Tiles of no queries come first: the last ones begin first.
        own = slice(room - line.shape[0], room) if name == "tiles" else slice(0, line.shape[axis])
        padded[(slice(None),) * axis + (own,)] = line
        return padded

    def tables(self, flat: torch.Tensor) -> list[RaggedTables]:
        """Each layer's tables, once they are on the device."""
        found = unflattened(flat, self.shapes)
        buffers, keys, values, shared = (found.pop(name) for name in ("buffers", "keys", "values", "shared"))
        tables = []
        for line, store in enumerate(self.stores):
            f, boosted = store.format, self.group.registry.boosted(store)
            tables.append(
                RaggedTables(
                    base=self.base.view(store.dtype),
                    buffers=buffers[line],
                    key_pages=PageAddresses(f.keys, self.base, keys[line], shared[line, :2], boosted),
                    value_pages=PageAddresses(f.values, self.base, values[line], shared[line, 2:]),
                    capacity=self.capacity,
                    **found,
                )
            )
        return tables

    def _offsets(self, numbers: list[int], is_key: bool) -> np.ndarray:
        storages = [store.key_pages if is_key else store.value_pages for store in self.stores]
        if not numbers:
            return np.zeros((len(storages), 0), np.int64)
        return np.stack([storage.offsets(numbers, self.base) for storage in storages])

    def _buffers(self) -> np.ndarray:
        origin, width = self.base.data_ptr(), self.stores[0].dtype.itemsize
        stores = zip(*([store.rows[part.row] for store in part.group.stores] for part in self.parts), strict=True)
        lines = [[(row.keys, row.values) for row in line] for line in stores]
        return np.array(
            [
                [
                    [(k.address - origin) // width, k.head_stride, (v.address - origin) // width, v.head_stride]
                    for k, v in line
                ]
                for line in lines
            ],
            np.int64,
        )

    def _copies(self, sequences: list[Sequence], begins: np.ndarray) -> np.ndarray:
        """Sink tokens, over what pages hold of them, and the tokens behind the last page of each side."""
        found = []
        for number, (sequence, begin) in enumerate(zip(sequences, begins.tolist(), strict=True)):
            for which, side in enumerate((sequence.keys, sequence.values)):
                own, first = len(side.pages), sequence.buffer_index(side, len(side.pages), PAGE_SIZE)
                found.append((number, which, 0, begin, sequence.hidden(0) if own else 0))
                found.append((number, which, first, begin + own * PAGE_SIZE, side.buffered - first))
        stretches = np.array(found, np.int64)
        owner, step = ranges(np.zeros(len(found), np.int64), -(-stretches[:, 4] // COPIED_TOKENS))
        table, done = stretches[owner], step * COPIED_TOKENS
        table[:, 2:4] += done[:, None]
        table[:, 4] = np.minimum(COPIED_TOKENS, table[:, 4] - done)
        return table
