"""Where everything that a layer stores lies: the tables that a decode kernel follows.

Addresses are offsets from a small tensor of the layer that never moves, because pages, spans and buffers are separate
allocations. Tables of pages and spans are rebuilt only when these change, that is about once in a page's worth of
steps; with every token only one small table changes, which has a line per row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.decode.plan import Segment, SequencePlan, WorkPlan, plan_work
from kvconvert.kernels.pages import KeyPages, LayerFormat, ValuePages
from kvconvert.methods import KVScheme
from kvconvert.runtime.cache.forward_pass import Chunk
from kvconvert.runtime.cache.pool import UNIT, PagePool
from kvconvert.runtime.cache.sequence import Sequence

# Full-precision tokens by which a sequence grows at most before its work is divided again.
GROWTH = 128
EVERY = slice(None)


@dataclass(frozen=True)
class QuantizedTable:
    """The quantized tokens of all rows.

    Entries stand row after row: a row's pages that are quantized on both sides, then its half-quantized pages, whose
    other side is still in the row's buffer (and 0 in that side's table), oldest first; then the blocks of its spans.

    Attributes:
        base: int16, aligned to 16 bytes; what offsets count from, whatever the dtype they lead to.
        keys, values: int64 [entries + 1] on the layer's device, offsets in units of 16 bytes. The last entry repeats
            another one.
        shared: int64 [S, 4] on the device, offsets in the same units of scale and zero point of keys, float16 [H, D],
            and of values, float16 [H, E]: those of each span, or of the whole layer where scales are static; else None.
        sequences: per row, which entries are its own. Masks count a row's tokens in the order of its pages,
            half-quantized pages, spans and residual tokens.
    """

    base: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    shared: torch.Tensor | None
    sequences: list[SequencePlan]


@dataclass(frozen=True)
class ResidualTable:
    """The full-precision tokens of all rows, as of now.

    A row's residual tokens are its sink tokens and the tokens after its last page of either side. Token i of them has
    index i in a buffer if it is a sink token, else i plus that side's skip: the tokens of half-quantized pages lie
    between.

    Attributes:
        base: in the model's dtype, what addresses count from.
        rows: int64 [B, 8] on the layer's device: address of the key buffer [H, capacity, D] from `base` and the
            distance from one key head to the next, the same two for values, all in units of 8 elements; sink tokens,
            key skip, value skip, residual tokens.
    """

    base: torch.Tensor
    rows: torch.Tensor


class BlockTables:
    """The tables of one layer, kept for as long as they are valid.

    Methods take the layer's sequences, and its version where the result is kept between calls.

    Args:
        layer: the layer's index, for messages.
        scheme, format: how its tokens are stored.
        key_pool, value_pool: its pages.
        dtype: of its full-precision tokens.

    Attributes:
        boosted: int32 [H, n] boosted channels of a scheme that fixes them, as kernels read them; else None.
    """

    def __init__(
        self,
        layer: int,
        scheme: KVScheme,
        format: LayerFormat,
        key_pool: PagePool[KeyPages],
        value_pool: PagePool[ValuePages],
        dtype: torch.dtype,
    ):
        self._layer, self._scheme, self._dtype = layer, scheme, dtype
        self._pools, self._device = (key_pool, value_pool), key_pool.device
        self._base = torch.zeros(UNIT, dtype=torch.int16, device=self._device)
        self._static_scales = (format.static_keys, format.static_values)
        self.boosted = None if format.boosted is None else format.boosted.int()
        self._tables: QuantizedTable | None = None
        self._built_for = (-1, 0)
        self._work: dict[int, WorkPlan] = {}
        self._append_rows: list[tuple[int, ...]] = []
        self._append_table: torch.Tensor | None = None

    @property
    def half_quantized(self) -> int:
        """0 where keys and values are quantized together, 1 where values are quantized later, 2 where keys are."""
        key_window, value_window = self._scheme.key_recent_tokens, self._scheme.value_recent_tokens
        return 0 if key_window == value_window else 1 if key_window < value_window else 2

    def quantized(self, sequences: list[Sequence], version: int) -> QuantizedTable:
        """Where pages and spans are; the same object until one of them changes."""
        # A copied cache has a base, and pages, of its own.
        now = (version, self._base.data_ptr())
        if self._tables is None or self._built_for != now:
            self._tables, self._built_for, self._work = self._build(sequences), now, {}
        return self._tables

    def _build(self, sequences: list[Sequence]) -> QuantizedTable:
        entries: tuple[list[int], list[int]] = ([], [])
        shared: list[list[int]] = []
        static = self._static_scales
        if any(static):
            shared.append([self._offset(part) if scales else 0 for scales in static for part in scales or (None, None)])
        plans = [self._describe(sequence, entries, shared) for sequence in sequences]
        keys, values = (self._upload(part + (part[-1:] or [0])) for part in entries)
        return QuantizedTable(self._base, keys, values, self._upload(shared) if shared else None, plans)

    def _describe(
        self, sequence: Sequence, entries: tuple[list[int], list[int]], shared: list[list[int]]
    ) -> SequencePlan:
        """Append a sequence's pages and spans to the tables; returns which entries they are."""
        size, first = self._scheme.page_size, len(entries[0])
        for target, side, pool in zip(entries, (sequence.keys, sequence.values), self._pools, strict=True):
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
                f"Codes or scales of layer {self._layer} do not begin at a multiple of {UNIT} bytes or are not "
                "contiguous, so that no kernel can read them; this is an error of kvconvert."
            )
        return distance // UNIT

    def _upload(self, entries: list) -> torch.Tensor:
        return torch.tensor(entries, dtype=torch.int64).to(self._device, non_blocking=True)

    def _residual(self, sequence: Sequence) -> int:
        """Sink tokens and tokens after the last page of either side."""
        return sequence.keys.buffered - (sequence.pages - len(sequence.keys.pages)) * self._scheme.page_size

    def _reserved(self, sequence: Sequence) -> int:
        """Residual tokens once the next page is complete: work is divided for as many from the start."""
        scheme, tokens = self._scheme, self._residual(sequence)
        if scheme.is_span:
            return tokens + GROWTH - 1
        recent = min(scheme.key_recent_tokens, scheme.value_recent_tokens)
        return tokens + (sequence.sink_tokens + recent - tokens) % GROWTH

    def work(self, sequences: list[Sequence], version: int, programs: int) -> WorkPlan:
        """How attention over all tables is divided among about `programs` programs, on the layer's device.

        The same object until pages or spans change, or a row has many more residual tokens than were planned for.
        """
        planned = self.quantized(sequences, version).sequences
        if any(self._residual(sequence) > plan.residual for sequence, plan in zip(sequences, planned, strict=True)):
            reserved = [self._reserved(sequence) for sequence in sequences]
            planned = [replace(plan, residual=tokens) for plan, tokens in zip(planned, reserved, strict=True)]
            self._tables, self._work = replace(self._tables, sequences=planned), {}
        if programs not in self._work:
            self._work[programs] = plan_work(planned, programs).to(self._device)
        return self._work[programs]

    @property
    def residual_base(self) -> torch.Tensor:
        """What addresses of full-precision tokens count from, in the model's dtype."""
        return self._base.view(self._dtype)

    def _address(self, buffer: torch.Tensor) -> int:
        # An empty buffer has no address.
        return (buffer.data_ptr() - self._base.data_ptr()) // buffer.element_size() if buffer.numel() else 0

    def residual(self, sequences: list[Sequence]) -> ResidualTable:
        """Where full-precision tokens are; valid until the next token is stored."""
        rows = []
        for sequence in sequences:
            line, skips = [], []
            for side in (sequence.keys, sequence.values):
                line += [self._address(side.buffer) // 8, side.buffer.stride(0) // 8]
                skips.append((sequence.pages - len(side.pages)) * self._scheme.page_size)
            rows.append([*line, sequence.sink_tokens, *skips, self._residual(sequence)])
        return ResidualTable(self.residual_base, self._upload(rows))

    def append_table(self, sequences: list[Sequence]) -> torch.Tensor:
        """Where new tokens go: int64 [B, 4] on the layer's device, the same object as long as no buffer moves.

        Columns are those of `rotate_and_append`: address of the key buffer from `residual_base`, elements from head to
        head, and the same for values. The values' address is shifted by as many tokens as they are more or fewer than
        the keys in their buffer, so that both sides' new tokens have the keys' index.
        """
        rows = []
        for sequence in sequences:
            keys, values = sequence.keys, sequence.values
            shift = (values.buffered - keys.buffered) * values.buffer.shape[2]
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

    def mask(self, sequences: list[Sequence], chunk: Chunk, queries: slice = EVERY) -> torch.Tensor | None:
        """Which stored tokens these queries of a forward pass attend to; None where each attends to all.

        Returns:
            uint8 [B, H or 1, T, n] with n the tokens of the fullest row. A row's tokens stand in the order of its pages
            (quantized on both sides or on one), its spans and its residual tokens, one right after the other; what
            follows is 0.
        """
        size, device = self._scheme.page_size, self._device
        positions = chunk.query_positions[queries]
        if chunk.is_causal and len(chunk.query_positions) == 1:
            return None
        seen = []
        for row, sequence in enumerate(sequences):
            begin = sequence.sink_tokens + sequence.dropped * size
            stored = [sequence.positions.slice(begin, begin + sequence.pages * size, device)]
            stored += [of_span.slice(0, len(of_span), device) for _, of_span in sequence.spans]
            stored.append(sequence.residual_positions(size, device))
            heads = max(part.shape[0] if part.dim() == 2 else 1 for part in stored)
            stored = [part.expand(heads, -1) for part in stored]
            seen.append(chunk.visible(row, positions, torch.cat(stored, -1)))
        heads, tokens = (max(part.shape[axis] for part in seen) for axis in (0, 2))
        mask = torch.zeros(len(seen), heads, len(positions), tokens, dtype=torch.uint8, device=device)
        for row, part in enumerate(seen):
            mask[row, :, :, : part.shape[2]] = part
        return mask
