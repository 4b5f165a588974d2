"""A bundle as vLLM serves it: the cache of each attention layer, or why not; nothing here imports vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvconvert.bundle.reader import Bundle, open_bundle
from kvconvert.cache.format import CacheFormat, with_plan
from kvconvert.errors import BundleError, listed
from kvconvert.methods import UNQUANTIZED, KVScheme
from kvconvert.methods.scheme import Evict, Pages
from kvconvert.vllm.blocks import BlockLayout
from kvconvert.vllm.layer import LayerCache

# Tensors of a layer's KV plan that have a part for each KV head.
OF_HEADS = {
    "key_mean",
    "key_feedback",
    "boosted_channels",
    *(f"static_{side}_{part}" for side in ("key", "value") for part in ("scale", "zero_point")),
}
# How much larger than the mean page blocks may be, which have the size of the largest.
MOST_PADDING = 1.25


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

    @property
    def schemes(self) -> list[KVScheme]:
        """Of each decoder layer; layers without a scheme hold pages of the model's own dtype."""
        return [scheme or UNQUANTIZED for scheme in self.bundle.manifest.schemes()]

    @property
    def has_cache(self) -> bool:
        """Whether any layer has a scheme; a bundle of weights alone needs no cache of ours."""
        return any(self.bundle.manifest.schemes())

    @property
    def has_own_weights(self) -> bool:
        """Whether weights are quantized and no AWQ checkpoint, so that kvconvert's kernels read them."""
        return self.bundle.config.get("quantization_config", {}).get("version") != "gemm" and any(
            module.method != "kept" for module in self.bundle.manifest.modules
        )

    @property
    def keeps_windows(self) -> bool:
        """Whether newest tokens stay in full precision besides the page being filled."""
        return any(scheme.key_recent_tokens or scheme.value_recent_tokens for scheme in self.schemes)

    def refusal(self, dtype: torch.dtype, ranks: int = 1) -> str | None:
        """Why the cache cannot be served, in one sentence; None if it can.

        Args:
            dtype: of the model.
            ranks: that KV heads are divided among.
        """
        for index, scheme in enumerate(self.schemes):
            reason = scheme_refusal(scheme) or self._division_refusal(index, ranks)
            if reason is not None:
                return f"Layer {index} of this bundle {reason}"
        config = self.bundle.config
        text = config.get("text_config", config)
        if text.get("kv_lora_rank"):
            return (
                "This model has latent attention (MLA), and the plugin serves keys and values per head; use "
                "kvconvert.load and model.generate."
            )
        others = sorted(set(text.get("layer_types") or ()) - {"full_attention"})
        if not others and text.get("sliding_window") and text.get("use_sliding_window", True):
            others = ["sliding_attention"]
        if others:
            return (
                f"This model has layers of type {listed(others)}, and the plugin serves attention over all tokens "
                "alone; use `kvconvert serve`."
            )
        own = [BlockLayout.of(self._cache(index, ranks)[1], dtype) for index in range(len(self.schemes))]
        if len({(layout.sink_tokens, layout.key_window, layout.value_window) for layout in own}) > 1:
            return (
                "The layers of this bundle keep different numbers of tokens in full precision, and vLLM's blocks are "
                "all alike; convert with one value of sink_tokens, key_recent_tokens and value_recent_tokens, or use "
                "`kvconvert serve`."
            )
        largest, mean = max(x.block_bytes for x in own), sum(x.block_bytes for x in own) / len(own)
        if largest > MOST_PADDING * mean:
            return (
                f"Pages of this bundle's layers take {mean:,.0f} bytes on average and {largest:,} at most, and vLLM's "
                "blocks all have the largest size, which would undo what the narrower layers save; convert with one "
                "width for all layers, or use `kvconvert serve`."
            )
        return None

    def layer(self, index: int, device: torch.device, dtype: torch.dtype, rank: int = 0, ranks: int = 1) -> LayerCache:
        """The cache of a decoder layer, with its part of the KV plan on a device.

        Args:
            index: of the layer.
            device, dtype: of its full-precision tokens.
            rank, ranks: whose heads it holds, of how many that the heads are divided among.
        """
        scheme, cache = self._cache(index, ranks)
        prefix, heads = f"layers.{index}.", cache.pages.keys.heads
        plan = {name.removeprefix(prefix): t for name, t in self.bundle.plan.items() if name.startswith(prefix)}
        own = {name: t[rank * heads : (rank + 1) * heads] if name in OF_HEADS else t for name, t in plan.items()}
        pages = with_plan(cache.pages, scheme, own, device)
        return LayerCache(pages, cache.rotations, self._layout(cache, dtype, ranks), dtype)

    def layout(self, dtype: torch.dtype, ranks: int = 1) -> BlockLayout:
        """Of every layer's blocks but for the sizes of its records, for a bundle that is not refused."""
        return self._layout(self._cache(0, ranks)[1], dtype, ranks)

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

    def _layout(self, cache: CacheFormat, dtype: torch.dtype, ranks: int) -> BlockLayout:
        every = (self._cache(index, ranks)[1] for index in range(len(self.schemes)))
        return BlockLayout.of(cache, dtype, max(BlockLayout.of(other, dtype).block_bytes for other in every))

    def _cache(self, index: int, ranks: int) -> tuple[KVScheme, CacheFormat]:
        heads, head_dim = self._shape(index)
        return self.schemes[index], CacheFormat.of(self.schemes[index], heads=heads // ranks, key_dim=head_dim)

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
