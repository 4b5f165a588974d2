"""How much of a model's behavior its bundle keeps, measured through the quantized cache."""

from kvconvert.fidelity.evaluate import evaluate
from kvconvert.fidelity.recall import DrillCounts
from kvconvert.fidelity.report import PARTS, FidelityReport

__all__ = ["PARTS", "DrillCounts", "FidelityReport", "evaluate"]
