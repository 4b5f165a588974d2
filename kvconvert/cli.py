"""The command line. Commands import what they need when they run, so that `kvconvert --help` answers at once."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from kvconvert.errors import KvconvertError, UsageError
from kvconvert.version import __version__


class _Commands(click.Group):
    """Commands in the order of their use; kvconvert's own errors become one sentence and their exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvconvertError as error:
            message = self._with_options(" ".join(str(error).splitlines()), ctx.invoked_subcommand)
            click.echo(f"Error: {message}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Error: Interrupted; nothing half written was left behind.", err=True)
            ctx.exit(1)

    def _with_options(self, message: str, invoked: str | None) -> str:
        """A message in which options stand for the arguments that the library names: `restart=True` is --restart.

        The invoked command's options come first, for its `work` may be another's -o.
        """
        for command in sorted(self.commands.values(), key=lambda command: command.name != invoked):
            for parameter in command.params:
                argument = isinstance(parameter, click.Argument)
                shown = parameter.human_readable_name if argument else parameter.opts[0]
                for name in (f"`{parameter.name}`", f"`{parameter.name}=True`"):
                    message = message.replace(name, shown)
        return message


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvconvert")
def cli() -> None:
    """Convert Hugging Face models into bundles with quantized weights and a calibrated low-bit key-value cache.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 fidelity limit not met.
    """


@cli.command()
@click.argument("model")
@click.option("-o", "work", metavar="WORK", required=True, type=click.Path(path_type=Path), help="Working directory.")
@click.option("--recipe", metavar="PRESET|FILE.toml", default="default", show_default=True, help="What to do.")
@click.option("--data", metavar="SOURCE", help="Calibration data; by default what ships with kvconvert.")
@click.option("--samples", metavar="N", type=click.IntRange(min=1), default=64, show_default=True, help="Sequences.")
@click.option(
    "--seq-len", metavar="L", type=click.IntRange(min=1), help="Tokens in each; 512 by default, or what an image needs."
)
@click.option("--seed", metavar="S", type=int, default=0, show_default=True, help="Seed of the choice of samples.")
@click.option("--device", metavar="D", default="cpu", show_default=True, help="Where layers are computed.")
@click.option("--restart", is_flag=True, help="Discard what WORK holds instead of going on from there.")
@click.option("--kv-bits", metavar="B", type=float, help="Recipe auto: average stored bits per value of the cache.")
@click.option("--kv-bytes-per-token", metavar="N", type=float, help="Recipe auto: the same as bytes per token.")
@click.option("--context", metavar="N", type=click.IntRange(min=1), help="Recipe auto: tokens for which that holds.")
@click.option("--auto-tokens", metavar="N", type=int, help="Recipe auto: held-out tokens to measure candidates on.")
@click.option(
    "--auto-from", metavar="WORK", type=click.Path(path_type=Path), help="Recipe auto: take measurements from there."
)
def calibrate(
    model: str,
    work: Path,
    recipe: str,
    data: str | None,
    samples: int,
    seq_len: int | None,
    seed: int,
    device: str,
    restart: bool,
    kv_bits: float | None,
    kv_bytes_per_token: float | None,
    context: int | None,
    auto_tokens: int | None,
    auto_from: Path | None,
) -> None:
    """Calibrate MODEL, a directory or Hub id, layer by layer into WORK; run again to resume.

    SOURCE is a .txt, .jsonl or .parquet file, a directory of them, or a Hub data set id with optional
    :config:split:column. For a vision-language model it may hold images: rows with an image column and a text column,
    or messages with images in them, or a directory of images with captions (NAME.txt beside each image, or a
    captions.jsonl with file_name and caption). Without SOURCE text is used, or, for a
    vision-language model, drawings.

    The recipe auto chooses bits, groups and windows of every layer for the size that --kv-bits or --kv-bytes-per-token
    allows, everything in the cache included, at 4,096 tokens or --context.
    """
    from kvconvert.convert.recipe import Recipe

    # A wrong recipe is refused before anything slow is imported.
    loaded = Recipe.load(recipe).with_search(
        kv_bits=kv_bits, kv_bytes_per_token=kv_bytes_per_token, context=context, auto_tokens=auto_tokens
    )
    from kvconvert.convert.pipeline import calibrate as run

    run(
        model,
        work,
        recipe=loaded,
        data=data,
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        device=device,
        restart=restart,
        auto_from=auto_from,
    )
    click.echo(f"Calibrated {model} in {work}; next: kvconvert export {work} -o BUNDLE")


@cli.command()
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


