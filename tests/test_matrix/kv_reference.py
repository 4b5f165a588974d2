"""A slow, independent model of every way in which a layer's keys and values are kept: full precision, fake-quantized.

Nothing here comes from kvconvert but the fields of a `KVScheme`. Keys and values stay in the order and the basis in
which the model gives them, padding included; what the cache would have compressed is replaced by its image when the
next tokens arrive, which is when the real cache first reads it. Without eviction and shifted scores the model's own
eager attention reads them; with either, `attend` below does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kvconvert.methods import KVScheme

PAGE = 128
NAME = "matrix_reference"
UNQUANTIZED = KVScheme(key_bits=16, value_bits=16)


def hadamard(size: int) -> Tensor:
    """Sylvester's orthonormal matrix."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def grid(groups: Tensor, levels: Tensor | int, share: float) -> tuple[Tensor, Tensor]:
    """Scale and lowest number of each group along the last dimension."""
    low, extent = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    low, extent = low + extent * (1 - share) / 2, extent * share
    return (extent / levels).half().float(), low.half().float()


def on_grid(x: Tensor, scale: Tensor, low: Tensor, levels: Tensor) -> Tensor:
    """The nearest numbers of grids."""
    codes = torch.where(scale > 0, (x - low) / scale, torch.zeros_like(x)).round()
    return torch.minimum(codes.clamp(min=0), levels) * scale + low


def image(x: Tensor, levels: Tensor | int, group: int, share: float = 1.0) -> Tensor:
    """Groups along the last dimension on a uniform grid; `levels` codes above zero, broadcast against the groups."""
    groups, levels = x.unflatten(-1, (-1, group)), torch.as_tensor(levels, dtype=x.dtype)
    return on_grid(groups, *grid(groups, levels, share), levels).flatten(-2)


def fed_back(x: Tensor, levels: Tensor | int, group: int, share: float, matrix: Tensor) -> Tensor:
    """The same of channels [H, D, n], one after another: what a channel errs by is taken from those after it."""
    groups = x.unflatten(-1, (-1, group))
    levels = torch.as_tensor(levels, dtype=x.dtype).expand(*groups.shape[:3], 1)
    scale, low = grid(groups, levels, share)
    left, found = groups.clone(), torch.empty_like(groups)
    for channel in range(x.shape[1]):
        found[:, channel] = on_grid(left[:, channel], scale[:, channel], low[:, channel], levels[:, channel])
        error = left[:, channel] - found[:, channel]
        left -= error[:, None] * matrix[:, channel].float()[:, :, None, None]
    return found.flatten(-2)


class ReferenceLayer(DynamicLayer):
    """One layer's keys [B, H, n, D] and values [B, H, n, E], with `padding[row]` positions before each sequence."""

    def __init__(self, scheme: KVScheme, padding: list[int], feedback: Tensor | None = None):
        super().__init__()
        self.scheme, self.padding, self.feedback = scheme, padding, feedback
        self.kept: list[Tensor | None] = [None] * len(padding)  # [H, tokens]: positions that a row holds, in order
        self.done = [[0, 0] for _ in padding]  # pages of keys and of values that are images already
        self.span = [0] * len(padding)  # positions before this one are a span
        self.attention_mass: Tensor | None = None  # [B, H, n], the attention mass of the prompt's tokens
        self.sealed = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            if key_states.shape[2] == 1 and not self.sealed:
                self._seal()
            if not self.scheme.is_span and (self.sealed or not self.scheme.evicts):
                self._flush()
        start = self.keys.shape[2] if self.is_initialized else 0
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        for row, padding in enumerate(self.padding):
            new = torch.arange(max(start, padding), keys.shape[2]).expand(keys.shape[1], -1)
            self.kept[row] = new if self.kept[row] is None else torch.cat([self.kept[row], new], 1)
        keys.reference = self
        return keys, values

    def _seal(self) -> None:
        scheme, self.sealed = self.scheme, True
        for row, padding in enumerate(self.padding):
            n = self.keys.shape[2] - padding
            if scheme.is_span:
                self.span[row] = self.keys.shape[2]
                span = (row, slice(None), slice(padding + scheme.sink_tokens, None))
                for x, bits, share in (
                    (self.keys, scheme.key_bits, scheme.key_clip_ratio),
                    (self.values, scheme.value_bits, scheme.value_clip_ratio),
                ):
                    length = scheme.span_tokens or self.keys.shape[2]
                    parts = x[span].transpose(1, 2).split(length, 2)
                    if x is self.keys and self.feedback is not None:
                        stored = [fed_back(part, 2**bits - 1, part.shape[2], share, self.feedback) for part in parts]
                    else:
                        stored = [image(part, 2**bits - 1, part.shape[2], share) for part in parts]
                    x[span] = torch.cat(stored, 2).transpose(1, 2)
            elif scheme.evicts:
                heavy, recent = round(scheme.heavy_ratio * n), round(scheme.recent_ratio * n)
                sinks = scheme.sink_tokens
                middle = self.attention_mass[row, :, padding + sinks : padding + n - recent]
                best = middle.argsort(dim=-1, descending=True, stable=True)[:, :heavy].sort(-1).values
                first, newest = torch.arange(sinks), torch.arange(n - recent, n)
                first, newest = (part.expand(best.shape[0], -1) for part in (first, newest))
                self.kept[row] = padding + torch.cat([first, best + sinks, newest], 1)

    def _flush(self) -> None:
        scheme = self.scheme
        for row, positions in enumerate(self.kept):
            for side, recent in ((0, scheme.key_recent_tokens), (1, scheme.value_recent_tokens)):
                while (first := self.done[row][side] * PAGE) + PAGE + recent <= positions.shape[1]:
                    # Sink tokens stay as they are, and the page's scales are those of its other tokens.
                    page = positions[:, max(first, scheme.sink_tokens) : first + PAGE]
                    self._replace(row, side, page)
                    self.done[row][side] += 1

    def _replace(self, row: int, side: int, positions: Tensor) -> None:
        x = (self.keys, self.values)[side]
        at = positions[:, :, None].expand(-1, -1, x.shape[-1])
        page = x[row].gather(1, at).float()
        x[row] = x[row].scatter(1, at, self._value_image(page) if side else self._key_image(page))

    def _key_image(self, page: Tensor) -> Tensor:
        """What a page of keys [H, n, D] comes back as; of the first page sink tokens are missing."""
        scheme = self.scheme
        if scheme.key_bits == 16:
            return page
        rotation = hadamard(page.shape[-1]) if scheme.rotate_keys == "hadamard" else torch.eye(page.shape[-1])
        page = page @ rotation
        norm = page.square().mean((0, 2), keepdim=True).sqrt().half().float() if scheme.token_norm == "joint" else 1
        levels = torch.full(page.shape[::2], 2**scheme.key_bits - 1)
        boosted = round(scheme.boost_fraction * page.shape[-1])
        strongest = page.abs().mean(1).argsort(dim=-1, descending=True, stable=True)[:, :boosted]
        levels.scatter_(1, strongest, 4**scheme.key_bits - 1)
        channels, group = (page / norm).transpose(1, 2), scheme.key_group_size
        channels = torch.cat([channels[..., :1].expand(-1, -1, PAGE - channels.shape[2]), channels], 2)
        if self.feedback is not None:
            stored = fed_back(channels, levels[:, :, None, None], group, scheme.key_clip_ratio, self.feedback)
        else:
            stored = image(channels, levels[:, :, None, None], group, scheme.key_clip_ratio)
        return stored[..., PAGE - page.shape[1] :].transpose(1, 2) * norm @ rotation.T

    def _value_image(self, page: Tensor) -> Tensor:
        """What a page of values [H, n, E] comes back as."""
        scheme, size = self.scheme, page.shape[-1]
        if scheme.value_bits == 16:
            return page
        rotation = hadamard(size) if scheme.rotate_values == "online" else torch.eye(size)
        group = min(scheme.value_group_size, size)
        return image(page @ rotation, 2**scheme.value_bits - 1, group, scheme.value_clip_ratio) @ rotation.T


