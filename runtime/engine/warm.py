"""Compiling the kernels that a bundle's model launches before it is served."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvconvert.errors import NO_GPU, MissingError, UsageError
from kvconvert.kernels.device import gpu, imagined, unsupported
from kvconvert.kernels.launches import cache_directory, check_cache, compile_launches, record_specializations
from kvconvert.runtime.engine.model_steps import rehearse_engine
from kvconvert.runtime.hf.fuse import fuse
from kvconvert.runtime.hf.load import load
from kvconvert.runtime.hf.rehearsal import rehearse_products, shortened


@dataclass(frozen=True)
class Warmed:
    """What `warm` has done.

    Attributes:
        gpu: "sm_90", say.
        kernels: specializations that the bundle's model may launch.
        compiled: those that were not in Triton's cache before.
        directory: of Triton's cache.
    """

    gpu: str
    kernels: int
    compiled: int
    directory: Path


@torch.no_grad()
def warm(bundle: str | Path, *, jobs: int | None = None, revision: str | None = None) -> Warmed:
    """Compile all kernels that a bundle's model may launch on this machine's first GPU, into Triton's cache, where
    every later process finds them. Nothing runs on the GPU: the model is read on the CPU.

    Args:
        bundle: a directory, or the id of a repository on the Hub.
        jobs: processes; None for one per CPU.
        revision: of a Hub repository.

    Raises:
        UsageError: this machine has no GPU that kernels exist for.
        BundleError: see `load`.
        KvconvertError: a kernel cannot be compiled.
    """
    if importlib.util.find_spec("triton") is None:
        raise UsageError("There are no kernels to compile without Triton, which is for Linux; install it.")
    if not torch.cuda.is_available():
        raise MissingError(NO_GPU)
    device = torch.device("cuda", 0)
    if reason := unsupported(device):
        raise UsageError(f"Kernels cannot be compiled for this machine's GPU: {reason}.")
    check_cache()
    # As on a GPU: not in the dtype that a CPU would prefer.
    model, _ = load(bundle, dtype="auto", revision=revision, verify="headers")
    if model.dtype == torch.float32:
        model.to(torch.bfloat16)
    here = gpu(device)
    with shortened(model):
        fuse(model)
    with record_specializations() as launches, imagined(here):
        if hasattr(model, "new_kv_cache"):
            rehearse_engine(model)
        else:
            _rehearse_without_plan(model)
    architecture = 10 * here.capability[0] + here.capability[1]
    compiled = compile_launches(launches, architecture, jobs=jobs)
    return Warmed(f"sm_{architecture}", len(launches), compiled, cache_directory())


def _rehearse_without_plan(model: Any) -> None:
    """A model without a KV plan: products, norms and gates, for passes over a short prompt."""
    with shortened(model):
        rehearse_products(model)
        for length in (1, 2, 300):
            model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
