"""`KVCache`: a transformers cache whose attention layers hold low-bit pages."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache

from kvconvert.errors import RecipeError, UnsupportedModelError
from kvconvert.methods import KVScheme, spread_ratios
from kvconvert.models.layer_types import HYBRID_LAYER_TYPES, has_pages, layer_types_of, pages_unsupported
from kvconvert.runtime.hf.hybrid_layer import HybridLayer
from kvconvert.runtime.hf.layer import PagedLayer
from kvconvert.runtime.hf.modality import Modality, ModalityMask, placeholder_ids

# The tensors of a KV plan that layers read.
PLAN_TENSORS = (
    "boosted_channels",
    "static_key_scale",
    "static_key_zero_point",
    "static_value_scale",
    "static_value_zero_point",
)
# What a layer without a scheme holds when its neighbours have one: pages of the model's own dtype.
UNQUANTIZED = KVScheme(key_bits=16, value_bits=16)


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds, measured from its tensors.

    Attributes:
        tokens: tokens stored by the longest layer, over all sequences.
        residual_tokens: how many of them are in full precision (sinks and residual).
        pages: pages in use over all layers.
        flushes: pages quantized so far.
        clamped_rows: query rows for which CalibQuant's shift had to make different scores of a span equal, so far.
        fallbacks: calls served by a slower path than the one meant for the device, over all layers; a warning named the
            reason of the first. 0 on a CPU, whose one path is the one meant for it.
        values: numbers that the stored keys and values stand for, over all layers.
        bytes_used, bytes_allocated: of pages with their metadata and of full-precision tokens, over all layers.
        other_layers: layers that keep transformers' own cache (linear attention and the like), not counted above.
    """

    tokens: int
    residual_tokens: int
    pages: int
    flushes: int
    clamped_rows: int
    fallbacks: int
    values: int
    bytes_used: int
    bytes_allocated: int
    other_layers: int

    @property
    def bits_per_value(self) -> float:
        """Bits per stored key or value number, metadata and full-precision tokens included."""
        return 8 * self.bytes_used / self.values if self.values else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token over all layers."""
        return self.bytes_used / self.tokens if self.tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values."""
        return asdict(self) | {"bits_per_value": self.bits_per_value, "bytes_per_token": self.bytes_per_token}


