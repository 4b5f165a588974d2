"""kvconvert inspect, verify and report BUNDLE: what it holds, whether it is intact, and both as a page."""

from __future__ import annotations

import codecs
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import click

from kvconvert.commands import Place, quiet
from kvconvert.errors import BundleError


@click.command()
@click.argument("bundle")
@click.option("--layers", is_flag=True, help="Every module and layer as well, and what searches measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: str, layers: bool, as_json: bool) -> None:
    """Show what BUNDLE holds: its source, weights, cache and fidelity.

    For a repository on the Hub, no weights are fetched.
    """
    from kvconvert.bundle.locate import locate

    directory = locate(bundle, weights=False)
    from dataclasses import asdict

    from kvconvert.bundle.describe import check_cache_size, kv_size, manifest_text, summary
    from kvconvert.bundle.reader import open_bundle
    from kvconvert.models.positions import stated_positions

    verify: Literal["headers", "plan"] = "headers" if os.path.exists(bundle) else "plan"
    opened = open_bundle(directory, verify=verify)
    manifest = opened.manifest
    windows: list[int | None] = []
    positions = stated_positions(opened.directory)
    is_known = not any(manifest.schemes()) or not _needs_transformers(opened.config, positions)
    if is_known:
        try:
            check_cache_size(manifest, windows)
        except BundleError:  # a model may have windows that its config.json does not name
            is_known = False
    if not is_known:
        from kvconvert.models.configuration import context_length, read_config, sliding_windows

        config = read_config(opened.directory, opened.config)
        windows, positions = sliding_windows(config), context_length(config)
        check_cache_size(manifest, windows)
    if as_json:
        size = kv_size(manifest, windows, positions)
        fields = manifest.model_dump(mode="json")
        fields["kv_size"] = None if size is None else asdict(size)
        click.echo(json.dumps(fields, indent=2))
    else:
        told = windows, positions
        click.echo(
            manifest_text(manifest, _is_utf8(sys.stdout.encoding), *told) if layers else summary(manifest, *told)
        )


def _needs_transformers(config: dict[str, Any], positions: int | None) -> bool:
    """Whether a config.json names windows, or few positions and a RoPE that may be scaled.

    Only transformers, which takes seconds to import, says where the windows are, and how many positions there are.
    """
    from kvconvert.methods.auto import DEFAULT_CONTEXT

    parts = [config, config.get("text_config")]
    if positions is not None and positions < DEFAULT_CONTEXT and "factor" in json.dumps(parts):
        return True
    used = [part for part in parts if isinstance(part, dict) and part.get("use_sliding_window") is not False]
    entries = [entry for part in used for entry in part.items()]
    return any(value and ("window" in name or "chunk" in name) for name, value in entries)


def _is_utf8(encoding: str | None) -> bool:
    return encoding is not None and codecs.lookup(encoding).name == "utf-8"


@click.command()
@click.argument("bundle")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def verify(bundle: str, as_json: bool) -> None:
    """Check every file of BUNDLE: hashes, headers, tensors, scales, and that all of it agrees.

    No model is built; loading BUNDLE checks in addition that the model of its config.json has these tensors.
    """
    from kvconvert.bundle.locate import locate

    directory = locate(bundle)
    from kvconvert.bundle.reader import open_bundle

    checks = open_bundle(directory, verify="full").checks
    if as_json:
        click.echo(json.dumps({"bundle": bundle, "checks": list(checks)}, indent=2))
        return
    for line in checks:
        click.echo(f"ok  {line}")
    click.echo(f"{bundle} is intact.")


@click.command()
@click.argument("bundle")
@click.option(
    "-o",
    "--output",
    "output",
    metavar="DIR",
    type=Place(file_okay=False),
    help="Directory for the files; BUNDLE-report beside the bundle by default, or here for a Hub id.",
)
@click.option(
    "--fidelity",
    metavar="FILE",
    type=Place(),
    help="What `eval --json` printed for this bundle; what export measured by default.",
)
@click.option(
    "--model", metavar="MODEL", help="The bundle's source: a short text is run on it for the figures of keys."
)
def report(bundle: str, output: Path | None, fidelity: Path | None, model: str | None) -> None:
    """Write what BUNDLE is and costs as one HTML page, and its figures as PNG.

    For a repository on the Hub, no weights are fetched. Needs matplotlib:
    pip install '.[report]' in a clone of kvconvert.
    """
    from kvconvert.bundle.locate import check_place

    check_place(bundle)
    from kvconvert.report import write_report

    if model is not None:
        from kvconvert.models import check_model

        check_model(model)
        quiet()
    click.echo(f"Wrote {write_report(bundle, output, fidelity=fidelity, model=model)}")
