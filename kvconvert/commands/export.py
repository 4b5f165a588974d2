"""kvconvert export WORK -o BUNDLE."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.option("-o", "bundle", metavar="BUNDLE", required=True, type=click.Path(path_type=Path), help="Bundle to write.")
@click.option("--force", is_flag=True, help="Replace an existing bundle, and accept missed fidelity limits.")
@click.option(
    "--device", metavar="D", help="cpu or cuda, where [limits] are measured; a GPU by default if there is one."
)
def export(work: Path, bundle: Path, force: bool, device: str | None) -> None:
    """Write the bundle of a finished calibration."""
    from kvconvert.bundle.writer import check_output

    check_output(bundle, force)
    from kvconvert.convert.export import export as run

    run(work, bundle, force=force, device=device)
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    click.echo(f"Exported {bundle}, {size:,} bytes; next: kvconvert generate {bundle} --prompt TEXT")
