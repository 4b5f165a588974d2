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
@click.option(
    "--weights-format",
    type=click.Choice(["awq", "compressed-tensors"]),
    default="awq",
    show_default=True,
    help="awq writes a bundle; compressed-tensors a checkpoint for engines that read it, without the KV plan.",
)
def export(work: Path, bundle: Path, force: bool, device: str | None, weights_format: str) -> None:
    """Write the bundle of a finished calibration."""
    from kvconvert.bundle.writer import check_output

    check_output(bundle, force)
    if weights_format == "compressed-tensors":
        from kvconvert.convert.compressed_tensors import export_compressed_tensors

        scaled = export_compressed_tensors(work, bundle, force=force, device=device)
        with_scales = "with fp8 scales of keys and values" if scaled else "without fp8 scales of keys and values"
        click.echo(f"Exported {bundle}, a compressed-tensors checkpoint {with_scales}; the KV plan is not in it.")
        return
    from kvconvert.convert.export import export as run

    run(work, bundle, force=force, device=device)
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    click.echo(f"Exported {bundle}, {size:,} bytes; next: kvconvert generate {bundle} --prompt TEXT")
