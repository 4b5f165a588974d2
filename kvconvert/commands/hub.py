"""kvconvert push BUNDLE USER/NAME, kvconvert pull USER/NAME [-o DIR]."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("bundle")
@click.argument("repository", metavar="USER/NAME")
@click.option("--private", is_flag=True, help="Make the repository a private one.")
@click.option("--revision", metavar="R", help="Branch to commit to, made if it does not exist; main by default.")
def push(bundle: str, repository: str, private: bool, revision: str | None) -> None:
    """Verify BUNDLE, then upload it to the Hub as USER/NAME, which is made if it does not exist.

    The access token is the one of `hf auth login` or HF_TOKEN.
    """
    from kvconvert.hub import push as run

    commit = run(bundle, repository, private=private, revision=revision)
    click.echo(f"Pushed {bundle} to {repository}, commit {commit}; next: kvconvert generate {repository} --prompt TEXT")


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
