"""Convert Hugging Face models into bundles with quantized weights and a calibrated low-bit key-value cache.

Importing this package is cheap: the runtime (`kvconvert.runtime`), the numerics (`kvconvert.kernels`) and the
conversion pipeline are imported by those who use them.
"""

from kvconvert.errors import KvconvertError

__all__ = ["KvconvertError", "__version__"]

__version__ = "0.1.0"
