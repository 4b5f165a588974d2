"""What becomes of full-precision tokens: whole prompts are sealed, complete pages quantized, old ones dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kvconvert.errors import KvconvertError, NumericError
from kvconvert.kernels.pages import new_flag, quantize_in_place, raise_if_flagged
from kvconvert.kernels.select import select_tokens
from kvconvert.kernels.spans import quantize_span
from kvconvert.runtime.cache.sequence import KVSide, Sequence, remove_tokens

if TYPE_CHECKING:
    from kvconvert.runtime.hf.layer import PagedLayer


def seal(layer: PagedLayer) -> None:
    """The prompt is complete: quantize it as a span, or keep what it needs; nothing to do for page methods."""
    for sequence in layer.sequences:
        if sequence.open_from is None:
            continue
        if layer.scheme.is_span:
            _seal_span(layer, sequence)
        else:
            _evict(layer, sequence)
        sequence.open_from, sequence.marked = None, []
        layer.version += 1
    # Nobody reads the layer between the passes, so that even a shared one may have its pages now.
    flush(layer, layer.page_size if layer.record_past else 0)


def _seal_span(layer: PagedLayer, sequence: Sequence) -> None:
    parts = _span_parts(layer, sequence)
    if not parts:
        return
    sides = (sequence.keys, sequence.values)
    with _NamedErrors(layer.index, 0):
        keys, values = (_joined([side.tokens(*part) for part in parts]) for side in sides)
        span = quantize_span(keys, values, layer.span_format)
    sequence.spans.append((span, sequence.columns.take(parts)))
    for side in sides:
        side.remove(parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Tokens [H, n, channels] one after another; a whole prompt needs no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _span_parts(layer: PagedLayer, sequence: Sequence) -> list[tuple[int, int]]:
    """The open prompt's tokens that go to its span, as (start, stop) in the buffers."""
    start, stop = max(sequence.open_from, sequence.sink_tokens), sequence.keys.dense
    if layer.scheme.modality == "all":
        return [(start, stop)] if stop > start else []
    parts = []
    for column, count in sequence.marked:
        first, end = max(start, sequence.columns.before(column)), sequence.columns.before(column + count)
        if end > first:
            parts.append((first, end))
    return parts


def _evict(layer: PagedLayer, sequence: Sequence) -> None:
    """Keep sink_tokens, heavy hitters and the newest tokens of each KV head."""
    n, received = sequence.keys.dense, sequence.received
    sequence.received = None
    heavy, recent = round(layer.scheme.heavy_ratio * n), round(layer.scheme.recent_ratio * n)
    if sequence.sink_tokens + heavy + recent >= n:
        return
    index = select_tokens(received, heavy, recent, sequence.sink_tokens)
    sequence.columns.keep(index)
    for side in (sequence.keys, sequence.values):
        tokens = side.tokens(0, n)
        side.replace(tokens.gather(1, index.unsqueeze(2).expand(-1, -1, tokens.shape[2])))


def flush(layer: PagedLayer, held_back: int) -> None:
    """Quantize complete pages of all sequences but for the newest tokens that scheme or caller hold back."""
    if layer.scheme.is_span:
        return
    sequences = [sequence for sequence in layer.sequences if sequence.open_from is None]
    for sequence in sequences:
        _drop_outside_window(layer, sequence)
    key_window = max(held_back, layer.scheme.key_recent_tokens)
    value_window = max(held_back, layer.scheme.value_recent_tokens)
    keys = [due for s in sequences if (due := _due(layer, s, s.keys, key_window)).count]
    values = [due for s in sequences if (due := _due(layer, s, s.values, value_window)).count]
    if keys or values:
        layer.version += 1
        _flush_sides(layer, keys, values)


class PendingPages(NamedTuple):
    """Complete pages in a side's buffer: the index of their first token, and how many."""

    side: KVSide
    start: int
    count: int


def _due(layer: PagedLayer, sequence: Sequence, side: KVSide, held_back: int) -> PendingPages:
    return PendingPages(
        side, sequence.sink_tokens, max(0, (side.dense - sequence.sink_tokens - held_back) // layer.page_size)
    )


def _flush_sides(layer: PagedLayer, keys: list[PendingPages], values: list[PendingPages]) -> None:
    """Move complete pages of all rows to the pools: keys, then values, all of them or, after an error, none."""
    f, size, moved = layer.format, layer.page_size, []
    if layer.flag is None:
        layer.flag = new_flag(layer.device)
    try:
        for pool, due, channels, static in (
            (layer.key_pool, keys, f.boosted, f.static_keys),
            (layer.value_pool, values, None, f.static_values),
        ):
            if not due:
                continue
            numbers = pool.reserve(sum(part.count for part in due))
            moved.append((pool, numbers, due))
            tokens = [side.tokens(start, start + count * size) for side, start, count in due]
            with _NamedErrors(layer.index, 1):
                quantize_in_place(tokens, pool.views(numbers), layer.flag, channels, static, layer.fall_back)
        # Read once for both sides: the host waits here for the device.
        with _NamedErrors(layer.index, 1):
            raise_if_flagged(layer.flag, f.keys.heads)
    except KvconvertError:
        for pool, numbers, _ in moved:
            pool.release(numbers)
        layer.flag = None
        raise
    for _, numbers, due in moved:
        for side, _, count in due:
            side.pages += numbers[:count]
            numbers = numbers[count:]
            layer.flushes += count
        remove_tokens([(side, start, start + count * size) for side, start, count in due])


def _drop_outside_window(layer: PagedLayer, sequence: Sequence) -> None:
    """Forget leading pages that no later query can see, quantized or not."""
    if not layer.sliding_window:
        return
    size = layer.page_size
    slack = size if layer.record_past else 0
    horizon = layer.attended - layer.sliding_window + 1 - slack  # columns below it are invisible from now on
    whole = (len(sequence.columns) - sequence.sink_tokens) // size - sequence.dropped
    outside = 0
    while outside < whole:
        last = sequence.sink_tokens + (sequence.dropped + outside + 1) * size - 1
        if sequence.columns.column(last) >= horizon:
            break
        outside += 1
    for side, pool in ((sequence.keys, layer.key_pool), (sequence.values, layer.value_pool)):
        paged = min(outside, len(side.pages))
        pool.release(side.pages[:paged])
        del side.pages[:paged]
        if outside > paged:
            side.remove([(sequence.sink_tokens, sequence.sink_tokens + (outside - paged) * size)])
    sequence.dropped += outside
    layer.version += bool(outside)


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
