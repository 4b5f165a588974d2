"""Bookkeeping for all layers that hold the same numbers of tokens in the same places.

Layers whose schemes have the same geometry (`geometry`) agree on every token: who appends, which pages are due, under
which numbers they are stored. A group plans that once per forward pass, on the host; its layers own tensors and launch
kernels. Layers come to a forward pass one after another, so plans and sequences are never changed, only replaced: a
layer keeps the sequences as they were at its own latest step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from kvconvert.errors import CacheError, counted
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.runtime.cache.forward_pass import (
    Compression,
    Destination,
    Discard,
    ForwardPass,
    ModalityMask,
    PassTokens,
    PendingPages,
    UnreadFlags,
    is_pure,
)
from kvconvert.runtime.cache.pool import PageNumbers
from kvconvert.runtime.cache.sequence import Sequence, Side, prompt_policy

Store = TypeVar("Store")
FREE = Sequence(occupied=False)


def geometry(scheme: KVScheme, sliding_window: int | None, keep_for_sharing: bool) -> Hashable:
    """What layers have to share to be planned together."""
    windows = (scheme.sink_tokens, *(side.recent_tokens for side in scheme.sides))
    return (windows, scheme.prompt, sliding_window, keep_for_sharing)


class LayerGroup(Generic[Store]):
    """The sequences of a batch, as a group of layers holds them.

    Args:
        scheme: of one of the layers; all share its geometry.
        sliding_window: the layers' window in tokens, or None.
        keep_for_sharing: later layers read these layers' keys again within one forward pass, so they are compressed
            when the next pass begins.
        numbers: of key and value pages, where another group's layers have their pages in the same storage.

    Attributes:
        stores: the layers, in the model's order.
        indices: their numbers in the model.
        registry: of the tables that kernels follow (`runtime/cache/steps.py`); tables: those in use.
        made_for: what knows the model that the layers are of, for whoever brings tokens (`runtime/hf/cache_layers.py`).
        policy: how prompts are compressed.
        key_numbers, value_numbers: which pages are in use on each side.
        shares_pages: whether another group has pages under these numbers, too.
        unapplied_tokens: single tokens that every occupied row has got since the sequences were last looked at.
        logical: positions so far, padding included.
        attended: positions whose own attention is over.
        real: bool [B, n] of the first n committed positions, after which all are real; None while all are.
        record_past: keep the newest tokens uncompressed until `crop` says which of them stay (assisted decoding).
        seal_at_once: the next forward pass holds the whole prompt.
        reading_prompt: passes bring parts of a prompt, however short, until it is sealed.
        tokens_beside: tokens of other caches in each forward pass, see `runtime/hf/packed.py`; place: among them.
        modality_mask: the tokens of the scheme's modality in the next forward pass.
        version: changes with whatever tables describe: pages, spans, buffers, and the order of sequences.
        changed: rows that changed so since tables were written; None where all may have.
        forward_pass: the latest; passes: how many there were.
        repetition: positions (start, stop) of the open prompt's tokens that the present pass repeats, to be scored
            (`runtime/cache/reconstruct.py`); else None.
        rehearsal: a pass whose kernels are launched again or recorded, while nothing else changes; else None.
        unread_flags: of each flush that nobody has looked at.
        error: what made the stored tokens unusable, or None.
    """

    def __init__(
        self,
        scheme: KVScheme,
        sliding_window: int | None,
        keep_for_sharing: bool,
        numbers: tuple[PageNumbers, PageNumbers] | None = None,
    ):
        self.scheme, self.sliding_window, self.keep_for_sharing = scheme, sliding_window, keep_for_sharing
        self.registry: Any = None
        self.made_for: Any = None
        self.policy = prompt_policy(scheme)
        self.rehearsal: ForwardPass | None = None
        self.repetition: tuple[int, int] | None = None
        self.stores: list[Store] = []
        self.indices: list[int] = []
        self.shares_pages = numbers is not None
        self.key_numbers, self.value_numbers = numbers or (PageNumbers(), PageNumbers())
        self.record_past = False
        self.version = 0
        self.passes = self.tokens_beside = self.place = 0
        self._clear()

    def _clear(self) -> None:
        self.seal_at_once = self.reading_prompt = False
        self._sequences: tuple[Sequence, ...] = ()
        self.unapplied_tokens = 0
        self.tables: Any = None
        self.logical = 0
        self.attended = 0
        self.real: torch.Tensor | None = None
        self.modality_mask: ModalityMask | None = None
        self.changed: set[int] | None = None
        self.forward_pass: ForwardPass | None = None
        self.error: BaseException | None = None
        self.unread_flags: list[UnreadFlags] = []

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """One per row of the batch; none before the first tokens."""
        self._settle()
        return self._sequences

    @sequences.setter
    def sequences(self, sequences: tuple[Sequence, ...]) -> None:
        self._sequences = sequences

    @property
    def rows(self) -> int:
        """How many sequences there are."""
        return len(self._sequences)

    def _settle(self) -> None:
        """Add the tokens that wait to their sequences."""
        if not self.unapplied_tokens:
            return
        count, self.unapplied_tokens = self.unapplied_tokens, 0
        runs, sinks = [(self.logical - count, count)], self.scheme.sink_tokens
        self._replace_sequences(tuple(s.extend(runs, sinks) if s.occupied else s for s in self._sequences))

    def drop_newest(self) -> None:
        """Forget the newest token of every occupied row, at position `logical`: it waits, or lies in the buffers."""
        if self.unapplied_tokens:
            self.unapplied_tokens -= 1
            return
        self._replace_sequences(tuple(s.crop(self.logical) if s.occupied else s for s in self._sequences))

    def add(self, store: Store, index: int) -> None:
        """Add a layer, whose number in the model is `index`."""
        self.stores.append(store)
        self.indices.append(index)
        self.key_numbers.name = self.value_numbers.name = f"{self.name} of the KV cache"

    @property
    def name(self) -> str:
        """Its first layer, which messages name: what concerns it concerns all."""
        return f"layer {self.indices[0]}"

    def reset(self) -> None:
        """Forget all sequences and give their pages back; the layers drop what they store."""
        self.release(self.sequences)
        if not self.shares_pages:
            self.key_numbers, self.value_numbers = PageNumbers(), PageNumbers()
            self.key_numbers.name = self.value_numbers.name = f"{self.name} of the KV cache"
        self._clear()
        self.touch()

    def release(self, sequences: tuple[Sequence, ...]) -> None:
        """Give the pages of some sequences back."""
        for sequence in sequences:
            self.key_numbers.release(sequence.keys.pages)
            self.value_numbers.release(sequence.values.pages)

    def touch(self, row: int | None = None) -> None:
        """Record that tables of a row, or of all rows, have to be written anew."""
        self.version += 1
        if row is None:
            self.changed = None
        elif self.changed is not None:
            self.changed.add(row)

    def begin(self, length: int) -> ForwardPass:
        """Begin a forward pass with `length` new positions.

        Raises:
            CacheError: what is stored has become unusable.
        """
        if self.error is not None:
            raise CacheError(
                f"The cache lost tokens of {self.name} after this error and cannot be used further: {self.error}"
            ) from self.error
        self._settle()
        # Layers learn the shape of their tokens one after another.
        self.forward_pass = ForwardPass(self.logical, length, all_allocated=self.stores[-1].is_allocated)
        self.passes += 1
        self.logical += length
        return self.forward_pass

    def append(self, forward_pass: ForwardPass, chunk: PassTokens, check: bool = True) -> None:
        """Plan where the new tokens go, once per pass.

        Args:
            forward_pass: the latest.
            chunk: its tokens.
            check: compare its padding with that of the tokens stored.

        Raises:
            CacheError: the attention mask differs for stored positions or between layers, or the scheme compresses one
                modality and no mask tells which tokens of a prompt are of it.
        """
        if forward_pass.chunk is not None:
            if chunk is not forward_pass.chunk and not chunk.same_padding(forward_pass.chunk):
                raise CacheError(f"The layers of the group of {self.name} were given different attention masks.")
            return
        start, count = forward_pass.start, forward_pass.length
        if check:
            chunk.check_past(self.real, start, self.name)
        if chunk.real is not None:
            self.real = chunk.real
        forward_pass.chunk = chunk
        modality_mask, self.modality_mask = self.modality_mask, None
        decoding = self.is_decoding(count)
        sequences, destinations = list(self.sequences), []
        for row, sequence in enumerate(sequences):
            runs = chunk.runs(row, start, count) if sequence.occupied else []
            if not runs:
                continue
            if sequence.open_from is None and self.policy.opens(sequence, decoding):
                sequence = replace(sequence, open_from=sequence.keys.buffered)
            if sequence.open_from is not None and self.scheme.modality != "all":
                found = self._modality_runs(modality_mask, row, start, count)
                sequence = replace(sequence, modality_runs=(*sequence.modality_runs, *found))
            own = [(first - start, n) for first, n in runs]
            destinations.append(Destination(row, own, sequence.keys.buffered, sequence.values.buffered))
            sequences[row] = sequence.extend(runs, self.scheme.sink_tokens)
        forward_pass.destinations = tuple(destinations)
        forward_pass.appended = self.sequences = tuple(sequences)

    def is_decoding(self, count: int) -> bool:
        """Whether a pass of so many new tokens continues sequences rather than prompts."""
        # A single token means that the prompt is complete, unless it is said to go on; so do the drafts of assisted
        # decoding, which compresses the first prompt alone.
        return self.record_past or (count == 1 and not self.reading_prompt)

    def _modality_runs(
        self, modality_mask: ModalityMask | None, row: int, start: int, count: int
    ) -> list[tuple[int, int]]:
        """(position, how many) of a row's new tokens whose modality the scheme compresses."""
        if modality_mask is None:
            raise CacheError(
                f'Layer {self.indices[0]} of the cache compresses modality = "{self.scheme.modality}" and has no '
                "modality mask for these tokens: call the model with input_ids (inputs_embeds alone are not enough) "
                "after kvconvert.runtime.watch_inputs(model), or call KVCache.set_modality_mask before the forward "
                "pass."
            )
        rows, layer = len(self.sequences), self.indices[0]
        return [(start + first, n) for first, n in modality_mask.of_row(row, rows, count, layer)]

    def plan_compression(self, seal: bool) -> Compression:
        """Plan what is compressed after the attention of committed tokens; the group's sequences are those after it.

        Args:
            seal: the open prompts are complete.

        Raises:
            CacheError: the pages have a fixed capacity and no room left.
        """
        sequences, seals, discards = list(self.sequences), [], []
        if seal:
            for row, sequence in enumerate(sequences):
                if sequence.open_from is not None:
                    sequences[row], work = self.policy.seal(row, sequence)
                    seals += [work] if work is not None else []
                    self.touch(row)
        keys: list[PendingPages] = []
        values: list[PendingPages] = []
        outside: list[tuple[PageNumbers, tuple[int, ...]]] = []
        try:
            if self.policy.flushes:
                for row, sequence in enumerate(sequences):
                    if sequence.open_from is None and sequence.occupied:
                        sequence = self.without_outsiders(row, sequence, discards, outside)
                        sequences[row] = self._with_pages(row, sequence, keys, values)
        except CacheError:
            for numbers, pending in ((self.key_numbers, keys), (self.value_numbers, values)):
                for part in pending:
                    numbers.release(part.numbers)
            raise
        for numbers, pages in outside:
            numbers.release(pages)
        self.sequences = tuple(sequences)
        return Compression(tuple(seals), tuple(discards), tuple(keys), tuple(values), self.sequences)

    def _with_pages(
        self, row: int, sequence: Sequence, keys: list[PendingPages], values: list[PendingPages]
    ) -> Sequence:
        """The sequence once complete pages beyond its recent windows have left the buffers.

        These pages are added to `keys` and `values`.
        """
        scheme, held_back = self.scheme, PAGE_SIZE if self.record_past else 0
        sides = []
        for side, stored, numbers, pending in (
            (sequence.keys, scheme.keys, self.key_numbers, keys),
            (sequence.values, scheme.values, self.value_numbers, values),
        ):
            page = len(side.pages)
            start = sequence.buffer_index(side, page)
            count = (side.buffered - start - stored.recent_tokens - held_back) // PAGE_SIZE
            if count > 0:
                taken, hidden = numbers.reserve(count), sequence.hidden(page)
                position = sequence.page_position(page)
                pending.append(PendingPages(row, start, hidden, taken, side.buffered, position))
                side = Side(side.buffered - count * PAGE_SIZE + hidden, side.pages + taken)
                self.touch(row)
            sides.append(side)
        if sides == [sequence.keys, sequence.values]:
            return sequence
        return replace(sequence, keys=sides[0], values=sides[1])

    def without_outsiders(
        self,
        row: int,
        sequence: Sequence,
        discards: list[Discard],
        outside_pages: list[tuple[PageNumbers, tuple[int, ...]]],
    ) -> Sequence:
        """The sequence without the oldest pages that no later query attends to.

        Those that are stored are added to `outside_pages`, to be released, those still in buffers to `discards`.
        """
        if not self.sliding_window:
            return sequence
        slack = PAGE_SIZE if self.record_past else 0
        horizon = self.attended - self.sliding_window + 1 - slack  # positions below it are masked from now on
        whole = len(sequence) // PAGE_SIZE - sequence.dropped
        outside = 0
        while outside < whole:
            if sequence.position(sequence.page_position(outside + 1) - 1) >= horizon:
                break
            outside += 1
        if not outside:
            return sequence
        sides = []
        for number, (side, pool) in enumerate(
            ((sequence.keys, self.key_numbers), (sequence.values, self.value_numbers))
        ):
            paged = min(outside, len(side.pages))
            outside_pages.append((pool, side.pages[:paged]))
            start = sequence.buffer_index(side, paged) + sequence.hidden(paged)
            stop = sequence.buffer_index(side, outside)
            if paged < outside:
                discards.append(Discard(row, number, start, stop, side.buffered))
                side = replace(side, buffered=side.buffered - (stop - start))
            sides.append(replace(side, pages=side.pages[paged:]))
        self.touch(row)
        return replace(sequence, keys=sides[0], values=sides[1], dropped=sequence.dropped + outside)

    def masks_on_device(self, chunk: PassTokens) -> bool:
        """Whether `GroupTables.step_mask` serves a step."""
        if chunk.is_causal:
            return True
        evicted = any(sequence.kept for sequence in self.sequences)
        return bool(self.sliding_window) and not evicted and is_pure(chunk.mask_function)

    def reorder(self, rows: list[int]) -> None:
        """Keep the sequences of these rows, in this order; repeated ones share pages and have buffers of their own."""
        for row in rows:
            self.key_numbers.retain(self.sequences[row].keys.pages)
            self.value_numbers.retain(self.sequences[row].values.pages)
        self.release(self.sequences)
        for store in self.stores:
            store.reorder(rows)
        self._replace_sequences(tuple(self.sequences[row] for row in rows))
        if self.real is not None:
            self.real = self.real[rows]
        self.touch()

    def open_rows(self, count: int) -> None:
        """Make room in an empty group for `count` sequences that join one by one.

        Raises:
            CacheError: the group holds sequences.
        """
        if self.sequences:
            raise CacheError("Rows can be opened in an empty cache only; call reset() first.")
        self._replace_sequences((FREE,) * count)

    def resize_rows(self, count: int) -> None:
        """Have as many rows, of which those that are left out are free, and those that are new.

        Raises:
            CacheError: a row that would be left out holds a sequence.
        """
        if any(sequence.occupied for sequence in self.sequences[count:]):
            raise CacheError(f"The cache cannot have {counted(count, 'row')}, as one beyond them holds a sequence.")
        more = (FREE,) * (count - self.rows)
        for store in self.stores:
            if store.is_allocated:
                store.rows = [*store.rows[:count], *(store.empty_row() for _ in more)]
        self._replace_sequences((*self.sequences[:count], *more))
        self.touch()

    def join(self, row: int, other: LayerGroup[Store]) -> None:
        """Move the only sequence of another cache's group of the same layers, with pages in the same storage, to a row,
        or to that row and the next where KV heads have rows of their own.

        Its tokens get the positions right before the next pass's, as if it were padded on its left.

        Raises:
            CacheError: the row is taken, the other cache does not hold one sealed sequence, or its pages lie elsewhere.
        """
        if row >= len(self.sequences):
            raise CacheError(f"There is no row {row}: the cache has {len(self.sequences)}; call open_rows() first.")
        if self.sequences[row].occupied:
            raise CacheError(f"Row {row} of the cache holds a sequence; let it leave first.")
        count = self.stores[0].heads_apart
        is_open = any(sequence.open_from is not None for sequence in other.sequences)
        if len(other.sequences) != count or is_open or other.real is not None:
            raise CacheError("Only a cache with one sequence, without padding and sealed, can join another one.")
        if other.key_numbers is not self.key_numbers:
            raise CacheError("Only a cache made by beside() can join: its pages have to lie in the same storage.")
        if other.error is not None:
            raise CacheError(f"The sequence cannot join, because it lost tokens: {other.error}") from other.error
        by = self.logical - other.logical
        for store, source in zip(self.stores, other.stores, strict=True):
            store.take_rows(row, source, by, len(self.sequences))
        for index, sequence in enumerate(other.sequences, row):
            self._put(index, replace(sequence.shift(by), occupied=True))
        # Its pages are the row's now.
        other.sequences = ()
        other.reset()
        for source in other.stores:
            source.reset()

    def take_prompts(self, other: LayerGroup[Store], heads: int) -> None:
        """Have another group's sequences, which are in full precision, as open prompts: each in `heads` rows."""
        self._replace_sequences(tuple(replace(s, open_from=0) for s in other.sequences for _ in range(heads)))
        self.logical = self.attended = other.logical
        self.real = None if other.real is None else other.real.repeat_interleave(heads, 0)
        self.touch()

    def leave(self, row: int) -> None:
        """Free a row and its pages.

        Raises:
            CacheError: the row holds no sequence.
        """
        if row >= len(self.sequences) or not self.sequences[row].occupied:
            raise CacheError(f"Row {row} of the cache holds no sequence.")
        self.release((self.sequences[row],))
        for store in self.stores:
            store.rows[row] = store.empty_row()
        self._put(row, FREE)
        if not any(sequence.occupied for sequence in self.sequences):
            # What an error made unusable is gone, and with it a pass that some layers did not come to.
            self.error, self.unread_flags, self.forward_pass = None, [], None
            for store in self.stores:
                store.forward_pass = store.ended = store.pending = None
                store.passes = self.passes

    def move_rows(self, moves: Mapping[int, int]) -> None:
        """Move sequences to free rows; `moves` has the new row by the old one.

        Raises:
            CacheError: a row does not exist, holds no sequence, or is not free.
        """
        sequences = list(self.sequences)
        for old, new in moves.items():
            if max(old, new) >= len(sequences) or not sequences[old].occupied or sequences[new].occupied:
                raise CacheError(f"The sequence in row {old} of the cache cannot move to row {new}.")
            sequences[old], sequences[new] = FREE, sequences[old]
        for store in self.stores:
            for old, new in moves.items():
                store.rows[old], store.rows[new] = store.rows[new], store.rows[old]
        self._replace_sequences(tuple(sequences))
        self.touch()

    def _put(self, row: int, sequence: Sequence) -> None:
        self._replace_sequences((*self.sequences[:row], sequence, *self.sequences[row + 1 :]))
        self.touch(row)

    def _replace_sequences(self, sequences: tuple[Sequence, ...]) -> None:
        """Let the group and all of its layers hold these."""
        self.sequences = sequences
        for store in self.stores:
            store.sequences = sequences
