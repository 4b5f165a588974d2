"""Attention over everything that a layer stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvconvert.kernels.decode import (
    PageTables,
    PageTile,
    ResidualTokens,
    ResidualWindows,
    SpanTokens,
    Visibility,
    decode_attention,
    pages_per_tile,
)
from kvconvert.kernels.pages import KeyPages, ValuePages
from kvconvert.kernels.prompt import prompt_attention
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.kernels.select import column_sums, selective_attention
from kvconvert.runtime.cache.forward_pass import Chunk
from kvconvert.runtime.cache.pool import PagePool
from kvconvert.runtime.cache.sequence import KVSide, Sequence
from kvconvert.runtime.cache.store import LayerStore


def attend(
    store: LayerStore,
    queries: torch.Tensor,
    chunk: Chunk,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    rotated: bool = False,
) -> torch.Tensor:
    """Attention of queries [B, Hq, T, D] over everything stored: [B, Hq, T, E] in the queries' dtype.

    The queries are at the last T positions; outputs at padding are zeros or meaningless, as with every mask. `rotated`
    tells that the scheme's rotation has been applied to the queries.
    """
    if store.rotations.keys and not rotated:
        queries = hadamard_transform(queries)
    length = queries.shape[2]
    first = store.logical - length
    output = queries.new_zeros(*queries.shape[:3], store.format.values.head_dim)
    others = []
    for row, sequence in enumerate(store.sequences):
        selecting = sequence.open_from is not None and store.scheme.evicts
        if not (sequence.untouched and length > 1 and chunk.is_causal):
            if selecting:
                _add_attention_mass(store, row, sequence, queries[row], chunk, scaling, softcap, sink_logits)
            others.append(row)
            continue
        tokens, before = sequence.keys.buffered, sequence.positions.before(first)
        if tokens == before:
            continue
        # A prompt, or a part of one, over full-precision tokens alone; padding is excluded from queries and keys.
        padded = tokens - before < length
        at = sequence.positions.slice(before, tokens, queries.device) - first if padded else slice(None)
        arguments = (sequence.keys.tokens(0, tokens), sequence.values.tokens(0, tokens), scaling, softcap, sink_logits)
        if selecting:
            attended, sums = selective_attention(queries[row][:, at], *arguments)
            _add_sums(sequence, sums)
        else:
            attended = prompt_attention(queries[row][:, at], *arguments)
        output[row, :, at] = attended.to(output.dtype)
    if others:
        attended = decode_attention(
            queries,
            StoredRows(store, others, chunk, length),
            store.format,
            store.dtype,
            scaling,
            span=store.span_format,
            half_quantized=store.block_tables.half_quantized,
            softcap=softcap,
            sink_logits=sink_logits,
            clamped_rows=store.clamped_rows,
            fall_back=store.fall_back,
        )
        if len(others) == len(store.sequences):
            output = attended.to(output.dtype)
        else:
            output[others] = attended[others].to(output.dtype)
    return hadamard_transform(output, inverse=True) if store.rotations.values else output


def _add_attention_mass(
    store: LayerStore,
    row: int,
    sequence: Sequence,
    queries: torch.Tensor,
    chunk: Chunk,
    scaling: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> None:
    """Add the attention that the open prompt's tokens receive from these queries [Hq, T, D], padding excluded."""
    tokens, first = sequence.keys.buffered, store.logical - queries.shape[1]
    positions = sequence.positions.slice(0, tokens, queries.device)
    own = positions[sequence.positions.before(first) :]
    visible = None
    if not chunk.is_causal:

        def visible(block: slice, keys: slice) -> torch.Tensor:
            return chunk.visible(row, own[block], positions[keys])[0]

    stored = sequence.keys.tokens(0, tokens)
    _add_sums(sequence, column_sums(queries[:, own - first], stored, visible, scaling, softcap, sink_logits))


def _add_sums(sequence: Sequence, sums: torch.Tensor) -> None:
    """Add one chunk's column sums [H, n] to the attention mass of the open prompt's tokens."""
    if sequence.attention_mass is not None:
        sums[:, : sequence.attention_mass.shape[1]] += sequence.attention_mass
    sequence.attention_mass = sums


