"""Giving the newest tokens back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconvert.errors import CacheError
from kvconvert.runtime.cache.compress import flush
from kvconvert.runtime.cache.sequence import Sequence

if TYPE_CHECKING:
    from kvconvert.runtime.hf.layer import PagedLayer


def crop(layer: PagedLayer, tokens_to_remove: int) -> None:
    """Remove the newest columns; `tokens_to_remove` is zero or negative, as transformers passes it.

    Raises:
        CacheError: the tokens are compressed already, or have left a sliding window that would need them again.
    """
    if tokens_to_remove > 0:
        raise CacheError(
            f"crop({tokens_to_remove}) is not possible: pass the number of tokens to remove as a negative number."
        )
    if not layer.is_initialized:
        return
    length = layer.logical + tokens_to_remove
    for row, sequence in enumerate(layer.sequences):
        _check_crop(layer, row, sequence, length)
    for sequence in layer.sequences:
        kept = sequence.columns.before(length)
        removed = len(sequence.columns) - kept
        for side in (sequence.keys, sequence.values):
            side.truncate(side.dense - removed)
        sequence.sink_tokens = min(sequence.sink_tokens, sequence.keys.dense)
        sequence.columns.truncate(kept)
        sequence.marked = [(column, min(n, length - column)) for column, n in sequence.marked if column < length]
        if sequence.received is not None:
            sequence.received = sequence.received[:, : sequence.keys.dense]
    layer.logical = layer.attended = length
    if layer.real is not None:
        layer.real = layer.real[:, :length]
    layer.version += 1
    flush(layer, 0)


def _check_crop(layer: PagedLayer, row: int, sequence: Sequence, length: int) -> None:
    removed = len(sequence.columns) - sequence.columns.before(length)
    free = 0 if sequence.untouched else sequence.sink_tokens
    loose = min(sequence.keys.dense, sequence.values.dense) - free
    in_span = any(columns.before(length) < len(columns) for _, columns in sequence.spans)
    if removed > loose or in_span:
        raise CacheError(
            f"Sequence {row} cannot give back its newest {removed} tokens: layer {layer.index} has already quantized "
            "some of them; call activate_past_recording() before the tokens are added, and crop at most a page at a "
            "time."
        )
    if removed and sequence.dropped and layer.sliding_window:
        oldest = sequence.columns.column(sequence.sink_tokens + sequence.dropped * layer.page_size)
        if oldest > length - layer.sliding_window:
            raise CacheError(
                f"Sequence {row} cannot give back its newest {removed} tokens: layer {layer.index} has dropped tokens "
                "that its sliding window would need again; call activate_past_recording() before the tokens are added."
            )
