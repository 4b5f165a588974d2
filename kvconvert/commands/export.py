"""kvconvert export WORK -o BUNDLE."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import click

from kvconvert.commands import Place, as_argument, device_option

_FORMATS, _WEIGHTS = ("bundle", "onnx"), ("awq", "compressed-tensors")


class _Form(click.Choice[str]):
    """A choice whose values are easily given to another option: `others` are that option's, by which it is named."""

    def __init__(self, choices: tuple[str, ...], other: str, others: tuple[str, ...]) -> None:
        super().__init__(choices)
        self._other, self._others = other, others

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The value; one of the other option names that option."""
        if value in self._others:
            self.fail(f"{value!r} belongs to {self._other}; write {self._other} {value}.", param, ctx)
        return super().convert(value, param, ctx)


@click.command()
@click.argument("work")
@click.option("-o", "--output", "bundle", metavar="OUTPUT", required=True, type=Place(), help="Directory to write.")
@click.option("--force", is_flag=True, help="Replace an existing output, and accept missed fidelity limits.")
@device_option("cpu or cuda, where [limits] are measured; a GPU by default if there is one.")
@click.option("--base-model", metavar="ID", help="Id on the Hub of a source that was a local directory.")
@click.option(
    "--license", metavar="L", help="License, by the Hub's identifier; by default the one on the source's card."
)
@click.option("--license-name", metavar="NAME", help="With --license other: its name.")
@click.option("--license-link", metavar="URL", help="With --license other: its address, or a file of the bundle.")
@click.option(
    "--format",
    "format_",
    type=_Form(_FORMATS, "--weights-format", _WEIGHTS),
    default="bundle",
    show_default=True,
    help="A bundle, or a graph for ONNX Runtime; for that, WORK may be a bundle as well.",
)
@click.option(
    "--kv-cache",
    type=click.Choice(["plan", "float"]),
    help="With --format onnx: the cache of the KV plan, which has to have static scales (default), or float32.",
)
@click.option(
    "--int8-activations",
    is_flag=True,
    help="With --format onnx: round activations to int8 in products with 4-bit weights; faster, less exact.",
)
@click.option(
    "--weights-format",
    type=_Form(_WEIGHTS, "--format", _FORMATS),
    default="awq",
    show_default=True,
    help="awq writes a bundle; compressed-tensors a checkpoint for engines that read it, without the KV plan.",
)
def export(
    work: str,
    bundle: Path,
    force: bool,
    device: str | None,
    format_: str,
    kv_cache: Literal["plan", "float"] | None,
    int8_activations: bool,
    weights_format: str,
    **stated: Any,
) -> None:
    """Write the bundle of a finished calibration, or a model for other programs."""
    if (format_, weights_format) != ("bundle", "awq"):
        given = next((name for name, value in stated.items() if value is not None), None)
        if given is not None:
            raise click.UsageError(f"--{given.replace('_', '-')} is for the card of a bundle; leave it out.")
    from kvconvert.bundle.locate import BUNDLE, CHECKPOINT, check_output
    from kvconvert.convert.work_files import check_finished

    if format_ == "onnx":
        if weights_format != "awq":
            raise click.UsageError("--weights-format does not apply to --format onnx; leave one of them out.")
        _export_onnx(work, bundle, force=force, device=device, kv_cache=kv_cache, int8_activations=int8_activations)
        return
    if kv_cache is not None or int8_activations:
        raise click.UsageError("--kv-cache and --int8-activations belong to --format onnx; add it, or leave them out.")
    check_finished(Path(work))
    check_output(bundle, force, CHECKPOINT if weights_format == "compressed-tensors" else BUNDLE)
    if weights_format == "compressed-tensors":
        from kvconvert.convert.compressed_tensors import export_compressed_tensors

        scaled = export_compressed_tensors(work, bundle, force=force, device=device)
        with_scales = "with fp8 scales of keys and values" if scaled else "without fp8 scales of keys and values"
        click.echo(f"Exported {bundle}, a compressed-tensors checkpoint {with_scales}; the KV plan is not in it.")
        return
    from kvconvert.convert.export import export as run

    run(work, bundle, force=force, device=device, **stated)
    click.echo(exported(bundle))


def exported(bundle: Path) -> str:
    """The message about a bundle that was written."""
    return f"Exported {bundle}, {_size(bundle):,} bytes; next: kvconvert generate {as_argument(bundle)} TEXT"


def _export_onnx(source: str, output: Path, kv_cache: Literal["plan", "float"] | None, **options: Any) -> None:
    from kvconvert.bundle.locate import GENAI_NAME, MANIFEST_NAME, ONNX_EXPORT, check_output
    from kvconvert.convert.work_files import check_finished
    from kvconvert.io.hub import is_hub_id
    from kvconvert.onnx import check_installed

    # A wrong source or output is refused before torch is imported, which takes seconds.
    if not os.path.isfile(os.path.join(source, MANIFEST_NAME)) and (os.path.exists(source) or not is_hub_id(source)):
        check_finished(Path(source))
    check_output(output, options["force"], ONNX_EXPORT)
    check_installed()
    from kvconvert.onnx.export import export_onnx

    export_onnx(source, output, kv_cache=kv_cache or "plan", **options)
    click.echo(f"Exported {output}, {_size(output):,} bytes, for ONNX Runtime and, by {GENAI_NAME}, onnxruntime-genai.")


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
