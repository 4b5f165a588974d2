"""Bytes of a key-value cache: the only arithmetic of them, for planner, search, recipes, reports and cards.

`KVCache.stats()` measures tensors instead; after a prompt that is read at once it finds these bytes exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kvconvert.cache.format import CacheFormat
from kvconvert.kernels.pages import PAGE_SIZE, empty_keys, empty_values
from kvconvert.kernels.spans import span_lengths
from kvconvert.methods import KVScheme

FULL_PRECISION = torch.bfloat16
_POSITION_BYTES = 4  # of a token that an eviction kept: heads keep different ones
_SPAN_SCALE_BYTES = 4  # a scale and a zero point of a channel, float16 each


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values.

    Attributes:
        heads, key_dim, value_dim: heads as they are stored, and channels of a head's keys and values; 0 of a layer
            without any.
        scheme: how they are stored; None where the layer keeps transformers' own cache.
        sliding_window: of the layer in tokens, or None.
    """

    heads: int
    key_dim: int
    value_dim: int
    scheme: KVScheme | None = None
    sliding_window: int | None = None

    @property
    def values_per_token(self) -> int:
        """Numbers of a token's keys and values."""
        return self.heads * (self.key_dim + self.value_dim)

    def plain_bytes(self, context: int) -> int:
        """Bytes of one sequence of `context` tokens in 16 bits, of which a sliding window leaves only the newest."""
        return self.values_per_token * FULL_PRECISION.itemsize * min(context, self.sliding_window or context)

    def bytes(self, context: int) -> int:
        """Bytes of one sequence once a prompt of `context` tokens has been read.

        A scheme that compresses the tokens of one modality is taken to have read a prompt of nothing else.
        """
        scheme = self.scheme
        if scheme is None:
            return self.plain_bytes(context)
        if scheme.is_span:
            return self._span_bytes(context)
        positions = 0
        if scheme.evicts:
            sinks = min(context, scheme.sink_tokens)
            kept = sinks + round(scheme.heavy_ratio * context) + round(scheme.recent_ratio * context)
            if kept < context:
                # Of kept tokens only bounds of their positions are known, and with these the last page is `kept` away.
                context, positions = kept, _POSITION_BYTES * self.heads * kept
        return positions + sum(self.sides(context))

    def sides(self, context: int) -> tuple[int, int]:
        """Bytes of keys and of values of `context` tokens that go to pages, without eviction."""
        sinks = min(context, self.scheme.sink_tokens)
        beyond, dropped = context - sinks, 0
        if self.sliding_window:  # pages that no later token attends to
            dropped = min(max(0, (context - self.sliding_window + 1 - sinks) // PAGE_SIZE), beyond // PAGE_SIZE)
        keys, values = (
            max(0, complete - dropped) * page + (context - max(complete, dropped) * PAGE_SIZE) * token
            for recent, token, page in self._sides
            for complete in [max(0, (beyond - recent) // PAGE_SIZE)]
        )
        return keys, values

    @cached_property
    def _sides(self) -> tuple[tuple[int, int, int], ...]:
        """Of keys and of values: recent tokens in full precision, bytes of one of them, bytes of a page."""
        pages = CacheFormat.of(self.scheme, heads=self.heads, key_dim=self.key_dim, value_dim=self.value_dim).pages
        return tuple(
            (
                recent,
                form.heads * form.head_dim * FULL_PRECISION.itemsize,
                empty(1, form, FULL_PRECISION, torch.device("meta")).nbytes,
            )
            for recent, form, empty in (
                (self.scheme.key_recent_tokens, pages.keys, empty_keys),
                (self.scheme.value_recent_tokens, pages.values, empty_values),
            )
        )

    def _span_bytes(self, context: int) -> int:
        scheme = self.scheme
        sinks = min(context, scheme.sink_tokens)
        spans = span_lengths(context - sinks, scheme.span_tokens)
        tokens = sum(-(-length // PAGE_SIZE) * PAGE_SIZE for length in spans)
        codes = self.heads * (self.key_dim * scheme.key_bits + self.value_dim * scheme.value_bits) * tokens // 8
        scales = self.heads * (self.key_dim + self.value_dim) * _SPAN_SCALE_BYTES * len(spans)
        return codes + scales + sinks * self.values_per_token * FULL_PRECISION.itemsize


@dataclass(frozen=True)
class ModelCache:
    """The cache of all layers of a model.

    Attributes:
        layers: one each.
        budget_bytes_per_token: of the layers with a scheme together, where a search is yet to choose schemes that keep
            to it; None for others.
    """

    layers: tuple[LayerCache, ...]
    budget_bytes_per_token: float | None = None

    def bytes(self, context: int) -> int:
        """Bytes of one sequence of `context` tokens, sink tokens, windows and the page being filled included."""
        if self.budget_bytes_per_token is None:
            return sum(layer.bytes(context) for layer in self.layers)
        rest = (layer for layer in self.layers if layer.scheme is None)
        return round(self.budget_bytes_per_token * context) + sum(layer.bytes(context) for layer in rest)

    def plain_bytes(self, context: int) -> int:
        """The same in 16 bits."""
        return sum(layer.plain_bytes(context) for layer in self.layers)

    def bits_per_value(self, context: int) -> float | None:
        """Average over the numbers held; None for a model without keys and values."""
        plain = self.plain_bytes(context)
        return 16 * self.bytes(context) / plain if plain else None
