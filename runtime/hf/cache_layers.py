"""What a cache is made of for a model and its KV schemes: the layers, why some or all cannot have pages, what stored
tokens depend on, and the figures of what is held.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig

from kvconvert.cache import ModelCache
from kvconvert.errors import CacheError, RecipeError, UnsupportedModelError, UsageError, counted
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme, check_layers, preset_calibration, spread_ratios
from kvconvert.models.configuration import (
    has_pages,
    has_short_windows,
    is_latent,
    layer_types_of,
    model_cache,
    pages_unsupported,
    placeholder_ids,
)


@dataclass(frozen=True)
class CacheLayers:
    """What all caches of a model with the same schemes have in common.

    Attributes:
        types: of each layer in transformers' terms; arguments: of transformers' cache layer of that type.
        schemes: of all layers, None for one that is not quantized.
        paged: how many layers can have pages.
        heads_apart: whether KV heads share a budget, so that each has rows of its own.
        is_latent: whether attention is latent (MLA).
        shares_keys: whether layers read earlier layers' keys and values.
        rotary_switch: see the function of this name.
        placeholders: ids of the tokens of each modality that a scheme compresses.
        state_bits: width of recurrent states; 12 only for models whose modules `read_by_sequence` has changed,
            for some of transformers' write into the states that a cache gives them.
        configs: of models that these layers are known to fit.
    """

    types: tuple[str, ...]
    arguments: tuple[dict[str, Any], ...]
    schemes: tuple[KVScheme | None, ...]
    paged: int
    heads_apart: bool
    is_latent: bool
    shares_keys: bool
    rotary_switch: int | None
    placeholders: dict[str, tuple[int, ...]]
    state_bits: int = 16
    configs: list[PretrainedConfig] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, config: PretrainedConfig, scheme: KVScheme | str | Sequence[KVScheme | None]) -> CacheLayers:
        """Those of a model.

        Args:
            config: the model's.
            scheme: as `KVCache` takes it.

        Raises:
            RecipeError, UnsupportedModelError: see `KVCache`.
        """
        text_config = config.get_text_config(decoder=True)
        types, arguments = layer_types_of(config)
        schemes = _per_layer(scheme, has_short_windows(config), _folded_layers(config))
        found = {(kind, own): pages_unsupported(config, kind, own) for kind, own in {*zip(types, schemes, strict=True)}}
        reasons = [found[layer] for layer in zip(types, schemes, strict=True)]
        attending = [reason for kind, reason in zip(types, reasons, strict=True) if has_pages(kind)]
        if all(reasons) or any(attending):
            reason = next((reason for reason in [*attending, *reasons] if reason), "it has no layers")
            raise UnsupportedModelError(
                f"No layer of this {text_config.model_type} model can keep its keys and values in a kvconvert cache "
                f"({reason}); use the model without a KV scheme."
            )
        spread = spread_ratios(schemes)
        heads_apart = any(layer is not None and layer.heads_apart for layer in spread)
        if heads_apart:
            check_shared_budget(config, spread, types)
        quantized = (own for kind, own in zip(types, spread, strict=True) if own is not None and has_pages(kind))
        modalities = {own.modality for own in quantized} - {"all"}
        return cls(
            tuple(types),
            tuple(arguments),
            spread,
            sum(reason is None for reason in reasons),
            heads_apart,
            is_latent(config),
            bool(getattr(text_config, "num_kv_shared_layers", 0)) or "dummy" in types,
            rotary_switch(config),
            {modality: placeholder_ids(config, modality) for modality in sorted(modalities)},
            configs=[config],
        )

    def check_reader(self, config: PretrainedConfig) -> None:
        """Refuse (CacheError) a model whose layers are of other number, types, windows, or sizes.

        Args:
            config: the configuration of the model that uses the cache, or of its text decoder.
        """
        if any(config is known for known in self.configs):
            return
        if reason := _difference(_layers_of(self.configs[0]), _layers_of(config)):
            raise CacheError(f"The cache was made for another model ({reason}); make it with this model's config.")
        self.configs.append(config)

    def page_bytes(self, config: PretrainedConfig, kv_memory: int) -> int:
        """Bytes for pages of each layer, of `kv_memory` for all; UsageError if these do not hold a page."""
        if self.heads_apart:
            raise UsageError(
                f'`kv_memory` is not possible with selection = "{self.schemes[0].selection}", for layers keep '
                "different numbers of tokens; leave it out."
            )
        _check_memory(kv_memory, model_cache(config, self.schemes), self.paged)
        return kv_memory // self.paged


def _layers_of(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The type and sizes of each layer's keys and values, by the names that messages use."""
    types, _ = layer_types_of(config)
    return [
        {
            "type": kind,
            "KV heads": layer.heads,
            "key channels": layer.key_dim,
            "value channels": layer.value_dim,
            "sliding window": layer.sliding_window,
            "indexer channels": layer.index_dim,
        }
        for kind, layer in zip(types, model_cache(config, (None,) * len(types)).layers, strict=True)
    ]


def _difference(cache: Sequence[Mapping[str, Any]], model: Sequence[Mapping[str, Any]]) -> str | None:
    """The first difference between the layers of a cache and of a model; None where there is none."""
    if len(cache) != len(model):
        return f"{counted(len(cache), 'layer')} in the cache, {len(model)} in the model"
    for index, (one, other) in enumerate(zip(cache, model, strict=True)):
        for name in one:
            if one[name] != other[name]:
                return f"{name} of layer {index}: {one[name]} in the cache, {other[name]} in the model"
    return None


def _folded_layers(config: PretrainedConfig) -> frozenset[int]:
    """Layers whose weights carry the value rotation: known from a bundle's quantization config, none otherwise."""
    schemes = getattr(getattr(config, "quantization_config", None), "kv_schemes", None) or []
    return frozenset(i for i, scheme in enumerate(schemes) if scheme is not None and scheme.folds_values)


