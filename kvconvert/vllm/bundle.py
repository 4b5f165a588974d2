"""A bundle as vLLM serves it: the cache of each attention layer, or why not, and which of vLLM's settings it needs and
refuses; nothing here imports vLLM.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from kvconvert.bundle.files import read_object, read_settings
from kvconvert.bundle.generation import NAME, configured_settings, read_generation, stop_tokens
from kvconvert.bundle.locate import fetch_config, fetch_repository
from kvconvert.bundle.reader import Bundle, open_bundle
from kvconvert.cache import layer_format
from kvconvert.cache.plan_tensors import with_plan
from kvconvert.errors import BundleError, HubError, first_line, listed
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.kernels.pages import PAGE_SIZE
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
# those that vLLM keeps a state of; and those that vLLM attends to its own way, over a cache of its own, with a window
# or over latents of all heads (MLA).
OURS = ("full_attention", "attention", "hybrid")
STATES = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")
WINDOWS = ("sliding_attention", "hybrid_sliding")
LATENTS = "latent_attention"
WITHOUT_CACHE = ("mlp", "moe", "sparse", "dense")
# The period with which layers of these types attend to all tokens, where config.json does not say it.
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
        text, layers = self._text, len(self.bundle.manifest.schemes())
        stated = text.get("layer_types") or text.get("layers_block_type")
        try:
            # Types of layers that draft may follow.
            found = list(stated)[:layers] if stated else [_in_own_words(text, index) for index in range(layers)]
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise _no_attention(first_line(error)) from error
        if len(found) != layers or not all(isinstance(kind, str) and kind.isidentifier() for kind in found):
            raise _no_attention(f"its types of layers are no words for {layers}")
        if text.get("kv_lora_rank"):
            found = [LATENTS if kind in OURS else kind for kind in found]
        return found

    @property
    def _text(self) -> Mapping[str, Any]:
        """What config.json says of the language model."""
        found = self.bundle.config.get("text_config") or self.bundle.config
        if not isinstance(found, dict):
            raise _no_attention("text_config is no object")
        return found

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
        others = sorted(set(self.layer_types) - {*OURS, *STATES, *WINDOWS, LATENTS, *WITHOUT_CACHE})
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
        self,
        index: int,
        device: torch.device,
        dtype: torch.dtype,
        rank: int = 0,
        ranks: int = 1,
        drafts: int = 0,
        apart: bool = False,
    ) -> tuple[LayerFormat, BlockLayout]:
        """The format of a decoder layer, with its part of the KV plan on a device, and the layout of its blocks.

        Args:
            index: of the layer.
            device, dtype: of its full-precision tokens.
            rank, ranks: whose heads it holds, of how many that the heads are divided among.
            drafts, apart: as for `layouts`.
        """
        format = self._format(index, ranks)
        prefix, heads = f"layers.{index}.", format.keys.heads
        plan = {name.removeprefix(prefix): t for name, t in self.bundle.plan.items() if name.startswith(prefix)}
        own = {name: t[rank * heads : (rank + 1) * heads] if name in OF_HEADS else t for name, t in plan.items()}
        format = with_plan(format, self.schemes[index], own, device)
        return format, self.layouts(dtype, ranks, drafts, apart)[index]

    def layouts(
        self, dtype: torch.dtype, ranks: int = 1, drafts: int = 0, apart: bool = False
    ) -> dict[int, BlockLayout]:
        """The layout of each layer's blocks, all found by the same rows of a block table.

        Args:
            dtype: of full-precision tokens.
            ranks: that heads are divided among.
            drafts: newest tokens of a request that may be taken back.
            apart: whether each layer's blocks have to be apart: beside caches of layers that draft, or where devices
                have different layers, for which requests have the same rows.
        """
        formats = tuple(self._format(index, ranks) for index in self.attending)
        side_by_side = not apart and {*self.layer_types} <= {*OURS, *WITHOUT_CACHE} and not self.has_states
        found = _layouts(formats, dtype, side_by_side, self.has_states, drafts)
        return dict(zip(self.attending, found, strict=True))

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
        heads, key_dim, value_dim = self._shape(index)
        return layer_format(self.schemes[index], heads=heads // ranks, key_dim=key_dim, value_dim=value_dim)

    def _shape(self, index: int) -> tuple[int, int, int]:
        """KV heads of a layer, and channels of each head's keys and values."""
        planned = self.bundle.manifest.layers[index]
        heads, key_dim, value_dim = planned.num_key_value_heads, planned.head_dim, planned.value_head_dim
        if heads is None or key_dim is None:
            text = self._text
            queries, hidden = text.get("num_attention_heads"), text.get("hidden_size")
            heads, key_dim = text.get("num_key_value_heads", queries), text.get("head_dim")
            if not key_dim and _is_count(queries) and _is_count(hidden):
                key_dim = hidden // queries
            value_dim = text.get("v_head_dim")
        value_dim = value_dim or key_dim
        if not all(_is_count(size) for size in (heads, key_dim, value_dim)):
            raise _no_attention("its numbers of heads and channels are none")
        return heads, key_dim, value_dim


