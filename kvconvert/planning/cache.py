"""Bytes of a planned key-value cache, and what fits beside the weights in a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvconvert.auto.sizes import stored_bytes
from kvconvert.bundle.manifest import LayerPlan
from kvconvert.calibration.protocol import LayerJob
from kvconvert.convert.layer_records import resolved_fields
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.kernels.pages import LayerFormat
from kvconvert.methods import KVScheme
from kvconvert.methods.minikv import FORMULAS, spread_ratios
from kvconvert.models.adapters import head_dim, key_value_heads, layer_config
from kvconvert.models.configuration import has_pages, layer_types_of
from kvconvert.recipes.recipe import Recipe
from kvconvert.runtime.cache.formats import layer_format

CONTEXT_LIMIT = 2**30
CHUNK_TOKENS = 2048  # of a prompt that is read at once, for the allowance
RUNTIME_BYTES = 600_000_000  # CUDA context, libraries' workspaces and compiled kernels


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache.

    Attributes:
        scheme, pages: as planned; None where the layer keeps transformers' own cache.
        values_per_token: numbers of keys and values per token, 0 for a layer without any.
        sliding_window: of the layer, or None.
        bits_per_token: of stored tokens, where the prompt is treated as a whole; None where it goes to pages.
    """

    scheme: KVScheme | None
    pages: LayerFormat | None
    values_per_token: int
    sliding_window: int | None
    bits_per_token: float | None = None

    def bytes(self, context: int) -> int:
        """Of one sequence of `context` tokens."""
        if self.scheme is None:
            held = min(context, self.sliding_window or context)
            return 2 * self.values_per_token * held
        if self.bits_per_token is not None:
            return round(self.bits_per_token * context / 8)
        return sum(stored_bytes(self.scheme, self.pages, context, self.sliding_window))


@dataclass(frozen=True)
class CachePlan:
    """The cache of all layers.

    Attributes:
        layers: one each.
        exact: whether bytes follow from the layout of pages alone; otherwise shares of prompts and spans are counted as
            their methods state them, without sink tokens and windows.
        budget_bytes_per_token: of a recipe that searches, which its search keeps to; None for others.
    """

    layers: tuple[LayerCache, ...]
    exact: bool
    budget_bytes_per_token: float | None = None

    def bytes(self, context: int) -> int:
        """Of one sequence of `context` tokens, sink tokens, windows and the page being filled included."""
        if self.budget_bytes_per_token is not None:
            rest = (layer for layer in self.layers if layer.scheme is None)
            return round(self.budget_bytes_per_token * context) + sum(layer.bytes(context) for layer in rest)
        return sum(layer.bytes(context) for layer in self.layers)

    def plain_bytes(self, context: int) -> int:
        """The same in 16 bits."""
        return sum(2 * layer.values_per_token * min(context, layer.sliding_window or context) for layer in self.layers)

    def bits_per_value(self, context: int) -> float | None:
        """Average over the numbers held; None for a model without keys and values."""
        plain = self.plain_bytes(context)
        return 16 * self.bytes(context) / plain if plain else None


def cache_plan(runner: LayerRunner, recipe: Recipe, jobs: Sequence[LayerJob]) -> CachePlan:
    """The cache that a recipe gives a model."""
    kinds, arguments = layer_types_of(runner.config)
    schemes = [job.scheme for job in jobs]
    # Budgets that are spread by measurement have the same mean as those that are not.
    if all(scheme is None or not scheme.evicts or scheme.allocation in FORMULAS for scheme in schemes):
        schemes = list(spread_ratios(schemes))
    layers = []
    for index, scheme in enumerate(schemes):
        config = layer_config(runner.config, index)
        heads, channels = key_value_heads(config), head_dim(config)
        window = arguments[index].get("sliding_window")
        if scheme is None:
            layers.append(LayerCache(None, None, _plain_values(runner.config, kinds[index], heads, channels), window))
            continue
        whole = None
        if scheme.compresses_prompts() or scheme.only_tokens() is not None:
            fields = resolved_fields(scheme, channels, heads)
            plan = LayerPlan(index=index, kv=fields.pop("scheme"), **fields)
            whole = scheme.bits_per_token(plan.shape())
        layers.append(
            LayerCache(scheme, layer_format(scheme, heads, channels, channels), 2 * heads * channels, window, whole)
        )
    return CachePlan(tuple(layers), all(layer.bits_per_token is None for layer in layers), _budget(recipe, layers))


def _plain_values(config, kind: str, heads: int, channels: int) -> int:
    """Keys and values per token of a layer that keeps transformers' own cache."""
    if not has_pages(kind):
        return 0
    if getattr(config, "kv_lora_rank", None):  # latent attention: transformers keeps the expanded heads
        return config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return 2 * heads * channels


def _budget(recipe: Recipe, layers: list[LayerCache]) -> float | None:
    if recipe.auto is None:
        return None
    if recipe.auto.kv_bytes_per_token is not None:
        return recipe.auto.kv_bytes_per_token
    return recipe.auto.kv_bits / 8 * sum(layer.values_per_token for layer in layers if layer.scheme is not None)


@dataclass(frozen=True)
class Fit:
    """What fits in a GPU's memory.

    Attributes:
        allowance: bytes set aside for the CUDA context, one prompt chunk's activations and logits of `batch` sequences.
        longest_context: tokens of each of `batch` sequences; 0 where nothing fits.
        limited_by: "memory", or "the model's positions".
        largest_batch: sequences of `context` tokens.
    """

    allowance: int
    longest_context: int
    limited_by: str
    largest_batch: int


def fit(
    memory: int,
    weights: int,
    cache: CachePlan,
    context: int,
    batch: int,
    positions: int | None,
    allowance: Callable[[int], int],
) -> Fit:
    """Longest context of `batch` sequences, and largest batch of `context` tokens, that fit.

    Args:
        memory: of the GPU in bytes.
        weights: of the bundle in bytes.
        cache: see `cache_plan`.
        context, batch: tokens of a sequence, sequences.
        positions: that the model has, or None.
        allowance: bytes beside weights and cache, by number of sequences.
    """
    room = memory - weights - allowance(batch)
    most = positions or CONTEXT_LIMIT
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if batch * cache.bytes(middle) <= room:
            low = middle
        else:
            high = middle - 1
    longest = low if room >= 0 else 0
    each = cache.bytes(context) + allowance(2) - allowance(1)
    rows = max(0, (memory - weights - allowance(0)) // each) if each else 0
    return Fit(allowance(batch), longest, "the model's positions" if longest == most else "memory", rows)
