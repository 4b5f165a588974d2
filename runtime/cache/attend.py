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
from kvconvert.runtime.cache.history import attend_to_history, is_served
from kvconvert.runtime.cache.pass_tables import can_mask_on_device, chunk_tables, step_tables
from kvconvert.runtime.cache.pool import PageStorage
from kvconvert.runtime.cache.store import LayerStore
from kvconvert.runtime.cache.tables import GroupTables

EVERY = slice(None)


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
    if length == 1:
        for row, sequence in enumerate(store.sequences if store.group.policy.selects else ()):
            # A prompt of one token.
            if sequence.open_from is not None:
                _add_attention_mass(store, row, queries[row], chunk, scaling, softcap, sink_logits)
        output = _attend_to_stored(store, list(range(len(queries))), queries, chunk, scaling, softcap, sink_logits)
        output = output.to(queries.dtype)
        return hadamard_transform(output, inverse=True) if store.rotations.values else output
    first = store.logical - length
    output = queries.new_zeros(*queries.shape[:3], store.format.values.head_dim)
    others = []
    for row, (sequence, tensors) in enumerate(zip(store.sequences, store.rows, strict=True)):
        selecting = sequence.open_from is not None and store.group.policy.selects
        if not (sequence.untouched and chunk.is_causal):
            if selecting:
                _add_attention_mass(store, row, queries[row], chunk, scaling, softcap, sink_logits)
            if is_served(store, row, queries, chunk, scaling, softcap):
                attend_to_history(store, row, queries[row], chunk, scaling, softcap, sink_logits, output[row])
            else:
                others.append(row)
            continue
        tokens, before = sequence.keys.buffered, sequence.before(first)
        if tokens == before:
            continue
        # A prompt, or a part of one, over full-precision tokens alone; padding is excluded from queries and keys.
        padded = tokens - before < length
        at = store.positions(row, before, tokens) - first if padded else slice(None)
        arguments = (tensors.keys.tokens(0, tokens), tensors.values.tokens(0, tokens), scaling, softcap, sink_logits)
        if selecting:
            attended, sums = selective_attention(queries[row][:, at], *arguments)
            _add_sums(store, row, sums)
        else:
            attended = prompt_attention(queries[row][:, at], *arguments)
        output[row, :, at] = attended.to(output.dtype)
    if others:
        attended = _attend_to_stored(store, others, queries, chunk, scaling, softcap, sink_logits)
        if len(others) == len(store.rows):
            output = attended.to(output.dtype)
        else:
            output[others] = attended[others].to(output.dtype)
    return hadamard_transform(output, inverse=True) if store.rotations.values else output


