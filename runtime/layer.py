"""One attention layer of the cache: per sequence sinks, pages, spans and residual, behind transformers' layer protocol.

`update()` only parks new keys and values; the attention function commits them once it knows which columns are padding
(`runtime/attention.py`). Pages are flushed after the attention of the tokens that fill them, so a prompt attends to
itself in full precision, and a page, once written, is never quantized again. Schemes that treat whole prompts leave a
prompt in full precision until it is sealed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from transformers.cache_utils import CacheLayerMixin

from kvconvert.bundle.scheme import KVScheme
from kvconvert.errors import CacheError, NumericError, RecipeError
from kvconvert.kernels.attention import (
    DenseRun,
    LayerFormat,
    PageTile,
    SpanRun,
    paged_attention,
    pages_per_tile,
    prompt_attention,
)
from kvconvert.kernels.hadamard import hadamard_transform
from kvconvert.kernels.pages import (
    ChannelScales,
    KeyFormat,
    KeyPages,
    ValueFormat,
    ValuePages,
    empty_keys,
    empty_values,
    quantize_keys,
    quantize_values,
)
from kvconvert.kernels.selection import column_sums, select_tokens
from kvconvert.kernels.spans import Span, SpanFormat, quantize_span
from kvconvert.runtime.pool import PagePool
from kvconvert.runtime.seam import Chunk, KeyHandle
from kvconvert.runtime.sequence import Sequence, Side

# Pages quantized in one call: bounds the float32 copies that a long prompt's flush needs.
FLUSH_PAGES = 32


def layer_format(
    scheme: KVScheme, heads: int, key_dim: int, value_dim: int, boosted: torch.Tensor | None = None
) -> LayerFormat:
    """The page formats of a scheme for a layer's shape; `boosted` int64 [H, n] are its fixed boosted channels.

    Its static scales are left to `static_scales`.

    Raises:
        RecipeError: the head size cannot be packed at these bits, or calibrated channels are missing or too many.
    """
    for name, bits, dim in (("key_bits", scheme.key_bits, key_dim), ("value_bits", scheme.value_bits, value_dim)):
        if bits < 16 and dim % (16 // bits):
            raise RecipeError(
                f"[kv] {name} = {bits} needs a head size that is a multiple of {16 // bits}; this model has {dim}."
            )
    count = scheme.boosted_for(key_dim)
    if count and scheme.boost_select == "calibrated":
        shape = None if boosted is None else tuple(boosted.shape)
        if shape != (heads, count):
            raise RecipeError(
                f"[kv] boost_select = 'calibrated' needs {count} channels for each of {heads} heads from a KV plan, "
                "and "
                f"found {'none' if shape is None else shape}; use a bundle calibrated so, or select dynamically."
            )
    static = scheme.static_scales == "calibrated"
    keys = KeyFormat(
        heads,
        key_dim,
        scheme.page_size,
        scheme.key_bits,
        scheme.page_size if static else scheme.key_group_size,
        scheme.token_norm,
        scheme.token_norm_measure,
        scheme.key_range,
        count,
        scheme.boost_select,
        static and scheme.key_bits < 16,
    )
    values = ValueFormat(
        heads,
        value_dim,
        scheme.page_size,
        scheme.value_bits,
        value_dim if static or scheme.value_bits == 16 else scheme.value_group_for(value_dim),
        scheme.value_range,
        static and scheme.value_bits < 16,
    )
    return LayerFormat(keys, values, boosted if scheme.boost_select == "calibrated" else None)


def static_scales(
    side: Literal["key", "value"], f: KeyFormat | ValueFormat, plan: Mapping[str, torch.Tensor], device: torch.device
) -> ChannelScales | None:
    """The scales that static pages of one side need, from a layer's part of the KV plan; None for other pages.

    Raises:
        RecipeError: they are missing or do not fit the layer's shape.
    """
    if not f.static:
        return None
    parts = []
    for part in ChannelScales._fields:
        tensor = plan.get(f"static_{side}_{part}")
        shape = None if tensor is None else tuple(tensor.shape)
        if shape != (f.heads, f.head_dim):
            raise RecipeError(
                f"[kv] static_scales = 'calibrated' needs static_{side}_{part} for {f.heads} heads of {f.head_dim} "
                f"channels from a KV plan, and found {'none' if shape is None else shape}; use a bundle calibrated so, "
                'or static_scales = "none".'
            )
        parts.append(tensor.to(device, torch.float16))
    return ChannelScales(*parts)


def span_format(scheme: KVScheme) -> SpanFormat | None:
    """The span format of a scheme, or None for pages."""
    if not scheme.is_span:
        return None
    return SpanFormat(scheme.key_bits, scheme.value_bits, scheme.key_range, scheme.value_range)


class PagedLayer(CacheLayerMixin):
    """The low-bit cache of one attention layer.

    Args:
        scheme: how tokens are stored; `rotate_values="folded"` asserts that the layer's weights carry the rotation, and
            `heavy_ratio` is this layer's own.
        index: the layer's index in the model, for messages.
        sliding_window: the layer's window in tokens, or None.
        page_bytes: room for pages in bytes, taken at the first update and never exceeded; None grows as needed.
        keep_for_sharing: later layers read this layer's keys again within one forward pass, so pages are flushed one
            step late.
        plan: this layer's part of the KV plan, as far as the scheme asks for it: `boosted_channels` integers [H, n];
            `static_key_scale`, `static_key_minimum` float16 [H, D], `static_value_scale`, `static_value_minimum`
            float16 [H, E].
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        scheme: KVScheme,
        index: int,
        sliding_window: int | None = None,
        page_bytes: int | None = None,
        keep_for_sharing: bool = False,
        plan: Mapping[str, torch.Tensor] | None = None,
    ):
        super().__init__()
        self.scheme, self.index, self.page_bytes, self.keep_for_sharing = scheme, index, page_bytes, keep_for_sharing
        self.plan = plan or {}
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = False
        self.seal_at_once = False  # the next forward pass holds the whole prompt
        self.reset()

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.scheme.page_size

    def reset(self) -> None:
        """Forget everything; the next update starts anew."""
        self.logical = 0  # columns seen, padding included
        self.attended = 0  # columns whose own attention is over
        self.real: torch.Tensor | None = None  # bool [B, logical] of committed columns; None while no padding was seen
        self.flushes = 0
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.sequences: list[Sequence] = []
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn shape, dtype and device from the first keys [B, H, T, D] and values [B, H, T, E]."""
        batch, heads, _, key_dim = key_states.shape
        value_dim = value_states.shape[-1]
        self.dtype, self.device = key_states.dtype, key_states.device
        boosted = self.plan.get("boosted_channels")
        boosted = None if boosted is None else boosted.to(self.device, torch.long)
        format = layer_format(self.scheme, heads, key_dim, value_dim, boosted)
        self.format = replace(
            format,
            static_keys=static_scales("key", format.keys, self.plan, self.device),
            static_values=static_scales("value", format.values, self.plan, self.device),
        )
        self.span_format = span_format(self.scheme)
        name = f"layer {self.index} of the KV cache"
        capacity = None
        if self.page_bytes is not None:
            meta = torch.device("meta")
            capacity = self.page_bytes // (self._room_for_keys(1, meta).nbytes + self._room_for_values(1, meta).nbytes)
        self.key_pool: PagePool[KeyPages] = PagePool(self._room_for_keys, self.device, capacity, name)
        self.value_pool: PagePool[ValuePages] = PagePool(self._room_for_values, self.device, capacity, name)
        self.sequences = [
            Sequence(Side(key_states.new_empty(heads, 0, key_dim)), Side(value_states.new_empty(heads, 0, value_dim)))
            for _ in range(batch)
        ]
        self.flattened = torch.zeros((), dtype=torch.int64, device=self.device)
        self.is_initialized = True

    def _room_for_keys(self, count: int, device: torch.device) -> KeyPages:
        return empty_keys(count, self.format.keys, self.dtype, device)

    def _room_for_values(self, count: int, device: torch.device) -> ValuePages:
        return empty_values(count, self.format.values, self.dtype, device)

    # --- transformers' cache-layer protocol

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Park new keys [B, H, T, D] and values [B, H, T, E]; the key handle leads the attention function back here."""
        if args or kwargs:
            raise CacheError(
                f"Layer {self.index}'s model passes {[*kwargs] or args} to the cache, which kvconvert does not know."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.pending is not None:
            raise CacheError(
                f"Layer {self.index} received keys twice without attention in between; is the model's attention "
                "implementation "
                f'"kvconvert"? Call model.set_attn_implementation("kvconvert").'
            )
        if key_states.shape[0] != len(self.sequences):
            raise CacheError(
                f"The cache holds {len(self.sequences)} sequences and layer {self.index} was given "
                f"{key_states.shape[0]}; "
                f"use a new cache for another batch."
            )
        if self.keep_for_sharing:
            self._flush(0)
        self.pending = (key_states, value_states)
        self.logical += key_states.shape[2]
        return KeyHandle.wrap(key_states, self), value_states

    def get_seq_length(self) -> int:
        """Columns seen so far, padding included."""
        return self.logical

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks speak of all columns ever seen, whatever the layer still stores."""
        return self.logical + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def activate_past_recording(self) -> None:
        """Keep the newest tokens unflushed until `crop` says which of them stay (assisted decoding)."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest columns; `tokens_to_remove` is zero or negative, as transformers passes it.

        Raises:
            CacheError: the tokens are compressed already, or have left a sliding window that would need them again.
        """
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop({tokens_to_remove}) is not possible: pass the number of tokens to remove as a negative number."
            )
        if not self.is_initialized:
            return
        length = self.logical + tokens_to_remove
        for row, sequence in enumerate(self.sequences):
            self._check_crop(row, sequence, length)
        for sequence in self.sequences:
            kept = sequence.columns.before(length)
            removed = len(sequence.columns) - kept
            for side in (sequence.keys, sequence.values):
                side.truncate(side.dense - removed)
            sequence.sinks = min(sequence.sinks, sequence.keys.dense)
            sequence.columns.truncate(kept)
            if sequence.received is not None:
                sequence.received = sequence.received[:, : sequence.keys.dense]
        self.logical = self.attended = length
        if self.real is not None:
            self.real = self.real[:, :length]
        self._flush(0)

    def _check_crop(self, row: int, sequence: Sequence, length: int) -> None:
        removed = len(sequence.columns) - sequence.columns.before(length)
        free = 0 if sequence.untouched else sequence.sinks
        loose = min(sequence.keys.dense, sequence.values.dense) - free
        in_span = any(columns.before(length) < len(columns) for _, columns in sequence.spans)
        if removed > loose or in_span:
            raise CacheError(
                f"Sequence {row} cannot give back its newest {removed} tokens: layer {self.index} has already "
                f"quantized some of them; call activate_past_recording() before the tokens are added, and crop at most "
                f"a page at a time."
            )
        if removed and sequence.dropped and self.sliding_window:
            oldest = sequence.columns.column(sequence.sinks + sequence.dropped * self.page_size)
            if oldest > length - self.sliding_window:
                raise CacheError(
                    f"Sequence {row} cannot give back its newest {removed} tokens: layer {self.index} has dropped "
                    f"tokens that its sliding window would need again; call activate_past_recording() before the "
                    f"tokens are added."
                )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences of `beam_idx`, in its order; pages are shared, residuals copied."""
        if not self.is_initialized:
            return
        chosen = [int(i) for i in beam_idx]
        for row in chosen:
            self.key_pool.retain(self.sequences[row].keys.pages)
            self.value_pool.retain(self.sequences[row].values.pages)
        for sequence in self.sequences:
            self.key_pool.release(sequence.keys.pages)
            self.value_pool.release(sequence.values.pages)
        seen = set()
        reordered = []
        for row in chosen:
            reordered.append(self.sequences[row].copy() if row in seen else self.sequences[row])
            seen.add(row)
        self.sequences = reordered
        if self.real is not None:
            self.real = self.real[torch.tensor(chosen, device=self.real.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self.reorder_cache(torch.arange(len(self.sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences."""
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        """Refused: pages are small because they are quantized, and offloading them is not available."""
        raise CacheError("Offloading a kvconvert cache is not available; create it without offloading.")

    prefetch = offload

    # --- what the attention function does

    def commit(self, chunk: Chunk) -> None:
        """Store the parked tokens whose columns are real; later calls in the same forward pass do nothing.

        Raises:
            CacheError: the mask changed its mind about columns that are already stored.
        """
        if self.pending is None:
            return
        (keys, values), self.pending = self.pending, None
        n = keys.shape[2]
        start = self.logical - n
        chunk.check_past(self.real, start, f"layer {self.index}")
        self.real = chunk.real
        # Decoding goes on, so the prompt is complete. The drafts of assisted decoding are decoding too.
        decoding = n == 1 or self.record_past
        if decoding:
            self.seal()
        if self.scheme.rotate_keys == "hadamard":
            keys = hadamard_transform(keys)
        if self.scheme.rotate_values == "online":
            values = hadamard_transform(values)
        for row, sequence in enumerate(self.sequences):
            runs = chunk.runs(row, start, n)
            if not runs:
                continue
            self._open_prompt(sequence, decoding)
            if len(runs) == 1:
                at: slice | torch.Tensor = slice(runs[0][0] - start, sum(runs[0]) - start)
            else:
                at = torch.cat([torch.arange(c - start, c - start + m, device=keys.device) for c, m in runs])
            sequence.append(keys[row][:, at].detach(), values[row][:, at].detach(), self.scheme.sink_tokens)
            for column, count in runs:
                sequence.columns.append(column, count)

    def _open_prompt(self, sequence: Sequence, decoding: bool) -> None:
        """Remember where a prompt begins that will be compressed as a whole: the first one, or for spans any one."""
        first = sequence.untouched and not sequence.keys.dense
        if sequence.open_from is None and (
            (first and (self.scheme.is_span or self.scheme.evicts)) or (self.scheme.is_span and not decoding)
        ):
            sequence.open_from = sequence.keys.dense

    def attend(
        self,
        queries: torch.Tensor,
        chunk: Chunk,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of queries [B, Hq, T, D] over everything stored: [B, Hq, T, E] in the queries' dtype.

        The last T columns are the queries'; outputs at padding columns are zeros or meaningless, as with every mask.
        """
        if self.scheme.rotate_keys == "hadamard":
            queries = hadamard_transform(queries)
        length = queries.shape[2]
        first = self.logical - length
        output = queries.new_zeros(*queries.shape[:3], self.format.values.head_dim)
        others = []
        for row, sequence in enumerate(self.sequences):
            if sequence.open_from is not None and self.scheme.evicts:
                self._receive(row, sequence, queries[row], chunk, scaling, softcap, sinks)
            tokens = sequence.keys.dense
            fresh = sequence.untouched and length > 1 and sequence.columns.before(first) == 0
            if not (fresh and chunk.is_causal and softcap is None and sinks is None):
                others.append(row)
            elif tokens:
                # A prompt with nothing behind it: its real columns attend to each other and nothing else.
                at = sequence.columns.span(0, tokens, queries.device) - first
                keys, values = sequence.keys.tokens(0, tokens), sequence.values.tokens(0, tokens)
                output[row, :, at] = prompt_attention(queries[row][:, at], keys, values, scaling).to(output.dtype)
        if others:
            attended = paged_attention(
                queries,
                self._tiles(others, chunk, length, queries.shape[1]),
                self._dense(others, chunk, length),
                self.format,
                scaling,
                softcap,
                sinks,
                self._spans(others, chunk),
            )
            output[others] = attended[others].to(output.dtype)
        return hadamard_transform(output, inverse=True) if self.scheme.rotate_values == "online" else output

    def _receive(
        self,
        row: int,
        sequence: Sequence,
        queries: torch.Tensor,
        chunk: Chunk,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Add what the open prompt's tokens receive from these queries [Hq, T, D]; padding queries ask nothing."""
        tokens, first = sequence.keys.dense, self.logical - queries.shape[1]
        columns = sequence.columns.span(0, tokens, queries.device)
        own = columns[sequence.columns.before(first) :]
        visible = None
        if not chunk.is_causal:

            def visible(block: slice, keys: slice) -> torch.Tensor:
                return chunk.visible(row, own[block], columns[keys])[0]

        stored = sequence.keys.tokens(0, tokens)
        sums = column_sums(queries[:, own - first], stored, visible, scaling, softcap, sinks)
        if sequence.received is not None:
            sums[:, : sequence.received.shape[1]] += sequence.received
        sequence.received = sums

    def _dense(self, rows: list[int], chunk: Chunk, length: int) -> Iterator[DenseRun]:
        for row in rows:
            sequence, size = self.sequences[row], self.page_size
            keys, values = sequence.tail(sequence.keys, size), sequence.tail(sequence.values, size)
            if not keys.shape[1]:
                continue
            visible = None
            if length > 1 or not chunk.is_causal:
                visible = chunk.visible(row, chunk.query_columns, sequence.tail_columns(size, self.device))
            yield DenseRun(row, keys, values, visible)

    def _spans(self, rows: list[int], chunk: Chunk) -> Iterator[SpanRun]:
        for row in rows:
            spans = self.sequences[row].spans
            if not spans:
                continue
            visible = None
            if not chunk.is_causal:
                columns = torch.cat([c.span(0, len(c), self.device) for _, c in spans])
                visible = chunk.visible(row, chunk.query_columns, columns)
            tau1, tau2 = self.scheme.tau1, self.scheme.tau2
            yield SpanRun(row, [s for s, _ in spans], self.span_format, tau1, tau2, visible, self.flattened)

    def _tiles(self, rows: list[int], chunk: Chunk, length: int, query_heads: int) -> Iterator[PageTile]:
        """Pages of all rows: first those quantized on both sides, then those whose other side is still dense."""
        size, step = self.page_size, pages_per_tile(query_heads, length, self.format)
        both: list[tuple[int, int]] = []
        half: list[tuple[int, int]] = []
        for row in rows:
            sequence = self.sequences[row]
            shared = min(len(sequence.keys.pages), len(sequence.values.pages))
            both += [(row, page) for page in range(shared)]
            half += [(row, page) for page in range(shared, sequence.pages)]
        for part in [both[i : i + step] for i in range(0, len(both), step)] + [[entry] for entry in half]:
            visible = None
            # Pages are older than every query, so only windows and other special masks can hide them.
            if not chunk.is_causal:
                visible = torch.stack(
                    [
                        chunk.visible(
                            row, chunk.query_columns, self.sequences[row].page_columns(page, size, self.device)
                        )
                        for row, page in part
                    ]
                )
            keys = self._read(self.key_pool, [self.sequences[row].keys for row, _ in part], part)
            values = self._read(self.value_pool, [self.sequences[row].values for row, _ in part], part)
            yield PageTile(keys, values, torch.tensor([row for row, _ in part], device=self.device), visible)

    def _read(
        self, pool: PagePool, sides: list[Side], part: list[tuple[int, int]]
    ) -> KeyPages | ValuePages | torch.Tensor:
        row, page = part[0]
        if page >= len(sides[0].pages):
            return self.sequences[row].buffer_tokens(sides[0], page, 1, self.page_size)[None]
        return pool.read([side.pages[page] for side, (_, page) in zip(sides, part, strict=True)])

    def settle(self) -> None:
        """After the attention of committed tokens: compress what is complete."""
        self.attended = self.logical
        if self.seal_at_once:
            self.seal_at_once = False
            self.seal()
        if not self.keep_for_sharing:
            self._flush(self.page_size if self.record_past else 0)

    def seal(self) -> None:
        """The prompt is complete: quantize it as a span, or keep what it needs; nothing to do for page methods."""
        for sequence in self.sequences:
            if sequence.open_from is None:
                continue
            if self.scheme.is_span:
                self._seal_span(sequence)
            else:
                self._evict(sequence)
            sequence.open_from = None
        if not self.keep_for_sharing:
            self._flush(self.page_size if self.record_past else 0)

    def _seal_span(self, sequence: Sequence) -> None:
        start, stop = max(sequence.open_from, sequence.sinks), sequence.keys.dense
        if stop <= start:
            return
        with _NamedErrors(self.index, 0):
            span = quantize_span(
                sequence.keys.tokens(start, stop), sequence.values.tokens(start, stop), self.span_format
            )
        sequence.spans.append((span, sequence.columns.take(start, stop)))
        for side in (sequence.keys, sequence.values):
            side.remove(start, stop)

    def _evict(self, sequence: Sequence) -> None:
        """Keep sinks, heavy hitters and the newest tokens of each KV head."""
        n, received = sequence.keys.dense, sequence.received
        sequence.received = None
        heavy, recent = round(self.scheme.heavy_ratio * n), round(self.scheme.recent_ratio * n)
        if sequence.sinks + heavy + recent >= n:
            return
        index = select_tokens(received, heavy, recent, sequence.sinks)
        sequence.columns.keep(index)
        for side in (sequence.keys, sequence.values):
            tokens = side.tokens(0, n)
            side.replace(tokens.gather(1, index.unsqueeze(2).expand(-1, -1, tokens.shape[2])))

    def _flush(self, held_back: int) -> None:
        """Quantize complete pages of all sequences but for the newest tokens that scheme or caller hold back."""
        if self.scheme.is_span:
            return
        for sequence in self.sequences:
            if sequence.open_from is not None:
                continue
            self._drop_outside_window(sequence)
            self._flush_side(sequence, sequence.keys, self.key_pool, max(held_back, self.scheme.key_recent_tokens))
            self._flush_side(
                sequence, sequence.values, self.value_pool, max(held_back, self.scheme.value_recent_tokens)
            )

    def _flush_side(self, sequence: Sequence, side: Side, pool: PagePool, held_back: int) -> None:
        size, start = self.page_size, sequence.sinks
        count = max(0, (side.dense - start - held_back) // size)
        for first in range(0, count, FLUSH_PAGES):
            tokens = side.tokens(start + first * size, start + min(first + FLUSH_PAGES, count) * size)
            pages = tokens.unflatten(1, (-1, size)).transpose(0, 1)
            with _NamedErrors(self.index, 1):
                if side is sequence.keys:
                    quantized = quantize_keys(pages, self.format.keys, self.format.boosted, self.format.static_keys)
                else:
                    quantized = quantize_values(pages, self.format.values, self.format.static_values)
            side.pages += pool.write(quantized)
        if count:
            side.remove(start, start + count * size)
            self.flushes += count

    def _drop_outside_window(self, sequence: Sequence) -> None:
        """Forget leading pages that no later query can see, quantized or not."""
        if not self.sliding_window:
            return
        size = self.page_size
        slack = size if self.record_past else 0
        horizon = self.attended - self.sliding_window + 1 - slack  # columns below it are invisible from now on
        whole = (len(sequence.columns) - sequence.sinks) // size - sequence.dropped
        outside = 0
        while outside < whole:
            last = sequence.sinks + (sequence.dropped + outside + 1) * size - 1
            if sequence.columns.column(last) >= horizon:
                break
            outside += 1
        for side, pool in ((sequence.keys, self.key_pool), (sequence.values, self.value_pool)):
            paged = min(outside, len(side.pages))
            pool.release(side.pages[:paged])
            del side.pages[:paged]
            if outside > paged:
                side.remove(sequence.sinks, sequence.sinks + (outside - paged) * size)
        sequence.dropped += outside

    # --- measurement

    def tokens(self) -> int:
        """Tokens stored over all sequences, shared pages counted once per sequence."""
        return sum(sequence.stored(self.page_size) for sequence in self.sequences)

    def residual_tokens(self) -> int:
        """Tokens over all sequences whose key or value is in full precision."""
        return sum(max(sequence.keys.dense, sequence.values.dense) for sequence in self.sequences)

    def pages(self) -> int:
        """Key and value pages in use; one page's worth of tokens counts 1."""
        return max(self.key_pool.pages_used, self.value_pool.pages_used)

    def bytes_used(self) -> int:
        """Bytes of pages in use, spans, full-precision tokens and kept columns, from the tensors' own sizes."""
        dense = sum(
            side.dense * side.buffer.shape[0] * side.buffer.shape[2]
            for sequence in self.sequences
            for side in (sequence.keys, sequence.values)
        )
        pages = sum(pool.pages_used * pool.page_bytes for pool in (self.key_pool, self.value_pool))
        return pages + dense * self.dtype.itemsize + self._other_bytes()

    def bytes_allocated(self) -> int:
        """Bytes of the pools' chunks, spans and full-precision buffers."""
        buffers = sum(s.keys.buffer.nbytes + s.values.buffer.nbytes for s in self.sequences)
        return self.key_pool.bytes_allocated + self.value_pool.bytes_allocated + buffers + self._other_bytes()

    def _other_bytes(self) -> int:
        # Beams share spans.
        spans: dict[int, Span] = {id(span): span for sequence in self.sequences for span, _ in sequence.spans}
        extra = [t for s in self.sequences for t in (s.columns.kept, s.received) if t is not None]
        return sum(span.nbytes for span in spans.values()) + sum(tensor.nbytes for tensor in extra)


class _NamedErrors:
    """Adds layer and head to a numeric error; `position` is the head's place in the quantized tensor's shape."""

    def __init__(self, layer: int, position: int):
        self.layer, self.position = layer, position

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NumericError):
            index = getattr(error, "index", None)
            head = f", KV head {index[self.position]}" if index is not None and len(index) > self.position else ""
            raise NumericError(
                f"Layer {self.layer}{head}: the cache cannot store these keys or values: {error}"
            ) from error
