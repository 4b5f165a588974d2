"""One cell of the matrix on the cache's side: an architecture generates through one scheme, against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kv_reference import NAME, needs_own_attention, reference_cache
from tiny.models import ARCHITECTURES, GREEDY, TinyModel
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvconvert import KVCache, KVScheme

STEPS = 8


@dataclass(frozen=True)
class KVRecipe:
    """A scheme and the prompt on which it has something to compress.

    Attributes:
        scheme: of every layer.
        length: of the prompt, padding included; what compresses lies within a sliding window of its end.
        padding: tokens before the first row's sequence; the second has none.
    """

    scheme: KVScheme
    length: int
    padding: int = 5


EXACT = KVScheme(key_bits=16, value_bits=16, rotate_keys="hadamard", rotate_values="online", sink_tokens=5)
RECIPES = {
    "exact": KVRecipe(EXACT, 150, 37),
    "kivi": KVRecipe(KVScheme.preset("kivi"), 136),
    "oscar": KVRecipe(KVScheme.preset("oscar").with_online_rotation(), 136),
    # 32 sinks, and values follow keys 128 tokens later; windows of 40 tokens still have pages then.
    "kitty": KVRecipe(KVScheme.preset("kitty"), 400),
    # Half of a prompt of two pages is one page.
    "minikv": KVRecipe(KVScheme.preset("minikv"), 270),
    "calibquant": KVRecipe(KVScheme.preset("calibquant-1bit"), 80),
}

# Architectures without a low-bit cache, and a word of the reason.
REFUSED = {
    "bloom": "computes attention by itself",
    "mpt": "computes attention by itself",
    "falcon": "computes attention by itself",
    "falcon_alibi": "computes attention by itself",
} | {name: "MLA" for name, entry in ARCHITECTURES.items() if "mla" in entry.features}


class Forced(LogitsProcessor):
    """Generates given tokens, so that logits can be compared step by step."""

    def __init__(self, tokens: Tensor, prompt: int):
        self.tokens, self.prompt = tokens, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, float("-inf"))
        return forced.scatter(1, self.tokens[:, input_ids.shape[1] - self.prompt, None], 0.0)


@dataclass(frozen=True)
class KVResult:
    """Logits [B, steps, V] of one cell, and what the cache held.

    Attributes:
        cache, alone: through the cache: the padded batch, and its first row without padding.
        reference: the same through the reference.
        full: through transformers' own cache.
        tokens: that full precision chooses, [B, steps].
        pages, spans, evicted: over all layers, after the last step.
        other_layers: that keep transformers' own cache.
    """

    cache: Tensor
    alone: Tensor
    reference: Tensor
    full: Tensor
    tokens: Tensor
    pages: int
    spans: int
    evicted: int
    other_layers: int

    @property
    def error(self) -> float:
        """Mean distance of the cache's logits from the reference's, as a share of what compression changes."""
        return float((self.cache - self.reference).abs().mean() / self.effect)

    @property
    def padding_error(self) -> float:
        """The same between the padded row and that row alone."""
        return float((self.cache[:1] - self.alone).abs().mean() / self.effect)

    @property
    def effect(self) -> float:
        """Mean distance of the reference's logits from full precision's."""
        return float((self.reference - self.full).abs().mean())


def with_attention(model: PreTrainedModel, entry: TinyModel, name: str) -> PreTrainedModel:
    """Set the language part's attention; a tower keeps its own."""
    model.set_attn_implementation({"": name, "text_config": name} if entry.multimodal else name)
    return model


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Cache | None, tokens: Tensor | None) -> Tensor:
    """Logits [B, steps, V] of greedy generation, or of generating `tokens`; None for the model's own cache."""
    forced = [] if tokens is None else [Forced(tokens, inputs["input_ids"].shape[1])]
    out = model.generate(
        **inputs,
        max_new_tokens=STEPS,
        past_key_values=cache,
        logits_processor=forced,
        return_dict_in_generate=True,
        output_logits=True,
        **GREEDY,
    )
    return torch.stack(out.logits, 1)


def kv_cell(entry: TinyModel, recipe: KVRecipe) -> KVResult:
    """Run one cell: two rows, the first of them padded, and the first row alone."""
    model = entry.build()
    inputs = entry.inputs(2, recipe.length, padding=recipe.padding)
    full = generate(model, inputs, DynamicCache(config=model.config), None)
    tokens = full.argmax(-1)
    with_attention(model, entry, NAME if needs_own_attention(recipe.scheme) else "eager")
    if recipe.scheme.key_bits == 16:
        reference = full
    else:
        reference = generate(model, inputs, reference_cache(model, recipe.scheme, [recipe.padding, 0]), tokens)
    with_attention(model, entry, "kvconvert")
    cache = KVCache(model.config, recipe.scheme)
    batch = generate(model, inputs, cache, tokens)
    alone = generate(model, entry.first_row(inputs, recipe.padding), KVCache(model.config, recipe.scheme), tokens[:1])
    sequences = [sequence for store in cache.stores() for sequence in store.sequences]
    length = recipe.length + STEPS - 1
    return KVResult(
        batch,
        alone,
        reference,
        full,
        tokens,
        pages=cache.stats().pages,
        spans=sum(len(sequence.spans) for sequence in sequences),
        evicted=sum(length - sequence.stored for sequence in sequences) if recipe.scheme.evicts else 0,
        other_layers=cache.stats().other_layers,
    )