class KVCache(Cache):
    """A low-bit key-value cache for any model whose attention goes through transformers' attention interface.

    Use it as `past_key_values`, with the model's attention implementation set to "kvconvert". On a model that is not a
    kvconvert bundle, a preset's folded value rotation becomes an online one; results are the same up to rounding.

    Args:
        config: the model's config.
        scheme: a preset's name, one scheme for all layers, or one per layer (None leaves a layer unquantized).
        plan: calibrated tensors by the names of a bundle's KV plan, `layers.{i}.` before each of `PLAN_TENSORS`.
        kv_memory: bytes for pages, over all layers, taken at once and never exceeded; None grows as needed.
            Full-precision tokens (sinks, residuals, the prompt being read) come on top.

    Raises:
        RecipeError: a scheme says that weights are folded and the model's are not, or the number of schemes is wrong.
        UnsupportedModelError: no layer's keys and values can be kept here (latent attention, an attention of the
            model's own), or a scheme asks for a modality that the config has no token for.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        scheme: KVScheme | str | Sequence_[KVScheme | None],
        *,
        plan: Mapping[str, torch.Tensor] | None = None,
        kv_memory: int | None = None,
    ):
        text_config = config.get_text_config(decoder=True)
        kinds, arguments = layer_types_of(config)
        unsupported_reasons = [pages_unsupported(config, kind) for kind in kinds]
        if all(unsupported_reasons):
            reason = next(iter(unsupported_reasons), "it has no layers")
            raise UnsupportedModelError(
                f"No layer of this {text_config.model_type} model can keep its keys and values in a kvconvert cache "
                f"({reason}); use the model without a KV scheme."
            )
        self.schemes = spread_ratios(_per_layer(scheme, len(kinds), _folded_layers(config)))
        paged = sum(unsupported_reason is None for unsupported_reason in unsupported_reasons)
        page_bytes = kv_memory // paged if kv_memory is not None else None
        shared = bool(getattr(text_config, "num_kv_shared_layers", 0)) or "dummy" in kinds
        layers = []
        for index, (kind, kwargs) in enumerate(zip(kinds, arguments, strict=True)):
            if not has_pages(kind):
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs))
                continue
            window = kwargs.get("sliding_window")
            tensors = {name: (plan or {}).get(f"layers.{index}.{name}") for name in PLAN_TENSORS}
            own = (self.schemes[index] or UNQUANTIZED, index, window, page_bytes, shared, tensors)
            if kind in HYBRID_LAYER_TYPES:
                layers.append(HybridLayer(*own, number_of_states=kwargs.get("number_of_states", 1)))
            else:
                layers.append(PagedLayer(*own))
        super().__init__(layers=layers)
        # Ids of the tokens of each modality that a scheme asks for.
        self.placeholders = {
            modality: placeholder_ids(config, modality)
            for modality in sorted({layer.scheme.modality for layer in self.paged_layers()} - {"all"})
        }

    def mark(self, tokens: torch.Tensor | None, modality: Modality) -> None:
        """Say which tokens of the next forward pass are visual, or audio: bool [B, T], T its new tokens.

        `watch_inputs(model)` does this by itself. Layers whose scheme asks for another modality, or for none, take no
        notice. None takes back what was said.
        """
        marks = None if tokens is None else ModalityMask(tokens)
        for layer in self.paged_layers():
            if layer.scheme.modality == modality:
                layer.marks = marks

    def seal(self) -> None:
        """Say that the prompt is complete.

        Schemes that treat whole prompts (spans, eviction) compress it here, or by themselves at the first single-token
        step; page methods have nothing left to do.
        """
        for layer in self.paged_layers():
            layer.seal()

    def expect_whole_prompt(self) -> None:
        """Say that the next forward pass holds the whole prompt.

        Each layer then compresses it before the next layer runs, so that the prefill's peak is one layer's keys and
        values. Where later layers read earlier layers' keys again, that has to wait until the first step.
        """
        for layer in self.paged_layers():
            layer.seal_at_once = not layer.keep_for_sharing

    def paged_layers(self) -> list[PagedLayer]:
        """The attention layers."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def stats(self) -> CacheStats:
        """Measure the cache; cheap enough for every step."""
        layers = [layer for layer in self.paged_layers() if layer.is_initialized]

        def width(layer: PagedLayer) -> int:
            return layer.format.keys.heads * (layer.format.keys.head_dim + layer.format.values.head_dim)

        return CacheStats(
            tokens=max((layer.tokens() for layer in layers), default=0),
            residual_tokens=max((layer.residual_tokens() for layer in layers), default=0),
            pages=sum(layer.pages() for layer in layers),
            flushes=sum(layer.flushes for layer in layers),
            clamped_rows=sum(int(layer.clamped_rows) for layer in layers),
            fallbacks=sum(layer.fallbacks for layer in layers),
            values=sum(layer.tokens() * width(layer) for layer in layers),
            bytes_used=sum(layer.bytes_used() for layer in layers),
            bytes_allocated=sum(layer.bytes_allocated() for layer in layers),
            other_layers=len(self.layers) - len(self.paged_layers()),
        )


def _folded_layers(config: PretrainedConfig) -> frozenset[int]:
    """Layers whose weights carry the value rotation: known from a bundle's quantization config, none otherwise."""
    schemes = getattr(getattr(config, "quantization_config", None), "kv_schemes", None) or []
    return frozenset(i for i, scheme in enumerate(schemes) if scheme is not None and scheme.rotate_values == "folded")


def _per_layer(
    scheme: KVScheme | str | Sequence_[KVScheme | None], count: int, folded: frozenset[int]
) -> tuple[KVScheme | None, ...]:
    if isinstance(scheme, str):
        preset = KVScheme.preset(scheme)
        return tuple(preset if i in folded else preset.with_online_rotation() for i in range(count))
    schemes = (scheme,) * count if isinstance(scheme, KVScheme) else tuple(scheme)
    if len(schemes) != count:
        raise RecipeError(
            f"{len(schemes)} KV schemes were given for a model of {count} layers; give one, or one per layer."
        )
    for index, layer_scheme in enumerate(schemes):
        if layer_scheme is not None and layer_scheme.rotate_values == "folded" and index not in folded:
            raise RecipeError(
                f'The scheme of layer {index} says rotate_values = "folded", but the model\'s weights carry no '
                "rotation; use "
                f'"online" (KVScheme.with_online_rotation()).'
            )
    return schemes
