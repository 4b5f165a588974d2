"""kvconvert verify BUNDLE."""

from __future__ import annotations

import click


@click.command()
@click.argument("bundle")
def verify(bundle: str) -> None:
    """Check every file of BUNDLE: hashes, headers, tensors, scales, and that all of it agrees.

    The model is built without weights, to see that config.json fits the tensors.
    """
    from kvconvert.bundle.locate import locate
    from kvconvert.bundle.reader import open_bundle

    opened = open_bundle(locate(bundle), verify="full")
    for line in opened.checks:
        click.echo(f"ok  {line}")
    from kvconvert.runtime.hf.quantizer import check_fits

    click.echo(f"ok  config.json: {check_fits(opened)} tensors fit the model that it describes")
    click.echo(f"{bundle} is intact.")
