"""kvconvert inspect BUNDLE."""

from __future__ import annotations

import codecs
import json
import os
import sys

import click


@click.command()
@click.argument("bundle")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: str, as_json: bool) -> None:
    """Show what BUNDLE holds: coverage of the weights and the plan of the cache, also as a picture.

    Of a repository on the Hub, no weights are fetched.
    """
    from dataclasses import asdict

    from kvconvert.bundle.locate import locate
    from kvconvert.bundle.reader import open_bundle
    from kvconvert.bundle.summary import estimate_kv, manifest_text

    verify = "headers" if os.path.exists(bundle) else "plan"
    manifest = open_bundle(locate(bundle, weights=False), verify=verify).manifest
    if as_json:
        estimate = estimate_kv(manifest.layers)
        fields = manifest.model_dump(mode="json")
        fields["kv_estimate_not_measured"] = None if estimate is None else asdict(estimate)
        click.echo(json.dumps(fields, indent=2))
    else:
        click.echo(manifest_text(manifest, unicode=_is_utf8(sys.stdout.encoding)))


def _is_utf8(encoding: str | None) -> bool:
    return encoding is not None and codecs.lookup(encoding).name == "utf-8"
