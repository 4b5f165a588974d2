"""A bundle's static scales as the quantized cache of ONNX Runtime's GroupQueryAttention.

That cache is symmetric: it stores clamp(round(x / scale), -2^(b-1), 2^(b-1) - 1). The bundle's grid has a zero point:

    x = code scale + zero_point = (code - 2^(b-1)) scale + center,    center = zero_point + 2^(b-1) scale

So the operator is given keys and values less their centers, which makes both grids the same. The values' center is
added to the attention output, whose weights sum to 1. The keys' center needs nothing: it adds the same number to all
scores of a query, which the softmax does not notice, unless a soft cap comes between.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvconvert.bundle.manifest import LayerPlan
from kvconvert.bundle.reader import Bundle
from kvconvert.errors import UnsupportedModelError
from kvconvert.methods import KVScheme

# ONNX Runtime divides by the scale; a channel that was constant has scale 0, and is restored by its center alone.
_SMALLEST_SCALE = 1e-20


class StaticSide(NamedTuple):
    """Scale and center of keys or values, float32 [KV heads, head_dim]."""

    scale: Tensor
    center: Tensor


class StaticLayer(NamedTuple):
    """One layer's keys and values."""

    key: StaticSide
    value: StaticSide


class StaticCache(NamedTuple):
    """The quantized cache of a model: 8 or 4 bits in all layers."""

    bits: int
    layers: list[StaticLayer]


def has_plan(bundle: Bundle) -> bool:
    """Whether the bundle says anything about the cache."""
    return any(layer.kv is not None for layer in bundle.manifest.layers)


def static_cache(bundle: Bundle, attention_softcap: float = 0.0) -> StaticCache:
    """The cache that the bundle's KV plan describes.

    Args:
        bundle: an open bundle.
        attention_softcap: the model's soft cap of scores, 0 for none.

    Raises:
        UnsupportedModelError: ONNX Runtime's cache cannot follow the plan; the message says why and what can be done.
    """
    plans = bundle.manifest.layers
    widths = {served_bits(plan) for plan in plans}
    if len(widths) > 1:
        raise _unsupported("its layers differ in their number of bits")
    if attention_softcap:
        raise _unsupported(
            "the model's soft cap of scores comes between the keys' zero points and the softmax", advice=""
        )
    (bits,) = widths
    return StaticCache(
        bits,
        [
            StaticLayer(*(_side(bundle.plan, f"layers.{plan.index}.static_{side}", bits) for side in ("key", "value")))
            for plan in plans
        ],
    )


def _side(plan: dict[str, Tensor], name: str, bits: int) -> StaticSide:
    scale, zero_point = plan[f"{name}_scale"].float(), plan[f"{name}_zero_point"].float()
    return StaticSide(scale.clamp(min=_SMALLEST_SCALE), torch.add(zero_point, scale, alpha=2 ** (bits - 1)))


def served_bits(plan: LayerPlan) -> int:
    """Width of a layer's keys and values, 8 or 4.

    Raises:
        UnsupportedModelError: something of the layer's scheme would be lost.
    """
    scheme = plan.scheme()
    if scheme is None or not scheme.is_static:
        raise _unsupported(f"layer {plan.index} has no static scales")
    obstacle = _obstacle(scheme)
    if obstacle is not None:
        raise _unsupported(f"layer {plan.index} has {obstacle}")
    return scheme.keys.bits


def _obstacle(scheme: KVScheme) -> str | None:
    """Settings of a scheme with static scales that the operator lacks."""
    keys, values = scheme.sides
    if keys.bits != values.bits or keys.bits not in (4, 8):
        return f"keys of {keys.bits} and values of {values.bits} bits, where both need 8 or both 4"
    if scheme.rotate_keys != "none" or scheme.rotate_values == "online":
        return "keys or values that are rotated at run time"
    if scheme.sink_tokens:
        return f"{scheme.sink_tokens} sink tokens, which its scales leave out"
    if keys.recent_tokens or values.recent_tokens:
        return "windows in full precision"
    if scheme.heavy_ratio is not None:
        return "a prompt budget (heavy_ratio)"
    if scheme.key_rounding != "nearest":
        return "error feedback (key_rounding)"
    return None


def _unsupported(
    reason: str,
    advice: str = 'calibrate with static_scales = "calibrated" and 8 or 4 bits (docs/bundle.md has the recipe), or ',
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"ONNX Runtime's quantized cache cannot follow this bundle's KV plan: {reason}; {advice}set `kv_cache` to "
        '"float", which leaves the plan out.'
    )
