"""Which layers of a model can keep their keys and values in pages, and why others cannot."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from transformers import PretrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

# Layers with keys and values; those of the second line carry a recurrent state besides.
ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
HYBRID_LAYER_TYPES = ("hybrid", "hybrid_sliding")


def layer_types_of(config: PretrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """The type of each layer in transformers' terms, and the arguments of transformers' cache for it.

    "dummy" is a layer without a cache of its own: it reads an earlier layer's, or has no attention.
    """
    return get_layer_types_and_kwargs(config.get_text_config(decoder=True))


def has_pages(layer_type: str) -> bool:
    """Whether a layer of this type has keys and values that pages can hold."""
    return layer_type in ATTENTION_LAYER_TYPES or layer_type in HYBRID_LAYER_TYPES


def pages_unsupported(config: PretrainedConfig, layer_type: str) -> str | None:
    """Why a layer of this type keeps transformers' own cache, or None where it can have pages."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        return "latent attention (MLA) stores no keys and values per head; its cache is left to transformers"
    if not _uses_attention_interface(text):
        return (
            f"{text.model_type} computes attention by itself instead of through transformers' attention interface; its "
            "cache is left to transformers"
        )
    if layer_type == "dummy":
        return "it has no keys and values of its own: it reads an earlier layer's, or does not attend"
    if not has_pages(layer_type):
        return f"a {layer_type} layer has no keys and values; its state is left to transformers"
    return None


def changing_rope(config: PretrainedConfig) -> str | None:
    """Why a model's RoPE turns the same position by different angles at different lengths, or None."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    changing = next((k["rope_type"] for k in kinds if k.get("rope_type") in ("dynamic", "longrope")), None)
    return None if changing is None else f"RoPE of type {changing} has other angles where sequences are longer"


def _uses_attention_interface(config: PretrainedConfig) -> bool:
    """Whether a model of transformers uses the attention interface; models from elsewhere are assumed to."""
    name = type(config).__module__
    if not name.startswith("transformers.models.") or ".configuration_" not in name:
        return True
    modeling = name.replace(".configuration_", ".modeling_")
    if modeling not in sys.modules and importlib.util.find_spec(modeling) is None:
        return True
    return hasattr(importlib.import_module(modeling), "ALL_ATTENTION_FUNCTIONS")
