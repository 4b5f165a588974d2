"""kvconvert push BUNDLE USER/NAME."""

from __future__ import annotations

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
