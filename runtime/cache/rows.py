"""The order of sequences in a batch, and sequences that move from one cache to another."""

from __future__ import annotations

from kvconvert.runtime.cache.compress import Group


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
