"""Launches of Triton kernels as notes, so that what a run will launch is compiled before it begins.

Triton compiles a kernel anew for each combination of dtypes, constants, alignment of pointers, and of integers that are
1 or divisible by 16. A `Launch` is one such combination: what the dispatch passes to a kernel, less what makes no
difference. The list of a model's launches is made by its own dispatch, run within `record_specializations`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import Any

import torch
from tqdm import tqdm

from kvconvert.errors import KvconvertError
from kvconvert.kernels.device import capability
from kvconvert.kernels.launches.notes import Launch, Pointer, record_specializations, skips_launches

logger = logging.getLogger(__name__)

# Seconds after which there is a bar.
DELAY = 1.0


def deferred(module: str, *names: str) -> list[Callable[..., Any]]:
    """Functions of a module of `kvconvert.kernels` that needs Triton and is therefore imported by the first call."""

    def of(name: str) -> Callable[..., Any]:
        @lru_cache(maxsize=1)
        def found() -> Callable[..., Any]:
            return getattr(import_module(f"kvconvert.kernels.{module}"), name)

        def call(*arguments: Any, **named: Any) -> Any:
            return found()(*arguments, **named)

        return call

    return [of(name) for name in names]


def compile_launches(launches: Collection[Launch], architecture: int, *, jobs: int | None = None) -> int:
    """Compile launches into Triton's cache, in processes of their own; those that are there are passed over.

    Args:
        launches: what `record_specializations` gave.
        architecture: the GPU's that they are for: 90 for sm_90.
        jobs: processes; None for one per CPU that may be used.

    Returns:
        how many were not there.

    Raises:
        KvconvertError: a kernel cannot be compiled, or kept.
    """
    from kvconvert.kernels.launches.triton_processes import compile_in_processes, unready

    missing = unready(launches, architecture)
    if missing:
        check_cache()
        jobs = jobs or len(os.sched_getaffinity(0))
        with tqdm(total=len(missing), desc="Compiling kernels", delay=DELAY, leave=False, disable=None) as bar:
            compile_in_processes(missing, architecture, jobs, bar.update)
    return len(missing)


def check_cache() -> None:
    """Refuse (KvconvertError) a folder that compiled kernels cannot be written to."""
    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise KvconvertError(
            f"Compiled kernels cannot be kept in {folder} ({error.strerror}); set TRITON_CACHE_DIR to another folder."
        ) from error


def begin_to_compile(launches: Collection[Launch], device: torch.device) -> Thread:
    """Compile launches for a GPU beside what this process goes on with, until the thread ends.

    Nothing is said of a kernel that cannot be compiled: `make_ready` tries again.
    """
    major, minor = capability(device)

    def compile_quietly() -> None:
        try:
            compile_launches(launches, 10 * major + minor)
        except KvconvertError as error:
            logger.debug("%s", error)

    thread = Thread(target=compile_quietly, name="kvconvert kernels", daemon=True)
    thread.start()
    return thread


def cache_directory() -> Path:
    """Where Triton keeps compiled kernels: TRITON_CACHE_DIR, or a folder of the user's."""
    from kvconvert.kernels.launches.triton_processes import directory

    return directory()


def make_ready(launches: Collection[Launch], device: torch.device) -> None:
    """Compile launches for a GPU, and bring them there, so that the first of each takes no longer than others."""
    from kvconvert.kernels.launches.triton_processes import load

    major, minor = capability(device)
    with torch.cuda.device(device):
        try:
            compile_launches(launches, 10 * major + minor)
        except KvconvertError as error:
            logger.warning("%s This process goes on by itself.", error)
        load(launches)