def _no_attention(reason: str) -> BundleError:
    return BundleError(f"config.json does not tell how its layers attend ({reason}); fetch or export the bundle again.")


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _in_own_words(text: Mapping[str, Any], index: int) -> str:
    """The type of a layer of a model whose config.json says it in words of its own."""
    family = text.get("model_type")
    if family == "falcon_h1":
        return "hybrid"
    # Of MiMo-V2, which states the size of chunks, too.
    windows = text.get("hybrid_layer_pattern")
    if windows:
        return "sliding_attention" if windows[index] else "full_attention"
    if text.get("attention_chunk_size"):
        return "chunked_attention"
    sparse = (text.get("sparse_attention_config") or {}).get("sparse_attention_freq")
    if sparse and sparse[index]:
        return "minimax_m3_sparse"
    attends = None
    if "attn_layer_indices" in text:
        attends = index in (text["attn_layer_indices"] or ())
    elif "attn_layer_period" in text:
        attends = index % text["attn_layer_period"] == text.get("attn_layer_offset", 4)
    elif family == "qwen3_next":
        attends = (index + 1) % text.get("full_attention_interval", 4) == 0
    if attends is not None:
        return "full_attention" if attends else "linear_attention"
    if not text.get("sliding_window") or not text.get("use_sliding_window", True):
        return "full_attention"
    pattern = text.get("sliding_window_pattern") or WINDOW_PATTERNS.get(family)
    return "full_attention" if isinstance(pattern, int) and (index + 1) % pattern == 0 else "sliding_attention"


@lru_cache(maxsize=16)
def _layouts(
    formats: tuple[LayerFormat, ...], dtype: torch.dtype, side_by_side: bool, equal: bool, drafts: int
) -> list[BlockLayout]:
    return block_layouts(formats, dtype, side_by_side=side_by_side, equal=equal, drafts=drafts)


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


logger = logging.getLogger(__name__)
# Minor versions of vLLM whose interfaces the plugin was tried with.
VERSIONS = ("0.32", "0.33")
# Ways to draft that were tried: without a model, and by one whose layers have a cache of vLLM's own.
DRAFTS = ("ngram", "suffix")
MODEL_DRAFTS = ("eagle", "mtp")
OWN_BACKEND = "bundles bring their own attention backend"
# Tokens of a block of layers that are not ours, which vLLM's backends take on CPUs and GPUs.
OTHERS_BLOCK = 32


def is_known(version: str) -> bool:
    """Whether the plugin was tried with a version of vLLM."""
    return ".".join(version.split(".")[:2]) in VERSIONS


def choose_settings(arguments: Any, version: str) -> ServedBundle | None:
    """Set what the bundle named by vLLM's engine arguments needs; None where they name none.

    Raises:
        BundleError: an argument is set to what cannot be served, or the plugin was not tried with vLLM's version.
        HubError: see `fetch_bundle`.
    """
    fetch_bundle(arguments)
    path = Path(arguments.model)
    if not (path / "config.json").is_file() or not is_bundle(read_object(path / "config.json")):
        return None
    if not is_known(version):
        raise BundleError(
            f"This kvconvert serves bundles in vLLM {' and '.join(VERSIONS)}, and {version} is installed; install one "
            "of these, or a kvconvert that knows yours."
        )
    served = served_bundle(arguments.model)
    if getattr(arguments, "generation_config", "auto") == "auto":
        arguments.generation_config = _generation_config(path)
    if served.unused_schemes:
        kinds, dtype = {served.layer_types[index] for index in served.unused_schemes}, arguments.kv_cache_dtype
        logger.warning(
            "vLLM keeps the cache of %d layers of type %s itself, in %s: their schemes are not used, and it takes more "
            "memory than the bundle says; `kvconvert serve` uses them.",
            len(served.unused_schemes),
            listed(sorted(kinds)),
            "the model's dtype" if dtype == "auto" else dtype,
        )
    if not served.has_cache:
        return served
    needed = {"kv_cache_dtype": ("auto", "the bundle says how the cache is stored")}
    drafts = arguments.speculative_config
    by_model = drafts is not None and drafts.get("method") not in DRAFTS
    if not served.is_hybrid:
        needed["attention_backend"] = "CUSTOM", OWN_BACKEND
    if served.has_states:
        needed["block_size"] = None, "it follows from the sizes of pages and states"
    elif not (served.is_hybrid or by_model):
        needed["block_size"] = PAGE_SIZE, f"a block is a page of {PAGE_SIZE} tokens"
    elif arguments.block_size is None:
        # Of the other layers; small blocks are easily put where our pages are.
        arguments.block_size = OTHERS_BLOCK
    for name, (value, reason) in needed.items():
        given = getattr(arguments, name)
        given = getattr(given, "name", given)
        if given not in (None, "auto", value):
            raise refused(f"--{name.replace('_', '-')} {given}", reason)
        setattr(arguments, name, value)
    if drafts is not None and arguments.async_scheduling is None:
        arguments.async_scheduling = False
    arguments.enable_prefix_caching = bool(arguments.enable_prefix_caching)
    if arguments.enable_prefix_caching and served.has_states:
        raise refused("--enable-prefix-caching", "beside layers with a state that was not tried")
    return served