def _check_memory(kv_memory: int, cache: ModelCache, paged: int) -> None:
    """Refuse less than a page in every layer; `paged` layers get equal shares, so that the largest page decides."""
    needed = paged * max((layer.one_page_bytes for layer in cache.layers if layer.is_quantized), default=0)
    if kv_memory < needed:
        raise UsageError(
            f"`kv_memory` = {kv_memory:,} bytes are not enough for one page of {PAGE_SIZE} tokens in each of {paged} "
            f"layers; give at least {needed:,} bytes, or leave it out to let the cache grow."
        )


def check_shared_budget(
    config: PretrainedConfig,
    schemes: Sequence[KVScheme | None],
    layer_types: Sequence[str],
) -> None:
    """Refuse layers that cannot share a budget, and prompts that cannot be read again (RecipeError,
    UnsupportedModelError).
    """
    setting = f'selection = "{next(own.selection for own in schemes if own is not None and own.heads_apart)}"'
    if any(scheme is None for scheme in schemes) or (reason := check_layers(schemes)):
        reason = "leaves layers out" if any(scheme is None for scheme in schemes) else reason
        raise RecipeError(f"[kv] {setting} needs one scheme for all layers, and this cache {reason}.")
    text_config = config.get_text_config(decoder=True)
    other = sorted({*layer_types} - {"full_attention"})
    for reason in (
        f"has layers with {', '.join(other)}" if other else None,
        "has layers that share keys" if getattr(text_config, "num_kv_shared_layers", 0) else None,
        "changes its rotary factors with length" if rotary_switch(config) is not None else None,
        "reads more than text" if text_config is not config else None,
    ):
        if reason is not None:
            raise UnsupportedModelError(
                f"{setting} scores prompts by their repetition, which is not possible here: this "
                f'{text_config.model_type} model {reason}; choose selection = "attention".'
            )


def _per_layer(
    scheme: KVScheme | str | Sequence[KVScheme | str | None], short: list[bool], folded: frozenset[int]
) -> tuple[KVScheme | None, ...]:
    """The scheme of every layer; presets, by name, as a layer with a short window or without can have them."""
    count = len(short)
    given = (scheme,) * count if isinstance(scheme, KVScheme | str) else tuple(scheme)
    if len(given) != count:
        raise RecipeError(
            f"A model of {counted(count, 'layer')} was given a list of {counted(len(given), 'KV scheme')}; give one "
            "without a list, or a list of one per layer."
        )

    def preset(name: str, index: int) -> KVScheme:
        own = KVScheme.preset(name)
        own = preset_calibration(name).of_window(own) if short[index] else own
        return own if index in folded else own.with_online_rotation()

    schemes = tuple(preset(own, index) if isinstance(own, str) else own for index, own in enumerate(given))
    for index, layer_scheme in enumerate(schemes):
        if layer_scheme is not None and layer_scheme.folds_values and index not in folded:
            raise RecipeError(
                f"The scheme of layer {index} says that the model's weights carry the rotation of values, and they do "
                "not; use KVScheme.with_online_rotation()."
            )
    return schemes


def rotary_switch(config: PretrainedConfig) -> int | None:
    """Tokens up to which a model has its short factors, or None where factors do not depend on length.

    The factors of a forward pass follow from its largest position, so that they are those of all rows of a batch, and
    keys that were stored before are turned by other ones.
    """
    text_config = config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope" or rope.get("long_factor") == rope.get("short_factor"):
        return None
    switch = rope.get("original_max_position_embeddings")
    return switch if switch and switch < text_config.max_position_embeddings else None


# Of what pages hold and where they begin; part of every fingerprint.
LAYOUT = 1
# Of a config: where it came from, and by what it is read.
_UNRELATED = {"_name_or_path", "transformers_version", "dtype", "architectures", "quantization_config"}


def fingerprint_of(
    config: PretrainedConfig, schemes: Sequence[KVScheme | None], plan: Mapping[str, torch.Tensor], seal: str
) -> str:
    """A hash of model, schemes and KV plan.

    Args:
        config: the model's config.
        schemes: of all layers.
        plan: see `KVCache`.
        seal: of the manifest of the model's bundle; with "" the model is known by its config alone.
    """
    known = _related(config.to_dict())
    described = [scheme and scheme.to_dict() for scheme in schemes]
    found = hashlib.sha256(json.dumps([LAYOUT, seal, known, described], sort_keys=True, default=str).encode())
    for name in sorted(plan):
        tensor = plan[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _related(value: Any) -> Any:
    """Plain values without what says nothing of the numbers, in nested configs, too."""
    if isinstance(value, dict):
        return {str(name): _related(part) for name, part in value.items() if name not in _UNRELATED}
    return [_related(part) for part in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds, measured from its tensors.

    Attributes:
        tokens: tokens stored by the longest layer, over all sequences.
        residual_tokens: how many of them are in full precision (sink tokens and residual window).
        pages: pages in use over all layers.
        flushes: pages quantized so far.
        clamped_rows: query rows for which CalibQuant's shift had to make different scores of a span equal, so far.
        fallbacks: calls that a slower path served than the one meant for the device, over all layers; a warning gives
            the reason of the first. Always 0 on a CPU, which has one path.
        values: keys and values that the model's own cache would hold of these sequences, over all layers.
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
        """Bits of a key or value at the present length, metadata and full-precision tokens included."""
        return 8 * self.bytes_used / self.values if self.values else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token over all layers."""
        return self.bytes_used / self.tokens if self.tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values."""
        return asdict(self) | {"bits_per_value": self.bits_per_value, "bytes_per_token": self.bytes_per_token}
