"""What one layer of the cache stores: per sequence full-precision tokens, pages and spans."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kvconvert.cache import layer_format
from kvconvert.cache.plan_tensors import with_plan
from kvconvert.errors import CacheError, UsageError, counted, first_line
from kvconvert.kernels.device import fall_back, upload
from kvconvert.kernels.latent import unsupported as latents_unsupported
from kvconvert.kernels.page_formats import page_bytes
from kvconvert.kernels.pages import PAGE_SIZE, PageTensors
from kvconvert.kernels.rotate import KERNEL_DTYPES, largest_appended
from kvconvert.kernels.spans import Span, quantize_span
from kvconvert.methods import KVScheme
from kvconvert.runtime.cache.forward_pass import ForwardPass, PassTokens
from kvconvert.runtime.cache.groups import LayerGroup
from kvconvert.runtime.cache.pool import PageStorage, TokenBuffer
from kvconvert.runtime.cache.sequence import SealSpan, Sequence


@dataclass
class LayerRow:
    """One sequence's tensors in one layer.

    Attributes:
        keys, values: full-precision tokens.
        spans: prompts that were compressed as a whole.
        kept: positions of the tokens that survived an eviction, int32 [H, n]; None without one.
        attention_mass: attention that the open prompt's tokens have received so far, float32 [H, n], or the largest
            weight from its repetition; None unless the scheme evicts.
    """

    keys: TokenBuffer
    values: TokenBuffer
    spans: list[Span] = field(default_factory=list)
    kept: torch.Tensor | None = None
    attention_mass: torch.Tensor | None = None

    def add_attention_mass(self, sums: torch.Tensor) -> None:
        """Add one chunk's column sums [H, n] to the attention mass of the open prompt's tokens."""
        if self.attention_mass is not None:
            sums[:, : self.attention_mass.shape[1]] += self.attention_mass
        self.attention_mass = sums

    def copy(self) -> LayerRow:
        """A copy that shares spans and owns its buffers."""
        mass = None if self.attention_mass is None else self.attention_mass.clone()
        return LayerRow(self.keys.copy(), self.values.copy(), self.spans.copy(), self.kept, mass)


class LayerStore:
    """The keys and values of one attention layer, for every sequence of a batch.

    New tokens are parked, committed once the padding is known (`append`), attended to (`attend`) and compressed after
    that attention (`compress`): a prompt attends to itself in full precision, and a page, once written, is never
    quantized again. Where tokens lie is planned by the layer's group, for all of its layers.

    Args:
        scheme: how tokens are stored; whether weights are folded as it says is not checked here, and its budget is this
            layer's own.
        index: the layer's index in the model, for messages.
        group: which plans for it.
        page_bytes: room for pages in bytes, taken at the first tokens and never exceeded; None grows as needed.
        plan: this layer's part of the KV plan, of which `allocate` takes what the scheme needs (`with_plan`).
        pages: another store of the same layer, in whose storage this one has its pages.
        is_latent: whether the layer has latent attention: latents are its keys, and RoPE parts its values.

    Attributes:
        heads_apart: rows that a sequence has, one for each KV head where these share a budget, else 1.
        is_indexed: whether an indexer chooses the tokens that the layer attends to.
        in_chunks: whether tokens attend to their own chunk alone, of those that a sequence falls into from its first
            token on (Llama 4).
        up_projections: of a layer of latents, W_UK [Hq, D, R] and W_UV [Hq, E, R], once attention needs them.
        pending: parked keys [B, H, T, D] and values [B, H, T, E]; None once they are committed.
        rows: the tensors of each sequence.
        forward_pass: the latest that the layer took part in; passes: how many there were.
        ended: the latest pass whose attention in this layer is over.
        flushes: pages quantized so far.
        fallbacks: calls that a slower path served than the one meant for the device.
        dtype, device: of the tokens; these and the following exist once `allocate` was called.
        format: how they are stored; scorer: what predicts scores where the scheme says so, or None.
        key_pages, value_pages: their storage.
        origin: a small tensor of the tokens' dtype and device, from which addresses of buffers count.
        empty_tokens: keys [H, 0, D] and values [H, 0, E] of the shape, dtype and device of tokens.
        clamped_rows: int64 scalar, query rows for which CalibQuant's shift had to make different scores equal.
        flag: what page kernels raise on numbers that cannot be stored; None before the first flush.
    """

    def __init__(
        self,
        scheme: KVScheme,
        index: int,
        group: LayerGroup[LayerStore],
        *,
        page_bytes: int | None = None,
        plan: Mapping[str, torch.Tensor] | None = None,
        pages: LayerStore | None = None,
        is_latent: bool = False,
    ):
        self.is_latent, self.up_projections, self.is_indexed, self.in_chunks = is_latent, None, False, False
        self.scheme, self.index, self.group, self.page_bytes = scheme, index, group, page_bytes
        self.plan, self.pages = plan or {}, pages
        self.heads_apart = 1
        group.add(self, index)
        self.reset()

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The group's sequences, as of this layer's latest step."""
        if self.group.unapplied_tokens:
            return self.group.sequences
        return self._sequences

    @sequences.setter
    def sequences(self, sequences: tuple[Sequence, ...]) -> None:
        self._sequences = sequences

    @property
    def logical(self) -> int:
        """Positions so far as this layer knows them, padding included."""
        latest = self.group.forward_pass
        if latest is None or latest is self.forward_pass:
            return self.group.logical
        return latest.start

    def reset(self) -> None:
        """Drop everything stored; the next tokens start a new cache."""
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sequences: tuple[Sequence, ...] = ()
        self.rows: list[LayerRow] = []
        self.forward_pass: ForwardPass | None = None
        self.ended: ForwardPass | None = None
        self.passes = self.group.passes
        self.flushes = 0
        self.fallbacks = 0
        if self.pages is None and self.is_allocated_storage:
            # The group begins with numbers of its own.
            del self.key_pages, self.value_pages

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Prepare for tokens of the batch size, shape, dtype and device of these: [B, H, T, D] and [B, H, T, E].

        Raises:
            RecipeError: the scheme does not fit the shape, or needs tensors that the KV plan lacks.
            UsageError: there is no memory for all pages of a cache that has a limit.
        """
        batch, heads, _, key_dim = keys.shape
        value_dim = values.shape[-1]
        self.dtype, self.device = keys.dtype, keys.device
        twin, shape = self.pages, {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        if twin is not None and twin.knows_tokens and twin.device == self.device:
            # What it needs of the plan is on the device already.
            self.format, self.scorer = twin.format, twin.scorer
        else:
            format = layer_format(self.scheme, **shape, latent=self.is_latent)
            self.format = with_plan(format, self.scheme, self.plan, self.device)
            self.scorer = self.group.registry.scorer(self) if self.scheme.predicts else None
        group = self.group
        if self.is_allocated_storage and (self.key_pages.dtype, self.key_pages.device) == (self.dtype, self.device):
            pass  # a cache beside this one has seen tokens already
        elif self.pages is not None and self.pages.is_allocated_storage:
            self.key_pages, self.value_pages = self.pages.key_pages, self.pages.value_pages
        else:
            try:
                self._make_pages()
            except (MemoryError, RuntimeError) as error:
                if self.page_bytes is None:
                    raise
                raise UsageError(
                    f"`kv_memory` cannot be allocated, of which a layer has {self.page_bytes:,} bytes "
                    f"({first_line(error)}); give less, or leave it out to let the cache grow."
                ) from error
            if self.pages is not None:
                self.pages.key_pages, self.pages.value_pages = self.key_pages, self.value_pages
        self.clamped_rows = torch.zeros((), dtype=torch.int64, device=self.device)
        self.flag: torch.Tensor | None = None
        self.origin = keys.new_zeros(8)
        self.empty_tokens = keys.new_empty(heads, 0, key_dim), values.new_empty(heads, 0, value_dim)
        if twin is not None and not twin.knows_tokens:
            twin._learn(self)
        # The group may be further already: the first layers of the first pass come before this one.
        self.sequences = (Sequence(),) * batch
        group.sequences = group.sequences or self.sequences
        self.rows = [self.empty_row() for _ in self.sequences]

    def _make_pages(self) -> None:
        """Storage of pages: all that there may be at once, or none yet where their number has no limit."""
        group = self.group
        if self.page_bytes is not None:
            if self.device.type == "cpu":  # refused at once, before there are numbers of all pages
                torch.empty(self.page_bytes, dtype=torch.uint8)
            formats = self.format.keys, self.format.values
            both = sum(page_bytes(f, self.dtype.itemsize) for f in formats)
            capacity = self.page_bytes // both
            group.key_numbers.limit(capacity)
            group.value_numbers.limit(capacity)
        # Either both or, where one cannot be made, neither.
        keys = PageStorage(self.format.keys, self.dtype, self.device, group.key_numbers)
        values = PageStorage(self.format.values, self.dtype, self.device, group.value_numbers)
        self.key_pages, self.value_pages = keys, values

    def adopt(self, other: LayerStore, rows: int) -> None:
        """Prepare for `rows` sequences of the shape, dtype and device that another store of this layer holds."""
        self._learn(other)
        self.clamped_rows, self.flag = torch.zeros((), dtype=torch.int64, device=self.device), None
        self.sequences = self.group.sequences
        self.rows = [self.empty_row() for _ in range(rows)]

    def _learn(self, other: LayerStore) -> None:
        """Know what another store of this layer knows of its tokens."""
        for name in ("dtype", "device", "format", "scorer", "key_pages", "value_pages", "origin", "empty_tokens"):
            setattr(self, name, getattr(other, name))

    def take_rows(self, row: int, other: LayerStore, by: int, rows: int) -> None:
        """Take the only sequence of another store of this layer as row `row` of `rows`, or as that row and the next
        where KV heads have rows of their own; its positions are `by` further.

        The other store has to be reset afterwards.
        """
        if not self.is_allocated:
            self.adopt(other, rows)
        for index, tensors in enumerate(other.rows, row):
            self.rows[index] = tensors if tensors.kept is None else replace(tensors, kept=tensors.kept + by)
        self.flushes += other.flushes
        self.fallbacks += other.fallbacks
        self.clamped_rows = self.clamped_rows + other.clamped_rows

    def take_heads(self, other: LayerStore) -> None:
        """Hold, as open prompts, the sequences of another store of this layer, a row for each KV head, in the memory in
        which they lie.

        This store has rows for them without tokens; the other one has to be reset afterwards.
        """
        heads = range(self.heads_apart)
        self.rows = [
            LayerRow(*(TokenBuffer(side.tensor[head : head + 1]) for side in (row.keys, row.values)))
            for row in other.rows
            for head in heads
        ]
        self.group.take_prompts(other.group, self.heads_apart)

    def empty_row(self) -> LayerRow:
        """Room for a sequence without tokens."""
        return LayerRow(*map(TokenBuffer, self.empty_tokens))

    def park(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold new keys [B, H, T, D] and values [B, H, T, E] until their padding is known.

        The first layer of its group begins a forward pass.

        Raises:
            CacheError: the batch size differs from that of the tokens stored, another layer of the group was given
                another number of tokens, this one was passed over, or what is stored has become unusable.
        """
        if keys.shape[0] != len(self.sequences):
            raise CacheError(
                f"The cache holds {counted(len(self.sequences) // self.heads_apart, 'sequence')} and layer "
                f"{self.index} was given {keys.shape[0] // self.heads_apart}; use a new cache for another batch."
            )
        if self.group.rehearsal is not None:
            self.forward_pass, self.pending = self.group.rehearsal, (keys, values)
            return
        latest, length = self.group.forward_pass, keys.shape[2]
        if latest is None or latest is self.forward_pass:
            latest = self.group.begin(length)
        self.passes += 1
        if self.passes != self.group.passes or latest.length != length:
            raise CacheError(
                f"Layer {self.index} did not receive the same tokens as {self.group.name}: a cache needs the keys and "
                "values of every layer at every step."
            )
        self.forward_pass, self.pending = latest, (keys, values)

    @property
    def is_allocated_storage(self) -> bool:
        """Whether there is storage for pages."""
        return "key_pages" in self.__dict__

    @property
    def knows_tokens(self) -> bool:
        """Whether it has seen the shape, dtype and device of tokens, here or in a cache beside."""
        return "empty_tokens" in self.__dict__ and self.is_allocated_storage

    @property
    def is_allocated(self) -> bool:
        """Whether the layer knows shape, dtype and device of its tokens."""
        return bool(self.rows)

    @property
    def appends_in_one_launch(self) -> bool:
        """Whether the append kernel takes tokens of this shape and dtype, and a kernel attends to heads so large."""
        sides = zip((self.format.keys, self.format.values), self.format.rotations, strict=True)
        return self.dtype in KERNEL_DTYPES and all(
            side.head_dim % 8 == 0 and side.head_dim <= largest_appended(rotated or not self.is_latent)
            for side, rotated in sides
        )

    @property
    def latents_unsupported(self) -> str | None:
        """Why no kernel attends to this layer's latents; None if one does."""
        if self.format.half_quantized:
            return "latents and RoPE parts stay in full precision for different numbers of tokens"
        return latents_unsupported(self.format, self.dtype, self.device)

    def reserve(self, row: int, after: Sequence) -> bool:
        """Make room for a row's tokens as they will be; whether its buffers have moved."""
        before, tensors = self.sequences[row], self.rows[row]
        moved = tensors.keys.reserve(after.keys.buffered, before.keys.buffered)
        return tensors.values.reserve(after.values.buffered, before.values.buffered) or moved

    def reorder(self, rows: list[int]) -> None:
        """Keep the tensors of these rows, in this order; repeated ones get buffers of their own."""
        taken: set[int] = set()
        reordered = []
        for row in rows:
            reordered.append(self.rows[row].copy() if row in taken else self.rows[row])
            taken.add(row)
        self.rows = reordered

    def buffer(self, row: int, is_key: bool) -> TokenBuffer:
        """The full-precision keys or values of a row."""
        return self.rows[row].keys if is_key else self.rows[row].values

    def seal_span(self, work: SealSpan) -> None:
        """Quantize a prompt as spans."""
        row, parts = self.rows[work.row], list(work.parts)
        keys, values = (_joined([side.tokens(*part) for part in parts]) for side in (row.keys, row.values))
        for side in zip(keys.split(work.lengths, 1), values.split(work.lengths, 1), strict=True):
            row.spans.append(quantize_span(*side, self.format.span, self.format.key_tensors.feedback))
        for side in (row.keys, row.values):
            side.remove(parts, work.used)

    def fall_back(self, operation: str, reason: str) -> None:
        """Count a call that a slower path serves than the one meant for this device, and warn once."""
        self.fallbacks += 1
        fall_back(operation, reason)

    def positions(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Positions of a row's tokens start..stop-1: int64 [n] on the device, or [H, n] with kept ones among them."""
        sequence, kept = self.sequences[row], self.rows[row].kept
        plain = sequence.positions.slice(start - sequence.kept, stop - sequence.kept, self.device)
        if start >= sequence.kept:
            return plain
        first = kept[:, start : min(stop, sequence.kept)].long()
        return torch.cat([first, plain.expand(len(first), -1)], 1)

    def residual_positions(self, row: int) -> torch.Tensor:
        """Positions of the tokens of `residual`: int64 [n] or [H, n]."""
        sequence = self.sequences[row]
        first = self.positions(row, 0, sequence.sink_tokens)
        after = sequence.page_position(sequence.pages)
        rest = self.positions(row, max(after, sequence.sink_tokens), len(sequence))
        if first.dim() != rest.dim():
            heads = max(first, rest, key=torch.Tensor.dim).shape[0]
            first, rest = (x if x.dim() == 2 else x.expand(heads, -1) for x in (first, rest))
        return torch.cat([first, rest], -1)

    def page_positions(self, row: int, page: int, count: int = 1) -> torch.Tensor:
        """Positions of the tokens of pages from page `page` on (0 is the first one not dropped): [n] or [H, n]."""
        first = self.sequences[row].page_position(page)
        return self.positions(row, first, first + count * PAGE_SIZE)

    def residual(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of sink tokens, then of the residual window after the last page of either side: [H, n, .]."""
        sequence, tensors, parts = self.sequences[row], self.rows[row], []
        count, sinks = sequence.residual, sequence.sink_tokens
        for side, buffer in ((sequence.keys, tensors.keys), (sequence.values, tensors.values)):
            skip, tokens = side.buffered - count, buffer.tensor[:, : side.buffered]
            parts.append(torch.cat([tokens[:, :sinks], tokens[:, sinks + skip :]], 1) if skip else tokens)
        return parts[0], parts[1]

    def read_pages(
        self, part: list[tuple[int, int]], numbers: tuple[int, ...] | None, is_key: bool, most: int
    ) -> list[PageTensors] | torch.Tensor:
        """Pages (row, page) of these numbers, see `PageStorage.parts`, or without numbers the full-precision tokens
        [1, H, P, channels] of the only one.
        """
        if numbers is not None:
            return (self.key_pages if is_key else self.value_pages).parts(numbers, most)
        row, page = part[0]
        sequence = self.sequences[row]
        start = sequence.buffer_index(sequence.keys if is_key else sequence.values, page)
        return self.buffer(row, is_key).tokens(start, start + PAGE_SIZE)[None]

    def described_rows(self) -> torch.Tensor:
        """The layer's lines of `GroupTables.described`, as of now, counted from its origin."""
        places = buffer_places(self.rows, self.origin, self.dtype) // 8
        tokens = np.array([sequence.residual_places for sequence in self.sequences])
        return upload(np.concatenate([places, tokens], 1), self.device)

    def stored_mask(self, chunk: PassTokens, queries: slice = slice(None)) -> torch.Tensor | None:
        """Which stored tokens these queries of a forward pass attend to; None where each attends to all.

        Returns:
            uint8 [B, H or 1, T, n] with n the tokens of the fullest row. A row's tokens stand in the order of its pages
            (quantized on both sides or on one), its spans and its residual tokens, one right after the other; what
            follows is 0. Sink tokens in a page are as visible as outside of it.
        """
        positions = chunk.query_positions[queries]
        if chunk.is_causal and len(chunk.query_positions) == 1:
            return None
        seen = []
        for row, sequence in enumerate(self.sequences):
            stored = [self.page_positions(row, 0, sequence.pages)]
            stored += [span.positions.slice(0, span.tokens, self.device) for span in sequence.spans]
            stored.append(self.residual_positions(row))
            heads = max(part.shape[0] if part.dim() == 2 else 1 for part in stored)
            stored = [part.expand(heads, -1) for part in stored]
            seen.append(chunk.visible(row, positions, torch.cat(stored, -1)))
        heads, tokens = (max(part.shape[axis] for part in seen) for axis in (0, 2))
        mask = torch.zeros(len(seen), heads, len(positions), tokens, dtype=torch.uint8, device=self.device)
        for row, part in enumerate(seen):
            mask[row, :, :, : part.shape[2]] = part
        return mask

    def tokens(self) -> int:
        """Tokens stored over all sequences, the mean over heads; shared pages counted once per sequence."""
        return sum(sequence.stored for sequence in self.sequences) // self.heads_apart

    def residual_tokens(self) -> int:
        """Tokens over all sequences whose key or value is in full precision, sink tokens included."""
        return sum(sequence.buffered for sequence in self.sequences) // self.heads_apart

    def pages_used(self) -> int:
        """Key and value pages in use; one page's worth of tokens counts 1."""
        return max(self.group.key_numbers.used, self.group.value_numbers.used)

    def numbers(self) -> int:
        """Keys and values that the model's own cache would hold: of all tokens, or of those in the sliding window."""
        window = self.group.sliding_window
        tokens = sum(min(sequence.seen, window or sequence.seen) for sequence in self.sequences)
        return tokens * self.format.keys.heads * (self.format.keys.head_dim + self.format.values.head_dim)

    def bytes_used(self) -> int:
        """Bytes of pages in use, spans, full-precision tokens and kept positions, from the tensors' own sizes."""
        residual = sum(
            sequence.keys.buffered * row.keys.token_bytes + sequence.values.buffered * row.values.token_bytes
            for sequence, row in zip(self.sequences, self.rows, strict=True)
        )
        pages = sum(storage.numbers.used * storage.page_bytes for storage in (self.key_pages, self.value_pages))
        return pages + residual + self._other_bytes()

    def bytes_allocated(self) -> int:
        """Bytes of the pools' chunks, spans and full-precision buffers."""
        buffers = sum(row.keys.nbytes + row.values.nbytes for row in self.rows)
        return self.key_pages.bytes_allocated + self.value_pages.bytes_allocated + buffers + self._other_bytes()

    def _other_bytes(self) -> int:
        # Beams share spans.
        spans: dict[int, Span] = {id(span): span for row in self.rows for span in row.spans}
        extra = [t for row in self.rows for t in (row.kept, row.attention_mass) if t is not None]
        return sum(span.nbytes for span in spans.values()) + sum(tensor.nbytes for tensor in extra)


# The layers of a cache that are planned together.
Group = LayerGroup[LayerStore]


def buffer_places(rows: Sequence_[LayerRow], base: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """Where buffers of tokens of a dtype lie: int64 [n, 4], of each row the distance of its keys from `base` and from
    one head to the next, and the same for its values, in elements. Empty buffers lie nowhere, so their distance is 0.

    Args:
        rows: the rows of one layer.
        base: a tensor on the same device.
        dtype: the dtype of the tokens.
    """
    origin, size = base.data_ptr(), dtype.itemsize
    sides = [side for row in rows for side in (row.keys, row.values)]
    places = [(((side.address or origin) - origin) // size, side.head_stride) for side in sides]
    return np.array(places, np.int64).reshape(-1, 4)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Tokens [H, n, channels] one after another; a whole prompt needs no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
