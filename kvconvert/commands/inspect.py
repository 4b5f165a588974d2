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
    from kvconvert.bundle.summary import kv_size, manifest_text
    from kvconvert.models.cache_shapes import sliding_windows
    from kvconvert.runtime.hf.fit import read_config

    verify = "headers" if os.path.exists(bundle) else "plan"
    opened = open_bundle(locate(bundle, weights=False), verify=verify)
    manifest = opened.manifest
    windows = sliding_windows(read_config(opened)) if any(manifest.schemes()) else ()
    if as_json:
        size = kv_size(manifest, windows)
        fields = manifest.model_dump(mode="json")
        fields["kv_size"] = None if size is None else asdict(size)
        click.echo(json.dumps(fields, indent=2))
    else:
        click.echo(manifest_text(manifest, _is_utf8(sys.stdout.encoding), windows))


def _is_utf8(encoding: str | None) -> bool:
    return encoding is not None and codecs.lookup(encoding).name == "utf-8"
