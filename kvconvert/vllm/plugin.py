"""The plugin: what vLLM calls in each of its processes, and how a bundle chooses its own settings."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

import vllm
from vllm.config import SpeculativeConfig, get_current_vllm_config, replace
from vllm.engine.arg_utils import EngineArgs

from kvconvert.vllm.bundle import OWN_BACKEND, choose_settings, is_known, refuse_config, refused

_BACKEND = "kvconvert.vllm.backend.LowBitBackend"


def register() -> None:
    """Make bundles known to vLLM; other models are served as without the plugin, whatever vLLM's version."""
    if hasattr(EngineArgs.create_engine_config, "__wrapped__"):
        return
    EngineArgs.create_engine_config = _recognizing(EngineArgs.create_engine_config)
    if is_known(vllm.__version__):
        _register_backend()


def _register_backend() -> None:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    import kvconvert.vllm.weights  # noqa: F401

    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    Attention.get_kv_cache_spec = _naming_the_layer(Attention.get_kv_cache_spec)
    Attention.__init__ = _whatever_the_model_names(Attention.__init__, AttentionBackendEnum.CUSTOM)
    makers = (SpecDecodeBaseProposer, "_create_draft_vllm_config"), (SpeculativeConfig, "apply_draft_overrides")
    for owner, name in makers:
        setattr(owner, name, _drafting_with_its_own(getattr(owner, name), AttentionBackendEnum.CUSTOM))
    if current_platform.is_cpu():
        # vLLM takes its own backend on a CPU whatever is asked for.
        platform = type(current_platform)
        platform.get_attn_backend_cls = _honoring(platform.get_attn_backend_cls, AttentionBackendEnum.CUSTOM)


def _recognizing(create_engine_config: Any) -> Any:
    """Engine arguments that name a bundle get the settings that it needs."""

    @wraps(create_engine_config)
    def wrapped(arguments: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        served = choose_settings(arguments, vllm.__version__)
        if served is not None:
            _share_kernels()
            if served.has_cache and served.is_hybrid:
                _attend_beside_others(arguments)
        config = create_engine_config(arguments, *args, **kwargs)
        if served is not None:
            refuse_config(served, config)
        return config

    return wrapped


def _attend_beside_others(arguments: EngineArgs) -> None:
    """Take the backend for attention to all tokens alone, and leave other layers to vLLM's own.

    Raises:
        BundleError: the arguments name another one for it.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    per_kind = arguments.attention_config.backend_per_kind
    given = per_kind.setdefault("full_attention", AttentionBackendEnum.CUSTOM)
    if given != AttentionBackendEnum.CUSTOM:
        raise refused(f"--attention-config.backend_per_kind full_attention={given.name}", OWN_BACKEND)


def _share_kernels() -> None:
    """Let kernels be compiled once for all bundles.

    Unless a folder is named, vLLM gives each model's compiled code one of its own, and all of Triton's with it.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        from kvconvert.kernels.launches import cache_directory

        os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory()))


def _honoring(get_attn_backend_cls: Any, custom: Any) -> Any:
    @wraps(get_attn_backend_cls)
    def wrapped(selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if selected_backend == custom:
            return _BACKEND
        return get_attn_backend_cls(selected_backend, *args, **kwargs)

    return staticmethod(wrapped)


def _whatever_the_model_names(init: Any, custom: Any) -> Any:
    """Models whose values have other sizes than their keys name vLLM's backend for these, also in layers that are ours.

    Layers with sliding windows keep it.
    """

    @wraps(init)
    def wrapped(layer: Any, *args: Any, attn_backend: Any = None, **kwargs: Any) -> None:
        if attn_backend is not None and attn_backend.get_name().endswith("_DIFFKV"):
            config = get_current_vllm_config().attention_config
            chosen = config.backend_per_kind.get("full_attention", config.backend)
            if chosen == custom and kwargs.get("per_layer_sliding_window") is None:
                attn_backend = custom.get_class()
        init(layer, *args, attn_backend=attn_backend, **kwargs)

    return wrapped


def _drafting_with_its_own(make_config: Any, custom: Any) -> Any:
    """Give draft layers vLLM's own attention backend, unless the speculative config names one.

    vLLM's V1 model runner keeps the target's `backend_per_kind` for them, its V2 model runner the target's whole
    attention config.

    Args:
        make_config: a method of a proposer or of the drafts' settings, whose result is the config of those layers.
        custom: the backend of this plugin.
    """

    @wraps(make_config)
    def wrapped(drafts: Any, *args: Any) -> Any:
        config = make_config(drafts, *args)
        attention = config.attention_config
        if custom not in (attention.backend, attention.backend_per_kind.get("full_attention")):
            return config
        given = getattr(drafts, "speculative_config", drafts).attention_backend
        return replace(config, attention_config=replace(attention, backend=given, backend_per_kind={}))

    return wrapped


def _naming_the_layer(get_kv_cache_spec: Any) -> Any:
    """A backend is not told which layer's spec it customizes, and our layers have blocks of different sizes.

    vLLM asks once the weights are loaded, and compiles the model after that.
    """

    @wraps(get_kv_cache_spec)
    def wrapped(layer: Any, vllm_config: Any) -> Any:
        spec, backend = get_kv_cache_spec(layer, vllm_config), layer.get_attn_backend()
        if spec is None or f"{backend.__module__}.{backend.__qualname__}" != _BACKEND:
            return spec
        backend.begin_to_compile(vllm_config)
        return backend.spec(layer.layer_name, spec)

    return wrapped
