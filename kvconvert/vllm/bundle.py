"""A bundle as vLLM serves it: the cache of each attention layer, or why not; nothing here imports vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from kvconvert.bundle.reader import Bundle, open_bundle
from kvconvert.cache.format import layer_format
from kvconvert.cache.plan_tensors import with_plan
from kvconvert.errors import BundleError, listed
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.methods import UNQUANTIZED, KVScheme
from kvconvert.methods.scheme import Evict, Pages
from kvconvert.vllm.blocks import MOST_PADDING, BlockLayout, block_layouts

# Tensors of a layer's KV plan that have a part for each KV head.
OF_HEADS = {
    "key_mean",
    "key_feedback",
    "boosted_channels",
    *(f"static_{side}_{part}" for side in ("key", "value") for part in ("scale", "zero_point")),
}
# Types of decoder layers, in transformers' words: those whose attention is to all tokens before, which is ours;
# those that vLLM keeps a state of; and those that vLLM attends to its own way, over a cache of its own.
OURS = ("full_attention", "attention", "hybrid")
STATES = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")
WINDOWS = ("sliding_attention", "hybrid_sliding")
WITHOUT_CACHE = ("mlp", "moe", "sparse", "dense")
# Every so many layers of these one attends to all tokens, where config.json does not say it.
WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}


def is_bundle(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a bundle."""
    settings = config.get("quantization_config")
    return isinstance(settings, dict) and "kvconvert" in settings


@lru_cache(maxsize=4)
def served_bundle(directory: str) -> ServedBundle:
    """The bundle in a directory; read once by each process."""
    return ServedBundle(open_bundle(Path(directory), verify="plan"))


