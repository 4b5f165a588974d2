"""Load a bundle and generate with its low-bit key-value cache.

Importing this package registers the "kvconvert" attention implementation and bundles with transformers, so that
`AutoModelForCausalLM.from_pretrained(bundle)` works as well as `load(bundle)`.
"""

from kvconvert.runtime.hf import attention, quantizer
from kvconvert.runtime.hf.cache import CacheStats, KVCache
from kvconvert.runtime.hf.load import load
from kvconvert.runtime.hf.modality import watch_inputs

attention.register()
quantizer.register()

__all__ = ["CacheStats", "KVCache", "load", "watch_inputs"]
