"""kvconvert bench BUNDLE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvconvert.commands import count_option, device_option, dtype_option


@click.command()
@click.argument("bundle")
@click.option("--against", metavar="MODEL", help="Source model to measure as well.")
@count_option(
    "--context", "contexts", multiple=True, help="Tokens of the prompts, 1,024 by default; may be given again."
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
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def bench(
    bundle: str, against: str | None, contexts: tuple[int, ...], new_tokens: int, as_json: bool, **options: Any
) -> None:
    """Measure how fast BUNDLE generates on this machine, and the memory it takes.

    With --against its source is measured in the same way, with transformers' DynamicCache and, on a GPU, with its
    StaticCache and torch.compile.
    """
    from kvconvert.bundle.locate import check_place

    check_place(bundle)
    if against is not None:
        from kvconvert.models import check_model

        check_model(against)
    from kvconvert.models.positions import check_prompts, stated_positions

    check_prompts(contexts, new_tokens, stated_positions(Path(bundle)))
    from kvconvert.benchmark import bench as run
    from kvconvert.benchmark.bench import table

    report = run(bundle, against, contexts=contexts or None, new_tokens=new_tokens, **options)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else table(report))
