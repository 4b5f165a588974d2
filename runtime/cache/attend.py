"""Attention over everything that a layer stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvconvert.kernels.decode.reference import (
    DenseRun,
    PageTile,
    SpanRun,
    paged_attention,
    pages_per_tile,
)
from kvconvert.kernels.device import runs_triton, why_not
from kvconvert.kernels.pages import KeyPages, ValuePages
from kvconvert.kernels.prompt import prompt_attention, selective_attention
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.kernels.select import column_sums
from kvconvert.runtime.cache.pool import PagePool
from kvconvert.runtime.cache.sequence import KVSide, Sequence
from kvconvert.runtime.hf.handles import Chunk

if TYPE_CHECKING:
    from kvconvert.runtime.hf.layer import PagedLayer

# Queries of one launch of the decode kernel: bounds masks and partial results when a prompt follows stored tokens.
QUERIES_AT_ONCE = 256


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
                _receive(layer, row, sequence, queries[row], chunk, scaling, softcap, sink_logits)
            others.append(row)
            continue
        tokens, before = sequence.keys.dense, sequence.columns.before(first)
        if tokens == before:
            continue
        # A prompt, or a part of one, over nothing but what is in full precision; padding neither asks nor answers.
        padded = tokens - before < length
        at = sequence.columns.span(before, tokens, queries.device) - first if padded else slice(None)
        arguments = (sequence.keys.tokens(0, tokens), sequence.values.tokens(0, tokens), scaling, softcap, sink_logits)
        if selecting:
            attended, sums = selective_attention(queries[row][:, at], *arguments)
            _add_received(sequence, sums)
        else:
            attended = prompt_attention(queries[row][:, at], *arguments)
        output[row, :, at] = attended.to(output.dtype)
    if others:
        attended = _in_one_kernel(layer, queries, chunk, scaling, softcap, sink_logits)
        if attended is None:
            attended = paged_attention(
                queries,
                _tiles(layer, others, chunk, length, queries.shape[1]),
                _dense(layer, others, chunk, length),
                layer.format,
                scaling,
                softcap,
                sink_logits,
                _spans(layer, others, chunk),
            )
        if len(others) == len(layer.sequences):
            output = attended.to(output.dtype)
        else:
            output[others] = attended[others].to(output.dtype)
    return hadamard_transform(output, inverse=True) if layer.scheme.rotate_values == "online" else output


def _in_one_kernel(
    layer: PagedLayer,
    queries: torch.Tensor,
    chunk: Chunk,
    scaling: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor | None:
    """All rows' attention by the fused decode kernel, [B, Hq, T, E]; None where it is not meant to serve, or cannot."""
    if not runs_triton(queries.device):
        if queries.is_cuda:
            layer.fall_back("attention over the cache", why_not(queries.device))
        return None
    from kvconvert.kernels.decode.triton import launch as decode

    format, heads, length = layer.places.format, queries.shape[1], queries.shape[2]
    reason = decode.why_not_decode(format, layer.span_format, layer.dtype, heads)
    if reason is None and queries.dtype != layer.dtype:
        reason = f"queries are {queries.dtype} and stored tokens {layer.dtype}"
    if reason is not None:
        layer.fall_back("attention over the cache", reason)
        return None
    tables, dense = layer.places.tables(), layer.places.dense()
    tails = decode.Tails(dense.base, dense.rows)
    parts = []
    for start in range(0, length, QUERIES_AT_ONCE):
        part = queries[:, :, start : start + QUERIES_AT_ONCE]
        mask = layer.places.mask(chunk, slice(start, start + QUERIES_AT_ONCE))
        visibility = None
        if mask is not None:
            visibility = decode.Visibility(mask, mask.stride(0), mask.stride(1) * (mask.shape[1] > 1), mask.stride(2))
        programs = decode.programs_for(
            queries.device, format, layer.span_format, heads // format.keys.heads, part.shape[2]
        )
        parts.append(
            decode.decode_attention(
                part,
                decode.PageTables(
                    tables.base, tables.base, tables.keys, tables.values, layer.places.work(programs), tables.shared
                ),
                tails,
                format,
                scaling,
                span=layer.span_format,
                half=tables.half,
                softcap=softcap,
                sink_logits=sink_logits,
                visibility=visibility,
                tau1=layer.scheme.tau1,
                tau2=layer.scheme.tau2,
                clamped_rows=layer.clamped_rows,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _receive(
    layer: PagedLayer,
    row: int,
    sequence: Sequence,
    queries: torch.Tensor,
    chunk: Chunk,
    scaling: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> None:
    """Add what the open prompt's tokens receive from these queries [Hq, T, D]; padding queries ask nothing."""
    tokens, first = sequence.keys.dense, layer.logical - queries.shape[1]
    columns = sequence.columns.span(0, tokens, queries.device)
    own = columns[sequence.columns.before(first) :]
    visible = None
    if not chunk.is_causal:

        def visible(block: slice, keys: slice) -> torch.Tensor:
            return chunk.visible(row, own[block], columns[keys])[0]

    stored = sequence.keys.tokens(0, tokens)
    _add_received(sequence, column_sums(queries[:, own - first], stored, visible, scaling, softcap, sink_logits))


def _add_received(sequence: Sequence, sums: torch.Tensor) -> None:
    """Add what one chunk's queries give to the open prompt's tokens, [H, n]."""
    if sequence.received is not None:
        sums[:, : sequence.received.shape[1]] += sequence.received
    sequence.received = sums


def _dense(layer: PagedLayer, rows: list[int], chunk: Chunk, length: int) -> Iterator[DenseRun]:
    for row in rows:
        sequence, size = layer.sequences[row], layer.page_size
        keys, values = sequence.tail(sequence.keys, size), sequence.tail(sequence.values, size)
        if not keys.shape[1]:
            continue
        visible = None
        if length > 1 or not chunk.is_causal:
            visible = chunk.visible(row, chunk.query_columns, sequence.tail_columns(size, layer.device))
        yield DenseRun(row, keys, values, visible)


def _spans(layer: PagedLayer, rows: list[int], chunk: Chunk) -> Iterator[SpanRun]:
    for row in rows:
        spans = layer.sequences[row].spans
        if not spans:
            continue
        visible = None
        if not chunk.is_causal:
            columns = torch.cat([c.span(0, len(c), layer.device) for _, c in spans])
            visible = chunk.visible(row, chunk.query_columns, columns)
        tau1, tau2 = layer.scheme.tau1, layer.scheme.tau2
        yield SpanRun(row, [s for s, _ in spans], layer.span_format, tau1, tau2, visible, layer.clamped_rows)


def _tiles(layer: PagedLayer, rows: list[int], chunk: Chunk, length: int, query_heads: int) -> Iterator[PageTile]:
    """Pages of all rows: first those quantized on both sides, then those whose other side is still dense."""
    size, step = layer.page_size, pages_per_tile(query_heads, length, layer.format)
    both: list[tuple[int, int]] = []
    half: list[tuple[int, int]] = []
    for row in rows:
        sequence = layer.sequences[row]
        shared = min(len(sequence.keys.pages), len(sequence.values.pages))
        both += [(row, page) for page in range(shared)]
        half += [(row, page) for page in range(shared, sequence.pages)]
    for part in [both[i : i + step] for i in range(0, len(both), step)] + [[entry] for entry in half]:
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
