"""Attention through a quantized cache, simulated in one forward pass over whole sequences.

A query reads a page as it is stored once the page has been written: after the attention of the token that completes it
and of `recent` further ones (`clip_ratios.pages_read`). Between two such moments all queries read the same pages
quantized and everything else exactly, so that a sequence is attended block by block, with quantized pages put in the
place of the exact ones as they become available. That is what decoding token by token through the cache gives, in one
pass and with the cache's own quantizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvconvert.calibration.attention_sample import as_cached, model_attention
from kvconvert.calibration.scales import pages_read, stored_tokens
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.models.masks import tensor_mask

SIMULATED_ATTENTION = "kvconvert_simulate"


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of a call of one layer's attention.

    Attributes:
        queries: [B, Hq, T, D]; keys: [B, H, T, D]; values: [B, H, T, E].
        mask: the attention mask of the model, or None for causal attention.
        arguments: the rest (scaling, softcap, s_aux).
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    arguments: dict[str, Any]


class _Simulation:
    """State of the attention function: caches by layer, and layers whose calls are kept."""

    caches: Mapping[int, LayerFormat] = {}
    captured: dict[int, AttentionCall | None] | None = None


@contextmanager
def simulated_caches(caches: Mapping[int, LayerFormat]) -> Iterator[None]:
    """Let these layers of models with `SIMULATED_ATTENTION` read their keys and values as such caches return them."""
    previous, _Simulation.caches = _Simulation.caches, caches
    try:
        yield
    finally:
        _Simulation.caches = previous


@contextmanager
def attention_calls(*layers: int) -> Iterator[dict[int, AttentionCall | None]]:
    """Keep what the attention of these layers is called with, by layer."""
    previous, _Simulation.captured = _Simulation.captured, dict.fromkeys(layers)
    try:
        yield _Simulation.captured
    finally:
        _Simulation.captured = previous


def simulated_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cache: LayerFormat,
    **kwargs: Any,
) -> Tensor:
    """Causal attention of whole sequences that are read token by token through a cache.

    Args:
        module: the attention module.
        query: [B, Hq, T, D]; key: [B, H, T, D]; value: [B, H, T, E]; without padding.
        attention_mask: the attention mask of the model, bool or additive [B or 1, 1, T, T]; None is causal.
        cache: formats with the clip ratios to be used.
        kwargs: what the model passes to attention.

    Returns:
        [B, T, Hq, E] in the dtype of `query`; computed in float32.

    Raises:
        NumericError: keys or values that cannot be quantized.
    """
    queries, keys, values = as_cached(query, key, value, cache)
    length, stored, written = keys.shape[2], [], []
    for name, tokens in (("key", keys), ("value", values)):
        f = cache.side(name == "key")[0]
        stored.append(stored_tokens(tokens, cache, name, [f.clip_ratio])[0])
        written.append(_written(length, cache.window(f.is_key), f.page_size))
    read = (keys.clone(), values.clone())
    outputs = []
    for start, stop in pairwise(sorted({0, length, *written[0], *written[1]})):
        for tokens, quantized, moments in zip(read, stored, written, strict=True):
            if start in moments:
                page = moments[start]
                tokens[:, :, page] = quantized[:, :, page]
        mask = _mask_of(attention_mask, start, stop, keys.device)
        block = queries[:, :, start:stop]
        outputs.append(model_attention(module, block, *(side[:, :, :stop] for side in read), mask, **kwargs))
    output = torch.cat(outputs, 1)
    if cache.rotations.values:
        output = hadamard_transform(output, inverse=True)
    return output.to(query.dtype)


def _written(length: int, recent: int, page_size: int) -> dict[int, slice]:
    """The tokens of each page that some token reads as it is stored, by the first token that does."""
    starts = (page * page_size for page in range(pages_read(length, recent, page_size)))
    return {start + page_size + recent: slice(start, start + page_size) for start in starts}


def _mask_of(mask: Tensor | None, start: int, stop: int, device: torch.device) -> Tensor:
    """The rows of a mask for queries start to stop, over the tokens before `stop`."""
    if mask is None:
        return torch.ones(stop - start, stop, dtype=torch.bool, device=device).tril(start)[None, None]
    return mask[:, :, start:stop, :stop]


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    layer = getattr(module, "layer_idx", None)
    captured = _Simulation.captured
    if captured is not None and layer in captured:
        captured[layer] = AttentionCall(query, key, value, attention_mask, kwargs)
    cache = _Simulation.caches.get(layer)
    if cache is None:
        return model_attention(module, query, key, value, attention_mask, **kwargs), None
    return simulated_attention(module, query, key, value, attention_mask, cache, **kwargs), None


AttentionInterface.register(SIMULATED_ATTENTION, _attention_function)
AttentionMaskInterface.register(SIMULATED_ATTENTION, tensor_mask)
