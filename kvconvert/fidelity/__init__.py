"""How much of a model's behaviour its bundle keeps, measured through the quantized cache."""

from kvconvert.fidelity.evaluate import FidelityReport, evaluate

__all__ = ["FidelityReport", "evaluate"]
