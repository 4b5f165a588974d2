"""One attention layer of the cache: per sequence sink, pages and residual, behind transformers' cache-layer protocol.

`update()` only parks new keys and values; the attention function commits them once it knows which columns are padding
(`runtime/attention.py`). Pages are flushed after the attention of the tokens that fill them, so a prompt attends to
itself in full precision, and a page, once written, is never quantized again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import CacheLayerMixin

from kvconvert.bundle.scheme import KVScheme
from kvconvert.errors import CacheError, NumericError, RecipeError
from kvconvert.kernels.attention import DenseRun, PageTile, paged_attention, pages_per_tile, prompt_attention
from kvconvert.kernels.hadamard import hadamard_transform
from kvconvert.kernels.pages import PageFormat, quantize_pages
from kvconvert.runtime.columns import TokenColumns
from kvconvert.runtime.pool import PagePool
from kvconvert.runtime.seam import Chunk, KeyHandle

# The full-precision buffer of a sequence grows in steps of this many tokens, which bounds its unused room.
DENSE_STEP = 16
# Pages quantized in one call: bounds the float32 copies that a long prompt's flush needs.
FLUSH_PAGES = 32


def page_format(scheme: KVScheme, num_key_value_heads: int, key_head_dim: int, value_head_dim: int) -> PageFormat:
    """The page format of a scheme for a layer's shape.

    Raises:
        RecipeError: the head size cannot be packed at these bits.
    """
    for name, bits, dim in (
        ("key_bits", scheme.key_bits, key_head_dim),
        ("value_bits", scheme.value_bits, value_head_dim),
    ):
        if bits < 16 and dim % (16 // bits):
            raise RecipeError(
                f"[kv] {name} = {bits} needs a head size that is a multiple of {16 // bits}; this model has {dim}."
            )
    return PageFormat(
        num_key_value_heads=num_key_value_heads,
        key_head_dim=key_head_dim,
        value_head_dim=value_head_dim,
        page_size=scheme.page_size,
        key_bits=scheme.key_bits,
        value_bits=scheme.value_bits,
        key_group_size=scheme.key_group_size,
        value_group_size=scheme.value_group_for(value_head_dim) if scheme.value_bits < 16 else value_head_dim,
        token_norm=scheme.token_norm,
        token_norm_measure=scheme.token_norm_measure,
        key_range=scheme.key_range,
        value_range=scheme.value_range,
    )


@dataclass
class Sequence:
    """The stored tokens of one sequence: [sinks | dropped pages | pages | residual], columns ascending.

    Sinks and residual share one buffer, sinks first. `dropped` counts pages that left a sliding window for good.
    """

    keys: torch.Tensor  # [H, capacity, D]
    values: torch.Tensor  # [H, capacity, E]
    dense: int = 0  # tokens in the buffer
    sinks: int = 0  # how many of them are sinks
    dropped: int = 0
    pages: list[int] = field(default_factory=list)
    columns: TokenColumns = field(default_factory=TokenColumns)

    def append(self, keys: torch.Tensor, values: torch.Tensor, sink_tokens: int) -> None:
        """Append tokens [H, n, D], [H, n, E]; the first `sink_tokens` of the sequence become sinks."""
        n = keys.shape[1]
        if self.dense + n > self.keys.shape[1]:
            self.resize(self.dense + n)
        self.keys[:, self.dense : self.dense + n] = keys
        self.values[:, self.dense : self.dense + n] = values
        self.dense += n
        self.sinks = min(sink_tokens, max(self.sinks, self.dense if not self.pages and not self.dropped else 0))

    def resize(self, tokens: int) -> None:
        """Reallocate the buffer for `tokens` tokens, rounded up to a step."""
        capacity = -(-tokens // DENSE_STEP) * DENSE_STEP
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(old.shape[0], capacity, old.shape[2])
            new[:, : self.dense] = old[:, : self.dense]
            setattr(self, name, new)

    def remove_dense(self, start: int, stop: int) -> None:
        """Take tokens start..stop-1 out of the buffer and shrink it to what remains."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            kept = self.dense - (stop - start)
            new = old.new_empty(old.shape[0], -(-kept // DENSE_STEP) * DENSE_STEP, old.shape[2])
            new[:, :start] = old[:, :start]
            new[:, start:kept] = old[:, stop : self.dense]
            setattr(self, name, new)
        self.dense -= stop - start

    def dense_columns(self, device: torch.device) -> torch.Tensor:
        """Columns of the buffer's tokens, int64 [dense]."""
        residual = len(self.columns) - (self.dense - self.sinks)
        return torch.cat(
            [self.columns.span(0, self.sinks, device), self.columns.span(residual, len(self.columns), device)]
        )

    def copy(self) -> Sequence:
        """A copy that shares the pages (whose references the caller counts) and owns its buffer."""
        return Sequence(
            self.keys.clone(),
            self.values.clone(),
            self.dense,
            self.sinks,
            self.dropped,
            self.pages.copy(),
            self.columns.copy(),
        )


class PagedLayer(CacheLayerMixin):
    """The low-bit cache of one attention layer.

    Args:
        scheme: how tokens are stored; `rotate_values="folded"` asserts that the layer's weights carry the rotation.
        index: the layer's index in the model, for messages.
        sliding_window: the layer's window in tokens, or None.
        page_bytes: room for pages in bytes, taken at the first update and never exceeded; None grows as needed.
        keep_for_sharing: later layers read this layer's keys again within one forward pass, so pages are flushed one
            step late.
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
    ):
        super().__init__()
        self.scheme, self.index, self.page_bytes, self.keep_for_sharing = scheme, index, page_bytes, keep_for_sharing
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = False
        self.sequences: list[Sequence] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next update starts anew."""
        self.logical = 0  # columns seen, padding included
        self.real: torch.Tensor | None = None  # bool [B, logical] of committed columns; None while no padding was seen
        self.flushes = 0
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.sequences = []
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn shape, dtype and device from the first keys [B, H, T, D] and values [B, H, T, E]."""
        batch, heads, _, key_dim = key_states.shape
        value_dim = value_states.shape[-1]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.format = page_format(self.scheme, heads, key_dim, value_dim)
        name = f"layer {self.index} of the KV cache"
        self.pool = PagePool(self.format, self.dtype, self.device, name=name)
        if self.page_bytes is not None:
            self.pool = PagePool(self.format, self.dtype, self.device, self.page_bytes // self.pool.page_bytes, name)
        self.sequences = [
            Sequence(key_states.new_empty(heads, 0, key_dim), value_states.new_empty(heads, 0, value_dim))
            for _ in range(batch)
        ]
        self.is_initialized = True

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
            CacheError: the tokens are in pages already, or have left a sliding window that would need them again.
        """
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop({tokens_to_remove}) is not possible: pass the number of tokens to remove as a negative number."
            )
        if not self.is_initialized:
            return
        length = self.logical + tokens_to_remove
        for row, sequence in enumerate(self.sequences):
            kept = sequence.columns.before(length)
            removed = len(sequence.columns) - kept
            if removed > sequence.dense - (sequence.sinks if sequence.pages or sequence.dropped else 0):
                raise CacheError(
                    f"Sequence {row} cannot give back its newest {removed} tokens: layer {self.index} has already "
                    "quantized some of "
                    "them; call activate_past_recording() before the tokens are added, and crop at most a page at a "
                    "time."
                )
            if removed and sequence.dropped and self.sliding_window:
                oldest = sequence.columns.column(sequence.sinks + sequence.dropped * self.format.page_size)
                if oldest > length - self.sliding_window:
                    raise CacheError(
                        f"Sequence {row} cannot give back its newest {removed} tokens: layer {self.index} has "
                        "dropped tokens that its "
                        f"sliding window would need again; call activate_past_recording() before the tokens are added."
                    )
        for sequence in self.sequences:
            kept = sequence.columns.before(length)
            sequence.dense -= len(sequence.columns) - kept
            sequence.sinks = min(sequence.sinks, sequence.dense)
            sequence.columns.truncate(kept)
            if sequence.keys.shape[1] - sequence.dense >= DENSE_STEP:
                sequence.resize(sequence.dense)
        self.logical = length
        if self.real is not None:
            self.real = self.real[:, :length]
        self._flush(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences of `beam_idx`, in its order; pages are shared, residuals copied."""
        if not self.is_initialized:
            return
        chosen = [int(i) for i in beam_idx]
        for row in chosen:
            self.pool.retain(self.sequences[row].pages)
        for sequence in self.sequences:
            self.pool.release(sequence.pages)
        first_use = set()
        reordered = []
        for row in chosen:
            reordered.append(self.sequences[row].copy() if row in first_use else self.sequences[row])
            first_use.add(row)
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
        if self.scheme.rotate_keys == "hadamard":
            keys = hadamard_transform(keys)
        if self.scheme.rotate_values == "online":
            values = hadamard_transform(values)
        for row, sequence in enumerate(self.sequences):
            runs = chunk.runs(row, start, n)
            if not runs:
                continue
            whole = len(runs) == 1
            first, last = runs[0][0] - start, runs[-1][0] - start + runs[-1][1]
            if whole:
                new_keys, new_values = keys[row, :, first:last], values[row, :, first:last]
            else:
                kept = torch.cat([torch.arange(c - start, c - start + m, device=keys.device) for c, m in runs])
                new_keys, new_values = keys[row][:, kept], values[row][:, kept]
            sequence.append(new_keys, new_values, self.scheme.sink_tokens)
            for column, count in runs:
                sequence.columns.append(column, count)

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
        columns = chunk.query_columns
        output = queries.new_zeros(*queries.shape[:3], self.format.value_head_dim)
        plain = chunk.is_causal
        others = []
        for row, sequence in enumerate(self.sequences):
            tokens = len(sequence.columns)
            fresh = tokens == sequence.dense and length > 1 and sequence.columns.before(self.logical - length) == 0
            if not (fresh and plain and softcap is None and sinks is None):
                others.append(row)
            elif tokens:
                # A prompt with nothing behind it: its real columns attend to each other and nothing else.
                at = sequence.columns.span(0, tokens, queries.device) - (self.logical - length)
                keys, values = sequence.keys[:, :tokens], sequence.values[:, :tokens]
                output[row, :, at] = prompt_attention(queries[row][:, at], keys, values, scaling).to(output.dtype)
        if others:
            tiles, dense = (
                self._tiles(others, columns, chunk, length, queries.shape[1]),
                self._dense(others, columns, chunk, length),
            )
            attended = paged_attention(queries, tiles, dense, self.format, scaling, softcap, sinks)
            output[others] = attended[others].to(output.dtype)
        return hadamard_transform(output, inverse=True) if self.scheme.rotate_values == "online" else output

    def _visible(self, chunk: Chunk, row: int, query_columns: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return chunk.visible(row, query_columns, columns.to(query_columns.device))

    def _dense(self, rows: list[int], query_columns: torch.Tensor, chunk: Chunk, length: int) -> Iterator[DenseRun]:
        for row in rows:
            sequence = self.sequences[row]
            if not sequence.dense:
                continue
            visible = None
            if length > 1 or not chunk.is_causal:
                visible = self._visible(chunk, row, query_columns, sequence.dense_columns(query_columns.device))
            yield DenseRun(row, sequence.keys[:, : sequence.dense], sequence.values[:, : sequence.dense], visible)

    def _tiles(
        self, rows: list[int], query_columns: torch.Tensor, chunk: Chunk, length: int, query_heads: int
    ) -> Iterator[PageTile]:
        size = self.format.page_size
        entries = [(row, position) for row in rows for position in range(len(self.sequences[row].pages))]
        step = pages_per_tile(query_heads, length, self.format)
        for begin in range(0, len(entries), step):
            part = entries[begin : begin + step]
            pages = self.pool.read([self.sequences[row].pages[position] for row, position in part])
            visible = None
            # Pages are older than every query, so only windows and other special masks can hide them.
            if not chunk.is_causal:
                masks = []
                for row, position in part:
                    sequence = self.sequences[row]
                    first = sequence.sinks + (sequence.dropped + position) * size
                    masks.append(self._visible(chunk, row, query_columns, sequence.columns.span(first, first + size)))
                visible = torch.stack(masks)
            yield PageTile(pages, torch.tensor([row for row, _ in part], device=self.device), visible)

    def settle(self) -> None:
        """After the attention of committed tokens: quantize the pages that are complete."""
        if not self.keep_for_sharing:
            self._flush(self.format.page_size if self.record_past else 0)

    def _flush(self, held_back: int) -> None:
        """Quantize complete pages of all sequences but for the newest tokens that the scheme, or the caller, holds
        back.
        """
        if not self.is_initialized:
            return
        size = self.format.page_size
        held_back = max(held_back, self.scheme.key_recent_tokens)
        batch: list[tuple[Sequence, int, int]] = []  # sequence, first token in its buffer, pages
        for sequence in self.sequences:
            count = max(0, (sequence.dense - sequence.sinks - held_back) // size)
            self._drop_pages_outside_window(sequence, count)
            skipped = self._pages_outside_window(sequence, count)
            if skipped:
                sequence.dropped += skipped
                sequence.remove_dense(sequence.sinks, sequence.sinks + skipped * size)
                count -= skipped
            if count:
                batch.append((sequence, sequence.sinks, count))
        for sequence, start, count in batch:
            for first in range(0, count, FLUSH_PAGES):
                pages = min(FLUSH_PAGES, count - first)
                tokens = slice(start + first * size, start + (first + pages) * size)
                sequence.pages += self.pool.write(self._quantize(sequence.keys[:, tokens], sequence.values[:, tokens]))
            sequence.remove_dense(start, start + count * size)
            self.flushes += count

    def _quantize(self, keys: torch.Tensor, values: torch.Tensor):
        def paged(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(1, (-1, self.format.page_size)).transpose(0, 1)

        try:
            return quantize_pages(paged(keys), paged(values), self.format)
        except NumericError as error:
            index = getattr(error, "index", None)
            head = f", KV head {index[1]}" if index is not None and len(index) > 1 else ""
            raise NumericError(
                f"Layer {self.index}{head}: the cache cannot store these keys or values: {error}"
            ) from error

    def _horizon(self) -> int:
        """Columns below this one are invisible to every later query of a sliding layer."""
        slack = self.format.page_size if self.record_past else 0
        return self.logical - self.sliding_window + 1 - slack if self.sliding_window else 0

    def _drop_pages_outside_window(self, sequence: Sequence, coming: int) -> None:
        """Release leading pages that no later query can see."""
        size, outside = self.format.page_size, 0
        while outside < len(sequence.pages):
            last = sequence.sinks + (sequence.dropped + outside + 1) * size - 1
            if sequence.columns.column(last) >= self._horizon():
                break
            outside += 1
        if outside:
            self.pool.release(sequence.pages[:outside])
            del sequence.pages[:outside]
            sequence.dropped += outside

    def _pages_outside_window(self, sequence: Sequence, count: int) -> int:
        """How many of the `count` pages about to be written are invisible already (only once no older page is left)."""
        if sequence.pages or not self.sliding_window:
            return 0
        size, outside = self.format.page_size, 0
        first = sequence.sinks + sequence.dropped * size
        while outside < count and sequence.columns.column(first + (outside + 1) * size - 1) < self._horizon():
            outside += 1
        return outside

    # --- measurement

    def tokens(self) -> int:
        """Tokens stored over all sequences, shared pages counted once per sequence."""
        return sum(len(s.pages) * self.format.page_size + s.dense for s in self.sequences)

    def bytes_used(self) -> int:
        """Bytes of pages in use and of full-precision tokens, from the tensors' own sizes."""
        dense = sum(s.dense * (s.keys.shape[0] * (s.keys.shape[2] + s.values.shape[2])) for s in self.sequences)
        return self.pool.pages_used * self.pool.page_bytes + dense * self.dtype.itemsize

    def bytes_allocated(self) -> int:
        """Bytes of the pool's chunks and of the full-precision buffers."""
        return self.pool.bytes_allocated + sum(s.keys.nbytes + s.values.nbytes for s in self.sequences)
