"""Where everything lies that a layer stores: the tables that a decode kernel follows.

Addresses are offsets from a small tensor of the layer that never moves, because pages, spans and buffers are separate
allocations. Tables of pages and spans are built anew only when these change, that is about once in a page's worth of
steps; what changes with every token is one small table with a line per row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.decode.plan import Segment, SequencePlan, WorkPlan, plan_work
from kvconvert.kernels.pages import LayerFormat
from kvconvert.runtime.cache.pool import UNIT
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.hf.handles import Chunk

if TYPE_CHECKING:
    from kvconvert.runtime.hf.layer import PagedLayer

# Full-precision tokens by which a sequence grows at most before its work is divided anew.
GROWTH = 128
EVERY = slice(None)


@dataclass(frozen=True)
class LayerTables:
    """The quantized tokens of all rows.

    Entries of the tables stand row after row. Those of a row are its pages that are quantized on both sides, then its
    half pages, whose other side is still in the row's buffer (and 0 in that side's table), oldest first; then the
    blocks of its spans.

    Attributes:
        base: int16, aligned to 16 bytes; what offsets count from, whatever the dtype of what lies there.
        keys, values: int64 [entries + 1] on the layer's device, offsets in units of 16 bytes. The last entry repeats
            another one.
        shared: int64 [S, 4] on the device, offsets in the same units of scale and zero_point of keys, float16 [H, D], and
            of values, float16 [H, E]: those of each span, or of the whole layer where scales are static; else None.
        sequences: per row, which entries are its own. Masks count a row's tokens in the order of its pages, half pages,
            spans and tail.
    """

    base: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    shared: torch.Tensor | None
    sequences: list[SequencePlan]


@dataclass(frozen=True)
class DenseTable:
    """The full-precision tokens of all rows, as of now.

    A row's tail is its sink_tokens and the tokens after its last page of either side. Token i of it has index i in a buffer
    if i is below the sink_tokens, else i plus that side's skip: the tokens of half pages lie between.

    Attributes:
        base: in the model's dtype, what addresses count from.
        rows: int64 [B, 8] on the layer's device: address of the key buffer [H, capacity, D] from `base` and the
            distance from one key head to the next, the same two for values, all in units of 8 elements; sink_tokens, key
            skip, value skip, tail tokens.
    """

    base: torch.Tensor
    rows: torch.Tensor


class BlockTables:
    """Tables of one layer, kept as long as they hold."""

    def __init__(self, layer: PagedLayer):
        self._layer = layer
        self._base = torch.zeros(UNIT, dtype=torch.int16, device=layer.device)
        boosted = layer.format.boosted
        self._format = replace(layer.format, boosted=None if boosted is None else boosted.int())
        self._tables: LayerTables | None = None
        self._built_for = (-1, 0)
        self._work: dict[int, WorkPlan] = {}
        self._append_rows: list[tuple[int, ...]] = []
        self._append_table: torch.Tensor | None = None

    @property
    def format(self) -> LayerFormat:
        """The layer's, with indices of boosted channels in int32."""
        return self._format

    @property
    def half_quantized(self) -> int:
        """0 where keys and values are quantized together, 1 where values stay longer in full precision, 2 where keys."""
        windows = (self._layer.scheme.key_recent_tokens, self._layer.scheme.value_recent_tokens)
        return 0 if windows[0] == windows[1] else 1 if windows[0] < windows[1] else 2

    def tables(self) -> LayerTables:
        """Where pages and spans are; the same object until one of them changes."""
        # A copied cache has a base, and pages, of its own.
        now = (self._layer.version, self._base.data_ptr())
        if self._tables is None or self._built_for != now:
            self._tables, self._built_for, self._work = self._build(), now, {}
        return self._tables

    def _build(self) -> LayerTables:
        layer = self._layer
        entries: tuple[list[int], list[int]] = ([], [])
        shared: list[list[int]] = []
        static = (layer.format.static_keys, layer.format.static_values)
        if any(static):
            shared.append([self._offset(part) if scales else 0 for scales in static for part in scales or (None, None)])
        sequences = [self._describe(sequence, entries, shared) for sequence in layer.sequences]
        keys, values = (self._upload(part + (part[-1:] or [0])) for part in entries)
        return LayerTables(self._base, keys, values, self._upload(shared) if shared else None, sequences)

    def _describe(
        self, sequence: Sequence, entries: tuple[list[int], list[int]], shared: list[list[int]]
    ) -> SequencePlan:
        """Enter what a sequence has stored into the tables, and say where."""
        layer, size = self._layer, self._layer.page_size
        first = len(entries[0])
        for target, side, pool in zip(
            entries, (sequence.keys, sequence.values), (layer.key_pool, layer.value_pool), strict=True
        ):
            target += pool.offsets(side.pages, self._base)
            target += [0] * (sequence.pages - len(side.pages))
        both = min(len(sequence.keys.pages), len(sequence.values.pages))
        segments = [Segment(first, first + both, both * size)] if both else []
        tokens = sequence.pages * size
        for span, _ in sequence.spans:
            begin = len(entries[0])
            for target, codes in zip(entries, (span.key_codes, span.value_codes), strict=True):
                start, stride = self._offset(codes), codes.stride(0) * codes.element_size() // UNIT
                target += [start + block * stride for block in range(len(codes))]
            segments.append(Segment(begin, len(entries[0]), span.tokens, len(shared), tokens))
            scales = (span.key_scale, span.key_zero_point, span.value_scale, span.value_zero_point)
            shared.append([self._offset(part) for part in scales])
            tokens += span.tokens
        return SequencePlan(
            tuple(segments), self._reserved(sequence), sequence.pages - both, first + both, both * size, tokens
        )

    def _offset(self, tensor: torch.Tensor) -> int:
        distance = tensor.data_ptr() - self._base.data_ptr()
        if distance % UNIT or not tensor.is_contiguous():
            raise CacheError(
                f"Codes or scales of layer {self._layer.index} do not begin at a multiple of {UNIT} bytes or are not "
                "contiguous, so that no kernel can read them; this is an error of kvconvert."
            )
        return distance // UNIT

    def _upload(self, entries: list) -> torch.Tensor:
        return torch.tensor(entries, dtype=torch.int64).to(self._layer.device, non_blocking=True)

    def _tail(self, sequence: Sequence) -> int:
        return sequence.keys.dense - (sequence.pages - len(sequence.keys.pages)) * self._layer.page_size

    def _reserved(self, sequence: Sequence) -> int:
        """Tokens that the tail will have when its next page is complete: programs are there for them beforehand."""
        scheme, tail = self._layer.scheme, self._tail(sequence)
        if scheme.is_span:
            return tail + GROWTH - 1
        return tail + (sequence.sink_tokens + min(scheme.key_recent_tokens, scheme.value_recent_tokens) - tail) % GROWTH

    def work(self, programs: int) -> WorkPlan:
        """How attention over the tables and tails is divided among about so many programs, on the layer's device.

        The same object until tables change or a tail has grown a lot: programs are there for tokens to come.
        """
        sequences, planned = self._layer.sequences, self.tables().sequences
        if any(self._tail(sequence) > plan.residual for sequence, plan in zip(sequences, planned, strict=True)):
            tails = [self._reserved(sequence) for sequence in sequences]
            planned = [replace(plan, residual=tail) for plan, tail in zip(planned, tails, strict=True)]
            self._tables, self._work = replace(self._tables, sequences=planned), {}
        if programs not in self._work:
            self._work[programs] = plan_work(planned, programs).to(self._layer.device)
        return self._work[programs]

    @property
    def dense_base(self) -> torch.Tensor:
        """What addresses of full-precision tokens count from, in the model's dtype."""
        return self._base.view(self._layer.dtype)

    def _address(self, buffer: torch.Tensor) -> int:
        # An empty buffer has no address.
        return (buffer.data_ptr() - self._base.data_ptr()) // buffer.element_size() if buffer.numel() else 0

    def dense(self) -> DenseTable:
        """Where full-precision tokens are; to be asked for anew after every forward pass's tokens."""
        rows = []
        for sequence in self._layer.sequences:
            line, skips = [], []
            for side in (sequence.keys, sequence.values):
                line += [self._address(side.buffer) // 8, side.buffer.stride(0) // 8]
                skips.append((sequence.pages - len(side.pages)) * self._layer.page_size)
            rows.append([*line, sequence.sink_tokens, *skips, self._tail(sequence)])
        return DenseTable(self.dense_base, self._upload(rows))

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

    def mask(self, chunk: Chunk, queries: slice = EVERY) -> torch.Tensor | None:
        """Which stored tokens these queries of a forward pass may see; None where each may see all.

        Returns:
            uint8 [B, H or 1, T, n] with n the tokens of the fullest row. A row's tokens stand in the order of its pages
            (of both kinds), its spans and its tail, one right after the other; what follows is 0.
        """
        layer, columns = self._layer, chunk.query_columns[queries]
        if chunk.is_causal and len(chunk.query_columns) == 1:
            return None
        seen = []
        for row, sequence in enumerate(layer.sequences):
            size, device = layer.page_size, layer.device
            begin = sequence.sink_tokens + sequence.dropped * size
            stored = [sequence.columns.span(begin, begin + sequence.pages * size, device)]
            stored += [where.span(0, len(where), device) for _, where in sequence.spans]
            stored.append(sequence.tail_columns(size, device))
            heads = max(part.shape[0] if part.dim() == 2 else 1 for part in stored)
            stored = [part.expand(heads, -1) for part in stored]
            seen.append(chunk.visible(row, columns, torch.cat(stored, -1)))
        heads, tokens = (max(part.shape[axis] for part in seen) for axis in (0, 2))
        mask = torch.zeros(len(seen), heads, len(columns), tokens, dtype=torch.uint8, device=layer.device)
        for row, part in enumerate(seen):
            mask[row, :, :, : part.shape[2]] = part
        return mask
