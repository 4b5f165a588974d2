"""kvconvert pull USER/NAME [-o DIR]."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("repository", metavar="USER/NAME")
@click.option(
    "-o", "output", metavar="DIR", type=click.Path(path_type=Path), help="Directory to write; the Hub's cache without."
)
@click.option("--revision", metavar="R", help="Branch, tag or commit; main by default.")
@click.option("--force", is_flag=True, help="Replace a bundle at DIR.")
def pull(repository: str, output: Path | None, revision: str | None, force: bool) -> None:
    """Fetch the bundle USER/NAME from the Hub and verify all of it; run again to go on after an interruption."""
    from kvconvert.bundle.hub import fetch

    directory, commit = fetch(repository, output, revision=revision, force=force)
    click.echo(f"Pulled {repository}, commit {commit}, to {directory}; it is intact.")
