"""A KV scheme in the terms of kernels: what the bytes of one layer's pages and spans mean, for the layer's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from kvconvert.errors import RecipeError
from kvconvert.kernels.pages import ChannelScales, KeyCenter, LayerFormat, PageFormat, TokenNorm, key_center
from kvconvert.kernels.quantizer import affine_grid
from kvconvert.kernels.rotate import NO_ROTATION, Rotations
from kvconvert.kernels.spans import SpanFormat
from kvconvert.methods import KVScheme, Spans
from kvconvert.methods.static_scales import SCALE_NAMES

Side = Literal["key", "value"]


class ChannelBounds(NamedTuple):
    """Smallest and largest value of each channel of a layer's keys or values: float32 [H, channels]."""

    low: torch.Tensor
    high: torch.Tensor

    def scales(self, bits: int, clip_ratio: float) -> ChannelScales:
        """The grid from `low` to `high`, shrunk about its midpoint by `clip_ratio`."""
        return ChannelScales(*affine_grid(self.low, self.high, bits, clip_ratio))


@dataclass(frozen=True)
class CacheSide:
    """Keys or values of a layer's cache, but for the format of their pages.

    Attributes:
        recent_tokens: newest tokens in full precision, see `KVScheme`.
        bounds: of each channel, where pages are static and calibration has measured them.
    """

    recent_tokens: int = 0
    bounds: ChannelBounds | None = None


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """How one layer's cache stores keys and values: a KV scheme in the terms of kernels.

    Attributes:
        pages: of the layer's pages.
        span: of its spans (CalibQuant), or None where the cache is made of pages.
        rotations: what is rotated at run time, after RoPE.
        sink_tokens: first tokens in full precision, see `KVScheme`.
        keys, values: what else there is to say of each.
        modality: which tokens go to spans, see `KVScheme`.
    """

    pages: LayerFormat
    span: SpanFormat | None = None
    rotations: Rotations = NO_ROTATION
    sink_tokens: int = 0
    keys: CacheSide = CacheSide()
    values: CacheSide = CacheSide()
    modality: str = "all"

    @classmethod
    @lru_cache(maxsize=1024)
    def of(
        cls, scheme: KVScheme, *, heads: int, key_dim: int, value_dim: int | None = None, latent: bool = False
    ) -> CacheFormat:
        """The format of a scheme for a layer's shape, without the tensors of a KV plan (`with_plan`).

        Args:
            scheme: of the layer.
            heads: KV heads.
            key_dim, value_dim: channels of a head's keys and values; None for as many.
            latent: whether keys are latents (MLA), which other kernels read; they take as many bytes.

        Raises:
            RecipeError: the head size cannot be packed at these bits.
        """
        value_dim = key_dim if value_dim is None else value_dim
        for side, dim in zip(scheme.sides, (key_dim, value_dim), strict=True):
            # Both planes of 3-bit codes have eight fields per lane.
            multiple = 8 if side.bits == 3 else 16 // side.bits
            if dim % multiple:
                raise RecipeError(
                    f"[kv] {side.name}_bits = {side.bits} needs a head size that is a multiple of {multiple}; this "
                    f"model has {dim}."
                )
        (key, value), static = scheme.sides, scheme.is_static
        keys = PageFormat.keys(
            heads=heads,
            head_dim=key_dim,
            page_size=scheme.page_size,
            bits=key.bits,
            group_size=scheme.page_size if static else key.group_size,
            token_norm=TokenNorm(scheme.token_norm),
            token_norm_measure=scheme.token_norm_measure,
            clip_ratio=key.clip_ratio,
            boosted=scheme.boosted_for(key_dim),
            fixed_channels=scheme.boost_select == "calibrated",
            static=key.static,
            scale_bits=key.scale_bits,
            by_token=latent and key.bits in (2, 4),
        )
        whole_head = static or not value.quantized
        values = PageFormat.values(
            heads=heads,
            head_dim=value_dim,
            page_size=scheme.page_size,
            bits=value.bits,
            group_size=value_dim if whole_head else scheme.value_group_for(value_dim),
            clip_ratio=value.clip_ratio,
            static=value.static,
            scale_bits=value.scale_bits,
        )
        span = None
        if isinstance(scheme.prompt, Spans):
            span = SpanFormat(
                key_bits=key.bits,
                value_bits=value.bits,
                key_clip_ratio=key.clip_ratio,
                value_clip_ratio=value.clip_ratio,
                tau1=scheme.tau1,
                tau2=scheme.tau2,
                span_tokens=scheme.prompt.tokens,
            )
        return cls(
            pages=LayerFormat(keys, values),
            span=span,
            rotations=rotations(scheme),
            sink_tokens=scheme.sink_tokens,
            keys=CacheSide(key.recent_tokens),
            values=CacheSide(value.recent_tokens),
            modality=scheme.prompt.modality,
        )

    def side(self, name: Side) -> tuple[PageFormat, CacheSide]:
        """The format of keys' or values' pages, and what else there is to say of that side."""
        return (self.pages.keys, self.keys) if name == "key" else (self.pages.values, self.values)

    def static_scales(self, name: Side, clip_ratio: float) -> ChannelScales | None:
        """Scales of one side's static pages with this clip ratio; None for other pages."""
        f, own = self.side(name)
        return None if own.bounds is None else own.bounds.scales(f.bits, clip_ratio)


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


