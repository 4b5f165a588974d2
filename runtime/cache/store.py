"""What one layer of the cache stores: per sequence sink tokens, pages, spans and a residual window."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.device import fall_back
from kvconvert.kernels.pages import KeyPages, ValuePages, empty_keys, empty_values
from kvconvert.kernels.spans import Span
from kvconvert.methods import KVScheme
from kvconvert.runtime.cache.block_tables import BlockTables
from kvconvert.runtime.cache.formats import layer_format, rotations, span_format, with_plan
from kvconvert.runtime.cache.forward_pass import ModalityMask
from kvconvert.runtime.cache.pool import PagePool
from kvconvert.runtime.cache.sequence import CPU_GROWTH, GPU_GROWTH, BufferGrowth, KVSide, Sequence


class LayerStore:
    """The keys and values of one attention layer, for every sequence of a batch.

    New tokens are parked, committed once the padding is known (`append`), attended to (`attend`) and compressed after
    that attention (`compress`): a prompt attends to itself in full precision, and a page, once written, is never
    quantized again. Schemes that compress whole prompts leave a prompt in full precision until it is sealed.

    Args:
        scheme: how tokens are stored; what it says of weights is taken for true, and its budget is this layer's own.
        index: the layer's index in the model, for messages.
        sliding_window: the layer's window in tokens, or None.
        page_bytes: room for pages in bytes, taken at the first tokens and never exceeded; None grows as needed.
        keep_for_sharing: later layers read this layer's keys again within one forward pass, so pages are flushed one
            step late.
        plan: this layer's part of the KV plan, of which `allocate` takes what the scheme needs (`formats.with_plan`).
        growth: how the full-precision buffers grow; None chooses by device.

    Attributes:
        rotations: what is rotated at run time.
        record_past: keep the newest tokens uncompressed until `crop` says which of them stay (assisted decoding).
        seal_at_once: the next forward pass holds the whole prompt.
        logical: positions so far, padding included.
        attended: positions whose own attention is over.
        real: bool [B, logical] of committed positions; None while there was no padding.
        pending: parked keys [B, H, T, D] and values [B, H, T, E]; None once they are committed.
        modality_mask: the tokens of the scheme's modality in the next forward pass.
        sequences: one per row of the batch; none before the first tokens.
        version: changes with whatever block tables describe: pages, spans and the order of sequences.
        flushes: pages quantized so far.
        fallbacks: calls that a slower path served than the one meant for the device.
        dtype, device: of the tokens; these and the following exist once `allocate` was called.
        format, span_format: of pages, and of spans (None for schemes of pages).
        key_pool, value_pool: pages in use, and free ones.
        block_tables: where all of it lies, for kernels.
        clamped_rows: int64 scalar, query rows for which CalibQuant's shift had to make different scores equal.
        flag: what page kernels raise on numbers that cannot be stored; None before the first flush.
    """

    def __init__(
        self,
        scheme: KVScheme,
        index: int,
        *,
        sliding_window: int | None = None,
        page_bytes: int | None = None,
        keep_for_sharing: bool = False,
        plan: Mapping[str, torch.Tensor] | None = None,
        growth: BufferGrowth | None = None,
    ):
        self.scheme, self.index, self.page_bytes, self.keep_for_sharing = scheme, index, page_bytes, keep_for_sharing
        self.sliding_window = sliding_window
        self.plan, self.growth = plan or {}, growth
        self.rotations = rotations(scheme)
        self.record_past = False
        self.seal_at_once = False
        self.reset()

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.scheme.page_size

    def reset(self) -> None:
        """Drop everything stored; the next tokens start a new cache."""
        self.logical = 0
        self.attended = 0
        self.real: torch.Tensor | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.modality_mask: ModalityMask | None = None
        self.sequences: list[Sequence] = []
        self.version = 0
        self.flushes = 0
        self.fallbacks = 0

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Prepare for tokens of the batch size, shape, dtype and device of these: [B, H, T, D] and [B, H, T, E].

        Raises:
            RecipeError: the scheme does not fit the shape, or needs tensors that the KV plan lacks.
        """
        batch, heads, _, key_dim = keys.shape
        value_dim = values.shape[-1]
        self.dtype, self.device = keys.dtype, keys.device
        self.format = with_plan(layer_format(self.scheme, heads, key_dim, value_dim), self.plan, self.device)
        self.span_format = span_format(self.scheme)
        name = f"layer {self.index} of the KV cache"
        capacity = None
        if self.page_bytes is not None:
            meta = torch.device("meta")
            capacity = self.page_bytes // (self._empty_keys(1, meta).nbytes + self._empty_values(1, meta).nbytes)
        self.key_pool: PagePool[KeyPages] = PagePool(self._empty_keys, self.device, capacity, name)
        self.value_pool: PagePool[ValuePages] = PagePool(self._empty_values, self.device, capacity, name)
        growth = self.growth or (GPU_GROWTH if keys.is_cuda else CPU_GROWTH)
        self.sequences = [
            Sequence(
                KVSide(keys.new_empty(heads, 0, key_dim), growth), KVSide(values.new_empty(heads, 0, value_dim), growth)
            )
            for _ in range(batch)
        ]
        self.clamped_rows = torch.zeros((), dtype=torch.int64, device=self.device)
        self.flag: torch.Tensor | None = None
        self.block_tables = BlockTables(
            self.index, self.scheme, self.format, self.key_pool, self.value_pool, self.dtype
        )

    def _empty_keys(self, count: int, device: torch.device) -> KeyPages:
        return empty_keys(count, self.format.keys, self.dtype, device)

    def _empty_values(self, count: int, device: torch.device) -> ValuePages:
        return empty_values(count, self.format.values, self.dtype, device)

    def park(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold new keys [B, H, T, D] and values [B, H, T, E] until their padding is known.

        Raises:
            CacheError: the batch size differs from that of the tokens stored.
        """
        if keys.shape[0] != len(self.sequences):
            raise CacheError(
                f"The cache holds {len(self.sequences)} sequences and layer {self.index} was given {keys.shape[0]}; "
                "use a new cache for another batch."
            )
        self.pending = (keys, values)
        self.logical += keys.shape[2]

    def reorder(self, rows: list[int]) -> None:
        """Keep the sequences of these rows, in this order; repeated ones share pages and have buffers of their own."""
        if not self.sequences:
            return
        for row in rows:
            self.key_pool.retain(self.sequences[row].keys.pages)
            self.value_pool.retain(self.sequences[row].values.pages)
        for sequence in self.sequences:
            self.key_pool.release(sequence.keys.pages)
            self.value_pool.release(sequence.values.pages)
        taken: set[int] = set()
        reordered = []
        for row in rows:
            reordered.append(self.sequences[row].copy() if row in taken else self.sequences[row])
            taken.add(row)
        self.sequences = reordered
        self.version += 1
        if self.real is not None:
            self.real = self.real[torch.tensor(rows, device=self.real.device)]

    def fall_back(self, operation: str, reason: str) -> None:
        """Count a call that a slower path serves than the one meant for this device, and warn once."""
        self.fallbacks += 1
        fall_back(operation, reason)

    def tokens(self) -> int:
        """Tokens stored over all sequences, shared pages counted once per sequence."""
        return sum(sequence.stored(self.page_size) for sequence in self.sequences)

    def residual_tokens(self) -> int:
        """Tokens over all sequences whose key or value is in full precision, sink tokens included."""
        return sum(max(sequence.keys.buffered, sequence.values.buffered) for sequence in self.sequences)

    def pages(self) -> int:
        """Key and value pages in use; one page's worth of tokens counts 1."""
        return max(self.key_pool.pages_used, self.value_pool.pages_used)

    def numbers_per_token(self) -> int:
        """Key and value numbers of one token over all KV heads."""
        return self.format.keys.heads * (self.format.keys.head_dim + self.format.values.head_dim)

    def bytes_used(self) -> int:
        """Bytes of pages in use, spans, full-precision tokens and kept positions, from the tensors' own sizes."""
        residual = sum(
            side.buffered * side.buffer.shape[0] * side.buffer.shape[2]
            for sequence in self.sequences
            for side in (sequence.keys, sequence.values)
        )
        pages = sum(pool.pages_used * pool.page_bytes for pool in (self.key_pool, self.value_pool))
        return pages + residual * self.dtype.itemsize + self._other_bytes()

    def bytes_allocated(self) -> int:
        """Bytes of the pools' chunks, spans and full-precision buffers."""
        buffers = sum(s.keys.buffer.nbytes + s.values.buffer.nbytes for s in self.sequences)
        return self.key_pool.bytes_allocated + self.value_pool.bytes_allocated + buffers + self._other_bytes()

    def _other_bytes(self) -> int:
        # Beams share spans.
        spans: dict[int, Span] = {id(span): span for sequence in self.sequences for span, _ in sequence.spans}
        extra = [t for s in self.sequences for t in (s.positions.kept, s.attention_mass) if t is not None]
        return sum(span.nbytes for span in spans.values()) + sum(tensor.nbytes for tensor in extra)
