"""Load a bundle and generate with its low-bit key-value cache.

Importing this package registers the "kvconvert" attention implementation and bundles with transformers, so that
`AutoModelForCausalLM.from_pretrained(bundle)` works as well as `load(bundle)`.
"""

import importlib
from typing import TYPE_CHECKING, Any

import kvconvert.models  # noqa: F401, first: it refuses an unsupported version of transformers
from kvconvert.runtime.hf import attention, bundle_quantizer
from kvconvert.runtime.hf.cache import KVCache
from kvconvert.runtime.hf.cache_layers import CacheStats
from kvconvert.runtime.hf.generation import watch_inputs
from kvconvert.runtime.hf.load import load
from kvconvert.runtime.hf.prompts import seal_prompt

if TYPE_CHECKING:
    from kvconvert.runtime.engine import Engine, Sampling

attention.register()
bundle_quantizer.register()

__all__ = ["CacheStats", "Engine", "KVCache", "Sampling", "load", "seal_prompt", "watch_inputs"]


def __getattr__(name: str) -> Any:
    # Only servers need the engine; the package is imported when one of its names is first used.
    if name not in ("Engine", "Sampling"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("kvconvert.runtime.engine"), name)
