"""The tables of a packed pass over prompts (`kernels/ragged/tables.py`), written on the host for a group of layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from kvconvert.kernels.pages import PAGE_SIZE, PageAddresses
from kvconvert.kernels.ragged import COPIED_TOKENS, TILE_QUERIES, RaggedTables
from kvconvert.kernels.ragged.tables import COPY, TILE, TOKEN
from kvconvert.runtime.cache.pool import UNIT
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import Group

# Pages that tables of fixed addresses have room for, of all prompts in a pass: 32,768 tokens.
ROOM_PAGES = 256


@dataclass(frozen=True)
class _TokenRange:
    """Consecutive tokens of one side of a sequence and where they go in the workspace, counted from its first key.

    Attributes:
        side: 0 for keys, 1 for values.
        first: index of the first one in the buffer; of pages, the first one of these.
        place: of the first one.
        count: of tokens; of pages, of these.
    """

    side: int
    first: int
    place: int
    count: int


@dataclass(frozen=True)
class _WorkspaceLayout:
    """A sequence in the workspace.

    Attributes:
        pages: stretches of pages; copies: of full-precision tokens.
        tokens: in all.
    """

    pages: list[_TokenRange]
    copies: list[_TokenRange]
    tokens: int


def lay_out(sequence: Sequence, page_size: int) -> _WorkspaceLayout:
    """Everything stored of a sequence from its first page on that no sliding window has left, oldest first.

    Sink tokens of a page are copied over what it holds of them.

    Args:
        sequence: with its new tokens.
        page_size: tokens of a page.
    """
    pages, copies = [], []
    for number, side in enumerate((sequence.keys, sequence.values)):
        own = len(side.pages)
        pages.append(_TokenRange(number, 0, 0, own))
        if own:
            copies.append(_TokenRange(number, 0, 0, sequence.hidden(0)))
        first = sequence.buffer_index(side, own, page_size)
        copies.append(_TokenRange(number, first, own * page_size, side.buffered - first))
    return _WorkspaceLayout(pages, copies, len(sequence) - sequence.page_position(0, page_size))


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
    def of(cls, tokens: int) -> TableCapacity:
        """The capacity for passes of this many tokens: few sequences in short ones, and as much history for all."""
        sequences = max(4, min(32, tokens // 64))
        stretches = tokens // COPIED_TOKENS + 4 * sequences
        capacity = ROOM_PAGES * PAGE_SIZE + tokens + 2 * PAGE_SIZE * sequences
        return cls(tokens, sequences, ROOM_PAGES, 2 * stretches, tokens // TILE_QUERIES + sequences, capacity)


def _even(count: int) -> int:
    return count + count % 2


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
        self.count = tokens if limits is None else limits.tokens
        self.group, self.stores, self.parts = group, group.stores, parts
        self.base = self.group.registry.base(self.stores[0].device)
        laid = [lay_out(part.sequence, part.group.page_size) for part in self.parts]
        # Sequences begin at multiples of 8 tokens.
        begins = np.cumsum([0, *(-(-part.tokens // 8) * 8 for part in laid)])
        self.capacity = int(begins[-1]) if limits is None else limits.workspace_tokens
        self.fits = int(begins[-1]) <= self.capacity
        keys, values = (self._pages(laid, begins, side) for side in range(2))
        lines = {
            "buffers": self._buffers(),
            "tokens": self._tokens(),
            "keys": self._offsets(keys[0], True),
            "values": self._offsets(values[0], False),
            "shared": self._shared(),
            "key_places": keys[1],
            "value_places": values[1],
            "center_pages": self._center_pages(keys[1]),
            "centers": np.column_stack([keys[2], np.zeros((len(keys[2]), 2), np.int64)]),
            "copies": self._copies(laid, begins),
            "tiles": self._tiles(laid, begins),
        }
        if limits is not None:
            lines = {name: self._padded(name, line, limits) for name, line in lines.items()}
        self.shapes = {name: line.shape for name, line in lines.items()}
        # Each begins at a multiple of 16 bytes, on which kernels are specialized.
        self.flat = np.concatenate([np.resize(line, _even(line.size)) for line in lines.values()])

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
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), sizes, flat.split([_even(size) for size in sizes]), strict=True)
        found = {name: part[:size].view(shape) for (name, shape), size, part in parts}
        base, tables = self.base, []
        for line, store in enumerate(self.stores):
            f, shared, boosted = store.format, found["shared"][line], self.group.registry.boosted(store)
            tables.append(
                RaggedTables(
                    base.view(store.dtype),
                    found["buffers"][line],
                    found["tokens"],
                    PageAddresses(f.keys, base, found["keys"][line], shared[:2], boosted),
                    PageAddresses(f.values, base, found["values"][line], shared[2:]),
                    *(found[name] for name in ("key_places", "value_places", "center_pages", "centers")),
                    found["copies"],
                    found["tiles"],
                    self.capacity,
                )
            )
        return tables

    def _pages(
        self, laid: list[_WorkspaceLayout], begins: np.ndarray, side: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of one side's pages of all sequences: numbers, places, and positions of their first tokens."""
        numbers: list[int] = []
        places, positions = [], []
        size = self.group.page_size
        for own, part, begin in zip(self.parts, laid, begins, strict=False):
            sequence = own.sequence
            for stretch in part.pages:
                if stretch.side == side:
                    numbers += (sequence.keys, sequence.values)[side].pages
                    page = size * np.arange(stretch.count)
                    places.append(begin + stretch.place + page)
                    positions.append(sequence.page_position(0, size) + page)
        empty = np.zeros(0, np.int64)
        return np.array(numbers, np.int64), np.concatenate([empty, *places]), np.concatenate([empty, *positions])

    def _offsets(self, numbers: np.ndarray, is_key: bool) -> np.ndarray:
        storages = [store.key_pages if is_key else store.value_pages for store in self.stores]
        if not len(numbers):
            return np.zeros((len(storages), 0), np.int64)
        return np.stack([storage.offsets(numbers, self.base) for storage in storages])

    def _shared(self) -> np.ndarray:
        """Where the scales of static pages lie: [L, 4], as in `GroupTables.shared`."""
        lines = []
        for store in self.stores:
            scales = [
                part
                for static in (store.format.static_keys, store.format.static_values)
                for part in static or 2 * (None,)
            ]
            lines.append([0 if part is None else (part.data_ptr() - self.base.data_ptr()) // UNIT for part in scales])
        return np.array(lines, np.int64)

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

    def _tokens(self) -> np.ndarray:
        table = np.full((self.count, TOKEN), -1, np.int64)
        table[:, 0] = 0  # kernels look a sequence up before they see that its token is stored nowhere
        for number, part in enumerate(self.parts):
            here, step = table[part.first : part.first + part.count], np.arange(part.count)
            # The newest tokens are the last ones of both buffers.
            for column, side in ((1, part.sequence.keys), (2, part.sequence.values)):
                here[:, column] = side.buffered - part.count + step
            here[:, 0] = number
        return table

    def _center_pages(self, places: np.ndarray) -> np.ndarray:
        table, dim = np.zeros((len(places), 5), np.int64), self.stores[0].format.keys.head_dim
        table[:, 0], table[:, 1], table[:, 3] = places * dim, self.capacity * dim, PAGE_SIZE
        return table

    def _copies(self, laid: list[_WorkspaceLayout], begins: np.ndarray) -> np.ndarray:
        found = [np.zeros((0, COPY), np.int64)]
        for number, (part, begin) in enumerate(zip(laid, begins, strict=False)):
            for stretch in part.copies:
                start = np.arange(0, stretch.count, COPIED_TOKENS)
                table = np.empty((len(start), COPY), np.int64)
                table[:, 0], table[:, 1], table[:, 2] = number, stretch.side, stretch.first + start
                table[:, 3] = begin + stretch.place + start
                table[:, 4] = np.minimum(COPIED_TOKENS, stretch.count - start)
                found.append(table)
        return np.concatenate(found)

    def _tiles(self, laid: list[_WorkspaceLayout], begins: np.ndarray) -> np.ndarray:
        found = []
        for own, part, begin in zip(self.parts, laid, begins, strict=False):
            start = np.arange(0, own.count, TILE_QUERIES)
            table = np.empty((len(start), TILE), np.int64)
            table[:, 0], table[:, 1] = own.first + start, own.first + own.count
            table[:, 2] = part.tokens - own.count + start
            table[:, 3], table[:, 4] = begin, part.tokens
            found.append(table)
        tiles = np.concatenate(found)
        return tiles[np.argsort(tiles[:, 2], kind="stable")]
