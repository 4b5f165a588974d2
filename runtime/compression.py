"""What becomes of full-precision tokens: whole prompts are sealed, complete pages quantized, old ones dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconvert.errors import NumericError
from kvconvert.kernels.pages import quantize_keys, quantize_values
from kvconvert.kernels.selection import select_tokens
from kvconvert.kernels.spans import quantize_span
from kvconvert.runtime.pool import PagePool
from kvconvert.runtime.sequence import Sequence, Side

if TYPE_CHECKING:
    from kvconvert.runtime.layer import PagedLayer

# Pages quantized in one call: bounds the float32 copies that a long prompt's flush needs.
FLUSH_PAGES = 32


def seal(layer: PagedLayer) -> None:
    """The prompt is complete: quantize it as a span, or keep what it needs; nothing to do for page methods."""
    for sequence in layer.sequences:
        if sequence.open_from is None:
            continue
        if layer.scheme.is_span:
            _seal_span(layer, sequence)
        else:
            _evict(layer, sequence)
        sequence.open_from = None
    if not layer.keep_for_sharing:
        flush(layer, layer.page_size if layer.record_past else 0)


def _seal_span(layer: PagedLayer, sequence: Sequence) -> None:
    start, stop = max(sequence.open_from, sequence.sinks), sequence.keys.dense
    if stop <= start:
        return
    with _NamedErrors(layer.index, 0):
        keys, values = (side.tokens(start, stop) for side in (sequence.keys, sequence.values))
        span = quantize_span(keys, values, layer.span_format)
    sequence.spans.append((span, sequence.columns.take(start, stop)))
    for side in (sequence.keys, sequence.values):
        side.remove(start, stop)


def _evict(layer: PagedLayer, sequence: Sequence) -> None:
    """Keep sinks, heavy hitters and the newest tokens of each KV head."""
    n, received = sequence.keys.dense, sequence.received
    sequence.received = None
    heavy, recent = round(layer.scheme.heavy_ratio * n), round(layer.scheme.recent_ratio * n)
    if sequence.sinks + heavy + recent >= n:
        return
    index = select_tokens(received, heavy, recent, sequence.sinks)
    sequence.columns.keep(index)
    for side in (sequence.keys, sequence.values):
        tokens = side.tokens(0, n)
        side.replace(tokens.gather(1, index.unsqueeze(2).expand(-1, -1, tokens.shape[2])))


def flush(layer: PagedLayer, held_back: int) -> None:
    """Quantize complete pages of all sequences but for the newest tokens that scheme or caller hold back."""
    if layer.scheme.is_span:
        return
    key_window = max(held_back, layer.scheme.key_recent_tokens)
    value_window = max(held_back, layer.scheme.value_recent_tokens)
    for sequence in layer.sequences:
        if sequence.open_from is not None:
            continue
        _drop_outside_window(layer, sequence)
        _flush_side(layer, sequence, sequence.keys, layer.key_pool, key_window)
        _flush_side(layer, sequence, sequence.values, layer.value_pool, value_window)


def _flush_side(layer: PagedLayer, sequence: Sequence, side: Side, pool: PagePool, held_back: int) -> None:
    size, start = layer.page_size, sequence.sinks
    count = max(0, (side.dense - start - held_back) // size)
    for first in range(0, count, FLUSH_PAGES):
        tokens = side.tokens(start + first * size, start + min(first + FLUSH_PAGES, count) * size)
        pages = tokens.unflatten(1, (-1, size)).transpose(0, 1)
        with _NamedErrors(layer.index, 1):
            if side is sequence.keys:
                quantized = quantize_keys(pages, layer.format.keys, layer.format.boosted, layer.format.static_keys)
            else:
                quantized = quantize_values(pages, layer.format.values, layer.format.static_values)
        side.pages += pool.write(quantized)
    if count:
        side.remove(start, start + count * size)
        layer.flushes += count


def _drop_outside_window(layer: PagedLayer, sequence: Sequence) -> None:
    """Forget leading pages that no later query can see, quantized or not."""
    if not layer.sliding_window:
        return
    size = layer.page_size
    slack = size if layer.record_past else 0
    horizon = layer.attended - layer.sliding_window + 1 - slack  # columns below it are invisible from now on
    whole = (len(sequence.columns) - sequence.sinks) // size - sequence.dropped
    outside = 0
    while outside < whole:
        last = sequence.sinks + (sequence.dropped + outside + 1) * size - 1
        if sequence.columns.column(last) >= horizon:
            break
        outside += 1
    for side, pool in ((sequence.keys, layer.key_pool), (sequence.values, layer.value_pool)):
        paged = min(outside, len(side.pages))
        pool.release(side.pages[:paged])
        del side.pages[:paged]
        if outside > paged:
            side.remove(sequence.sinks, sequence.sinks + (outside - paged) * size)
    sequence.dropped += outside


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
