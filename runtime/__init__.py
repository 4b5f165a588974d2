"""Load a bundle and generate with its low-bit key-value cache.

Importing this package tells transformers about the "kvconvert" attention implementation and about bundles, so that
`AutoModelForCausalLM.from_pretrained(bundle)` works as well as `load(bundle)`.
"""

from kvconvert.runtime import attention, quantizer
from kvconvert.runtime.cache import CacheStats, KVCache
from kvconvert.runtime.load import load
from kvconvert.runtime.modality import watch_inputs

attention.register()
quantizer.register()

__all__ = ["CacheStats", "KVCache", "load", "watch_inputs"]
