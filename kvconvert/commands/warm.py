"""kvconvert warm BUNDLE."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvconvert.runtime.engine.warm import Warmed


@click.command()
@click.argument("bundle")
@click.option(
    "--gpu", "gpus", metavar="SM", multiple=True, help="sm_90, say; may be repeated. By default the one here."
)
@click.option(
    "--cache",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Instead of Triton's own folder; programs then need TRITON_CACHE_DIR=DIR.",
)
@click.option("--jobs", metavar="N", type=click.IntRange(min=1), help="Processes; by default one per CPU.")
@click.option("--revision", metavar="R", help="Branch, tag or commit of a Hub repository; main by default.")
def warm(bundle: str, gpus: tuple[str, ...], cache: Path | None, jobs: int | None, revision: str | None) -> None:
    """Compile the kernels that BUNDLE needs, so that the first start on a GPU does not.

    They go to Triton's cache, which every later process of kvconvert reads: in an image of a container, or on a volume.
    No GPU is needed. After another version of kvconvert, Triton or Python, run it again.
    """
    from kvconvert.bundle.locate import check_place
    from kvconvert.commands import quiet

    check_place(bundle)
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache.absolute())
    quiet()
    from kvconvert.runtime.engine.warm import warm as run

    for line in told(run(bundle, gpus, jobs=jobs, revision=revision)):
        click.echo(line)


def told(warmed: Sequence[Warmed]) -> list[str]:
    """What is said of kernels that are ready."""
    return [
        f"{each.kernels} kernels for {each.gpu} are in {each.directory}, {each.compiled} of them compiled now."
        for each in warmed
    ]
