"""kvconvert report BUNDLE."""

from __future__ import annotations

from pathlib import Path

import click

from kvconvert.commands.quiet import quiet


@click.command()
@click.argument("bundle")
@click.option(
    "-o",
    "output",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the files; BUNDLE-report beside the bundle by default, or here for a Hub id.",
)
@click.option(
    "--fidelity",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="What `eval --json` printed of this bundle; what export measured by default.",
)
@click.option(
    "--model", metavar="MODEL", help="The bundle's source: a short text is run on it for the figures of keys."
)
def report(bundle: str, output: Path | None, fidelity: Path | None, model: str | None) -> None:
    """Write what BUNDLE is and costs as one HTML page, and its figures as PNG.

    Of a repository on the Hub, no weights are fetched. Needs matplotlib: pip install 'kvconvert[report]'.
    """
    from kvconvert.report import write_report

    quiet()
    click.echo(f"Wrote {write_report(bundle, output, fidelity=fidelity, model=model)}")
