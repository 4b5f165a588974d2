"""Where everything lies that a layer stores: the tables that a decode kernel follows.

Addresses are offsets from a small tensor of the layer that never moves, because pages, spans and buffers are separate
allocations. Tables of pages and spans are built anew only when these change, that is about once in a page's worth of
steps; what changes with every token is one small table with a line per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvconvert.errors import CacheError
from kvconvert.runtime.pool import UNIT
from kvconvert.runtime.seam import Chunk

if TYPE_CHECKING:
    from kvconvert.runtime.layer import PagedLayer


@dataclass(frozen=True)
class SpanPlace:
    """One span of a row; offsets count 16 bytes from `LayerTables.base`.

    Attributes:
        row: the batch row.
        first, blocks: the span's entries in the tables.
        tokens: how many of the blocks' tokens are real.
        key_scale, key_minimum: offsets of float16 [H, D]; value_scale, value_minimum: of float16 [H, E].
    """

    row: int
    first: int
    blocks: int
    tokens: int
    key_scale: int
    key_minimum: int
    value_scale: int
    value_minimum: int


@dataclass(frozen=True)
class LayerTables:
    """The quantized tokens of all rows.

    Entries of the tables stand row after row. Those of a row are its pages that are quantized on both sides, then its
    half pages, whose other side is still in the row's buffer (and 0 in that side's table), oldest first; then the
    blocks of its spans. A row's entries begin at `first[row]`.

    Attributes:
        base: int16, aligned to 16 bytes; what offsets count from, whatever the dtype of what lies there.
        keys, values: int64 [entries] on the layer's device, offsets in units of 16 bytes.
        first, both, half: per row, its first entry, and pages of each kind.
        spans: of all rows, in the order of their entries.
    """

    base: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    first: list[int]
    both: list[int]
    half: list[int]
    spans: list[SpanPlace]


@dataclass(frozen=True)
class DenseTable:
    """The full-precision tokens of all rows, as of now.

    A row's tail is its sinks and the tokens after its last page of either side. Token i of it has index i in a buffer
    if i is below the sinks, else i plus that side's skip: the tokens of half pages lie between.

    Attributes:
        base: in the model's dtype, what addresses count from.
        rows: int64 [B, 8] on the layer's device: address of the key buffer [H, capacity, D] in elements from `base`,
            elements from one key head to the next, the same two for values, sinks, key skip, value skip, tail tokens.
        tails: per row, its tail tokens.
    """

    base: torch.Tensor
    rows: torch.Tensor
    tails: list[int]


class LayerPlaces:
    """Tables of one layer, kept as long as they hold."""

    def __init__(self, layer: PagedLayer):
        self._layer = layer
        self._base = torch.zeros(UNIT // 2, dtype=torch.int16, device=layer.device)
        self._tables: LayerTables | None = None
        self._built_for = (-1, 0)
        self._append_rows: list[tuple[int, ...]] = []
        self._append_table: torch.Tensor | None = None

    def tables(self) -> LayerTables:
        """Where pages and spans are; the same object until one of them changes."""
        # A copied cache has a base, and pages, of its own.
        now = (self._layer.version, self._base.data_ptr())
        if self._tables is None or self._built_for != now:
            self._tables, self._built_for = self._build(), now
        return self._tables

    def _build(self) -> LayerTables:
        layer = self._layer
        key_entries: list[int] = []
        value_entries: list[int] = []
        first: list[int] = []
        spans: list[SpanPlace] = []
        for row, sequence in enumerate(layer.sequences):
            first.append(len(key_entries))
            for entries, side, pool in (
                (key_entries, sequence.keys, layer.key_pool),
                (value_entries, sequence.values, layer.value_pool),
            ):
                entries += pool.offsets(side.pages, self._base)
                entries += [0] * (sequence.pages - len(side.pages))
            for span, _ in sequence.spans:
                scales = (span.key_scale, span.key_minimum, span.value_scale, span.value_minimum)
                places = [self._offset(tensor) for tensor in scales]
                spans.append(SpanPlace(row, len(key_entries), len(span.key_codes), span.tokens, *places))
                for entries, codes in ((key_entries, span.key_codes), (value_entries, span.value_codes)):
                    start, stride = self._offset(codes), codes.stride(0) * codes.element_size() // UNIT
                    entries += [start + block * stride for block in range(len(codes))]
        both = [min(len(s.keys.pages), len(s.values.pages)) for s in layer.sequences]
        half = [s.pages - shared for s, shared in zip(layer.sequences, both, strict=True)]
        keys, values = self._upload(key_entries), self._upload(value_entries)
        return LayerTables(self._base, keys, values, first, both, half, spans)

    def _offset(self, tensor: torch.Tensor) -> int:
        distance = tensor.data_ptr() - self._base.data_ptr()
        if distance % UNIT or not tensor.is_contiguous():
            raise CacheError(
                f"A span of layer {self._layer.index} does not begin at a multiple of {UNIT} bytes or is not "
                "contiguous, so that no kernel can read it; this is an error of kvconvert."
            )
        return distance // UNIT

    def _upload(self, entries: list) -> torch.Tensor:
        return torch.tensor(entries, dtype=torch.int64).to(self._layer.device, non_blocking=True)

    @property
    def dense_base(self) -> torch.Tensor:
        """What addresses of full-precision tokens count from, in the model's dtype."""
        return self._base.view(self._layer.dtype)

    def _address(self, buffer: torch.Tensor) -> int:
        # An empty buffer has no address.
        return (buffer.data_ptr() - self._base.data_ptr()) // buffer.element_size() if buffer.numel() else 0

    def dense(self) -> DenseTable:
        """Where full-precision tokens are; to be asked for anew after every forward pass's tokens."""
        rows, tails = [], []
        for sequence in self._layer.sequences:
            line, skips = [], []
            for side in (sequence.keys, sequence.values):
                line += [self._address(side.buffer), side.buffer.stride(0)]
                skips.append((sequence.pages - len(side.pages)) * self._layer.page_size)
            tails.append(sequence.keys.dense - skips[0])
            rows.append([*line, sequence.sinks, *skips, tails[-1]])
        return DenseTable(self.dense_base, self._upload(rows), tails)

    def append_table(self) -> torch.Tensor:
        """Where new tokens go: int64 [B, 4] on the layer's device, the same object as long as no buffer moves.

        Columns are those of `rotate_and_append`: address of the key buffer from `dense_base`, elements from head to
        head, and the same for values. The values' address is shifted by as many tokens as they are more or fewer than
        the keys in their buffer, so that both sides' new tokens have the keys' index.
        """
        rows = []
        for sequence in self._layer.sequences:
            keys, values = sequence.keys, sequence.values
            shift = (values.dense - keys.dense) * values.buffer.shape[2]
            rows.append(
                (
                    self._address(keys.buffer),
                    keys.buffer.stride(0),
                    self._address(values.buffer) + shift,
                    values.buffer.stride(0),
                )
            )
        if self._append_table is None or rows != self._append_rows:
            self._append_rows, self._append_table = rows, self._upload(rows)
        return self._append_table

    def mask(self, chunk: Chunk) -> torch.Tensor | None:
        """Which stored tokens each query of a forward pass may see; None where each may see all.

        Returns:
            uint8 [B, H or 1, T, n] with n the tokens of the fullest row. A row's tokens stand in the order of its pages
            (of both kinds), its tail and its spans, one kind right after the other; what follows is 0.
        """
        layer, columns = self._layer, chunk.query_columns
        if chunk.is_causal and len(columns) == 1:
            return None
        seen = []
        for row, sequence in enumerate(layer.sequences):
            size, device = layer.page_size, layer.device
            begin = sequence.sinks + sequence.dropped * size
            stored = [sequence.columns.span(begin, begin + sequence.pages * size, device)]
            stored.append(sequence.tail_columns(size, device))
            stored += [where.span(0, len(where), device) for _, where in sequence.spans]
            heads = max(part.shape[0] if part.dim() == 2 else 1 for part in stored)
            stored = [part.expand(heads, -1) for part in stored]
            seen.append(chunk.visible(row, columns, torch.cat(stored, -1)))
        heads, tokens = (max(part.shape[axis] for part in seen) for axis in (0, 2))
        mask = torch.zeros(len(seen), heads, len(columns), tokens, dtype=torch.uint8, device=layer.device)
        for row, part in enumerate(seen):
            mask[row, :, :, : part.shape[2]] = part
        return mask
