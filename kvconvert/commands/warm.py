"""kvconvert warm BUNDLE."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvconvert.commands import Place, count_option
from kvconvert.errors import NO_GPU, MissingError


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
    from kvconvert.runtime.engine.warm import warm as run

    warmed = run(bundle, jobs=jobs, revision=revision)
    click.echo(
        f"{warmed.kernels} kernels for {warmed.gpu} are in {warmed.directory}, {warmed.compiled} of them compiled now."
    )
