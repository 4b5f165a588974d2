"""Which calibration passes a recipe asks for in a layer, and in which order."""

from __future__ import annotations

from torch import Tensor

from kvconvert.calibration.attention_sample import AttentionSampler
from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.calibquant import CalibQuantPass
from kvconvert.calibration.clip_ratios import ClipRatioPass
from kvconvert.calibration.error_feedback import ErrorFeedbackPass
from kvconvert.calibration.gptq_pass import GptqPass
from kvconvert.calibration.key_treatments import KeyTreatmentPass
from kvconvert.calibration.kitty import KittyPass
from kvconvert.calibration.minikv import MiniKVPass
from kvconvert.calibration.oscar import OscarPass
from kvconvert.calibration.protocol import CalibrationPass, PassRequest, PassResult
from kvconvert.calibration.static_scales import StaticScalesPass
from kvconvert.calibration.structure import LayerStructure
from kvconvert.methods import PLAN_TENSORS, KVCalibration, KVScheme
from kvconvert.methods.awq import WeightsRecipe

# In the order in which they work: what folds first, the searches for weights after it, and what depends on the values
# that the cache will store after both. Passes that evaluate a sample of the finished layer's attention stand last.
PASSES: tuple[type[CalibrationPass], ...] = (
    OscarPass,
    KittyPass,
    AwqPass,
    GptqPass,
    StaticScalesPass,
    KeyTreatmentPass,
    ErrorFeedbackPass,
    ClipRatioPass,
    CalibQuantPass,
    MiniKVPass,
)


def make_passes(
    weights: WeightsRecipe, scheme: KVScheme | None, search: KVCalibration, structure: LayerStructure
) -> list[CalibrationPass]:
    """The passes that a recipe asks for in one layer, in order; the sampler stands before the first that needs it."""
    sampler = AttentionSampler()
    request = PassRequest(weights, scheme, search, structure, sampler)
    passes = [made for kind in PASSES if (made := kind.of(request)) is not None]
    first = next((i for i, made in enumerate(passes) if made.reads_sample), None)
    if first is not None:
        passes.insert(first, sampler)
    return passes


def plan_of(made: CalibrationPass, result: PassResult, index: int) -> dict[str, Tensor]:
    """A pass's tensors for the KV plan, by their names in it; every name has to be one that a method declares."""
    undeclared = result.plan.keys() - PLAN_TENSORS.keys()
    if undeclared:
        raise ValueError(f"no method declares the plan tensors {sorted(undeclared)} of the pass {made.name}")
    return {f"layers.{index}.{name}": tensor for name, tensor in result.plan.items()}
