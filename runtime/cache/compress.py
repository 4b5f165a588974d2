"""Compression of full-precision tokens: whole prompts are sealed, complete pages quantized, old pages dropped."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvconvert.errors import KvconvertError, NumericError
from kvconvert.kernels.pages import new_flag, quantize_in_place, raise_if_flagged
from kvconvert.kernels.select import select_tokens
from kvconvert.kernels.spans import quantize_span
from kvconvert.runtime.cache.sequence import KVSide, Sequence, remove_tokens
from kvconvert.runtime.cache.store import LayerStore


def end_forward(store: LayerStore) -> None:
    """Compress what is complete after the attention of committed tokens."""
    store.attended = store.logical
    if store.seal_at_once:
        store.seal_at_once = False
        seal(store)
    if not store.keep_for_sharing:
        flush(store, store.page_size if store.record_past else 0)


def seal(store: LayerStore) -> None:
    """Compress the open prompts, which are complete: quantize them as spans, or evict; page methods have none."""
    for sequence in store.sequences:
        if sequence.open_from is None:
            continue
        if store.scheme.is_span:
            _seal_span(store, sequence)
        else:
            _evict(store, sequence)
        sequence.open_from, sequence.modality_runs = None, []
        store.version += 1
    # Nothing reads the layer between forward passes, so even a shared one may flush its pages now.
    flush(store, store.page_size if store.record_past else 0)


def _seal_span(store: LayerStore, sequence: Sequence) -> None:
    parts = _span_parts(store, sequence)
    if not parts:
        return
    sides = (sequence.keys, sequence.values)
    with _NamedErrors(store.index, 0):
        keys, values = (_joined([side.tokens(*part) for part in parts]) for side in sides)
        span = quantize_span(keys, values, store.span_format)
    sequence.spans.append((span, sequence.positions.take(parts)))
    for side in sides:
        side.remove(parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Tokens [H, n, channels] one after another; a whole prompt needs no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _span_parts(store: LayerStore, sequence: Sequence) -> list[tuple[int, int]]:
    """The open prompt's tokens that go to its span, as (start, stop) in the buffers."""
    start, stop = max(sequence.open_from, sequence.sink_tokens), sequence.keys.buffered
    if store.scheme.modality == "all":
        return [(start, stop)] if stop > start else []
    parts = []
    for position, count in sequence.modality_runs:
        first, end = max(start, sequence.positions.before(position)), sequence.positions.before(position + count)
        if end > first:
            parts.append((first, end))
    return parts


def _evict(store: LayerStore, sequence: Sequence) -> None:
    """Keep the sink tokens, heavy hitters and the newest tokens of each KV head."""
    n, attention_mass = sequence.keys.buffered, sequence.attention_mass
    sequence.attention_mass = None
    heavy_hitters, recent = round(store.scheme.heavy_ratio * n), round(store.scheme.recent_ratio * n)
    if sequence.sink_tokens + heavy_hitters + recent >= n:
        return
    index = select_tokens(attention_mass, heavy_hitters, recent, sequence.sink_tokens)
    sequence.positions.keep(index)
    for side in (sequence.keys, sequence.values):
        tokens = side.tokens(0, n)
        side.replace(tokens.gather(1, index.unsqueeze(2).expand(-1, -1, tokens.shape[2])))


def flush(store: LayerStore, held_back: int) -> None:
    """Quantize complete pages of all sequences, except for recent tokens and at least the newest `held_back`."""
    if store.scheme.is_span:
        return
    sequences = [sequence for sequence in store.sequences if sequence.open_from is None]
    for sequence in sequences:
        _drop_outside_window(store, sequence)
    key_window = max(held_back, store.scheme.key_recent_tokens)
    value_window = max(held_back, store.scheme.value_recent_tokens)
    keys = [due for s in sequences if (due := _due(store, s, s.keys, key_window)).count]
    values = [due for s in sequences if (due := _due(store, s, s.values, value_window)).count]
    if keys or values:
        store.version += 1
        _flush_sides(store, keys, values)


class PendingPages(NamedTuple):
    """Complete pages in a side's buffer: the index of their first token, and how many."""

    side: KVSide
    start: int
    count: int


def _due(store: LayerStore, sequence: Sequence, side: KVSide, held_back: int) -> PendingPages:
    return PendingPages(
        side, sequence.sink_tokens, max(0, (side.buffered - sequence.sink_tokens - held_back) // store.page_size)
    )


def _flush_sides(store: LayerStore, keys: list[PendingPages], values: list[PendingPages]) -> None:
    """Move complete pages of all rows to the pools: keys, then values, all of them or, after an error, none."""
    f, size, moved = store.format, store.page_size, []
    if store.flag is None:
        store.flag = new_flag(store.device)
    try:
        for pool, due, channels, static in (
            (store.key_pool, keys, f.boosted, f.static_keys),
            (store.value_pool, values, None, f.static_values),
        ):
            if not due:
                continue
            numbers = pool.reserve(sum(part.count for part in due))
            moved.append((pool, numbers, due))
            tokens = [side.tokens(start, start + count * size) for side, start, count in due]
            with _NamedErrors(store.index, 1):
                quantize_in_place(tokens, pool.views(numbers), store.flag, channels, static, store.fall_back)
        # Read once for both sides: the host waits here for the device.
        with _NamedErrors(store.index, 1):
            raise_if_flagged(store.flag, f.keys.heads)
    except KvconvertError:
        for pool, numbers, _ in moved:
            pool.release(numbers)
        store.flag = None
        raise
    for _, numbers, due in moved:
        for side, _, count in due:
            side.pages += numbers[:count]
            numbers = numbers[count:]
            store.flushes += count
        remove_tokens([(side, start, start + count * size) for side, start, count in due])


def _drop_outside_window(store: LayerStore, sequence: Sequence) -> None:
    """Drop leading pages that no later query attends to, quantized or not."""
    if not store.sliding_window:
        return
    size = store.page_size
    slack = size if store.record_past else 0
    horizon = store.attended - store.sliding_window + 1 - slack  # positions below it are masked from now on
    whole = (len(sequence.positions) - sequence.sink_tokens) // size - sequence.dropped
    outside = 0
    while outside < whole:
        last = sequence.sink_tokens + (sequence.dropped + outside + 1) * size - 1
        if sequence.positions.position(last) >= horizon:
            break
        outside += 1
    for side, pool in ((sequence.keys, store.key_pool), (sequence.values, store.value_pool)):
        paged = min(outside, len(side.pages))
        pool.release(side.pages[:paged])
        del side.pages[:paged]
        if outside > paged:
            side.remove([(sequence.sink_tokens, sequence.sink_tokens + (outside - paged) * size)])
    sequence.dropped += outside
    store.version += bool(outside)


class _NamedErrors:
    """Adds layer and head to a numeric error; `position` is the head's place in the quantized tensor's shape."""

    def __init__(self, layer: int, position: int):
        self.layer, self.position = layer, position

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NumericError):
            index = getattr(error, "index", None)
            head = f", KV head {index[self.position]}" if index is not None and len(index) > self.position else ""
            raise NumericError(
                f"Layer {self.layer}{head}: the cache cannot store these keys or values: {error}"
            ) from error
