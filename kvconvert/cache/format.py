"""A KV scheme in the terms of kernels: what the bytes of one layer's pages and spans mean, for the layer's shape.

No torch, unless calibration has measured bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvconvert.errors import RecipeError
from kvconvert.kernels.page_formats import ChannelScales, LayerFormat, PageFormat, TokenNorm
from kvconvert.kernels.rotations import NO_ROTATION, Rotations
from kvconvert.kernels.span_formats import SpanFormat
from kvconvert.methods import KVScheme, Spans

if TYPE_CHECKING:
    import torch

Side = Literal["key", "value"]


class ChannelBounds(NamedTuple):
    """Smallest and largest value of each channel of a layer's keys or values: float32 [H, channels]."""

    low: torch.Tensor
    high: torch.Tensor

    def scales(self, bits: int, clip_ratio: float) -> ChannelScales:
        """The grid from `low` to `high`, shrunk about its midpoint by `clip_ratio`."""
        from kvconvert.kernels.quantizer import affine_grid

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


def rotations(scheme: KVScheme) -> Rotations:
    """Rotations at run time; folded values are rotated by the weights."""
    return Rotations(scheme.rotate_keys == "hadamard", scheme.rotate_values == "online")
