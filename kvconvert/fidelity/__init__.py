"""How much of a model's behaviour its bundle keeps, measured through the quantized cache."""

from kvconvert.fidelity.evaluate import FidelityReport, evaluate
from kvconvert.fidelity.recall import DrillCounts

__all__ = ["DrillCounts", "FidelityReport", "evaluate"]
