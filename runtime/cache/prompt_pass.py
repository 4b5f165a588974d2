"""A pass over chunks of several prompts, planned for all layers before any of them runs.

Each prompt has a cache of its own, whose layers would plan, append, attend and compress one after another. Here the
host plans once for all layers and prompts and writes what kernels follow (`kernels/ragged/tables.py`) into a single
tensor; a layer then launches a handful of kernels for all prompts together, and what is complete after the pass is
compressed in all layers at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from kvconvert.kernels import ragged
from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.device import upload
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
from kvconvert.runtime.cache.compress import end_planned, read_flags
from kvconvert.runtime.cache.forward_pass import PassTokens
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.steps import runs_steps
from kvconvert.runtime.cache.store import Group, LayerStore, buffer_places

# Pages that tables of fixed addresses have room for, of all prompts in a pass: 32,768 tokens. Passes after longer
# histories have larger tables, see `CapturedPasses.capacity`.
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
        self.group, self.stores = group, group.stores
        self.base = self.group.registry.base(self.stores[0].device)
        sequences = [part.sequence for part in parts]
        positions = [sequence.page_position(0) for sequence in sequences]
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
        rows = zip(*([store.rows[part.row] for store in part.group.stores] for part in parts), strict=True)
        lines = {
            "buffers": np.stack([buffer_places(line, self.base, self.stores[0].dtype) for line in rows]),
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

    def _copies(self, sequences: list[Sequence], begins: np.ndarray) -> np.ndarray:
        """Sink tokens, over what pages hold of them, and the tokens behind the last page of each side."""
        found = []
        for number, (sequence, begin) in enumerate(zip(sequences, begins.tolist(), strict=True)):
            for which, side in enumerate((sequence.keys, sequence.values)):
                own, first = len(side.pages), sequence.buffer_index(side, len(side.pages))
                found.append((number, which, 0, begin, sequence.hidden(0) if own else 0))
                found.append((number, which, first, begin + own * PAGE_SIZE, side.buffered - first))
        stretches = np.array(found, np.int64)
        owner, step = ranges(np.zeros(len(found), np.int64), -(-stretches[:, 4] // COPIED_TOKENS))
        table, done = stretches[owner], step * COPIED_TOKENS
        table[:, 2:4] += done[:, None]
        table[:, 4] = np.minimum(COPIED_TOKENS, table[:, 4] - done)
        return table


# New tokens that may lie in full precision in all layers at once: 1 GiB in bfloat16 for 32 layers with 8 KV heads of
# 128 channels.
MOST_TOKENS = 8192
# Memory for the keys and values of all prompts in one layer: 65,536 tokens of such a layer, or a 128th of the GPU's
# memory if that is more.
WORKSPACE_BYTES, WORKSPACE_SHARE = 256 << 20, 128
# All new tokens are real; positions are those of the caches.
_CHUNK = PassTokens(torch.zeros(1, dtype=torch.int64))


def unplanned(groups: Sequence_[Group], length: int) -> str | None:
    """Why a chunk of so many tokens of a prompt's cache cannot be planned for all layers; None if it can.

    Args:
        groups: of all the cache's layers, each of which knows the shape of its tokens.
        length: of the chunk, padding included.
    """
    for group in groups:
        if not runs_steps(group):
            return "kernels do not follow tables of its layers, or these lie on several devices"
        if group.keep_for_sharing or group.record_past or group.is_decoding(length):
            return "its newest tokens are compressed later than others"
        if group.policy.selects or group.scheme.modality != "all":
            return "its tokens are compressed by their attention mass or by their modality"
        if any(sequence.spans or sequence.kept or sequence.evicted for sequence in group.sequences):
            return "a prompt before it was compressed as a whole"
        if any(store.is_latent for store in group.stores):
            return "the model expands the latents of a prompt"
        if any(store.is_indexed for store in group.stores):
            return "an indexer chooses the tokens that are attended to"
        if len({_sizes(store) for store in group.stores}) > 1:
            return "its layers differ in heads"
        for store in group.stores:
            reason = group.registry.ragged_unsupported(store)
            if reason is not None:
                return reason
    return None


def _sizes(store: LayerStore) -> tuple[int, ...]:
    keys, values = store.format.keys, store.format.values
    return keys.heads, keys.head_dim, values.heads, values.head_dim, store.dtype.itemsize


@dataclass(eq=False)
class PlannedChunk:
    """The tokens of one cache in a pass.

    Attributes:
        groups: of the layers of the cache.
        rows: of each row that has tokens its number in the batch, the number of its first token in the pass, and how
            many there are.
        length: tokens of all rows.
    """

    groups: list[Group]
    rows: list[tuple[int, int, int]]
    length: int


class PromptPass:
    """Chunks of several prompts in one forward pass.

    `add` the chunks, then `write` the tables; each layer calls `append` and `attend`; `finish` ends the pass of a
    chunk.

    Args:
        groups: of a cache whose tables' registry and layers the prompts' caches share.
        tokens: of the pass, those of others included.

    Attributes:
        chunks: of the pass.
    """

    def __init__(self, groups: list[Group], tokens: int):
        self.chunks: list[PlannedChunk] = []
        self.tokens = tokens
        self._like, self._room = groups, [0] * len(groups)
        self._written: tuple[list[GroupWriter], torch.Tensor] = [], torch.empty(0)
        self._tables: dict[int, RaggedTables] = {}

    def has_room(self, groups: Sequence_[Group], length: int) -> bool:
        """Whether a chunk's tokens fit beside those that were added."""
        if sum(chunk.length for chunk in self.chunks) + length > MOST_TOKENS:
            return False
        return all(
            used + _stored(group) + length <= workspace_tokens(group)
            for used, group in zip(self._room, groups, strict=True)
        )

    def add(self, groups: list[Group], first: int, length: int, chunk: PassTokens | None = None) -> PlannedChunk:
        """Plan where a chunk's tokens go in all layers; `unplanned` and `has_room` accept it.

        Args:
            groups: of all the cache's layers.
            first: number of the chunk's first token in the pass, where one row's real tokens follow the other's.
            length: new positions of every row.
            chunk: which of them are padding: at most what comes before or after a row's tokens; None for none.

        Raises:
            CacheError: what is stored has become unusable.
            NumericError: what was stored before cannot be.
        """
        for group in groups:
            read_flags(group, wait=False)
        rows = []
        for index, group in enumerate(groups):
            before = _stored(group)
            latest = group.begin(length)
            group.append(latest, chunk or _CHUNK, check=False)
            for store in group.stores:
                for row, *_ in latest.destinations:
                    store.reserve(row, latest.appended[row])
                store.forward_pass, store.passes, store.sequences = latest, group.passes, latest.appended
            # Tokens are stored without the tables of single tokens.
            group.touch()
            if not rows:
                for row, ((_, count),), *_ in latest.destinations:
                    rows.append((row, first, count))
                    first += count
            self._room[index] += before + sum(count for *_, count in rows)
        self.chunks.append(PlannedChunk(groups, rows, sum(count for *_, count in rows)))
        return self.chunks[-1]

    def write(self, limits: TableCapacity | None = None) -> bool:
        """Write the tables of all layers.

        Args:
            limits: what tables of fixed addresses, which recorded launches know, have room for; None for tables of
                their own.

        Returns:
            whether they fit the limits; if not, they are tables of their own.
        """
        if limits is not None and self.tokens > limits.tokens:
            limits = None
        parts = self._writers(limits)
        if not all(part.fits for part in parts):
            limits, parts = None, self._writers(None)
        store = self._like[0].stores[0]
        flat = upload(np.concatenate([part.flat for part in parts]), store.device)
        if limits is not None:
            flat = self._like[0].registry.kept((limits, flat.shape), flat)
        self._written = parts, flat
        return limits is not None

    def _writers(self, limits: TableCapacity | None) -> list[GroupWriter]:
        found = []
        for index, group in enumerate(self._like):
            parts = [ChunkRow(chunk.groups[index], *row) for chunk in self.chunks for row in chunk.rows]
            found.append(GroupWriter(group, parts, self.tokens, limits))
        return found

    def _of_layer(self, store: LayerStore) -> RaggedTables:
        """The tables of a layer, of which a replay has no need."""
        if not self._tables:
            parts, flat = self._written
            for part, own in zip(parts, flat.split([len(part.flat) for part in parts]), strict=True):
                self._tables |= {s.index: tables for s, tables in zip(part.stores, part.tables(own), strict=True)}
        return self._tables[store.index]

    def append(
        self, store: LayerStore, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Store a layer's new keys [H, N, D] and values [H, N, E]; queries [Hq, N, D], rotated as the keys are."""
        keys, values = keys.to(store.dtype), values.to(store.dtype)
        return ragged.append(queries, keys, values, self._of_layer(store), store.format, store.format.rotations)

    def attend(self, store: LayerStore, queries: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Attention of all queries [Hq, N, D], rotated as the keys are, in the coordinates in which values are stored.

        Masks are causal, within the layer's sliding window if it has one.

        Returns:
            [N, Hq, E]; anything where the pass has tokens of others.
        """
        scoring = scoring._replace(window=store.group.sliding_window)
        return ragged.attend(queries, self._of_layer(store), store.format, scoring)

    @staticmethod
    def finish(chunk: PlannedChunk) -> None:
        """Count a chunk's tokens as stored and compress what is complete.

        Raises:
            CacheError: the pages have a fixed capacity and no room left.
            NumericError: a page holds numbers that cannot be stored.
        """
        for group in chunk.groups:
            seal, group.seal_at_once = group.seal_at_once, False
            end_planned(group, seal)


def _stored(group: Group) -> int:
    """Tokens of a cache's sequences that attention reads."""
    return sum(sequence.stored for sequence in group.sequences)


def workspace_tokens(group: Group) -> int:
    """Tokens of all prompts in a pass that the workspace has room for, in full precision, of one layer of a group."""
    store = group.stores[0]
    heads, size, _, value_size, width = _sizes(store)
    return _workspace_bytes(store.device) // (heads * (size + value_size) * width)


@lru_cache
def _workspace_bytes(device: torch.device) -> int:
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return max(WORKSPACE_BYTES, memory // WORKSPACE_SHARE)