@cli.command("eval")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--against", metavar="MODEL", help="Model to compare with; the bundle's source by default.")
@click.option("--data", metavar="SOURCE", help="Held-out text; the text that ships with kvconvert by default.")
@click.option("--tokens", metavar="N", type=click.IntRange(min=1), help="Tokens to score, 8192 by default.")
@click.option(
    "--context",
    metavar="N",
    type=click.IntRange(min=1),
    help="Tokens of a segment, and of the prose that hides a number; 1024 by default.",
)
@click.option(
    "--only",
    metavar="PART,...",
    help="Measure these: perplexity, kl, top1, recall, recitation, free-running, images, cache, weights.",
)
@click.option("--device", metavar="D", help="cpu or cuda; a GPU by default if there is one.")
@click.option("--dtype", metavar="T", help="float32, bfloat16 or float16; by default the model's, on a CPU float32.")
@click.option(
    "--harness", "tasks", metavar="TASK,...", help="Measure tasks of lm-evaluation-harness, or .yaml files, instead."
)
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="Examples of each task of --harness.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with every figure.")
def evaluate(
    bundle: Path,
    only: str | None,
    tokens: int | None,
    tasks: str | None,
    limit: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how far BUNDLE departs from its source, decoding with the low-bit cache.

    With --harness, tasks of lm-evaluation-harness are measured instead, and with --against those of that model, too.
    """
    if tasks is not None:
        others = {"only": only, "tokens": tokens, "data": options.pop("data"), "context": options.pop("context")}
        given = [f"--{name}" for name, value in others.items() if value is not None]
        if given:
            raise UsageError(f"{given[0]} says nothing to tasks of --harness; leave one of them out.")
        _quiet()
        from kvconvert.fidelity.harness import harness

        found = harness(bundle, [name.strip() for name in tasks.split(",") if name.strip()], limit=limit, **options)
        click.echo(json.dumps(found.to_dict(), indent=2) if as_json else found.table())
        return
    if limit is not None:
        raise UsageError("--limit is of the tasks of --harness; name some, or leave it out.")
    from kvconvert.fidelity import evaluate as run

    parts = None if only is None else [name.strip() for name in only.split(",") if name.strip()]
    _quiet()
    report = run(bundle, only=parts, **options, **({} if tokens is None else {"tokens": tokens}))
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
        return
    from kvconvert.fidelity.table import table

    click.echo(table(report))


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--against", metavar="MODEL", help="Source model to measure as well.")
@click.option(
    "--context",
    "contexts",
    metavar="N",
    multiple=True,
    type=click.IntRange(min=1),
    help="Tokens of the prompts, 1024 by default; may be given again.",
)
@click.option(
    "--batch",
    "batches",
    metavar="N",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1,),
    help="Sequences generated together, 1 by default; may be given again.",
)
@click.option(
    "--new-tokens",
    metavar="N",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Tokens that each sequence generates.",
)
@click.option("--device", metavar="D", help="cpu or cuda; a GPU by default if there is one.")
@click.option("--dtype", metavar="T", help="float32, bfloat16 or float16; by default what each model loads in.")
@click.option(
    "--json", "file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON, too."
)
def bench(
    bundle: Path,
    against: str | None,
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    new_tokens: int,
    device: str | None,
    dtype: str | None,
    file: Path | None,
) -> None:
    """Measure how fast BUNDLE generates on this machine, and the memory it takes.

    With --against its source is measured in the same way, with transformers' DynamicCache and, on a GPU, with its
    StaticCache and torch.compile.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise UsageError(f"The directory of {file} does not exist; make it, or name another file for --json.")
    from kvconvert.benchmark import bench as run
    from kvconvert.benchmark.table import table

    report = run(
        bundle,
        against,
        contexts=contexts or None,
        batches=batches,
        new_tokens=new_tokens,
        device=device,
        dtype=dtype,
    )
    if file is not None:
        file.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf8")
    click.echo(table(report))


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt", metavar="TEXT", help="Text to continue.")
@click.option("--chat", is_flag=True, help="Converse, one line of input a turn.")
@click.option(
    "--image",
    "images",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Image that the prompt, or the first turn, is about; may be given again.",
)
@click.option(
    "--max-new-tokens", metavar="N", type=click.IntRange(min=1), default=256, show_default=True, help="At most."
)
@click.option("--device", metavar="D", help="cpu or cuda; a GPU by default if there is one.")
def generate(
    bundle: Path, prompt: str | None, chat: bool, images: tuple[Path, ...], max_new_tokens: int, device: str | None
) -> None:
    """Generate text with BUNDLE and its low-bit cache.

    With --image the prompt goes through the model's chat template, if it has one. In a conversation with a
    vision-language model, a line `/image FILE` gives an image to the next line.
    """
    if chat == (prompt is not None):
        raise UsageError("kvconvert generate needs either --prompt TEXT or --chat, and not both.")
    _quiet()
    from kvconvert.console import Console

    console = Console(bundle, max_new_tokens, device)
    if prompt is not None:
        console.complete(prompt, images)
    else:
        console.chat(iter(sys.stdin), images)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds: coverage of the weights and the plan of the cache."""
    from dataclasses import asdict

    from kvconvert.bundle.reader import open_bundle
    from kvconvert.bundle.summary import estimate_kv, manifest_text

    manifest = open_bundle(bundle, verify="headers").manifest
    if as_json:
        estimate = estimate_kv(manifest.layers)
        fields = manifest.model_dump(mode="json")
        fields["kv_estimate_not_measured"] = None if estimate is None else asdict(estimate)
        click.echo(json.dumps(fields, indent=2))
    else:
        click.echo(manifest_text(manifest))


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
def verify(bundle: Path) -> None:
    """Check every file of BUNDLE: hashes, headers, tensors, scales, and that all of it agrees."""
    from kvconvert.bundle.reader import open_bundle

    for line in open_bundle(bundle, verify="full").checks:
        click.echo(f"ok  {line}")
    click.echo(f"{bundle} is intact.")


def _quiet() -> None:
    """Keep transformers' loading bars out of generated text."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _terminate(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def main() -> None:
    """Entry point: a terminated process cleans up like an interrupted one."""
    # Read when torch loads. Waiting threads that spin make small models ten times slower on a machine with other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, _terminate)
    cli(prog_name="kvconvert")


if __name__ == "__main__":
    main()
