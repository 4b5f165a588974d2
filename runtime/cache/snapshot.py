"""A sequence as it is at one moment, so that another cache, now or in another process, can go on from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

import torch

from kvconvert.errors import CacheError
from kvconvert.runtime.cache.buffer import TokenBuffer
from kvconvert.runtime.cache.pool import PageNumbers
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import Group, LayerRow, LayerStore


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One sequence without padding, in all layers of a cache, between two forward passes.

    It holds copies of full-precision tokens and the numbers of pages, to which whoever keeps it has to have references.

    Attributes:
        length: tokens read so far.
        sequences: of each group.
        stores: the layers that it was taken of, group by group; of the caches that it is put into they say dtype,
            device and formats.
        tokens: of each layer, keys [H, n, D] and values [H, m, E] in its buffers. Nothing may change them.
        states: of each layer with states, or keys of an indexer, by its number: its `copies`.
    """

    length: int
    sequences: tuple[Sequence, ...]
    stores: tuple[tuple[LayerStore, ...], ...]
    tokens: tuple[tuple[tuple[torch.Tensor, torch.Tensor], ...], ...]
    states: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    def state_pages(self, earlier: Snapshot | None) -> int:
        """Pages, each of all layers, that have as many bytes as the states that an earlier snapshot does not hold."""
        known = {id(t) for tensors in (earlier.states.values() if earlier else ()) for t in tensors.values()}
        size = sum(t.nbytes for tensors in self.states.values() for t in tensors.values() if id(t) not in known)
        sides = (side for stores in self.stores for store in stores for side in (store.key_pages, store.value_pages))
        return -(-size // sum(side.page_bytes for side in sides))

    @classmethod
    def take(
        cls,
        groups: Sequence_[Group],
        earlier: Snapshot | None = None,
        states: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
    ) -> Snapshot:
        """The only sequence of a cache whose latest pass is over.

        Args:
            groups: of the cache.
            earlier: of the same sequence; where nothing but sink tokens is in the buffers, they are not copied again.
            states: copies of all states; None for layers without.

        Raises:
            CacheError: there is no such sequence, or it cannot be gone on with elsewhere.
        """
        for group in groups:
            if reason := not_taken(group):
                raise CacheError(f"The sequence in {group.name} of the cache cannot be kept: {reason}.")
        sequences, tokens = tuple(group.sequences[0] for group in groups), []
        for number, (group, sequence) in enumerate(zip(groups, sequences, strict=True)):
            before = None if earlier is None else (earlier.sequences[number], earlier.tokens[number])
            tokens.append(tuple(_copied(group, sequence, layer, before) for layer in range(len(group.stores))))
        stores = tuple(tuple(group.stores) for group in groups)
        return cls(groups[0].logical, sequences, stores, tuple(tokens), states or {})

    def put(self, groups: Sequence_[Group]) -> None:
        """Let an empty cache of the same layers, with pages in the same storage, hold the sequence.

        Its pages get a reference each. The copies of tokens are the cache's buffers until it stores the next token,
        which moves them.
        """
        for group, sequence, stores, tokens in zip(groups, self.sequences, self.stores, self.tokens, strict=True):
            group.key_numbers.retain(sequence.keys.pages)
            group.value_numbers.retain(sequence.values.pages)
            group.sequences = (sequence,)
            group.logical = group.attended = self.length
            group.touch()
            for store, source, (keys, values) in zip(group.stores, stores, tokens, strict=True):
                if source is not store:
                    store.adopt(source, 1)
                store.sequences = group.sequences
                store.rows = [LayerRow(TokenBuffer(keys, store.growth), TokenBuffer(values, store.growth))]

    def pages_beyond(self, earlier: Snapshot | None) -> Iterator[tuple[PageNumbers, list[int]]]:
        """Pages of each side of each group that an earlier snapshot of the same prompt has not."""
        before = earlier.sequences if earlier is not None else (Sequence(),) * len(self.sequences)
        for sequence, known, stores in zip(self.sequences, before, self.stores, strict=True):
            group = stores[0].group
            for numbers, now, then in (
                (group.key_numbers, sequence.keys.pages, set(known.keys.pages)),
                (group.value_numbers, sequence.values.pages, set(known.values.pages)),
            ):
                yield numbers, [number for number in now if number not in then]


def _copied(
    group: Group, sequence: Sequence, layer: int, before: tuple[Sequence, tuple[tuple[torch.Tensor, ...], ...]] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in a layer's buffers, or an earlier copy of them where they are sink tokens alone."""
    row, found = group.stores[layer].rows[0], []
    for place, (buffer, side) in enumerate(((row.keys, sequence.keys), (row.values, sequence.values))):
        if before is not None:
            known = (before[0].keys, before[0].values)[place]
            if side.buffered == known.buffered == sequence.sink_tokens:
                found.append(before[1][layer][place])
                continue
        found.append(buffer.tokens(0, side.buffered).clone())
    return found[0], found[1]


def not_taken(group: Group) -> str | None:
    """Why a group's sequence cannot be kept, as the end of a sentence, or None."""
    if len(group.sequences) != 1:
        return f"there are {len(group.sequences)} sequences, and one can be kept"
    sequence = group.sequences[0]
    if group.real is not None:
        return "it has padding"
    if not group.policy.is_plain:
        return "its scheme compresses whole prompts (spans, eviction), which no other prompt begins with"
    if group.error is not None:
        return "tokens were lost"
    if group.record_past or sequence.open_from is not None:
        return "pages that are complete are not written yet"
    return None