@dataclass(frozen=True)
class StoredRows:
    """The tokens of some rows of a store, in the forms that `decode_attention` takes; tables hold every row.

    Attributes:
        store: of one layer.
        rows: of the batch.
        chunk: of the forward pass.
        length: queries of each row.
    """

    store: LayerStore
    rows: list[int]
    chunk: Chunk
    length: int

    def page_tables(self, programs: int) -> PageTables:
        """Where pages and spans lie, with work for about `programs` programs."""
        store, tables = self.store, self.store.block_tables
        quantized = tables.quantized(store.sequences, store.version)
        work = tables.work(store.sequences, store.version, programs)
        base = quantized.base
        return PageTables(base, base, quantized.keys, quantized.values, work, quantized.shared, tables.boosted)

    def residual_windows(self) -> ResidualWindows:
        """Where full-precision tokens lie."""
        table = self.store.block_tables.residual(self.store.sequences)
        return ResidualWindows(table.base, table.rows)

    def visibility(self, queries: slice) -> Visibility | None:
        """Which tokens some of the queries attend to; None for all."""
        mask = self.store.block_tables.mask(self.store.sequences, self.chunk, queries)
        if mask is None:
            return None
        return Visibility(mask, mask.stride(0), mask.stride(1) * (mask.shape[1] > 1), mask.stride(2))

    def residual_tokens(self) -> Iterator[ResidualTokens]:
        """The full-precision tokens of all rows that have any, rows of one length at a time."""
        store, chunk, size = self.store, self.chunk, self.store.page_size
        by_length: dict[int, list[int]] = {}
        for row in self.rows:
            sequence = store.sequences[row]
            count = sequence.keys.buffered - (sequence.pages - len(sequence.keys.pages)) * size
            if count:
                by_length.setdefault(count, []).append(row)
        for rows in by_length.values():
            sequences = [store.sequences[row] for row in rows]
            visible = None
            if self.length > 1 or not chunk.is_causal:
                seen = [
                    chunk.visible(row, chunk.query_positions, sequence.residual_positions(size, store.device))
                    for row, sequence in zip(rows, sequences, strict=True)
                ]
                heads = max(x.shape[0] for x in seen)
                visible = torch.stack([x.expand(heads, -1, -1) for x in seen])
            keys = _stacked([sequence.residual(sequence.keys, size) for sequence in sequences])
            values = _stacked([sequence.residual(sequence.values, size) for sequence in sequences])
            yield ResidualTokens(torch.tensor(rows, device=store.device), keys, values, visible)

    def spans(self) -> Iterator[SpanTokens]:
        """The spans of each row that has any."""
        store, chunk = self.store, self.chunk
        for row in self.rows:
            spans = store.sequences[row].spans
            if not spans:
                continue
            visible = None
            if not chunk.is_causal:
                positions = torch.cat([of_span.slice(0, len(of_span), store.device) for _, of_span in spans])
                visible = chunk.visible(row, chunk.query_positions, positions)
            yield SpanTokens(row, [s for s, _ in spans], store.span_format, visible, store.clamped_rows)

    def page_tiles(self, num_query_heads: int, num_queries: int) -> Iterator[PageTile]:
        """Pages of all rows: first those quantized on both sides, then those quantized on one."""
        store, chunk, size = self.store, self.chunk, self.store.page_size
        step = pages_per_tile(num_query_heads, num_queries, store.format)
        both: list[tuple[int, int]] = []
        half_quantized: list[tuple[int, int]] = []
        for row in self.rows:
            sequence = store.sequences[row]
            shared = min(len(sequence.keys.pages), len(sequence.values.pages))
            both += [(row, page) for page in range(shared)]
            half_quantized += [(row, page) for page in range(shared, sequence.pages)]
        for part in [both[i : i + step] for i in range(0, len(both), step)] + [[entry] for entry in half_quantized]:
            visible = None
            # Pages are older than every query, so only windows and other special masks can hide them.
            if not chunk.is_causal:
                seen = [
                    chunk.visible(
                        row, chunk.query_positions, store.sequences[row].page_positions(page, size, store.device)
                    )
                    for row, page in part
                ]
                # Tokens that survived an eviction have positions per KV head, those of later pages do not.
                heads = max(x.shape[0] for x in seen)
                visible = torch.stack([x.expand(heads, -1, -1) for x in seen])
            keys = _read(store, store.key_pool, [store.sequences[row].keys for row, _ in part], part)
            values = _read(store, store.value_pool, [store.sequences[row].values for row, _ in part], part)
            yield PageTile(keys, values, torch.tensor([row for row, _ in part], device=store.device), visible)


def _read(
    store: LayerStore, pool: PagePool, sides: list[KVSide], part: list[tuple[int, int]]
) -> KeyPages | ValuePages | torch.Tensor:
    row, page = part[0]
    if page >= len(sides[0].pages):
        return store.sequences[row].buffer_tokens(sides[0], page, 1, store.page_size)[None]
    return pool.read([side.pages[page] for side, (_, page) in zip(sides, part, strict=True)])


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape as one, without a copy where there is one."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)
