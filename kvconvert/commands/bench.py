"""kvconvert bench BUNDLE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvconvert.commands import count_option, device_option, dtype_option
from kvconvert.errors import MissingError


@click.command()
@click.argument("bundle")
@click.option("--against", metavar="MODEL", help="Source model to measure as well.")
@count_option(
    "--context", "contexts", multiple=True, help="Tokens of the prompts, 1024 by default; may be given again."
)
@count_option(
    "--batch",
    "batches",
    multiple=True,
    default=(1,),
    help="Sequences generated together, 1 by default; may be given again.",
)
@count_option("--new-tokens", least=2, default=128, show_default=True, help="Tokens that each sequence generates.")
@device_option()
@dtype_option("what each model loads in")
@click.option(
    "--json", "file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON, too."
)
def bench(bundle: str, against: str | None, contexts: tuple[int, ...], file: Path | None, **options: Any) -> None:
    """Measure how fast BUNDLE generates on this machine, and the memory it takes.

    With --against its source is measured in the same way, with transformers' DynamicCache and, on a GPU, with its
    StaticCache and torch.compile.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise MissingError(f"The directory of {file} does not exist; make it, or name another file for --json.")
    from kvconvert.bundle.locate import check_place

    check_place(bundle)
    if against is not None:
        from kvconvert.models import check_model

        check_model(against)
    from kvconvert.benchmark import bench as run
    from kvconvert.benchmark.bench import table

    report = run(bundle, against, contexts=contexts or None, **options)
    if file is not None:
        file.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf8")
    click.echo(table(report))
