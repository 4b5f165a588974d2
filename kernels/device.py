"""Where Triton kernels run, and what is said and counted where they do not."""

from __future__ import annotations

import logging
import os
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from kvconvert.errors import UsageError

logger = logging.getLogger(__name__)

# Tensor cores with fp16 and bf16, and asynchronous copies to shared memory.
LOWEST_CAPABILITY = (8, 0)

fallbacks: Counter[tuple[str, str]] = Counter()
_interpreted = False


@dataclass(frozen=True)
class GPU:
    """What the kernels' dispatch has to know of a GPU: compute capability, and streaming multiprocessors."""

    capability: tuple[int, int]
    multiprocessors: int


# What the interpreter's CPU passes for: what kernels are tuned for, but small, so that splits are exercised.
INTERPRETER = GPU((9, 0), 4)
_imagined: GPU | None = None


@contextmanager
def imagined(gpu: GPU) -> Iterator[None]:
    """Let tensors on a CPU pass for tensors on a GPU, so that launches can be recorded (`kernels/launches`).

    Kernels cannot run on them.
    """
    global _imagined
    before, _imagined = _imagined, gpu
    try:
        yield
    finally:
        _imagined = before


@contextmanager
def interpreted(enabled: bool = True) -> Iterator[None]:
    """Let Triton's interpreter stand in for a GPU: within the context, CPU tensors go to the kernels.

    Slow, for tests. The kernels' modules must have been imported with TRITON_INTERPRET=1. Within another such context,
    `interpreted(False)` gives CPU tensors back to the CPU's paths.
    """
    global _interpreted
    if enabled and os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError("Kernels run on a CPU only under Triton's interpreter; set TRITON_INTERPRET=1 and start anew.")
    before, _interpreted = _interpreted, enabled
    try:
        yield
    finally:
        _interpreted = before


def unsupported(device: torch.device) -> str | None:
    """Why Triton kernels do not run on a device; None for NVIDIA GPUs from Ampere on, or the interpreter's CPU."""
    if device.type == "cpu" and (_interpreted or _imagined is not None):
        return None
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    if torch.version.hip is not None:
        return "there are no kernels for AMD GPUs"
    if capability(device) < LOWEST_CAPABILITY:
        major, minor = capability(device)
        return f"compute capability {major}.{minor} is below {LOWEST_CAPABILITY[0]}.{LOWEST_CAPABILITY[1]}"
    return None


def runs_triton(device: torch.device) -> bool:
    """Whether kernels run on a device; if so, a call that they do not serve is a fallback."""
    return unsupported(device) is None


def compiles(device: torch.device) -> bool:
    """Whether kernels are compiled for a device and not interpreted: for a GPU, an imagined one included."""
    return device.type == "cuda" or _imagined is not None


def gpu(device: torch.device) -> GPU:
    """The GPU that a device is, or that stands in for it."""
    if device.type != "cuda":
        return _imagined or INTERPRETER
    return GPU(_capability(device.index or 0), _properties(device.index or 0).multi_processor_count)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU, or of what stands in for it."""
    return gpu(device).capability


def overlaps_launches(device: torch.device) -> bool:
    """Whether a GPU, from Hopper on, launches a kernel while the one before it is at work, and lets it wait there."""
    return compiles(device) and capability(device) >= (9, 0)


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU, or of what stands in for it."""
    return gpu(device).multiprocessors


@lru_cache(maxsize=16)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=16)
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a CPU should multiply matrices of `dtype`: its own, or float32 where that is faster.

    Without instructions for them, products of 16-bit numbers take six to sixty times as long as float32's.
    """
    slow = dtype == torch.float16 or (dtype == torch.bfloat16 and not multiplies_bfloat16())
    return torch.float32 if slow else dtype


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for products of bfloat16 matrices."""
    if platform.machine() in ("x86_64", "AMD64"):
        checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
        return any(check() for check in checks if check is not None)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fall_back(operation: str, reason: str) -> None:
    """Count a call that a slower path serves, and say so once per operation and reason."""
    key = (operation, reason)
    if not fallbacks[key]:
        logger.warning("%s runs on the slower reference path: %s.", operation, reason)
    fallbacks[key] += 1


@contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """Within the block products of float32 matrices on this device may use TF32.

    TF32 rounds the factors to 11 significant bits and adds in float32, several times as fast. That changes the error
    that rounding weights to 8 bits or less makes by far less than the error.
    """
    with _precision("high", device):
        yield


@contextmanager
def float32_products(device: torch.device) -> Iterator[None]:
    """Within the block, which may be inside one of `tf32_products`, they do not: a Hessian's inverse depends on its
    smallest eigenvalues.
    """
    with _precision("highest", device):
        yield


@contextmanager
def _precision(precision: str, device: torch.device) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and before != precision:
        torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        if before != torch.get_float32_matmul_precision():
            torch.set_float32_matmul_precision(before)


def upload(data: torch.Tensor | np.ndarray | list, device: torch.device) -> torch.Tensor:
    """Integers on a device, without waiting for what it is doing, as a copy from pageable memory would."""
    tensor = torch.from_numpy(data) if isinstance(data, np.ndarray) else torch.as_tensor(data)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
