"""Launches of Triton kernels as notes, so that what a run will launch is compiled before it begins.

Triton compiles a kernel anew for each combination of dtypes, constants, alignment of pointers, and of integers that are
1 or divisible by 16. A `Launch` is one such combination: what the dispatch passes to a kernel, less what makes no
difference. The list of a model's launches is made by its own dispatch, run within `noted`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvconvert.kernels.device import capability

# Seconds after which there is a bar.
DELAY = 1.0


@dataclass(frozen=True)
class Pointer:
    """A tensor as a kernel's specialization knows it.

    Attributes:
        dtype: of its elements.
        aligned: whether it begins at a multiple of 16 bytes.
        block: of a tensor descriptor, the shape of its tiles; None for a tensor.
    """

    dtype: torch.dtype
    aligned: bool
    block: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Launch:
    """A specialization of a kernel.

    Attributes:
        module, name: of the kernel.
        arguments: by name; a `Pointer` for a tensor, and for a number one that is specialized on alike.
        options: of the launch, such as num_warps.
    """

    module: str
    name: str
    arguments: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Notes:
    """What `noted` collects.

    Attributes:
        launches: each once, in the order of the first ones.
        makes: whether they are made, too.
    """

    launches: dict[Launch, None]
    makes: bool


_notes: Notes | None = None


def notes() -> Notes | None:
    """Where launches are to be noted; None outside of `noted`."""
    return _notes


def skips_launches() -> bool:
    """Whether launches are noted and not made."""
    return _notes is not None and not _notes.makes


@contextmanager
def noted(makes: bool = False) -> Iterator[dict[Launch, None]]:
    """Within the context launches are noted: the keys of what it gives.

    Unless `makes`, they are not made, and what they would have written keeps the values that it had.
    """
    global _notes
    before, _notes = _notes, Notes({}, makes)
    try:
        yield _notes.launches
    finally:
        _notes = before


def compile_launches(launches: Collection[Launch], architecture: int, *, here: bool, jobs: int | None = None) -> int:
    """Compile launches into Triton's cache, in processes of their own; those that are there are passed over.

    Args:
        launches: what `noted` gave.
        architecture: of the GPU that they are for: 90 for sm_90.
        here: whether they will run on this machine, whose driver some versions of Triton need to prepare launches.
        jobs: processes; None for one per CPU that may be used.

    Returns:
        how many were not there.

    Raises:
        KvconvertError: a kernel cannot be compiled.
    """
    from kvconvert.kernels.launches.triton_ahead import compile_ahead, unready

    missing = unready(launches, architecture, here)
    if missing:
        jobs = jobs or len(os.sched_getaffinity(0))
        with tqdm(total=len(missing), desc="Compiling kernels", delay=DELAY, leave=False, disable=None) as bar:
            compile_ahead(missing, architecture, here, jobs, bar.update)
    return len(missing)


def cache_directory() -> Path:
    """Where Triton keeps compiled kernels: TRITON_CACHE_DIR, or a folder of the user's."""
    from kvconvert.kernels.launches.triton_ahead import directory

    return directory()


def make_ready(launches: Collection[Launch], device: torch.device) -> int:
    """Compile launches for a GPU and bring them there; how many were not compiled. Errors as of `compile_launches`."""
    from kvconvert.kernels.launches.triton_ahead import load

    major, minor = capability(device)
    with torch.cuda.device(device):
        compiled = compile_launches(launches, 10 * major + minor, here=True)
        load(launches)
    return compiled
