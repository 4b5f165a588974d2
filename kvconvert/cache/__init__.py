"""The layout of a layer's keys and values by its KV scheme: formats for kernels, and bytes; no torch.

Here is the only arithmetic of bytes of a key-value cache, for planner, search, recipes, reports, cards and `eval`. A
size that is stated at a number of tokens is the mean over how full the last page is then: over the 128 lengths up to
it (`lengths`), with sink tokens, windows, scales and norms. Bits per value count the numbers that the model's own cache
would hold: evicted tokens are among them, tokens outside of a layer's sliding window are not.

`KVCache.stats()` measures tensors instead, at the length that it has; after a prompt it finds `exact_bytes`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from kvconvert.errors import RecipeError
from kvconvert.kernels.page_formats import PAGE_SIZE, LayerFormat, PageFormat, SpanFormat, TokenNorm, page_bytes
from kvconvert.kernels.rotations import Rotations, hadamard_kind
from kvconvert.methods import Evict, KVScheme, Spans

Side = Literal["key", "value"]


@lru_cache(maxsize=1024)
def layer_format(
    scheme: KVScheme, *, heads: int, key_dim: int, value_dim: int | None = None, latent: bool = False
) -> LayerFormat:
    """The format of a scheme for a layer's shape, without the tensors of a KV plan (`with_plan`).

    Args:
        scheme: the KV scheme of the layer.
        heads: KV heads.
        key_dim, value_dim: channels of a head's keys and values; None for as many.
        latent: whether keys are latents (MLA), which other kernels read; they take as many bytes.

    Raises:
        RecipeError: the head size cannot be packed at these bits.
    """
    value_dim = key_dim if value_dim is None else value_dim
    for side, dim in zip(scheme.sides, (key_dim, value_dim), strict=True):
        # Both planes of 3-bit codes have eight fields per lane.
        multiple = 8 if side.bits == 3 else 16 // side.bits
        if dim % multiple:
            raise RecipeError(
                f"[kv] {side.name}_bits = {side.bits} needs a head size that is a multiple of {multiple}; this "
                f"model has {dim}."
            )
    (key, value), static = scheme.sides, scheme.is_static
    keys = PageFormat.keys(
        heads=heads,
        head_dim=key_dim,
        page_size=scheme.page_size,
        bits=key.bits,
        group_size=scheme.page_size if static else key.group_size,
        token_norm=TokenNorm(scheme.token_norm),
        token_norm_measure=scheme.token_norm_measure,
        clip_ratio=key.clip_ratio,
        boosted=scheme.boosted_for(key_dim),
        fixed_channels=scheme.boost_select == "calibrated",
        static=key.static,
        scale_bits=key.scale_bits,
        by_token=latent and key.bits in (2, 4),
    )
    whole_head = static or not value.quantized
    values = PageFormat.values(
        heads=heads,
        head_dim=value_dim,
        page_size=scheme.page_size,
        bits=value.bits,
        group_size=value_dim if whole_head else scheme.value_group_for(value_dim),
        clip_ratio=value.clip_ratio,
        static=value.static,
        scale_bits=value.scale_bits,
    )
    span = None
    if isinstance(scheme.prompt, Spans):
        span = SpanFormat(
            key_bits=key.bits,
            value_bits=value.bits,
            key_clip_ratio=key.clip_ratio,
            value_clip_ratio=value.clip_ratio,
            tau1=scheme.tau1,
            tau2=scheme.tau2,
            span_tokens=scheme.prompt.tokens,
            modality=scheme.prompt.modality,
        )
    return LayerFormat(
        keys,
        values,
        span=span,
        # Folded values are rotated by the weights.
        rotations=Rotations(scheme.rotate_keys == "hadamard", scheme.rotate_values == "online"),
        sink_tokens=scheme.sink_tokens,
        key_window=key.recent_tokens,
        value_window=value.recent_tokens,
    )


def rotation_kinds(scheme: KVScheme, key_dim: int, value_dim: int) -> tuple[str | None, str | None]:
    """How the matrices are built that rotate a layer's keys, and its values where these have another size.

    Raises:
        UsageError: no matrix rotates heads of this size.
    """
    keys = hadamard_kind(key_dim) if scheme.rotates else None
    return keys, hadamard_kind(value_dim) if scheme.rotates and value_dim != key_dim else None


NUMBER_BYTES = 2  # of a number in full precision, but for models of 32 bits
_POSITION_BYTES = 4  # of a token that an eviction kept: heads keep different ones
_SPAN_SCALE_BYTES = 4  # a scale and a zero point of a channel, float16 each


def lengths(context: int) -> range:
    """The lengths over which sizes at `context` tokens are averaged."""
    return range(max(1, context - PAGE_SIZE + 1), context + 1)


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values.

    Attributes:
        heads, key_dim, value_dim: heads as they are stored, and channels of a head's keys and values; 0 of a layer
            without any.
        scheme: how they are stored; None where the layer keeps transformers' own cache.
        sliding_window: of the layer in tokens, or None.
        number_bytes: of a number of full-precision tokens.
        index_dim: channels of an indexer's key, of which there is one per token; 0 without an indexer.
    """

    heads: int
    key_dim: int
    value_dim: int
    scheme: KVScheme | None = None
    sliding_window: int | None = None
    number_bytes: int = NUMBER_BYTES
    index_dim: int = 0

    @property
    def values_per_token(self) -> int:
        """Numbers of a token's keys and values."""
        return self.heads * (self.key_dim + self.value_dim)

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values have fewer than 16 bits."""
        return self.scheme is not None and self.scheme.quantizes

    def numbers(self, context: int) -> int:
        """Keys and values that the model's own cache holds of `context` tokens: all, or those of a sliding window.

        An indexer's keys are among them.
        """
        return self.values_per_token * min(context, self.sliding_window or context) + context * self.index_dim

    def plain_bytes(self, context: int) -> int:
        """Bytes of one sequence of `context` tokens in full precision."""
        return self.numbers(context) * self.number_bytes

    def _index_bytes(self, context: int) -> int:
        """Bytes of an indexer's keys, which have codes of 8 bits and a scale where others are quantized."""
        if not self.index_dim:
            return 0
        scale = self.number_bytes
        return context * (self.index_dim + scale if self.is_quantized else self.index_dim * scale)

    def exact_bytes(self, context: int) -> int:
        """Bytes of one sequence once a prompt of `context` tokens has been read.

        A scheme that compresses the tokens of one modality is taken to have read a prompt of nothing else.
        """
        if self.scheme is None:
            return self.plain_bytes(context)
        prompt, positions = self.scheme.prompt, 0
        if isinstance(prompt, Spans):
            return self._span_bytes(context, prompt.tokens)
        if isinstance(prompt, Evict) and prompt.heads_apart:
            return self._shared_bytes(context, prompt)
        if isinstance(prompt, Evict):
            kept = min(context, self.scheme.sink_tokens) + sum(prompt.budget(context))
            if kept < context:
                # Of kept tokens only bounds of their positions are known, and with these the last page is `kept` away.
                context, positions = kept, _POSITION_BYTES * self.heads * kept
        return positions + sum(self.sides(context)) + self._index_bytes(context)

    def sides(self, context: int) -> tuple[int, int]:
        """Bytes of keys and of values of `context` tokens that go to pages, without eviction."""
        sinks, dropped = min(context, self.scheme.sink_tokens), 0
        if self.sliding_window:  # pages that no later token attends to
            dropped = min(max(0, (context - self.sliding_window + 1) // PAGE_SIZE), context // PAGE_SIZE)
        keys, values = (
            max(0, complete - dropped) * page + (context - outside * PAGE_SIZE + bool(outside) * sinks) * token
            for recent, token, page in self._sides
            for complete in [max(0, (context - recent) // PAGE_SIZE)]
            for outside in [max(complete, dropped)]
        )
        return keys, values

    def summed_sides(self, context: int) -> tuple[int, int]:
        """Bytes of keys and of values, see `sides`, summed over `lengths`."""
        keys, values = zip(*map(self.sides, lengths(context)), strict=True)
        return sum(keys), sum(values)

    @property
    def one_page_bytes(self) -> int:
        """Bytes of a complete page of keys and one of values."""
        return sum(page for _, _, page in self._sides)

    @cached_property
    def _sides(self) -> tuple[tuple[int, int, int], ...]:
        """Of keys and of values: recent tokens in full precision, bytes of one of them, bytes of a page."""
        own = layer_format(self.scheme, heads=self.heads, key_dim=self.key_dim, value_dim=self.value_dim)
        return tuple(
            (side.recent_tokens, form.heads * form.head_dim * self.number_bytes, page_bytes(form, self.number_bytes))
            for side, form in zip(self.scheme.sides, (own.keys, own.values), strict=True)
        )

    def _shared_bytes(self, context: int, prompt: Evict) -> int:
        """Where the heads of all layers share a budget: what a layer holds on average."""
        sinks = min(context, self.scheme.sink_tokens)
        pages = prompt.shared_pages(context, self.heads, sinks, PAGE_SIZE)
        if not pages:
            return sum(self.sides(context))
        forms = layer_format(self.scheme, heads=1, key_dim=self.key_dim, value_dim=self.value_dim)
        sides = (page_bytes(form, self.number_bytes) for form in (forms.keys, forms.values))
        page = sum(sides) + _POSITION_BYTES * PAGE_SIZE
        return pages * page + sinks * self.values_per_token * self.number_bytes

    def _span_bytes(self, context: int, span_tokens: int) -> int:
        sinks, (keys, values) = min(context, self.scheme.sink_tokens), self.scheme.sides
        whole, rest = divmod(context - sinks, length := span_tokens or max(context, 1))
        spans = whole + (rest > 0)
        # Of every span, codes lie in whole blocks.
        tokens = PAGE_SIZE * (whole * -(-length // PAGE_SIZE) + -(-rest // PAGE_SIZE))
        codes = self.heads * (self.key_dim * keys.bits + self.value_dim * values.bits) * tokens // 8
        scales = self.heads * (self.key_dim + self.value_dim) * _SPAN_SCALE_BYTES * spans
        return codes + scales + sinks * self.values_per_token * self.number_bytes


@dataclass(frozen=True)
class ModelCache:
    """The cache of all layers of a model.

    Attributes:
        layers: one each.
        budget_bits: bits per value of the quantized layers together, where a search is yet to choose schemes that keep
            to it; None for others.
    """

    layers: tuple[LayerCache, ...]
    budget_bits: float | None = None

    def exact_bytes(self, context: int) -> float:
        """Bytes of one sequence of `context` tokens, no more and no fewer, see `LayerCache.exact_bytes`."""
        if self.budget_bits is None:
            return sum(count * layer.exact_bytes(context) for layer, count in self._distinct)
        return sum(
            count
            * (layer.numbers(context) * self.budget_bits / 8 if layer.is_quantized else layer.plain_bytes(context))
            for layer, count in self._distinct
        )

    def plain_bytes(self, context: int) -> int:
        """The same in full precision."""
        return sum(count * layer.plain_bytes(context) for layer, count in self._distinct)

    def numbers(self, context: int) -> int:
        """Keys and values that the model's own cache holds of `context` tokens."""
        return sum(count * layer.numbers(context) for layer, count in self._distinct)

    def bits_per_value(self, context: int) -> float | None:
        """Mean bits of the numbers that the model's own cache would hold; None for a model without keys and values."""
        numbers = sum(map(self.numbers, lengths(context)))
        return 8 * sum(map(self.exact_bytes, lengths(context))) / numbers if numbers else None

    def bytes(self, context: int) -> float:
        """Bytes of one sequence at these bits."""
        bits = self.bits_per_value(context)
        return 0.0 if bits is None else bits * self.numbers(context) / 8

    @cached_property
    def _distinct(self) -> list[tuple[LayerCache, int]]:
        """Layers that differ, and how many are like each."""
        return list(Counter(self.layers).items())
