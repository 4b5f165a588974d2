"""kvconvert verify BUNDLE."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
def verify(bundle: Path) -> None:
    """Check every file of BUNDLE: hashes, headers, tensors, scales, and that all of it agrees."""
    from kvconvert.bundle.reader import open_bundle

    for line in open_bundle(bundle, verify="full").checks:
        click.echo(f"ok  {line}")
    click.echo(f"{bundle} is intact.")