@dataclass(frozen=True)
class ServedBundle:
    """A bundle whose cache vLLM is to hold.

    Attributes:
        bundle: with its plan, without its weights.
    """

    bundle: Bundle

    @cached_property
    def layer_types(self) -> list[str]:
        """The type of each decoder layer."""
        config = self.bundle.config
        text = config.get("text_config", config)
        stated = text.get("layer_types") or text.get("layers_block_type")
        layers = range(len(self.bundle.manifest.schemes()))
        return list(stated) if stated else [_in_own_words(text, index) for index in layers]

    @cached_property
    def attending(self) -> list[int]:
        """The decoder layers whose attention is ours."""
        return [index for index, kind in enumerate(self.layer_types) if kind in OURS]

    @property
    def is_hybrid(self) -> bool:
        """Whether vLLM has caches or states of its own besides."""
        return self.has_windows or self.has_states

    @property
    def has_windows(self) -> bool:
        """Whether vLLM attends in some layers to a sliding window."""
        return any(kind in WINDOWS for kind in self.layer_types)

    @property
    def has_states(self) -> bool:
        """Whether vLLM keeps states of some layers."""
        return any(kind in STATES for kind in self.layer_types)

    @cached_property
    def schemes(self) -> dict[int, KVScheme]:
        """The scheme of each layer whose attention is ours. One without holds pages of the model's own dtype, whose
        tokens go where those of the others do, so that one plan serves all.
        """
        stated = self.bundle.manifest.schemes()
        found = {index: stated[index] for index in self.attending}
        first = next((scheme for scheme in found.values() if scheme is not None), UNQUANTIZED)
        places = {name: getattr(first, name) for name in ("sink_tokens", "key_recent_tokens", "value_recent_tokens")}
        return {index: scheme or replace(UNQUANTIZED, **places) for index, scheme in found.items()}

    @property
    def has_cache(self) -> bool:
        """Whether a layer whose attention is ours has a scheme; else vLLM needs no cache of ours."""
        stated = self.bundle.manifest.schemes()
        return any(stated[index] for index in self.attending)

    @property
    def unused_schemes(self) -> list[int]:
        """Layers that have a scheme and are cached by vLLM, in the model's dtype."""
        stated = self.bundle.manifest.schemes()
        return [index for index, scheme in enumerate(stated) if scheme is not None and index not in self.attending]

    @property
    def has_own_weights(self) -> bool:
        """Whether weights are quantized and no AWQ checkpoint, so that kvconvert's kernels read them."""
        return self.bundle.config.get("quantization_config", {}).get("version") != "gemm" and any(
            module.method != "kept" for module in self.bundle.manifest.modules
        )

    @property
    def keeps_windows(self) -> bool:
        """Whether newest tokens stay in full precision besides the page being filled."""
        return any(s.key_recent_tokens or s.value_recent_tokens for s in self.schemes.values())

    def refusal(self, dtype: torch.dtype, ranks: int = 1) -> str | None:
        """Why the cache cannot be served, in one sentence; None if it can.

        Args:
            dtype: of the model.
            ranks: that KV heads are divided among.
        """
        for index, scheme in self.schemes.items():
            reason = scheme_refusal(scheme) or self._division_refusal(index, ranks)
            if reason is not None:
                return f"Layer {index} of this bundle {reason}"
        config = self.bundle.config
        text = config.get("text_config", config)
        if text.get("kv_lora_rank"):
            return (
                "This model has latent attention (MLA), and the plugin serves keys and values per head; use "
                "`kvconvert serve`."
            )
        for index in self.attending:
            layer = self.bundle.manifest.layers[index]
            if layer.value_head_dim is not None:
                return (
                    f"Layer {index} of this bundle has keys of {layer.head_dim} and values of {layer.value_head_dim} "
                    "channels, and the plugin serves keys and values of one size; use `kvconvert serve`."
                )
        others = sorted(set(self.layer_types) - {*OURS, *STATES, *WINDOWS, *WITHOUT_CACHE})
        if others:
            kinds = listed(others)
            return f"This model has layers of type {kinds}, which the plugin does not serve; use `kvconvert serve`."
        sizes = [layout.key_bytes + layout.value_bytes for layout in self.layouts(dtype, ranks).values()]
        if self.has_states and max(sizes) * len(sizes) > (1 + MOST_PADDING) * sum(sizes):
            return (
                f"Pages of this bundle's layers take from {min(sizes):,} to {max(sizes):,} bytes, and beside layers "
                "with a state vLLM's blocks have one size; convert with one width for all layers, or use `kvconvert "
                "serve`."
            )
        return None

    def layer(
        self, index: int, device: torch.device, dtype: torch.dtype, rank: int = 0, ranks: int = 1, drafts: int = 0
    ) -> tuple[LayerFormat, BlockLayout]:
        """The format of a decoder layer, with its part of the KV plan on a device, and the layout of its blocks.

        Args:
            index: of the layer.
            device, dtype: of its full-precision tokens.
            rank, ranks: whose heads it holds, of how many that the heads are divided among.
            drafts: newest tokens of a request that may be taken back.
        """
        format = self._format(index, ranks)
        prefix, heads = f"layers.{index}.", format.keys.heads
        plan = {name.removeprefix(prefix): t for name, t in self.bundle.plan.items() if name.startswith(prefix)}
        own = {name: t[rank * heads : (rank + 1) * heads] if name in OF_HEADS else t for name, t in plan.items()}
        format = with_plan(format, self.schemes[index], own, device)
        return format, self.layouts(dtype, ranks, drafts)[index]

    def layouts(self, dtype: torch.dtype, ranks: int = 1, drafts: int = 0) -> dict[int, BlockLayout]:
        """The layout of each layer's blocks, all found by the same rows of a block table."""
        formats = tuple(self._format(index, ranks) for index in self.attending)
        return dict(zip(self.attending, _layouts(formats, dtype, self.has_states, drafts), strict=True))

    def _division_refusal(self, index: int, ranks: int) -> str | None:
        """Why a layer's heads cannot be divided among ranks, to follow the layer's name; None if they can."""
        heads, scheme = self._shape(index)[0], self.schemes[index]
        if heads % ranks:
            return f"has {heads} KV heads, which tensor parallelism cannot divide among {ranks} devices."
        if ranks > 1 and scheme.token_norm == "joint":
            return (
                "divides its tokens by a norm over all KV heads, which tensor parallelism keeps on several devices; "
                'convert with token_norm = "per_head", or serve on one device.'
            )
        return None

    def _format(self, index: int, ranks: int) -> LayerFormat:
        heads, head_dim = self._shape(index)
        return layer_format(self.schemes[index], heads=heads // ranks, key_dim=head_dim)

    def _shape(self, index: int) -> tuple[int, int]:
        """KV heads of a layer and channels of each."""
        planned = self.bundle.manifest.layers[index]
        heads, head_dim = planned.num_key_value_heads, planned.head_dim
        if heads is None or head_dim is None:
            config = self.bundle.config
            text = config.get("text_config", config)
            heads = text.get("num_key_value_heads", text["num_attention_heads"])
            head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        return heads, head_dim


def _in_own_words(text: Mapping[str, Any], index: int) -> str:
    """The type of a layer of a model whose config.json says it in words of its own."""
    family = text.get("model_type")
    if family == "falcon_h1":
        return "hybrid"
    if text.get("attention_chunk_size"):
        return "chunked_attention"
    attends = None
    if "attn_layer_indices" in text:
        attends = index in (text["attn_layer_indices"] or ())
    elif "attn_layer_period" in text:
        attends = index % text["attn_layer_period"] == text.get("attn_layer_offset", 4)
    if attends is not None:
        return "full_attention" if attends else "linear_attention"
    if not text.get("sliding_window") or not text.get("use_sliding_window", True):
        return "full_attention"
    pattern = text.get("sliding_window_pattern") or WINDOW_PATTERNS.get(family)
    return "full_attention" if isinstance(pattern, int) and (index + 1) % pattern == 0 else "sliding_attention"


@lru_cache(maxsize=16)
def _layouts(formats: tuple[LayerFormat, ...], dtype: torch.dtype, equal: bool, drafts: int) -> list[BlockLayout]:
    return block_layouts(formats, dtype, equal, drafts)


def scheme_refusal(scheme: KVScheme) -> str | None:
    """Why pages in vLLM's blocks cannot hold a scheme, to follow the layer's name; None if they can."""
    instead = "which vLLM's blocks cannot hold; use `kvconvert serve`."
    if scheme.only_tokens() is not None:
        return f"compresses {scheme.only_tokens()} tokens alone, {instead}"
    if not isinstance(scheme.prompt, Pages):
        what = "keeps a part of each prompt" if isinstance(scheme.prompt, Evict) else "quantizes prompts as a whole"
        return f"{what}, {instead}"
    return None


def layer_index(name: str) -> int:
    """The decoder layer of an attention module's name, such as model.layers.3.self_attn.attn.

    Raises:
        BundleError: the name has no number, or several.
    """
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
    if len(numbers) != 1:
        raise BundleError(
            f"The attention module {name} does not tell its layer, so the plugin cannot serve this model."
        )
    return int(numbers[0])
