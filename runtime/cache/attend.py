"""Storing a forward pass's new tokens in full precision, and attention over everything that a layer stores.

With latent attention (MLA) a layer stores latents as its keys, and RoPE parts as its values, of one head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.decode import (
    PageTables,
    PageTile,
    ResidualTokens,
    ResidualWindows,
    SpanTokens,
    Visibility,
    decode_attention,
    divided_pages,
    pages_at_once,
    pages_per_tile,
)
from kvconvert.kernels.device import runs_triton, upload
from kvconvert.kernels.latent import latent_attention, latent_decode
from kvconvert.kernels.prompt import prompt_attention
from kvconvert.kernels.rotate import hadamard_transform, rotate_and_append, rotate_new_tokens, unsupported_append
from kvconvert.kernels.select import column_sums, selective_attention
from kvconvert.runtime.cache.chunked_prefill import ChunkedPrefill
from kvconvert.runtime.cache.compress import end_forward, seal
from kvconvert.runtime.cache.forward_pass import ForwardPass, PassTokens
from kvconvert.runtime.cache.group_tables import GroupTables
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import LayerStore, buffer_places


def commit(store: LayerStore, chunk: PassTokens, queries: torch.Tensor | None = None) -> torch.Tensor | None:
    """Store the parked tokens that are not padding; later calls in the same forward pass do nothing.

    Args:
        store: where tokens are parked.
        chunk: the tokens of the forward pass.
        queries: [B, Hq, T, D] of the same pass, to be rotated along with the keys. Those of latents come later, and
            are None.

    Returns:
        The queries in the coordinates of stored keys, for `attend(..., rotated=True)`; None if nothing was stored.

    Raises:
        CacheError: the attention mask differs for stored positions, or the scheme compresses one modality and no mask
            tells which tokens of a prompt are of it.
    """
    if store.pending is None:
        return None
    (keys, values), store.pending = store.pending, None
    group, latest = store.group, store.forward_pass
    if latest.chunk is None and group.is_decoding(latest.length) and not group.reading_prompt:
        seal(group)
    group.append(latest, chunk)
    n, in_one_launch = latest.length, False
    if store.is_latent:
        queries = keys
    if queries is not None and unsupported_append(store.dtype, queries, keys, values, store.format.rotations) is None:
        in_one_launch = all(destination.runs == [(0, n)] for destination in latest.destinations)
    tables = group.registry.step_tables(store) if in_one_launch else None
    if tables is not None:
        store.sequences = latest.appended
        table, base = tables.appends[group.stores.index(store)], tables.base.view(store.dtype)
        return rotate_and_append(queries, keys, values, base, table, tables.step[0], store.format.rotations)
    if group.rehearsal is not None:
        raise CacheError(f"Layer {store.index} was given keys and values that no kernel stores in a planned step.")
    for destination in latest.destinations:
        if store.reserve(destination.row, latest.appended[destination.row]):
            group.touch(destination.row)
    store.sequences = latest.appended
    if in_one_launch:
        table, first_tokens = _append_table(store, latest)
        return rotate_and_append(queries, keys, values, store.origin, table, first_tokens, store.format.rotations)
    queries, keys, values = rotate_new_tokens(queries, keys, values, store.format.rotations)
    for row, runs, *starts in latest.destinations:
        tensors = store.rows[row]
        for buffer, at, tokens in zip((tensors.keys, tensors.values), starts, (keys, values), strict=True):
            for first, count in runs:
                buffer.tensor[:, at : at + count] = tokens[row, :, first : first + count].detach()
                at += count
    return queries


def _append_table(store: LayerStore, latest: ForwardPass) -> tuple[torch.Tensor, torch.Tensor]:
    """Where one layer's new tokens go: the table of `GroupTables.appends`, and the first token's index of each row."""
    first, places = np.full(len(store.rows), -1), buffer_places(store.rows, store.origin, store.dtype)
    for row, _, first_key, first_value in latest.destinations:
        first[row] = first_key
        places[row, 2] += (first_value - first_key) * store.format.values.head_dim
    table, first_tokens = upload(np.concatenate([places.ravel(), first]), store.device).split([places.size, len(first)])
    return table.view(-1, 4), first_tokens


EVERY = slice(None)


def store_and_attend(
    store: LayerStore,
    queries: torch.Tensor,
    chunk: PassTokens,
    scoring: Scoring,
    unrotate_output: bool = True,
) -> torch.Tensor:
    """Store the parked tokens, attend from their queries [B, Hq, T, D] as `attend` does, and compress what is complete.

    Raises:
        KvconvertError: those of `commit` and `end_forward`.
    """
    rotated = commit(store, chunk, queries)
    queries = queries if rotated is None else rotated
    output = attend(store, queries, chunk, scoring, rotated is not None, unrotate_output)
    end_forward(store)
    return output


def attend(
    store: LayerStore,
    queries: torch.Tensor,
    chunk: PassTokens,
    scoring: Scoring,
    rotated: bool = False,
    unrotate_output: bool = True,
) -> torch.Tensor:
    """Attention of queries [B, Hq, T, D] over everything stored: [B, Hq, T, E] in the queries' dtype.

    The queries are at the last T positions; outputs at padding are zeros or meaningless, as with every mask. `rotated`
    tells that the scheme's rotation has been applied to the queries; without `unrotate_output` outputs stay in the
    coordinates in which values are stored.
    """
    if store.format.rotations.keys and not rotated:
        queries = hadamard_transform(queries)
    output = LayerAttention(store, chunk, scoring).output(queries)
    return hadamard_transform(output, inverse=True) if unrotate_output and store.format.rotations.values else output


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer over everything that it stores, in one forward pass.

    Attributes:
        store: what is attended to.
        chunk: the tokens of the forward pass.
        scoring: the layer's scoring, without its window.
    """

    store: LayerStore
    chunk: PassTokens
    scoring: Scoring

    def output(self, queries: torch.Tensor) -> torch.Tensor:
        """[B, Hq, T, E], in the coordinates in which values are stored, for queries in those of keys."""
        store, chunk, length = self.store, self.chunk, queries.shape[2]
        selects = store.group.policy.sums_attention
        if length == 1:
            for row, sequence in enumerate(store.sequences if selects else ()):
                # A prompt of one token.
                if sequence.open_from is not None:
                    self._add_attention_mass(row, queries[row])
            return self._over_stored_rows(list(range(len(queries))), queries).to(queries.dtype)
        first = store.logical - length
        output = queries.new_zeros(*queries.shape[:3], store.format.values.head_dim)
        others = []
        for row, (sequence, tensors) in enumerate(zip(store.sequences, store.rows, strict=True)):
            selecting = sequence.open_from is not None and selects
            if not (sequence.untouched and chunk.is_causal):
                if selecting:
                    self._add_attention_mass(row, queries[row])
                prefill = ChunkedPrefill(store, row, chunk, self.scoring)
                if prefill.is_served(queries):
                    prefill.attend(queries[row], output[row])
                else:
                    others.append(row)
                continue
            tokens, before = sequence.keys.buffered, sequence.before(first)
            if tokens == before:
                continue
            # A prompt, or a part of one, over full-precision tokens alone; padding is excluded from queries and keys.
            padded = tokens - before < length
            at = store.positions(row, before, tokens) - first if padded else EVERY
            stored = tensors.keys.tokens(0, tokens), tensors.values.tokens(0, tokens)
            arguments = (queries[row][:, at], *stored, self.scoring)
            if selecting:
                attended, sums = selective_attention(*arguments)
                tensors.add_attention_mass(sums)
            else:
                attended, _ = prompt_attention(*arguments)
            if len(store.rows) == 1 and not padded:
                return attended[None].to(output.dtype)
            output[row, :, at] = attended.to(output.dtype)
        if len(others) == len(store.rows):
            return self._over_stored_rows(others, queries).to(output.dtype)
        if others:
            output[others] = self._over_stored_rows(others, queries)[others].to(output.dtype)
        return output

    def _over_stored_rows(self, rows: list[int], queries: torch.Tensor) -> torch.Tensor:
        """Attention of some rows' queries over pages as they are stored: [B, Hq, T, E], meaningless in other rows."""
        store = self.store
        tables = store.group.registry.step_tables(store)
        return decode_attention(
            queries,
            StoredRows(store, rows, self.chunk, tables),
            store.format,
            store.dtype,
            self.scoring,
            clamped_rows=store.clamped_rows if tables is None else tables.clamped_rows[store.group.stores.index(store)],
            fall_back=store.fall_back,
        )

    def _add_attention_mass(self, row: int, queries: torch.Tensor) -> None:
        """Add the attention that the open prompt's tokens receive from these queries [Hq, T, D], padding excluded."""
        store, chunk = self.store, self.chunk
        sequence, first = store.sequences[row], store.logical - queries.shape[1]
        tokens = sequence.keys.buffered
        positions = store.positions(row, 0, tokens)
        own = positions[sequence.before(first) :]
        visible = None
        if not chunk.is_causal:

            def visible(block: slice, keys: slice) -> torch.Tensor:
                return chunk.visible(row, own[block], positions[keys])[0]

        stored, tensors = store.rows[row].keys.tokens(0, tokens), store.rows[row]
        arguments = queries[:, own - first], stored, visible, self.scoring
        tensors.add_attention_mass(column_sums(*arguments))


