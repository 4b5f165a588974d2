"""Which calibration passes a recipe asks for in a layer, and in which order."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvconvert.bundle.scheme import KVScheme
from kvconvert.calibration.attention_sample import AttentionSampler
from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.calibquant import CalibQuantPass
from kvconvert.calibration.clip_ratios import ClipRatioPass
from kvconvert.calibration.kitty import KittyPass
from kvconvert.calibration.minikv import MiniKVPass
from kvconvert.calibration.oscar import OscarPass, simulate_value_cache
from kvconvert.calibration.protocol import CacheFormat, CalibrationPass
from kvconvert.calibration.static_scales import StaticScalesPass
from kvconvert.calibration.structure import LayerStructure
from kvconvert.convert.recipe import KVCalibration, WeightsRecipe
from kvconvert.runtime.cache.formats import layer_format, span_format


def make_passes(
    weights: WeightsRecipe, scheme: KVScheme | None, calibration: KVCalibration, structure: LayerStructure
) -> list[CalibrationPass]:
    """The passes that a recipe asks for in one layer, in the order in which they work.

    Fold first, AWQ's search after it, and what depends on the values that the cache will see after both.
    """
    passes: list[CalibrationPass] = []
    quantize_values = None
    if scheme is not None and (scheme.key_bits < 16 or scheme.rotate_values == "folded"):
        passes.append(
            OscarPass(
                fold_values=scheme.rotate_values == "folded",
                group_size=scheme.key_group_size,
                token_norm="per_head" if scheme.token_norm == "per_head" else "joint",
                measure=scheme.token_norm_measure,
            )
        )
    if scheme is not None and scheme.boosted_for(structure.head_dim):
        passes.append(KittyPass(scheme.boost_select))
    # Values of spans and static pages have one scale per channel: scaling channels changes nothing about their error.
    if scheme is not None and scheme.value_bits < 16 and not scheme.is_span and scheme.static_scales == "none":
        group_size, rotate = scheme.value_group_for(structure.head_dim), scheme.rotate_values == "online"

        def quantize_values(values: Tensor) -> Tensor:
            return simulate_value_cache(values, scheme.value_bits, group_size, scheme.value_clip_ratio, rotate)

    if weights.method == "awq":
        passes.append(AwqPass(weights.bits, weights.group_size, quantize_values))
    if scheme is not None and scheme.static_scales == "calibrated":
        passes.append(StaticScalesPass())
    if scheme is not None:
        passes += _cache_searches(scheme, calibration)
    return passes


def _cache_searches(scheme: KVScheme, calibration: KVCalibration) -> list[CalibrationPass]:
    """Passes that try formats of the cache on a sample of the finished layer's attention, with the sampler."""
    sampler = AttentionSampler()
    searches: list[CalibrationPass] = []
    sides = {"key": scheme.key_bits < 16, "value": scheme.value_bits < 16}
    ranges = {side: quantized and calibration.searches_clip_ratio(side) for side, quantized in sides.items()}
    if not scheme.is_span and any(ranges.values()):
        searches.append(ClipRatioPass(sampler, ranges["key"], ranges["value"]))
    if scheme.is_span and (calibration.searches_tau or any(ranges.values())):
        grid = calibration.tau_grid if calibration.searches_tau else None
        taus = (scheme.tau1, scheme.tau2)
        searches.append(CalibQuantPass(sampler, grid, taus, ranges["key"], ranges["value"]))
    if scheme.evicts:
        searches.append(MiniKVPass(sampler, scheme.recent_ratio))
    return [sampler, *searches] if searches else []


def cache_format(scheme: KVScheme, structure: LayerStructure) -> CacheFormat:
    """A scheme in the terms of kernels; channels that calibration will fix are ranked page by page until then."""
    heads, channels = structure.num_key_value_heads, structure.head_dim
    return CacheFormat(
        pages=layer_format(replace(scheme, boost_select="dynamic"), heads, channels, channels),
        span=span_format(scheme),
        rotate_keys=scheme.rotate_keys == "hadamard",
        rotate_values=scheme.rotate_values == "online",
        sink_tokens=scheme.sink_tokens,
        key_recent_tokens=scheme.key_recent_tokens,
        value_recent_tokens=scheme.value_recent_tokens,
        modality=scheme.modality,
    )
