"""Which of vLLM's settings a bundle needs, and which it refuses; nothing here imports vLLM."""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvconvert.bundle.files import read_object, read_settings
from kvconvert.bundle.generation import NAME, read_generation, stop_tokens
from kvconvert.bundle.locate import fetch_config, fetch_repository
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import BundleError, HubError, listed
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.vllm.bundle import ServedBundle, is_bundle, served_bundle

logger = logging.getLogger(__name__)
# Minor versions of vLLM whose interfaces the plugin was tried with.
VERSIONS = ("0.32", "0.33")
# Ways to draft that were tried: without a model, and by one whose layers have a cache of vLLM's own.
DRAFTS = ("ngram", "suffix")
MODEL_DRAFTS = ("eagle",)
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
        kinds = listed(sorted({served.layer_types[index] for index in served.unused_schemes}))
        logger.warning(
            "vLLM keeps the cache of %d layers of type %s itself, in the model's dtype: their schemes are not used.",
            len(served.unused_schemes),
            kinds,
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
    if arguments.enable_prefix_caching and served.keeps_windows:
        raise refused("--enable-prefix-caching", "its newest tokens are in full precision, which no other request has")
    if arguments.enable_prefix_caching and (served.is_hybrid or by_model):
        raise refused(
            "--enable-prefix-caching" + " and drafts by a model" * (not served.is_hybrid),
            "vLLM shortens a prefix to what its other layers have cached, and would cut the blocks of sink tokens",
        )
    return served


def _generation_config(directory: Path) -> str:
    """A folder with the bundle's generation_config.json as vLLM applies it; it is there while the process runs."""
    file, config = directory / NAME, read_object(directory / "config.json")
    stated = read_object(file) if file.exists() else {}
    configured = [part.get("eos_token_id") for part in (config, config.get("text_config")) if isinstance(part, dict)]
    tokenizer = directory / "tokenizer.json"
    contents = read_settings(tokenizer) if tokenizer.exists() else None
    added = contents.get("added_tokens") if isinstance(contents, dict) else None
    special = {token.get("id") for token in added if isinstance(token, dict)} if isinstance(added, list) else None
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
    if config.lora_config is not None:
        raise refused("LoRA adapters", "they belong to the source's weights, which were scaled and rotated since")
    if parallel.tensor_parallel_size > 1 and served.has_own_weights:
        raise refused("tensor parallelism", "its weights have other widths than 4 bits")
    if not served.has_cache:
        return
    reason = served.refusal(config.model_config.dtype, parallel.tensor_parallel_size)
    if reason is not None:
        raise BundleError(reason)
    sizes = {
        "pipeline parallelism": parallel.pipeline_parallel_size,
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
    if drafts is not None and drafts.method == "draft_model":
        raise refused(
            "drafts by a model of their own",
            "vLLM would write its tokens to the blocks of the bundle's layers",
        )
    if drafts is not None and drafts.method not in (*DRAFTS, *MODEL_DRAFTS):
        raise refused(f"drafts by {drafts.method}", f"the plugin was tried with {listed([*DRAFTS, *MODEL_DRAFTS])}")
    if drafts is not None and drafts.method in MODEL_DRAFTS and served.is_hybrid:
        raise refused(f"drafts by {drafts.method}", "beside its windows or states that was not tried")
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