def _generation_config(directory: Path) -> str:
    """A folder with the bundle's generation_config.json as vLLM applies it; it is there while the process runs."""
    file, config = directory / NAME, read_object(directory / "config.json")
    stated = read_object(file) if file.exists() else configured_settings(config)
    configured = [part.get("eos_token_id") for part in (config, config.get("text_config")) if isinstance(part, dict)]
    tokenizer = directory / "tokenizer.json"
    contents = read_settings(tokenizer) if tokenizer.exists() else None
    added = contents.get("added_tokens") if isinstance(contents, dict) else None
    ids = [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else None
    special = None if ids is None else {id for id in ids if isinstance(id, int)}
    values, warning = read_generation(stated, stop_tokens(stated, configured, special=special)).for_vllm()
    if warning:
        logger.warning("%s", warning)
    folder = Path(tempfile.mkdtemp(prefix="kvconvert-vllm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / NAME).write_text(json.dumps(values), encoding="utf8")
    return str(folder)


def fetch_bundle(arguments: Any) -> None:
    """Let vLLM's engine arguments name a directory where they name a bundle on the Hub, which is fetched and verified.

    Raises:
        HubError, BundleError: it cannot be fetched, or does not hold what its manifest says.
    """
    name, options = arguments.model, {"revision": arguments.revision, "token": arguments.hf_token}
    if os.environ.get("VLLM_USE_MODELSCOPE", "0").lower() in ("1", "true"):
        return
    try:
        config = fetch_config(name, **options)
    except HubError:
        # vLLM needs that file, too, and says itself why it cannot have it.
        return
    if config is not None and is_bundle(read_object(config)):
        directory = fetch_repository(name, **options)
        open_bundle(directory)
        arguments.served_model_name = arguments.served_model_name or name
        arguments.model = str(directory)


def refuse_config(served: ServedBundle, config: Any) -> None:
    """Refuse a bundle, or vLLM's settings, that cannot be served (BundleError)."""
    parallel = config.parallel_config
    if config.lora_config is not None and served.bundle.manifest.transforms:
        raise refused("LoRA adapters", "they belong to the source's weights, which were changed since")
    if parallel.tensor_parallel_size > 1 and served.has_own_weights:
        raise refused("tensor parallelism", "its weights have other widths than 4 bits")
    if not served.has_cache:
        return
    reason = served.refusal(config.model_config.dtype, parallel.tensor_parallel_size)
    if reason is not None:
        raise BundleError(reason)
    sizes = {
        "decode context parallelism": parallel.decode_context_parallel_size,
        "prefill context parallelism": parallel.prefill_context_parallel_size,
    }
    for name, size in sizes.items():
        if size > 1:
            raise refused(name, "the plugin divides heads among devices and nothing else")
    if served.has_states and config.device_config.device_type == "cpu":
        # `CPUModelRunner._zero_block_ids` takes the number of a block for that of a part of one.
        raise BundleError(
            "vLLM on a CPU clears other blocks than it hands out where these hold several pages, as beside layers with "
            "a state, and answers would be wrong; serve this bundle on a GPU, or use `kvconvert serve`."
        )
    if served.has_windows and config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise refused("--disable-hybrid-kv-cache-manager", "layers with sliding windows have blocks of another size")
    drafts = config.speculative_config
    if parallel.pipeline_parallel_size > 1:
        if served.has_states:
            raise refused("pipeline parallelism", "beside layers with a state that was not tried")
        if drafts is not None:
            raise refused("drafts and pipeline parallelism", "only the last device knows how many were accepted")
    if drafts is not None and drafts.method == "draft_model":
        raise refused(
            "drafts by a model of their own",
            "vLLM would write its tokens to the blocks of the bundle's layers",
        )
    if drafts is not None and drafts.method not in (*DRAFTS, *MODEL_DRAFTS):
        raise refused(f"drafts by {drafts.method}", f"the plugin was tried with {listed([*DRAFTS, *MODEL_DRAFTS])}")
    if drafts is not None and drafts.method in MODEL_DRAFTS and served.has_states:
        raise refused(f"drafts by {drafts.method}", "beside layers with a state that was not tried")
    if drafts is not None and config.scheduler_config.async_scheduling:
        raise refused("--async-scheduling and drafts", "passes are planned from how many drafts were accepted")
    if config.kv_transfer_config is not None:
        raise refused(
            "a KV connector",
            "it takes a request's n-th block for its n-th 128 tokens once these are computed, and here sink tokens "
            "come first and a page is quantized later",
        )


def refused(what: str, reason: str) -> BundleError:
    """What ends the start where a setting cannot be served, and why."""
    return BundleError(f"A kvconvert bundle cannot be served with {what}: {reason}; leave it out.")
