"""The plugin: what vLLM calls in each of its processes, and how a bundle chooses its own settings."""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs

from kvconvert.vllm.settings import choose_settings, is_known, refuse_config, refuse_hub

_BACKEND = "kvconvert.vllm.backend.LowBitBackend"


def register() -> None:
    """Make bundles known to vLLM; other models are served as without the plugin, whatever vLLM's version."""
    if hasattr(EngineArgs.create_engine_config, "__wrapped__"):
        return
    EngineArgs.create_engine_config = _recognizing(EngineArgs.create_engine_config)
    if is_known(vllm.__version__):
        _register_backend()


def _register_backend() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    import kvconvert.vllm.weights  # noqa: F401

    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
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
        config = create_engine_config(arguments, *args, **kwargs)
        if served is not None:
            refuse_config(served, config)
        elif not Path(config.model_config.model).is_dir():
            refuse_hub(arguments, config.model_config.hf_config.to_dict())
        return config

    return wrapped


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