class HybridReferenceLayer(ReferenceLayer, LinearAttentionAndFullAttentionLayer):
    """The same beside a recurrent state."""


REFERENCE_LAYERS = {
    "full_attention": ReferenceLayer,
    "sliding_attention": ReferenceLayer,
    "chunked_attention": ReferenceLayer,
    "hybrid": HybridReferenceLayer,
}


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in one matrix, over what `key.reference` still holds."""
    layer: ReferenceLayer = key.reference
    scheme, (batch, heads, _, _), length = layer.scheme, key.shape, query.shape[2]
    groups = query.shape[1] // heads
    scores = query.unflatten(1, (heads, groups)) @ key[:, :, None].transpose(3, 4) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = torch.zeros(batch, heads, 1, 1, key.shape[2], dtype=torch.bool)
    for row, padding in enumerate(layer.padding):
        hidden[row] = True
        hidden[row].squeeze().view(heads, -1).scatter_(1, layer.kept[row], False)
        first, last = padding + scheme.sink_tokens, layer.span[row]
        if last > first and (scheme.tau1 or scheme.tau2):
            span = scores[row, ..., first:last]
            low, high = span.amin(-1, keepdim=True), span.amax(-1, keepdim=True)
            slope = (1 - (scheme.tau2 - scheme.tau1) / (high - low)).clamp(min=0)
            scores[row, ..., first:last] = (span - low) * slope + low - scheme.tau1
    scores = scores.masked_fill(hidden, float("-inf"))
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, None, :, : key.shape[2]]
    if s_aux is not None:
        sinks = s_aux.view(1, heads, groups, 1, 1).expand(batch, -1, -1, length, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    if scheme.evicts and not layer.sealed:
        asked = torch.stack([torch.arange(length) >= padding for padding in layer.padding])
        mass = (weights * asked[:, None, None, :, None]).sum((2, 3))
        # Layers that read an earlier layer's keys count too.
        layer.attention_mass = mass if layer.attention_mass is None else layer.attention_mass + mass
    return (weights @ value[:, :, None]).flatten(1, 2).transpose(1, 2).contiguous(), None


def reference_cache(
    model: PreTrainedModel,
    scheme: KVScheme | Sequence[KVScheme | None],
    padding: list[int],
    plan: Mapping[str, Tensor] | None = None,
) -> DynamicCache:
    """A cache of reference layers; layers without keys and values, or without a scheme, keep full precision."""
    plan = plan or {}
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    layer_types, arguments = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    schemes = [scheme] * len(layer_types) if isinstance(scheme, KVScheme) else scheme
    cache.layers = [
        REFERENCE_LAYERS[layer_type](own or UNQUANTIZED, padding, plan.get(f"layers.{index}.key_feedback"))
        if layer_type in REFERENCE_LAYERS
        else DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**settings)
        for index, (layer_type, settings, own) in enumerate(zip(layer_types, arguments, schemes, strict=True))
    ]
    return cache


def needs_own_attention(scheme: KVScheme) -> bool:
    """Whether eager attention cannot express the scheme."""
    return bool(scheme.evicts or scheme.tau1 or scheme.tau2)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, eager_mask)
