"""Bytes of the key-value cache that a recipe gives a model, and what fits beside the weights in a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvconvert.cache.size import ModelCache
from kvconvert.calibration.protocol import LayerJob
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.methods.auto import DEFAULT_CONTEXT, AutoSearch
from kvconvert.methods.minikv import FORMULAS, spread_ratios
from kvconvert.models.cache_shapes import model_cache
from kvconvert.recipes.recipe import Recipe

CONTEXT_LIMIT = 2**30
CHUNK_TOKENS = 2048  # of a prompt that is read at once, for the allowance
RUNTIME_BYTES = 600_000_000  # CUDA context, libraries' workspaces and compiled kernels


def recipe_cache(runner: LayerRunner, recipe: Recipe, jobs: Sequence[LayerJob]) -> ModelCache:
    """The cache that a recipe gives a model."""
    schemes = [job.scheme for job in jobs]
    # Budgets that are spread by measurement have the same mean as those that are not.
    if all(scheme is None or not scheme.evicts or scheme.allocation in FORMULAS for scheme in schemes):
        schemes = list(spread_ratios(schemes))
    cache = model_cache(runner.config, schemes)
    return cache if recipe.auto is None else replace(cache, budget_bits=_budget_bits(recipe.auto, cache))


def _budget_bits(auto: AutoSearch, cache: ModelCache) -> float:
    if auto.kv_bits is not None:
        return auto.kv_bits
    searched = ModelCache(tuple(layer for layer in cache.layers if layer.is_quantized))
    context = auto.context or DEFAULT_CONTEXT
    return 16 * auto.kv_bytes_per_token * context / searched.plain_bytes(context)


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
    cache: ModelCache,
    context: int,
    batch: int,
    positions: int | None,
    allowance: Callable[[int], int],
) -> Fit:
    """Longest context of `batch` sequences, and largest batch of `context` tokens, that fit.

    Args:
        memory: of the GPU in bytes.
        weights: of the bundle in bytes.
        cache: see `recipe_cache`.
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
    rows = max(0, int((memory - weights - allowance(0)) // each)) if each else 0
    return Fit(allowance(batch), longest, "the model's positions" if longest == most else "memory", rows)