def _attend_to_stored(
    store: LayerStore,
    rows: list[int],
    queries: torch.Tensor,
    chunk: Chunk,
    scaling: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of some rows' queries over pages as they are stored: [B, Hq, T, E], other rows being meaningless."""
    tables = step_tables(store)
    key_window, value_window = store.scheme.key_recent_tokens, store.scheme.value_recent_tokens
    return decode_attention(
        queries,
        StoredRows(store, rows, chunk, queries.shape[2], tables),
        store.format,
        store.dtype,
        scaling,
        span=store.span_format,
        half_quantized=0 if key_window == value_window else 1 if key_window < value_window else 2,
        softcap=softcap,
        sink_logits=sink_logits,
        clamped_rows=store.clamped_rows if tables is None else tables.clamped_rows[store.group.stores.index(store)],
        fall_back=store.fall_back,
    )


def _add_attention_mass(
    store: LayerStore,
    row: int,
    queries: torch.Tensor,
    chunk: Chunk,
    scaling: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> None:
    """Add the attention that the open prompt's tokens receive from these queries [Hq, T, D], padding excluded."""
    sequence, first = store.sequences[row], store.logical - queries.shape[1]
    tokens = sequence.keys.buffered
    positions = store.positions(row, 0, tokens)
    own = positions[sequence.before(first) :]
    visible = None
    if not chunk.is_causal:

        def visible(block: slice, keys: slice) -> torch.Tensor:
            return chunk.visible(row, own[block], positions[keys])[0]

    stored = store.rows[row].keys.tokens(0, tokens)
    _add_sums(store, row, column_sums(queries[:, own - first], stored, visible, scaling, softcap, sink_logits))


def _add_sums(store: LayerStore, row: int, sums: torch.Tensor) -> None:
    """Add one chunk's column sums [H, n] to the attention mass of the open prompt's tokens."""
    tensors = store.rows[row]
    if tensors.attention_mass is not None:
        sums[:, : tensors.attention_mass.shape[1]] += tensors.attention_mass
    tensors.attention_mass = sums


@dataclass(frozen=True)
class StoredRows:
    """The tokens of some rows of a store, in the forms that `decode_attention` takes; tables hold every row.

    Attributes:
        store: of one layer.
        rows: of the batch.
        chunk: of the forward pass.
        length: queries of each row.
        tables: of a pass of single tokens; None for other passes.
    """

    store: LayerStore
    rows: list[int]
    chunk: Chunk
    length: int
    tables: GroupTables | None

    def _tables(self) -> tuple[GroupTables, int]:
        if self.tables is not None:
            return self.tables, self.store.group.stores.index(self.store)
        return chunk_tables(self.store)

    def page_tables(self, programs: int) -> PageTables:
        """Where pages and spans lie, with work for about `programs` programs."""
        tables, layer = self._tables()
        if self.tables is not None:
            tables.asked.add(programs)
        work = tables.work(self.store.group, self.store.sequences, programs)
        base, keys, values = tables.base, tables.keys[layer], tables.values[layer]
        of_layer = tables.shared[layer], tables.boosted[layer], tables.centers[layer]
        return PageTables(base, base, keys, values, work, *of_layer, tables.key_rows)

    def residual_windows(self) -> ResidualWindows:
        """Where full-precision tokens lie."""
        tables, layer = self._tables()
        if self.tables is None:
            return ResidualWindows(self.store.origin, described_rows(self.store))
        return ResidualWindows(tables.base.view(self.store.dtype), tables.described[layer])

    def visibility(self, queries: slice) -> Visibility | None:
        """Which tokens some of the queries attend to; None for all."""
        if self.tables is not None and can_mask_on_device(self.store.group, self.chunk):
            shared = self.store.forward_pass.shared
            if "mask" not in shared:
                shared["mask"] = self.tables.step_mask(self.chunk)
            mask = shared["mask"]
        else:
            mask = stored_mask(self.store, self.chunk, queries)
        if mask is None:
            return None
        return Visibility(mask, mask.stride(0), mask.stride(1) * (mask.shape[1] > 1), mask.stride(2))

    def residual_tokens(self) -> Iterator[ResidualTokens]:
        """The full-precision tokens of all rows that have any, rows of one length at a time."""
        store, chunk = self.store, self.chunk
        by_length: dict[int, list[int]] = {}
        for row in self.rows:
            count = store.sequences[row].residual(store.page_size)
            if count:
                by_length.setdefault(count, []).append(row)
        for rows in by_length.values():
            visible = None
            if self.length > 1 or not chunk.is_causal:
                seen = [chunk.visible(row, chunk.query_positions, store.residual_positions(row)) for row in rows]
                heads = max(x.shape[0] for x in seen)
                visible = torch.stack([x.expand(heads, -1, -1) for x in seen])
            keys, values = (_stacked(list(side)) for side in zip(*map(store.residual, rows), strict=True))
            yield ResidualTokens(torch.tensor(rows, device=store.device), keys, values, visible)

    def spans(self) -> Iterator[SpanTokens]:
        """The spans of each row that has any."""
        store, chunk = self.store, self.chunk
        for row in self.rows:
            spans, parts = store.rows[row].spans, store.sequences[row].spans
            if not spans:
                continue
            visible = None
            if not chunk.is_causal:
                positions = torch.cat([part.positions.slice(0, part.tokens, store.device) for part in parts])
                visible = chunk.visible(row, chunk.query_positions, positions)
            yield SpanTokens(row, spans, store.span_format, visible, store.clamped_rows)

    def page_tiles(self, num_query_heads: int, num_queries: int) -> Iterator[PageTile]:
        """Pages of all rows: first those quantized on both sides, then those quantized on one."""
        store, chunk = self.store, self.chunk
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
                    chunk.visible(row, chunk.query_positions, store.page_positions(row, page)) for row, page in part
                ]
                # Tokens that survived an eviction have positions per KV head, those of later pages do not.
                heads = max(x.shape[0] for x in seen)
                visible = torch.stack([x.expand(heads, -1, -1) for x in seen])
            keys, values = _read(store, part, True), _read(store, part, False)
            positions = None
            if store.format.key_center is not None:
                positions = [store.sequences[row].page_position(page, store.page_size) for row, page in part]
                positions = torch.tensor(positions, device=store.device)
            rows = torch.tensor([row for row, _ in part], device=store.device)
            yield PageTile(keys, values, rows, visible, positions)


def _read(store: LayerStore, part: list[tuple[int, int]], is_key: bool) -> KeyPages | ValuePages | torch.Tensor:
    """Pages (row, page), or the full-precision tokens [1, H, P, channels] of one that is not quantized on this side."""
    storage: PageStorage = store.key_pages if is_key else store.value_pages
    sides = [s.keys if is_key else s.values for s in (store.sequences[row] for row, _ in part)]
    row, page = part[0]
    if page >= len(sides[0].pages):
        start = store.sequences[row].sink_tokens + (page - len(sides[0].pages)) * store.page_size
        buffer = store.rows[row].keys if is_key else store.rows[row].values
        return buffer.tokens(start, start + store.page_size)[None]
    return storage.read([side.pages[page] for side, (_, page) in zip(sides, part, strict=True)])


def described_rows(store: LayerStore) -> torch.Tensor:
    """One layer's lines of `GroupTables.described`, as of now, counted from the store's origin."""
    lines, origin, unit = [], store.origin.data_ptr(), 8 * store.dtype.itemsize
    for sequence, row in zip(store.sequences, store.rows, strict=True):
        line, skips = [], []
        for side, buffer in ((sequence.keys, row.keys), (sequence.values, row.values)):
            line += [(buffer.address - origin) // unit if buffer.address else 0, buffer.head_stride // 8]
            skips.append((sequence.pages - len(side.pages)) * store.page_size)
        lines.append([*line, sequence.sink_tokens, *skips, sequence.residual(store.page_size)])
    return torch.tensor(lines, dtype=torch.int64).to(store.device, non_blocking=True)


def stored_mask(store: LayerStore, chunk: Chunk, queries: slice = EVERY) -> torch.Tensor | None:
    """Which stored tokens these queries of a forward pass attend to; None where each attends to all.

    Returns:
        uint8 [B, H or 1, T, n] with n the tokens of the fullest row. A row's tokens stand in the order of its pages
        (quantized on both sides or on one), its spans and its residual tokens, one right after the other; what
        follows is 0.
    """
    positions = chunk.query_positions[queries]
    if chunk.is_causal and len(chunk.query_positions) == 1:
        return None
    seen = []
    for row, sequence in enumerate(store.sequences):
        stored = [store.page_positions(row, 0, sequence.pages)]
        stored += [span.positions.slice(0, span.tokens, store.device) for span in sequence.spans]
        stored.append(store.residual_positions(row))
        heads = max(part.shape[0] if part.dim() == 2 else 1 for part in stored)
        stored = [part.expand(heads, -1) for part in stored]
        seen.append(chunk.visible(row, positions, torch.cat(stored, -1)))
    heads, tokens = (max(part.shape[axis] for part in seen) for axis in (0, 2))
    mask = torch.zeros(len(seen), heads, len(positions), tokens, dtype=torch.uint8, device=store.device)
    for row, part in enumerate(seen):
        mask[row, :, :, : part.shape[2]] = part
    return mask


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape as one, without a copy where there is one."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)
