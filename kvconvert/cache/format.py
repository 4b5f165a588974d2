"""A KV scheme in the terms of kernels: what the bytes of one layer's pages and spans mean, for the layer's shape.

No torch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from kvconvert.errors import RecipeError
from kvconvert.kernels.page_formats import LayerFormat, PageFormat, SpanFormat, TokenNorm
from kvconvert.kernels.rotations import Rotations
from kvconvert.methods import KVScheme, Spans

Side = Literal["key", "value"]


@lru_cache(maxsize=1024)
def layer_format(
    scheme: KVScheme, *, heads: int, key_dim: int, value_dim: int | None = None, latent: bool = False
) -> LayerFormat:
    """The format of a scheme for a layer's shape, without the tensors of a KV plan (`with_plan`).

    Args:
        scheme: the KV scheme of the layer.
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
            modality=scheme.prompt.modality,
        )
    return LayerFormat(
        keys,
        values,
        span=span,
        # Folded values are rotated by the weights.
        rotations=Rotations(scheme.rotate_keys == "hadamard", scheme.rotate_values == "online"),
        sink_tokens=scheme.sink_tokens,
        key_window=key.recent_tokens,
        value_window=value.recent_tokens,
    )
