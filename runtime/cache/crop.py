"""Removing the newest tokens."""

from __future__ import annotations

from dataclasses import replace

from kvconvert.errors import CacheError
from kvconvert.runtime.cache.compress import Group, compress
from kvconvert.runtime.cache.sequence import Sequence


def crop(group: Group, tokens_to_remove: int) -> None:
    """Remove the newest tokens; `tokens_to_remove` is zero or negative, as transformers passes it.

    Raises:
        CacheError: the tokens are compressed already, or have left a sliding window that would need them again.
    """
    if tokens_to_remove > 0:
        raise CacheError(
            f"crop({tokens_to_remove}) is not possible: pass the number of tokens to remove as a negative number."
        )
    if not group.sequences:
        return
    length = group.logical + tokens_to_remove
    for row, sequence in enumerate(group.sequences):
        _check(group, row, sequence, length)
    cropped = tuple(_cropped(sequence, length) for sequence in group.sequences)
    for store in group.stores:
        for sequence, row in zip(cropped, store.rows, strict=True):
            row.keys.truncate(sequence.keys.buffered)
            row.values.truncate(sequence.values.buffered)
            if row.attention_mass is not None:
                row.attention_mass = row.attention_mass[:, : sequence.keys.buffered]
    group.sequences = cropped
    group.logical = group.attended = length
    if group.real is not None:
        group.real = group.real[:, :length]
    group.touch()
    # What was held back for this may be compressed now.
    recording, group.record_past = group.record_past, False
    compress(group, seal=False)
    group.record_past = recording


def _cropped(sequence: Sequence, length: int) -> Sequence:
    removed = len(sequence) - sequence.before(length)
    keys, values = (replace(side, buffered=side.buffered - removed) for side in (sequence.keys, sequence.values))
    runs = tuple((first, min(n, length - first)) for first, n in sequence.modality_runs if first < length)
    return replace(
        sequence,
        keys=keys,
        values=values,
        sink_tokens=min(sequence.sink_tokens, keys.buffered),
        positions=sequence.positions.part(0, len(sequence.positions) - removed),
        modality_runs=runs,
    )


def _check(group: Group, row: int, sequence: Sequence, length: int) -> None:
    removed = len(sequence) - sequence.before(length)
    free = 0 if sequence.untouched else sequence.sink_tokens
    loose = min(sequence.keys.buffered, sequence.values.buffered) - free
    in_span = any(span.positions.before(length) < span.tokens for span in sequence.spans)
    if removed > loose or in_span:
        raise CacheError(
            f"Sequence {row} cannot give back its newest {removed} tokens: {group.name} has already quantized "
            "some of them; call activate_past_recording() before the tokens are added, and crop at most a page at a "
            "time."
        )
    if removed and sequence.dropped and group.sliding_window:
        oldest = sequence.position(sequence.sink_tokens + sequence.dropped * group.page_size)
        if oldest > length - group.sliding_window + 1:
            raise CacheError(
                f"Sequence {row} cannot give back its newest {removed} tokens: {group.name} has dropped tokens "
                "that its sliding window would need again; call activate_past_recording() before the tokens are added."
            )
