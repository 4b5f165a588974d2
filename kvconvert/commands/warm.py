"""kvconvert warm BUNDLE."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import click

from kvconvert.commands import Place, count_option
from kvconvert.errors import NO_GPU, MissingError, UsageError


@click.command()
@click.argument("bundle")
@click.option(
    "--cache",
    metavar="DIR",
    type=Place(file_okay=False),
    help="Folder to use instead of Triton's own; programs then need TRITON_CACHE_DIR=DIR.",
)
@count_option("--jobs", help="Processes; by default one per CPU.")
@click.option("--revision", metavar="R", help="Branch, tag or commit of a Hub repository; main by default.")
def warm(bundle: str, cache: Path | None, jobs: int | None, revision: str | None) -> None:
    """Compile the kernels that BUNDLE needs on this machine's GPU, so that its first start does not.

    They go to Triton's cache, which every later process of kvconvert reads. After another version of kvconvert, Triton
    or Python, run it again.
    """
    from kvconvert.bundle.locate import check_outside, check_place
    from kvconvert.commands import has_driver, quiet

    check_place(bundle)
    if cache is not None:
        check_outside(cache / "kernels")
    if not has_driver():
        raise MissingError(NO_GPU)
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache.absolute())
    quiet()
    click.echo(compile_kernels(bundle, jobs, revision))


def compile_kernels(bundle: str, jobs: int | None = None, revision: str | None = None) -> str:
    """Compile all kernels that a bundle's model may launch on this machine's first GPU; says in a sentence what was
    done. Nothing runs on the GPU: the model is read on the CPU.

    Raises:
        UsageError: this machine has no GPU that kernels exist for.
        BundleError: see `load`.
        KvconvertError: a kernel cannot be compiled.
    """
    import torch

    from kvconvert.kernels.device import gpu, imagined, unsupported
    from kvconvert.kernels.launches import cache_directory, check_cache, compile_launches, record_specializations
    from kvconvert.runtime.engine.model_steps import rehearse_engine
    from kvconvert.runtime.hf.fuse import fuse
    from kvconvert.runtime.hf.load import load
    from kvconvert.runtime.hf.rehearsal import rehearse_products, shortened

    if importlib.util.find_spec("triton") is None:
        raise UsageError("There are no kernels to compile without Triton, which is for Linux; install it.")
    if not torch.cuda.is_available():
        raise MissingError(NO_GPU)
    device = torch.device("cuda", 0)
    if reason := unsupported(device):
        raise UsageError(f"Kernels cannot be compiled for this machine's GPU: {reason}.")
    check_cache()
    # As on a GPU: not in the dtype that a CPU would prefer.
    model: Any = load(bundle, dtype="auto", revision=revision, verify="headers")[0]
    if model.dtype == torch.float32:
        model.to(torch.bfloat16)
    here = gpu(device)
    with torch.no_grad():
        with shortened(model):
            fuse(model)
        with record_specializations() as launches, imagined(here):
            if hasattr(model, "new_kv_cache"):
                rehearse_engine(model)
            else:  # products, norms and gates, for passes over a short prompt
                with shortened(model):
                    rehearse_products(model)
                    for length in (1, 2, 300):
                        model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    architecture = 10 * here.capability[0] + here.capability[1]
    compiled = compile_launches(launches, architecture, jobs=jobs)
    counts = f"{len(launches)} kernels for sm_{architecture} are in {cache_directory()}"
    return f"{counts}, {compiled} of them compiled now."
