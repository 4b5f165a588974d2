"""Removing the newest tokens."""

from __future__ import annotations

from kvconvert.errors import CacheError
from kvconvert.runtime.cache.compress import flush
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import LayerStore


def crop(store: LayerStore, tokens_to_remove: int) -> None:
    """Remove the newest tokens; `tokens_to_remove` is zero or negative, as transformers passes it.

    Raises:
        CacheError: the tokens are compressed already, or have left a sliding window that would need them again.
    """
    if tokens_to_remove > 0:
        raise CacheError(
            f"crop({tokens_to_remove}) is not possible: pass the number of tokens to remove as a negative number."
        )
    if not store.sequences:
        return
    length = store.logical + tokens_to_remove
    for row, sequence in enumerate(store.sequences):
        _check_crop(store, row, sequence, length)
    for sequence in store.sequences:
        kept = sequence.positions.before(length)
        removed = len(sequence.positions) - kept
        for side in (sequence.keys, sequence.values):
            side.truncate(side.buffered - removed)
        sequence.sink_tokens = min(sequence.sink_tokens, sequence.keys.buffered)
        sequence.positions.truncate(kept)
        sequence.modality_runs = [
            (first, min(n, length - first)) for first, n in sequence.modality_runs if first < length
        ]
        if sequence.attention_mass is not None:
            sequence.attention_mass = sequence.attention_mass[:, : sequence.keys.buffered]
    store.logical = store.attended = length
    if store.real is not None:
        store.real = store.real[:, :length]
    store.version += 1
    flush(store, 0)


def _check_crop(store: LayerStore, row: int, sequence: Sequence, length: int) -> None:
    removed = len(sequence.positions) - sequence.positions.before(length)
    free = 0 if sequence.untouched else sequence.sink_tokens
    loose = min(sequence.keys.buffered, sequence.values.buffered) - free
    in_span = any(positions.before(length) < len(positions) for _, positions in sequence.spans)
    if removed > loose or in_span:
        raise CacheError(
            f"Sequence {row} cannot give back its newest {removed} tokens: layer {store.index} has already quantized "
            "some of them; call activate_past_recording() before the tokens are added, and crop at most a page at a "
            "time."
        )
    if removed and sequence.dropped and store.sliding_window:
        oldest = sequence.positions.position(sequence.sink_tokens + sequence.dropped * store.page_size)
        if oldest > length - store.sliding_window:
            raise CacheError(
                f"Sequence {row} cannot give back its newest {removed} tokens: layer {store.index} has dropped tokens "
                "that its sliding window would need again; call activate_past_recording() before the tokens are added."
            )
