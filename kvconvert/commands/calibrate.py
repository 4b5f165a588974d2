"""kvconvert calibrate MODEL -o WORK, and kvconvert convert MODEL BUNDLE, which exports as well."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvconvert.commands import (
    AnyWhole,
    Number,
    Place,
    as_argument,
    count_option,
    device_option,
    seed_option,
    with_options,
)
from kvconvert.commands.recipes import changes_of, recipe_changes
from kvconvert.errors import UsageError

# Of both commands.
_calibration = with_options(
    click.option("--recipe", metavar="PRESET|FILE.toml", default="default", show_default=True, help="What to do."),
    recipe_changes,
    click.option(
        "--data",
        metavar="SOURCE[=WEIGHT]",
        multiple=True,
        help="Calibration data, may be repeated; by default text that ships, kvconvert:books-calib.txt, "
        "kvconvert:code-calib.txt and kvconvert:chat-calib.jsonl, or drawings.",
    ),
    count_option(
        "--samples",
        help="Sequences; by default 16 of 2,048 tokens, 24 for small chat models, 64 of 512 or fewer or with images.",
    ),
    count_option("--seq-len", least=2, metavar="L", help="Tokens in each; 2,048 by default, or what an image needs."),
    seed_option(default=0, show_default=True, help="Seed of the choice of samples."),
    device_option("cpu or cuda, where layers are computed; a GPU by default if there is one."),
    click.option("--restart", is_flag=True, help="Discard an interrupted calibration instead of going on with it."),
    click.option(
        "--weight-bits", metavar="B", type=Number(), help="Average stored bits per weight, spent by measuring."
    ),
    click.option(
        "--kv-bits", metavar="B", type=Number(), help="Recipe auto: average stored bits per value of the cache."
    ),
    click.option("--kv-bytes-per-token", metavar="N", type=Number(), help="Recipe auto: the same as bytes per token."),
    count_option("--context", help="Recipe auto: tokens for which that holds."),
    click.option(
        "--auto-tokens", metavar="N", type=AnyWhole(), help="Recipe auto: held-out tokens to measure candidates on."
    ),
    click.option(
        "--auto-from",
        metavar="WORK",
        type=Place(),
        help="Recipe auto: take measurements from there.",
    ),
)


@click.command()
@click.argument("model")
@click.option("-o", "--output", "work", metavar="WORK", required=True, type=Place(), help="Working directory.")
@_calibration
def calibrate(model: str, work: Path, **options: Any) -> None:
    """Calibrate MODEL, a directory or Hub id, layer by layer into WORK; run again to resume.

    SOURCE is a .txt, .jsonl, .json, .csv or .parquet file or a directory of them, with optional ::column, a file or
    directory of source code or Markdown, or a Hub data set id with optional :config:split:column; several have weights,
    as in --data chat.jsonl=3 --data code=1. For a vision-language model it may hold images: rows with an image column
    and a text column, or messages with images in them, or a directory of images with captions (NAME.txt beside each
    image, or a captions.jsonl with file_name and caption). Without SOURCE text is used, or, for a vision-language
    model, drawings.

    Started as torchrun --nproc-per-node N -m kvconvert calibrate ..., N processes share the sequences, with --device
    cuda each on a GPU of its own.

    The recipe auto chooses bits, groups and windows of every layer for the size that --kv-bits or --kv-bytes-per-token
    allows, everything in the cache included, at --context tokens: 4,096, or the model's positions if fewer.

    --set and the options before it change single values of the recipe, as if its file said so; kvconvert recipes NAME
    shows them all.
    """
    _run(model, work, **options)
    from kvconvert.calibration.ranks import is_first_process

    if is_first_process():
        click.echo(f"Calibrated {model} in {work}; next: kvconvert export {as_argument(work)} -o BUNDLE")


@click.command()
@click.argument("model")
@click.argument("bundle", type=Place())
@_calibration
@click.option("--force", is_flag=True, help="Replace an existing bundle, and accept missed fidelity limits.")
def convert(model: str, bundle: Path, force: bool, **options: Any) -> None:
    """Calibrate MODEL and export BUNDLE in one go; run again to resume.

    The options are those of kvconvert calibrate. Its working directory, BUNDLE-work, is removed when BUNDLE is written.
    """
    from kvconvert.bundle.locate import check_output
    from kvconvert.convert.work_files import keeping_locks, remove_work
    from kvconvert.io.disk import STATE_NAME, check_writable

    def check_again(work: Path) -> None:
        """Refuse the output of a run that had the lock until now."""
        try:
            check_output(bundle, force)
        except UsageError:
            if not (work / STATE_NAME).exists():  # made a moment ago, for this run
                remove_work(work)
            raise

    check_output(bundle, force)
    check_writable(bundle.absolute().parent, "bundle")
    work = bundle.absolute().with_name(f"{bundle.absolute().name}-work")
    with keeping_locks(check_again):  # so that no other run has the directory between calibration and removal
        _run(model, work, **options)
        from kvconvert.commands.export import exported
        from kvconvert.convert.export import export

        export(work, bundle, force=force, device=options["device"])
        remove_work(work)
    click.echo(exported(bundle))


def _run(model: str, work: Path, *, recipe: str, data: tuple[str, ...], **options: Any) -> None:
    from kvconvert.convert.work_files import check_measured, check_place
    from kvconvert.data.sources import check_sources
    from kvconvert.models import check_model

    # A wrong model, place or recipe is refused before anything slow is imported.
    directory = check_model(model)
    check_sources(list(data) or None)
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun's processes would be in each other's way
        check_place(work)
    from kvconvert.recipes.recipe import Budget, Recipe, check_said_once

    changes, budget = changes_of(options), {name: options.pop(name) for name in Budget.__annotations__}
    check_said_once(changes, budget)
    loaded = Recipe.load(recipe, changes).with_budget(**budget)
    from kvconvert.models.positions import check_length, stated_positions

    positions = stated_positions(directory)
    check_length("seq_len", options["seq_len"], positions)
    check_length("context", None if loaded.auto is None else loaded.auto.context, positions)
    if options["auto_from"] is not None:
        check_measured(options["auto_from"], loaded)
    from kvconvert.io.checksums import begin
    from kvconvert.io.process import return_large_blocks

    return_large_blocks()
    # Hashing the model, which takes long, begins before the imports, which take seconds.
    begin(sorted(Path(model).glob("*.safetensors")))
    from kvconvert.convert.pipeline import calibrate

    calibrate(model, work, recipe=loaded, data=list(data) or None, **options)
