"""The layers of a model as the arithmetic of its cache needs them, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from kvconvert.cache.size import FULL_PRECISION, LayerCache, ModelCache
from kvconvert.methods import UNQUANTIZED, KVScheme
from kvconvert.models.adapters import head_dim, key_value_heads, layer_config
from kvconvert.models.configuration import has_pages, layer_types_of


def sliding_windows(config: PretrainedConfig) -> list[int | None]:
    """The sliding window of each decoder layer in tokens, or None."""
    return [arguments.get("sliding_window") for arguments in layer_types_of(config)[1]]


def model_cache(
    config: PretrainedConfig, schemes: Sequence[KVScheme | None], dtype: torch.dtype = FULL_PRECISION
) -> ModelCache:
    """The cache of a model whose layers have these schemes, as `KVCache` makes it.

    Args:
        config: of the model.
        schemes: of all layers, budgets spread over them; None leaves a layer unquantized.
        dtype: of full-precision tokens.
    """
    text = config.get_text_config(decoder=True)
    quantized = any(scheme is not None for scheme in schemes)
    layers = []
    for index, (scheme, kind, arguments) in enumerate(zip(schemes, *layer_types_of(config), strict=True)):
        own, window = layer_config(text, index), arguments.get("sliding_window")
        if not has_pages(kind):
            layers.append(LayerCache(0, 0, 0))
        elif getattr(text, "kv_lora_rank", None):
            # Of latent attention transformers stores one latent vector and the keys' rotated channels.
            layers.append(LayerCache(1, text.kv_lora_rank, text.qk_rope_head_dim, None, window, dtype))
        else:
            # Beside quantized layers the others have pages, too, of the model's own dtype.
            stored = UNQUANTIZED if scheme is None and quantized else scheme
            channels = head_dim(own)
            layers.append(LayerCache(key_value_heads(own), channels, channels, stored, window, dtype))
    return ModelCache(tuple(layers))
