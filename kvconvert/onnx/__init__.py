"""Export to ONNX Runtime: a decoder graph with 4-bit weights and, where the bundle has one, its int8 or int4 cache.

    from kvconvert.onnx.export import export_onnx

Needs the package onnx (`pip install ".[onnx]"`). docs/bundle.md describes the result and what is served.
"""
