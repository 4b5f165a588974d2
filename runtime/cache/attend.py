"""Attention over everything that a layer stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from kvconvert.runtime.cache.pool import PagePool
from kvconvert.runtime.cache.sequence import KVSide, Sequence
from kvconvert.runtime.hf.handles import Chunk

if TYPE_CHECKING:
    from kvconvert.runtime.hf.layer import PagedLayer


def attend(
    layer: PagedLayer,
    queries: torch.Tensor,
    chunk: Chunk,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    rotated: bool = False,
) -> torch.Tensor:
    """Attention of queries [B, Hq, T, D] over everything stored: [B, Hq, T, E] in the queries' dtype.

    The last T columns are the queries'; outputs at padding columns are zeros or meaningless, as with every mask.
    `rotated` says that the queries have the scheme's rotation already.
    """
    if layer.scheme.rotate_keys == "hadamard" and not rotated:
        queries = hadamard_transform(queries)
    length = queries.shape[2]
    first = layer.logical - length
    output = queries.new_zeros(*queries.shape[:3], layer.format.values.head_dim)
    others = []
    for row, sequence in enumerate(layer.sequences):
        selecting = sequence.open_from is not None and layer.scheme.evicts
        if not (sequence.untouched and length > 1 and chunk.is_causal):
            if selecting:
                _collect_mass(layer, row, sequence, queries[row], chunk, scaling, softcap, sink_logits)
            others.append(row)
            continue
        tokens, before = sequence.keys.dense, sequence.columns.before(first)
        if tokens == before:
            continue
        # A prompt, or a part of one, over full-precision tokens alone; padding is excluded from queries and keys.
        padded = tokens - before < length
        at = sequence.columns.span(before, tokens, queries.device) - first if padded else slice(None)
        arguments = (sequence.keys.tokens(0, tokens), sequence.values.tokens(0, tokens), scaling, softcap, sink_logits)
        if selecting:
            attended, sums = selective_attention(queries[row][:, at], *arguments)
            _add_mass(sequence, sums)
        else:
            attended = prompt_attention(queries[row][:, at], *arguments)
        output[row, :, at] = attended.to(output.dtype)
    if others:
        attended = decode_attention(
            queries,
            StoredRows(layer, others, chunk, length),
            layer.format,
            layer.dtype,
            scaling,
            span=layer.span_format,
            half_quantized=layer.places.half_quantized,
            softcap=softcap,
            sink_logits=sink_logits,
            tau1=layer.scheme.tau1,
            tau2=layer.scheme.tau2,
            clamped_rows=layer.clamped_rows,
            fall_back=layer.fall_back,
        )
        if len(others) == len(layer.sequences):
            output = attended.to(output.dtype)
        else:
            output[others] = attended[others].to(output.dtype)
    return hadamard_transform(output, inverse=True) if layer.scheme.rotate_values == "online" else output


def _collect_mass(
    layer: PagedLayer,
    row: int,
    sequence: Sequence,
    queries: torch.Tensor,
    chunk: Chunk,
    scaling: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> None:
    """Add these queries' [Hq, T, D] weights to the open prompt's attention mass; padding queries are excluded."""
    tokens, first = sequence.keys.dense, layer.logical - queries.shape[1]
    columns = sequence.columns.span(0, tokens, queries.device)
    own = columns[sequence.columns.before(first) :]
    visible = None
    if not chunk.is_causal:

        def visible(block: slice, keys: slice) -> torch.Tensor:
            return chunk.visible(row, own[block], columns[keys])[0]

    stored = sequence.keys.tokens(0, tokens)
    _add_mass(sequence, column_sums(queries[:, own - first], stored, visible, scaling, softcap, sink_logits))


def _add_mass(sequence: Sequence, sums: torch.Tensor) -> None:
    """Add one chunk's weights, summed over its queries, to the open prompt's attention mass, [H, n]."""
    if sequence.received is not None:
        sums[:, : sequence.received.shape[1]] += sequence.received
    sequence.received = sums


@dataclass(frozen=True)
class StoredRows:
    """What a layer has stored for some rows, as `decode_attention` asks for it; kernels are given every row.

    Attributes:
        layer: whose tokens they are.
        rows: of the batch.
        chunk: of the forward pass.
        length: queries of each row.
    """

    layer: PagedLayer
    rows: list[int]
    chunk: Chunk
    length: int

    def page_tables(self, programs: int) -> PageTables:
        """Where pages and spans lie, with work for about so many programs."""
        places = self.layer.places
        tables, work = places.tables(), places.work(programs)
        base, boosted = tables.base, places.format.boosted
        return PageTables(base, base, tables.keys, tables.values, work, tables.shared, boosted)

    def residual_windows(self) -> ResidualWindows:
        """Where full-precision tokens lie."""
        dense = self.layer.places.dense()
        return ResidualWindows(dense.base, dense.rows)

    def visibility(self, queries: slice) -> Visibility | None:
        """Which tokens some of the queries see; None for all."""
        mask = self.layer.places.mask(self.chunk, queries)
        if mask is None:
            return None
        return Visibility(mask, mask.stride(0), mask.stride(1) * (mask.shape[1] > 1), mask.stride(2))

    def residual_tokens(self) -> Iterator[ResidualTokens]:
        """The full-precision tokens of each row that has any."""
        layer, chunk, size = self.layer, self.chunk, self.layer.page_size
        for row in self.rows:
            sequence = layer.sequences[row]
            keys, values = sequence.tail(sequence.keys, size), sequence.tail(sequence.values, size)
            if not keys.shape[1]:
                continue
            visible = None
            if self.length > 1 or not chunk.is_causal:
                visible = chunk.visible(row, chunk.query_columns, sequence.tail_columns(size, layer.device))
            yield ResidualTokens(row, keys, values, visible)

    def spans(self) -> Iterator[SpanTokens]:
        """The spans of each row that has any."""
        layer, chunk = self.layer, self.chunk
        for row in self.rows:
            spans = layer.sequences[row].spans
            if not spans:
                continue
            visible = None
            if not chunk.is_causal:
                columns = torch.cat([c.span(0, len(c), layer.device) for _, c in spans])
                visible = chunk.visible(row, chunk.query_columns, columns)
            tau1, tau2 = layer.scheme.tau1, layer.scheme.tau2
            yield SpanTokens(row, [s for s, _ in spans], layer.span_format, tau1, tau2, visible, layer.clamped_rows)

    def page_tiles(self, num_query_heads: int, num_queries: int) -> Iterator[PageTile]:
        """Pages of all rows: first those quantized on both sides, then those quantized on one."""
        layer, chunk, size = self.layer, self.chunk, self.layer.page_size
        step = pages_per_tile(num_query_heads, num_queries, layer.format)
        both: list[tuple[int, int]] = []
        half_quantized: list[tuple[int, int]] = []
        for row in self.rows:
            sequence = layer.sequences[row]
            shared = min(len(sequence.keys.pages), len(sequence.values.pages))
            both += [(row, page) for page in range(shared)]
            half_quantized += [(row, page) for page in range(shared, sequence.pages)]
        for part in [both[i : i + step] for i in range(0, len(both), step)] + [[entry] for entry in half_quantized]:
            visible = None
            # Pages are older than every query, so only windows and other special masks can hide them.
            if not chunk.is_causal:
                seen = [
                    chunk.visible(row, chunk.query_columns, layer.sequences[row].page_columns(page, size, layer.device))
                    for row, page in part
                ]
                # Tokens that survived an eviction have columns per head, those of later pages have not.
                heads = max(x.shape[0] for x in seen)
                visible = torch.stack([x.expand(heads, -1, -1) for x in seen])
            keys = _read(layer, layer.key_pool, [layer.sequences[row].keys for row, _ in part], part)
            values = _read(layer, layer.value_pool, [layer.sequences[row].values for row, _ in part], part)
            yield PageTile(keys, values, torch.tensor([row for row, _ in part], device=layer.device), visible)


def _read(
    layer: PagedLayer, pool: PagePool, sides: list[KVSide], part: list[tuple[int, int]]
) -> KeyPages | ValuePages | torch.Tensor:
    row, page = part[0]
    if page >= len(sides[0].pages):
        return layer.sequences[row].buffer_tokens(sides[0], page, 1, layer.page_size)[None]
    return pool.read([side.pages[page] for side, (_, page) in zip(sides, part, strict=True)])
