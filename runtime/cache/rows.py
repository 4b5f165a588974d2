"""The order of sequences in a batch, and sequences that move from one cache to another."""

from __future__ import annotations

from dataclasses import replace

from kvconvert.errors import CacheError
from kvconvert.runtime.cache.compress import Group, read_flags
from kvconvert.runtime.cache.sequence import Sequence

FREE = Sequence(occupied=False)


def reorder(group: Group, rows: list[int]) -> None:
    """Keep the sequences of these rows, in this order; repeated ones share pages and have buffers of their own."""
    for row in rows:
        group.key_numbers.retain(group.sequences[row].keys.pages)
        group.value_numbers.retain(group.sequences[row].values.pages)
    group.release(group.sequences)
    group.sequences = tuple(group.sequences[row] for row in rows)
    for store in group.stores:
        store.reorder(rows)
        store.sequences = group.sequences
    if group.real is not None:
        group.real = group.real[rows]
    group.touch()


def open_rows(group: Group, count: int) -> None:
    """Make room in an empty group for `count` sequences that join one by one.

    Raises:
        CacheError: the cache holds sequences.
    """
    if group.sequences:
        raise CacheError("Rows can be opened in an empty cache only; call reset() first.")
    group.sequences = (FREE,) * count
    for store in group.stores:
        store.sequences = group.sequences


def join(group: Group, row: int, other: Group) -> None:
    """Move the only sequence of another cache's group of the same layers, with pages in the same storage, to a row.

    Its tokens get the positions right before the next pass's, as if it were padded on its left.

    Raises:
        CacheError: the row is taken, the other cache does not hold one sealed sequence, or its pages lie elsewhere.
    """
    if group.sequences[row].occupied:
        raise CacheError(f"Row {row} of the cache holds a sequence; let it leave first.")
    if len(other.sequences) != 1 or other.sequences[0].open_from is not None or other.real is not None:
        raise CacheError("Only a cache with one sequence, without padding and sealed, can join another one.")
    if other.key_numbers is not group.key_numbers:
        raise CacheError("Only a cache made by beside() can join: its pages have to lie in the same storage.")
    read_flags(other)
    if other.error is not None:
        raise CacheError(f"The sequence cannot join, because it lost tokens: {other.error}") from other.error
    by = group.logical - other.logical
    for store, source in zip(group.stores, other.stores, strict=True):
        if not store.is_allocated:
            store.adopt(source, len(group.sequences))
        tensors = source.rows[0]
        if tensors.kept is not None:
            tensors = replace(tensors, kept=tensors.kept + by)
        store.rows[row] = tensors
        store.flushes += source.flushes
        store.fallbacks += source.fallbacks
        store.clamped_rows = store.clamped_rows + source.clamped_rows
    _put(group, row, replace(other.sequences[0].shift(by), occupied=True))
    # Its pages are the row's now.
    other.sequences = ()
    other.reset()
    for source in other.stores:
        source.reset()


def leave(group: Group, row: int) -> None:
    """Free a row and its pages.

    Raises:
        CacheError: the row holds no sequence.
    """
    if not group.sequences[row].occupied:
        raise CacheError(f"Row {row} of the cache holds no sequence.")
    group.release((group.sequences[row],))
    for store in group.stores:
        store.rows[row] = store.empty_row()
    _put(group, row, FREE)
    if not any(sequence.occupied for sequence in group.sequences):
        # What an error made unusable is gone.
        group.error, group.unread_flags = None, []


def _put(group: Group, row: int, sequence: Sequence) -> None:
    group.sequences = (*group.sequences[:row], sequence, *group.sequences[row + 1 :])
    for store in group.stores:
        store.sequences = group.sequences
    group.touch(row)
