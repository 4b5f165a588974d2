"""kvconvert inspect BUNDLE."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("bundle")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: str, as_json: bool) -> None:
    """Show what BUNDLE holds: coverage of the weights and the plan of the cache."""
    from dataclasses import asdict

    from kvconvert.bundle.locate import locate
    from kvconvert.bundle.reader import open_bundle
    from kvconvert.bundle.summary import estimate_kv, manifest_text

    manifest = open_bundle(locate(bundle), verify="headers").manifest
    if as_json:
        estimate = estimate_kv(manifest.layers)
        fields = manifest.model_dump(mode="json")
        fields["kv_estimate_not_measured"] = None if estimate is None else asdict(estimate)
        click.echo(json.dumps(fields, indent=2))
    else:
        click.echo(manifest_text(manifest))