@dataclass(frozen=True)
class StoredRows:
    """The tokens of some rows of a store, in the forms that `decode_attention` takes; tables hold every row.

    Attributes:
        store: the store of one layer.
        rows: the rows of the batch.
        chunk: the tokens of the forward pass.
        tables: of a planned step; None for other passes.
    """

    store: LayerStore
    rows: list[int]
    chunk: PassTokens
    tables: GroupTables | None

    def _tables(self) -> tuple[GroupTables, int]:
        if self.tables is not None:
            return self.tables, self.store.group.stores.index(self.store)
        return self.store.group.registry.chunk_tables(self.store)

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
            return ResidualWindows(self.store.origin, self.store.described_rows())
        return ResidualWindows(tables.base.view(self.store.dtype), tables.described[layer])

    def visibility(self, queries: slice) -> Visibility | None:
        """Which tokens some of the queries attend to; None for all."""
        if self.tables is not None and self.store.group.masks_on_device(self.chunk):
            latest = self.store.forward_pass
            if latest.step_mask is None:
                latest.step_mask = self.tables.step_mask(self.chunk)
            mask = latest.step_mask
        else:
            mask = self.store.stored_mask(self.chunk, queries)
        if mask is None:
            return None
        return Visibility(mask, mask.stride(0), mask.stride(1) * (mask.shape[1] > 1), mask.stride(2))

    def residual_tokens(self) -> Iterator[ResidualTokens]:
        """The full-precision tokens of all rows that have any, rows of one length at a time."""
        store, chunk = self.store, self.chunk
        by_length: dict[int, list[int]] = {}
        for row in self.rows:
            count = store.sequences[row].residual
            if count:
                by_length.setdefault(count, []).append(row)
        for rows in by_length.values():
            hides = len(chunk.query_positions) > 1 or not chunk.is_causal
            visible = self._visible((row, store.residual_positions(row)) for row in rows) if hides else None
            keys, values = (_stacked(list(side)) for side in zip(*map(store.residual, rows), strict=True))
            every = len(rows) == len(store.rows)
            yield ResidualTokens(None if every else torch.tensor(rows, device=store.device), keys, values, visible)

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
            yield SpanTokens(row, spans, store.format.span, visible, store.clamped_rows)

    def page_tiles(self, num_query_heads: int, num_queries: int) -> Iterator[PageTile]:
        """Pages of all rows: first those quantized on both sides, then those quantized on one."""
        store, chunk = self.store, self.chunk
        most = pages_per_tile(num_query_heads, num_queries, store.format)
        for part in self._page_parts(pages_at_once(num_query_heads, num_queries, store.format)):
            # Pages are older than every query, so only windows and other special masks can hide them.
            visible = None if chunk.is_causal else self._visible((r, store.page_positions(r, p)) for r, p in part.pages)
            keys = store.read_pages(part.pages, part.keys, True, most)
            values = store.read_pages(part.pages, part.values, False, most)
            positions = None if store.format.key_tensors.center is None else part.positions
            yield PageTile(keys, values, part.rows, visible, positions, part.hidden)

    def _page_parts(self, step: int) -> list[PagePart]:
        """All pages, `step` at a time; planned by the first of the group's layers that asks for it."""
        latest, sequences = self.store.forward_pass, self.store.sequences
        known = latest.page_parts
        if known is None or known[0] is not sequences or known[1:3] != (step, self.rows):
            counts = [(row, len(sequences[row].keys.pages), len(sequences[row].values.pages)) for row in self.rows]
            parts = [PagePart.of(part, sequences, self.store.device) for part in divided_pages(counts, step)]
            known = latest.page_parts = (sequences, step, self.rows, parts)
        return known[3]

    def _visible(self, tokens: Iterable[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Which of some rows' tokens, at these positions, the queries attend to: bool [N, H or 1, T, n].

        Tokens that survived an eviction have positions per KV head, others do not.
        """
        seen = [self.chunk.visible(row, self.chunk.query_positions, positions) for row, positions in tokens]
        heads = max(part.shape[0] for part in seen)
        return torch.stack([part.expand(heads, -1, -1) for part in seen])


@dataclass(frozen=True)
class PagePart:
    """Some pages that are attended to at once, the same in all layers of a group.

    Attributes:
        pages: (row, page), 0 being a row's first one that is not dropped.
        keys, values: their numbers; None of pages that are not quantized on this side.
        rows: int64 [N]; None where there is one row.
        positions: int64 [N], of each page's first token among its sequence's.
        hidden: as for `PageTile`.
    """

    pages: list[tuple[int, int]]
    keys: tuple[int, ...] | None
    values: tuple[int, ...] | None
    rows: torch.Tensor | None
    positions: torch.Tensor
    hidden: list[tuple[int, int]]

    @classmethod
    def of(cls, pages: list[tuple[int, int]], sequences: tuple[Sequence, ...], device: torch.device) -> PagePart:
        """Pages that are quantized on both sides, or one that is quantized on one side."""
        numbers = []
        for is_key in (True, False):
            sides = [(s.keys if is_key else s.values, page) for s, page in ((sequences[row], p) for row, p in pages)]
            is_paged = sides[0][1] < len(sides[0][0].pages)
            numbers.append(tuple(side.pages[page] for side, page in sides) if is_paged else None)
        rows = torch.tensor([row for row, _ in pages], device=device) if len(sequences) > 1 else None
        positions = torch.tensor([sequences[row].page_position(page) for row, page in pages], device=device)
        hidden = [(i, n) for i, (row, page) in enumerate(pages) if (n := sequences[row].hidden(page))]
        return cls(pages, *numbers, rows, positions, hidden)


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape as one, without a copy where there is one."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def attend_latents(
    store: LayerStore,
    queries: torch.Tensor,
    up_keys: torch.Tensor,
    up_values: torch.Tensor,
    chunk: PassTokens,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention over everything that a layer of latents stores, the queries' own tokens included.

    Args:
        store: whose newest T positions are the queries'.
        queries: [B, Hq, T, D + r], the channels without RoPE first.
        up_keys: W_UK [Hq, D, R]; up_values: W_UV [Hq, E, R].
        chunk: the tokens of the forward pass.
        scoring: the layer's scoring.

    Returns:
        [B, Hq, T, E]; zeros at padding.

    Raises:
        CacheError: attention is not causal.
    """
    if chunk.mask_function is not None:
        raise CacheError(
            f"Layer {store.index} stores latents, whose attention is causal, and the model's mask is not; use the "
            "model without a KV scheme."
        )
    plain, rope = queries.split([up_keys.shape[1], queries.shape[-1] - up_keys.shape[1]], -1)
    latent = plain @ up_keys
    if store.format.rotations.keys:
        latent = hadamard_transform(latent)
    if store.format.rotations.values:
        rope = hadamard_transform(rope)
    reason = store.latents_unsupported
    if reason is None and queries.dtype != store.dtype:
        reason = f"queries are {queries.dtype} and stored tokens {store.dtype}"
    if reason is None and queries.shape[2] > 1:
        reason = "the kernel of their pages takes one query of each sequence"
    if reason is None and not chunk.is_causal:
        reason = "an indexer chose the tokens"
    if reason is None and (scoring.softcap is not None or scoring.sink_logits is not None):
        reason = "there are soft caps or sink logits"
    if reason is None:
        rows = StoredRows(store, list(range(len(queries))), chunk, store.group.registry.step_tables(store))
        attended = latent_decode(latent[:, :, 0], rope[:, :, 0], rows, store.format, scoring.scaling).unsqueeze(2)
    else:
        if runs_triton(store.device):
            store.fall_back("attention over latents", reason)
        attended = _over_dequantized(store, chunk, scoring, latent, rope)
    if store.format.rotations.keys:
        attended = hadamard_transform(attended, inverse=True)
    return attended.to(queries.dtype) @ up_values.mT


def _over_dequantized(
    store: LayerStore, chunk: PassTokens, scoring: Scoring, latent: torch.Tensor, rope: torch.Tensor
) -> torch.Tensor:
    """Sums of latents, float32 [B, Hq, T, R], for queries of latents of that shape and of RoPE parts [B, Hq, T, r]."""
    attended = torch.zeros(latent.shape, dtype=torch.float32, device=latent.device)
    for row, sequence in enumerate(store.sequences):
        prefill, visible = ChunkedPrefill(store, row, chunk, scoring), None
        own, at = prefill.newest(latent.shape[2], latent.device)
        if not own:
            continue
        if not chunk.is_causal:
            every = sequence.positions.slice(0, len(sequence.positions), latent.device)
            visible = chunk.visible(row, chunk.query_positions[at].to(latent.device), every)[0]
        queries, parts = (latent[row][:, at], rope[row][:, at]), prefill.parts(0, addressed=False)
        attended[row, :, at] = latent_attention(*queries, parts, scoring, visible=visible)
    return attended
