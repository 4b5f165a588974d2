"""Compiling the kernels that a bundle's model launches before it is served, also for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvconvert.errors import UsageError
from kvconvert.kernels.device import GPU, LOWEST_CAPABILITY, imagined
from kvconvert.kernels.launches import cache_directory, compile_launches, noted
from kvconvert.runtime.engine.model_steps import rehearse_engine
from kvconvert.runtime.hf.fuse import fuse
from kvconvert.runtime.hf.load import load
from kvconvert.runtime.hf.rehearsal import rehearse_products, shortened

# Streaming multiprocessors of usual GPUs, by compute capability; how products are divided depends on them.
MULTIPROCESSORS = {
    (8, 0): (108, 56),
    (8, 6): (84, 82, 72),
    (8, 9): (142, 128, 76, 58),
    (9, 0): (132, 114),
    (10, 0): (148,),
    (12, 0): (170, 188),
}


@dataclass(frozen=True)
class Warmed:
    """What `warm` has done for one GPU.

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
def warm(
    bundle: str | Path,
    gpus: Sequence[str] = (),
    *,
    jobs: int | None = None,
    revision: str | None = None,
) -> list[Warmed]:
    """Compile all kernels that a bundle's model may launch, into Triton's cache, where every later process finds them.

    Nothing runs on a GPU, and there need not be one. The model is read on the CPU.

    Args:
        bundle: a directory, or the id of a repository on the Hub.
        gpus: "sm_90" and the like, or "sm_90:132" with the number of multiprocessors; without it that of usual ones.
            Without any, the first GPU of this machine.
        jobs: processes; None for one per CPU.
        revision: of a Hub repository.

    Raises:
        UsageError: a name of no GPU that kernels exist for, or no GPU is here and none is named.
        BundleError: see `load`.
        KvconvertError: a kernel cannot be compiled.
    """
    if importlib.util.find_spec("triton") is None:
        raise UsageError("There are no kernels to compile without Triton, which is for Linux; install it.")
    places = [_parsed(name) for name in gpus] or [_here()]
    # As on a GPU: not in the dtype that a CPU would prefer.
    model, _ = load(bundle, dtype="auto", revision=revision, verify="headers")
    if model.dtype == torch.float32:
        model.to(torch.bfloat16)
    with shortened(model):
        fuse(model)
    found = []
    for capability, counts in places:
        with noted() as launches:
            with imagined(GPU(capability, counts[0])):
                if not hasattr(model, "new_kv_cache"):
                    _rehearse_without_plan(model)
                else:
                    rehearse_engine(model)
            for count in counts[1:]:
                with imagined(GPU(capability, count)), shortened(model):
                    rehearse_products(model)
        architecture = 10 * capability[0] + capability[1]
        here = torch.cuda.is_available() and torch.cuda.get_device_capability() == capability
        compiled = compile_launches(launches, architecture, here=here, jobs=jobs)
        found.append(Warmed(f"sm_{architecture}", len(launches), compiled, cache_directory()))
    return found


def _parsed(name: str) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Compute capability and numbers of multiprocessors."""
    match = re.fullmatch(r"sm_(\d+)(\d)a?(?::(\d+))?", name)
    capability = (int(match[1]), int(match[2])) if match else (0, 0)
    if match is None or capability < LOWEST_CAPABILITY:
        raise UsageError(f"{name} is no GPU that there are kernels for; name one like sm_80, sm_90 or sm_90:132.")
    counts = (int(match[3]),) if match[3] else MULTIPROCESSORS.get(capability)
    if counts is None:
        raise UsageError(f"How many multiprocessors a GPU of {name} has is not known; say it: {name}:132.")
    return capability, counts


def _here() -> tuple[tuple[int, int], tuple[int, ...]]:
    if not torch.cuda.is_available():
        raise UsageError("There is no GPU here; name one that kernels are compiled for, such as sm_90.")
    properties = torch.cuda.get_device_properties(0)
    return (properties.major, properties.minor), (properties.multi_processor_count,)


def _rehearse_without_plan(model: Any) -> None:
    """A model without a KV plan: products, norms and gates, for passes over a short prompt."""
    with shortened(model):
        rehearse_products(model)
        for length in (1, 2, 300):
            model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
