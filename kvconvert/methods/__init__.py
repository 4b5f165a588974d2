"""The methods, one file per paper: fields with their rules, presets, plan tensors, and their description; no torch."""

from kvconvert.methods.minikv import clamp_ratios, proportional_ratios, pyramid_ratios, spread_ratios
from kvconvert.methods.part import LayerShape, Part, PlanTensor
from kvconvert.methods.scheme import (
    FIELDS,
    OPTIONS,
    PAPER_PRESETS,
    PARTS,
    PLAN_TENSORS,
    PRESETS,
    SEARCHED_FIELDS,
    UNQUANTIZED,
    WHOLE_MODEL_OPTIONS,
    FieldInfo,
    KVCalibration,
    KVScheme,
    check_layers,
    layer_conventions,
    preset_calibration,
    refuse_renamed,
)
from kvconvert.methods.sides import Evict, Pages, SchemeSide, Spans

__all__ = [
    "FIELDS",
    "OPTIONS",
    "PAPER_PRESETS",
    "PARTS",
    "PLAN_TENSORS",
    "PRESETS",
    "SEARCHED_FIELDS",
    "UNQUANTIZED",
    "WHOLE_MODEL_OPTIONS",
    "Evict",
    "FieldInfo",
    "KVCalibration",
    "KVScheme",
    "LayerShape",
    "Pages",
    "Part",
    "PlanTensor",
    "SchemeSide",
    "Spans",
    "check_layers",
    "clamp_ratios",
    "layer_conventions",
    "preset_calibration",
    "proportional_ratios",
    "pyramid_ratios",
    "refuse_renamed",
    "spread_ratios",
]
