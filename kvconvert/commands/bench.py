"""kvconvert bench BUNDLE."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvconvert.commands import check_device, check_dtype
from kvconvert.errors import MissingError


@click.command()
@click.argument("bundle")
@click.option("--against", metavar="MODEL", help="Source model to measure as well.")
@click.option(
    "--context",
    "contexts",
    metavar="N",
    multiple=True,
    type=click.IntRange(min=1),
    help="Tokens of the prompts, 1024 by default; may be given again.",
)
@click.option(
    "--batch",
    "batches",
    metavar="N",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1,),
    help="Sequences generated together, 1 by default; may be given again.",
)
@click.option(
    "--new-tokens",
    metavar="N",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Tokens that each sequence generates.",
)
@click.option("--device", callback=check_device, metavar="D", help="cpu or cuda; a GPU by default if there is one.")
@click.option(
    "--dtype",
    callback=check_dtype,
    metavar="T",
    help="float32, bfloat16 or float16; by default what each model loads in.",
)
@click.option(
    "--json", "file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON, too."
)
def bench(
    bundle: str,
    against: str | None,
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    new_tokens: int,
    device: str | None,
    dtype: str | None,
    file: Path | None,
) -> None:
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

    report = run(
        bundle,
        against,
        contexts=contexts or None,
        batches=batches,
        new_tokens=new_tokens,
        device=device,
        dtype=dtype,
    )
    if file is not None:
        file.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf8")
    click.echo(table(report))
