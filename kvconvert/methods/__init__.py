"""The methods, one file per paper: fields with their rules, presets, plan tensors, and their description; no torch."""

from kvconvert.methods.minikv import clamp_ratios, pyramid_ratios, spread_ratios
from kvconvert.methods.part import LayerShape
from kvconvert.methods.scheme import (
    FIELDS,
    OPTIONS,
    PAPER_PRESETS,
    PLAN_TENSORS,
    PRESETS,
    SEARCHED_FIELDS,
    UNQUANTIZED,
    WHOLE_MODEL_OPTIONS,
    Evict,
    KVCalibration,
    KVScheme,
    Spans,
    check_layers,
    layer_conventions,
    preset_calibration,
    refuse_renamed,
)
