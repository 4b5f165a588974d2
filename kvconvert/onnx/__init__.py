"""Export to ONNX Runtime: a decoder graph with 4-bit weights and, where the bundle has one, its int8 or int4 cache.

    from kvconvert.onnx.export import export_onnx

Needs the package onnx (`pip install ".[onnx]"`). docs/bundle.md describes the result and what is served.

Nothing here imports torch, which takes seconds: `kvconvert export` refuses a missing package before that.
"""

import importlib.util

from kvconvert.errors import MissingError


def check_installed() -> None:
    """Refuse (MissingError) to export without the package onnx."""
    if importlib.util.find_spec("onnx") is None:
        raise MissingError(
            "The export to ONNX needs the package onnx; run `pip install '.[onnx]'` in a clone of kvconvert."
        )
