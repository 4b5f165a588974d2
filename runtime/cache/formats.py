"""The formats of one layer's pages and spans, from its scheme and its part of the KV plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Literal

import torch

from kvconvert.errors import RecipeError
from kvconvert.kernels.pages import ChannelScales, KeyCenter, KeyFormat, LayerFormat, ValueFormat, key_center
from kvconvert.kernels.rotate import Rotations
from kvconvert.kernels.spans import SpanFormat
from kvconvert.methods import KVScheme


def layer_format(scheme: KVScheme, heads: int, key_dim: int, value_dim: int) -> LayerFormat:
    """The page formats of a scheme for a layer's shape, without what comes from a KV plan.

    Raises:
        RecipeError: the head size cannot be packed at these bits.
    """
    for name, bits, dim in (("key_bits", scheme.key_bits, key_dim), ("value_bits", scheme.value_bits, value_dim)):
        # Both planes of 3-bit codes have eight fields per lane.
        multiple = 8 if bits == 3 else 16 // bits
        if bits < 16 and dim % multiple:
            raise RecipeError(
                f"[kv] {name} = {bits} needs a head size that is a multiple of {multiple}; this model has {dim}."
            )
    static = scheme.is_static
    keys = KeyFormat(
        heads,
        key_dim,
        scheme.page_size,
        scheme.key_bits,
        scheme.page_size if static else scheme.key_group_size,
        scheme.token_norm,
        scheme.token_norm_measure,
        scheme.key_clip_ratio,
        scheme.boosted_for(key_dim),
        scheme.boost_select == "calibrated",
        static and scheme.key_bits < 16,
    )
    values = ValueFormat(
        heads,
        value_dim,
        scheme.page_size,
        scheme.value_bits,
        value_dim if static or scheme.value_bits == 16 else scheme.value_group_for(value_dim),
        scheme.value_clip_ratio,
        static and scheme.value_bits < 16,
    )
    return LayerFormat(keys, values)


def with_plan(
    format: LayerFormat, scheme: KVScheme, plan: Mapping[str, torch.Tensor], device: torch.device
) -> LayerFormat:
    """A layer's formats with what its scheme needs of its part of the KV plan: fixed boosted channels, static scales,
    error feedback, key centers.

    Raises:
        RecipeError: a tensor is missing or does not fit the layer's shape.
    """
    return replace(
        format,
        boosted=_fixed_channels(format.keys, plan, device),
        static_keys=_static_scales("key", format.keys, plan, device),
        static_values=_static_scales("value", format.values, plan, device),
        key_feedback=_key_feedback(format.keys, plan, device) if scheme.feeds_errors_back else None,
        key_center=_key_center(format.keys, scheme, plan, device) if scheme.centers_keys else None,
    )


def _key_center(f: KeyFormat, scheme: KVScheme, plan: Mapping[str, torch.Tensor], device: torch.device) -> KeyCenter:
    """The center of a layer whose pages hold keys without it."""
    tensors = []
    for name, shape in (
        ("key_mean", (f.heads, f.head_dim)),
        ("rope_frequencies", (f.head_dim // 2,)),
        ("rope_pairs", (f.head_dim // 2, 2)),
    ):
        tensor = plan.get(name)
        found = None if tensor is None else tuple(tensor.shape)
        if found != shape:
            raise RecipeError(
                f"[kv] key_center = 'calibrated' needs {name} of shape {shape} from a KV plan, and found "
                f'{"none" if found is None else found}; use a bundle calibrated so, or key_center = "none".'
            )
        tensors.append(tensor.to(device))
    return key_center(*tensors, rotations(scheme).keys)


def _key_feedback(f: KeyFormat, plan: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """The matrices float16 [H, D, D] of a layer that rounds its keys with error feedback."""
    feedback, expected = plan.get("key_feedback"), (f.heads, f.head_dim, f.head_dim)
    shape = None if feedback is None else tuple(feedback.shape)
    if shape != expected:
        raise RecipeError(
            f"[kv] key_rounding = 'error_feedback' needs key_feedback of shape {expected} from a KV plan, and found "
            f'{"none" if shape is None else shape}; use a bundle calibrated so, or key_rounding = "nearest".'
        )
    return feedback.to(device, torch.float16).contiguous()


def _fixed_channels(f: KeyFormat, plan: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """The boosted channels int64 [H, n] of a layer that fixes them; None for other layers."""
    if not f.boosted or not f.fixed_channels:
        return None
    channels = plan.get("boosted_channels")
    shape = None if channels is None else tuple(channels.shape)
    if shape != (f.heads, f.boosted):
        raise RecipeError(
            f"[kv] boost_select = 'calibrated' needs {f.boosted} channels for each of {f.heads} heads from a KV plan, "
            f"and found {'none' if shape is None else shape}; use a bundle calibrated so, or select dynamically."
        )
    return channels.to(device, torch.long)


def _static_scales(
    side: Literal["key", "value"], f: KeyFormat | ValueFormat, plan: Mapping[str, torch.Tensor], device: torch.device
) -> ChannelScales | None:
    """The scales that static pages of one side need, from a layer's part of the KV plan; None for other pages.

    Raises:
        RecipeError: they are missing or do not fit the layer's shape.
    """
    if not f.static:
        return None
    parts = []
    for part in ChannelScales._fields:
        tensor = plan.get(f"static_{side}_{part}")
        shape = None if tensor is None else tuple(tensor.shape)
        if shape != (f.heads, f.head_dim):
            raise RecipeError(
                f"[kv] static_scales = 'calibrated' needs static_{side}_{part} for {f.heads} heads of {f.head_dim} "
                f"channels from a KV plan, and found {'none' if shape is None else shape}; use a bundle calibrated so, "
                'or static_scales = "none".'
            )
        parts.append(tensor.to(device, torch.float16))
    return ChannelScales(*parts)


def span_format(scheme: KVScheme) -> SpanFormat | None:
    """The span format of a scheme, or None for pages."""
    if not scheme.is_span:
        return None
    # It has the scheme's own fields.
    return SpanFormat(**{field.name: getattr(scheme, field.name) for field in fields(SpanFormat)})


def rotations(scheme: KVScheme) -> Rotations:
    """What a scheme rotates at run time; folded values are rotated by the weights."""
    return Rotations(scheme.rotate_keys == "hadamard", scheme.rotate_values == "online")
