"""kvconvert push BUNDLE USER/NAME, pull USER/NAME [-o DIR], list, and rm USER/NAME."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import click

from kvconvert.commands import Place


@click.command()
@click.argument("bundle")
@click.argument("repository", metavar="USER/NAME")
@click.option("--private", is_flag=True, help="Make the repository a private one.")
@click.option("--revision", metavar="R", help="Branch to commit to, made if it does not exist; main by default.")
def push(bundle: str, repository: str, private: bool, revision: str | None) -> None:
    """Verify BUNDLE, then upload it to the Hub as USER/NAME, which is made if it does not exist.

    The access token is the one of `hf auth login` or HF_TOKEN.
    """
    from kvconvert.bundle.locate import check_place
    from kvconvert.io.hub import check_can_push

    check_place(bundle)
    check_can_push(repository)
    from kvconvert.hub import push as run

    commit = run(bundle, repository, private=private, revision=revision)
    # An id without a revision stands for the main branch.
    then = f"generate {repository} TEXT"
    if revision not in (None, "main"):
        then = f"pull {repository} --revision {shlex.quote(revision)} -o DIR"
    click.echo(f"Pushed {bundle} to {repository}, commit {commit}; next: kvconvert {then}")


@click.command()
@click.argument("repository", metavar="USER/NAME")
@click.option(
    "-o", "--output", "output", metavar="DIR", type=Place(), help="Directory to write; the Hub's cache without."
)
@click.option("--revision", metavar="R", help="Branch, tag or commit; main by default.")
@click.option("--force", is_flag=True, help="Replace a bundle at DIR.")
def pull(repository: str, output: Path | None, revision: str | None, force: bool) -> None:
    """Fetch the bundle USER/NAME from the Hub and verify all of it; run again to go on after an interruption."""
    from kvconvert.bundle.locate import check_output
    from kvconvert.io.hub import check_id

    check_id(repository)
    if output is not None:
        check_output(output, force)
    from kvconvert.bundle.hub import fetch

    directory, commit = fetch(repository, output, revision=revision, force=force)
    click.echo(f"Pulled {repository}, commit {commit}, to {directory}; it is intact.")


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, sizes in bytes.")
def list_bundles(as_json: bool) -> None:
    """List the bundles in the Hub's cache: pulled without -o, or used by their id."""
    from kvconvert.bundle.locate import pulled

    found = pulled()
    if as_json:
        click.echo(json.dumps([asdict(bundle) for bundle in found], indent=2))
        return
    if not found:
        click.echo("No bundle is in the Hub's cache; kvconvert pull USER/NAME fetches one.")
        return
    from kvconvert.tables import text_table

    rows = [(b.repository, ", ".join(commit[:7] for commit in b.commits), f"{b.size:,}", b.modified) for b in found]
    click.echo(text_table(("bundle", "commits", "bytes", "modified"), rows))


@click.command()
@click.argument("repository", metavar="USER/NAME")
def rm(repository: str) -> None:
    """Remove the bundle USER/NAME from the Hub's cache."""
    from kvconvert.bundle.locate import remove_pulled

    click.echo(f"Removed {repository}, {remove_pulled(repository):,} bytes.")