def _planned(
    plan: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], setting: str, instead: str, needed: str = ""
) -> torch.Tensor:
    """A tensor of a layer's part of the KV plan, for which a setting asks (RecipeError: missing, misshapen)."""
    tensor = plan.get(name)
    found = None if tensor is None else tuple(tensor.shape)
    if tensor is None or found != shape:
        raise RecipeError(
            f"[kv] {setting} needs {needed or f'{name} of shape {shape}'} from a KV plan, and found "
            f"{'none' if found is None else found}; use a bundle calibrated so, or {instead}."
        )
    return tensor


def _key_center(f: PageFormat, scheme: KVScheme, plan: Mapping[str, torch.Tensor], device: torch.device) -> KeyCenter:
    """The center of a layer whose pages hold keys without it."""
    shapes = {"key_mean": (f.heads, f.head_dim), "rope_frequencies": (f.head_dim // 2,)}
    shapes["rope_pairs"] = (f.head_dim // 2, 2)
    setting, instead = "key_center = 'calibrated'", 'key_center = "none"'
    tensors = [_planned(plan, name, shape, setting, instead).to(device) for name, shape in shapes.items()]
    return key_center(*tensors, rotations(scheme).keys)


def _key_feedback(f: PageFormat, plan: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """The matrices float16 [H, D, D] of a layer that rounds its keys with error feedback."""
    setting, instead = "key_rounding = 'error_feedback'", 'key_rounding = "nearest"'
    feedback = _planned(plan, "key_feedback", (f.heads, f.head_dim, f.head_dim), setting, instead)
    return feedback.to(device, torch.float16).contiguous()


def _fixed_channels(f: PageFormat, plan: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """The boosted channels int64 [H, n] of a layer that fixes them; None for other layers."""
    if not f.boosted or not f.fixed_channels:
        return None
    shape, needed = (f.heads, f.boosted), f"{f.boosted} channels for each of {f.heads} heads"
    setting, instead = "boost_select = 'calibrated'", "select dynamically"
    return _planned(plan, "boosted_channels", shape, setting, instead, needed).to(device, torch.long)


def _static_scales(
    side: Side, f: PageFormat, plan: Mapping[str, torch.Tensor], device: torch.device
) -> ChannelScales | None:
    """The scales that static pages of one side need; None for other pages."""
    if not f.static:
        return None
    setting, instead = "static_scales = 'calibrated'", 'static_scales = "none"'
    parts = []
    for name in (f"static_{side}_{part}" for part in SCALE_NAMES):
        needed = f"{name} for {f.heads} heads of {f.head_dim} channels"
        tensor = _planned(plan, name, (f.heads, f.head_dim), setting, instead, needed)
        parts.append(tensor.to(device, torch.float16))
    return ChannelScales(*parts)


def rotations(scheme: KVScheme) -> Rotations:
    """Rotations at run time; folded values are rotated by the weights."""
    return Rotations(scheme.rotate_keys == "hadamard", scheme.rotate_values == "online")
