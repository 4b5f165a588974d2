"""One attention layer of the cache: per sequence sink tokens, pages, spans and residual, behind transformers' layer protocol.

`update()` only parks new keys and values; the attention function commits them once it knows which columns are padding
(`runtime/hf/attention.py`). Pages are flushed after the attention of the tokens that fill them, so a prompt attends to
itself in full precision, and a page, once written, is never quantized again. Schemes that treat whole prompts leave a
prompt in full precision until it is sealed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers.cache_utils import CacheLayerMixin

from kvconvert.errors import CacheError
from kvconvert.kernels.device import fall_back
from kvconvert.kernels.pages import KeyPages, ValuePages, empty_keys, empty_values
from kvconvert.kernels.spans import Span
from kvconvert.methods import KVScheme
from kvconvert.runtime.cache.append import commit
from kvconvert.runtime.cache.attend import attend
from kvconvert.runtime.cache.block_tables import BlockTables
from kvconvert.runtime.cache.compress import flush, seal
from kvconvert.runtime.cache.crop import crop
from kvconvert.runtime.cache.formats import layer_format, span_format, static_scales
from kvconvert.runtime.cache.pool import PagePool
from kvconvert.runtime.cache.sequence import KVSide, Sequence
from kvconvert.runtime.hf.handles import Chunk, KeyHandle
from kvconvert.runtime.hf.modality import ModalityMask


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
            `static_key_scale`, `static_key_zero_point` float16 [H, D], `static_value_scale`, `static_value_zero_point`
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
        self.fallbacks = 0
        self.version = 0  # of what `places` tells: pages, spans, and the order of sequences
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.marks: ModalityMask | None = None  # tokens of the scheme's modality in the next forward pass
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
            Sequence(
                KVSide(key_states.new_empty(heads, 0, key_dim)), KVSide(value_states.new_empty(heads, 0, value_dim))
            )
            for _ in range(batch)
        ]
        self.clamped_rows = torch.zeros((), dtype=torch.int64, device=self.device)
        self.flag: torch.Tensor | None = None  # what page kernels raise; made when they first run
        self.places = BlockTables(self)
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
                'implementation "kvconvert"? Call model.set_attn_implementation("kvconvert").'
            )
        if key_states.shape[0] != len(self.sequences):
            raise CacheError(
                f"The cache holds {len(self.sequences)} sequences and layer {self.index} was given "
                f"{key_states.shape[0]}; use a new cache for another batch."
            )
        if self.keep_for_sharing:
            flush(self, 0)
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
        crop(self, tokens_to_remove)

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
        self.version += 1
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

    def commit(self, chunk: Chunk, queries: torch.Tensor | None = None) -> torch.Tensor | None:
        """Store the parked tokens whose columns are real; later calls in the same forward pass do nothing.

        Args:
            chunk: of the forward pass.
            queries: [B, Hq, T, D] of the same pass, to be rotated along with the keys where one kernel does both.

        Returns:
            the rotated queries where it did, for `attend(..., rotated=True)`; else None.

        Raises:
            CacheError: the mask changed its mind about columns that are already stored.
        """
        return commit(self, chunk, queries)

    def attend(
        self,
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
        return attend(self, queries, chunk, scaling, softcap, sink_logits, rotated)

    def end_forward(self) -> None:
        """After the attention of committed tokens: compress what is complete."""
        self.attended = self.logical
        if self.seal_at_once:
            self.seal_at_once = False
            self.seal()
        if not self.keep_for_sharing:
            flush(self, self.page_size if self.record_past else 0)

    def seal(self) -> None:
        """The prompt is complete: quantize it as a span, or keep what it needs; nothing to do for page methods."""
        seal(self)

    def fall_back(self, operation: str, reason: str) -> None:
        """Count a call that a slower path serves than the one meant for this device, and warn once."""
        self.fallbacks += 1
        fall_back(operation, reason)

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
