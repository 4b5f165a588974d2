"""Convert Hugging Face models into bundles with quantized weights and a calibrated low-bit key-value cache.

Everything that a program needs is imported from here (docs/runtime.md):

    from kvconvert import bench, calibrate, export, evaluate, load, Recipe, KVScheme, KVCache

Importing this package is cheap: each of these names brings in its module, and with it torch and transformers, only when
it is first used. The command line comes through here before it can provide for Ctrl-C, so nothing else is imported.
"""

import os

from kvconvert.version import __version__

TYPE_CHECKING = False

# Read when torch loads. Waiting threads that spin make small models ten times slower on a machine with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:  # what editors and type checkers read; `_HOMES` says the same to Python
    from kvconvert.benchmark.bench import bench
    from kvconvert.convert.export import export
    from kvconvert.convert.pipeline import calibrate
    from kvconvert.errors import KvconvertError
    from kvconvert.fidelity.evaluate import evaluate
    from kvconvert.methods import KVScheme
    from kvconvert.recipes.recipe import Recipe
    from kvconvert.runtime import KVCache, load

__all__ = [
    "KVCache",
    "KVScheme",
    "KvconvertError",
    "Recipe",
    "__version__",
    "bench",
    "calibrate",
    "evaluate",
    "export",
    "load",
]

_HOMES = {
    "KVCache": "kvconvert.runtime",
    "KVScheme": "kvconvert.methods",
    "KvconvertError": "kvconvert.errors",
    "Recipe": "kvconvert.recipes.recipe",
    "bench": "kvconvert.benchmark.bench",
    "calibrate": "kvconvert.convert.pipeline",
    "evaluate": "kvconvert.fidelity.evaluate",
    "export": "kvconvert.convert.export",
    "load": "kvconvert.runtime",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name != "KvconvertError":  # which `except` names while another error is on its way
        importlib.import_module("kvconvert.models")  # refuses an unsupported transformers
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
