"""kvconvert plan MODEL."""

from __future__ import annotations

from typing import Any

import click

from kvconvert.commands import AnyWhole, ByteSize, Number, count_option, device_option
from kvconvert.commands.recipes import changes_of, recipe_changes


@click.command()
@click.argument("model")
@click.option("--recipe", metavar="PRESET|FILE.toml", default="default", show_default=True, help="What to do.")
@recipe_changes
@click.option("--gpu-memory", metavar="SIZE", type=ByteSize(), help="Memory of the GPU that will serve, such as 24GB.")
@count_option("--context", help="Tokens of a sequence; 4,096 by default, or fewer.")
@count_option("--batch", default=1, show_default=True, help="Sequences served.")
@count_option("--samples", help="Calibration sequences; as many as calibrate takes by default.")
@count_option("--seq-len", least=2, metavar="L", help="Tokens in each; as many as calibrate takes by default.")
@click.option("--data", metavar="SOURCE[=WEIGHT]", multiple=True, help="Calibration data, as calibrate takes it.")
@device_option("cpu or cuda, where layers are computed; a GPU by default if there is one.")
@click.option(
    "--weight-bits", metavar="B", type=Number(), help="Average stored bits per weight, as calibrate takes it."
)
@click.option("--kv-bits", metavar="B", type=Number(), help="Recipe auto: bits per value of the cache.")
@click.option(
    "--kv-bytes-per-token", metavar="N", type=Number(), help="Recipe auto: the same budget in bytes per token."
)
@click.option("--auto-tokens", metavar="N", type=AnyWhole(), help="Recipe auto: tokens that its search measures on.")
@click.option("--no-probe", is_flag=True, help="Calibrate no layer: no time, and a lower bound of memory.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON, in bytes and seconds.")
def plan(model: str, recipe: str, data: tuple[str, ...], no_probe: bool, as_json: bool, **options: Any) -> None:
    """Show what converting MODEL takes and what will fit, before anything runs.

    Sizes follow from the headers of MODEL's files and its configuration. For time and memory one layer is calibrated on
    few sequences and thrown away; --no-probe leaves that out.
    """
    from kvconvert.data.sources import check_sources
    from kvconvert.models import check_model

    directory = check_model(model)
    check_sources(list(data) or None)
    from kvconvert.recipes.recipe import Recipe, check_said_once

    stated = ("kv_bits", "kv_bytes_per_token", "auto_tokens", "weight_bits")
    changes, budget = changes_of(options), {name: options.pop(name) for name in stated}
    check_said_once(changes, budget)
    loaded = Recipe.load(recipe, changes).with_budget(**budget)
    from kvconvert.models.positions import check_length, stated_positions

    for name in ("seq_len", "context"):
        check_length(name, options[name], stated_positions(directory))
    import json
    from dataclasses import asdict

    from kvconvert.planning.plan import plan as run
    from kvconvert.planning.plan import plan_text

    found = run(model, recipe=loaded, data=list(data) or None, probe=not no_probe, **options)
    click.echo(json.dumps(asdict(found), indent=2) if as_json else plan_text(found))
