"""kvconvert recipes [NAME|FILE.toml], and the options of every command that change single values of a recipe."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import click

from kvconvert.commands import with_options
from kvconvert.errors import UsageError

_SHORT = {
    "weights": "weights.method",
    "group_size": "weights.group_size",
    "key_bits": "kv.key_bits",
    "value_bits": "kv.value_bits",
}


# For commands that give them to `changes_of`.
recipe_changes = with_options(
    click.option(
        "--weights", metavar="METHOD", help="The recipe's weights.method: auto, awq, gptq, awq+gptq, rtn or none."
    ),
    click.option("--group-size", metavar="N", help="Its weights.group_size: inputs that share a scale, or auto."),
    click.option("--key-bits", metavar="N", help="Its kv.key_bits: width of stored keys."),
    click.option("--value-bits", metavar="N", help="Its kv.value_bits: width of stored values."),
    click.option(
        "--set",
        "changes",
        metavar="TABLE.KEY=VALUE",
        multiple=True,
        help="Any value of the recipe, as in kv.sink_tokens=8; may be given again.",
    ),
)


def changes_of(options: dict[str, Any]) -> dict[str, Any]:
    """Changes that the options of `recipe_changes` ask for, by table and key; they are taken out of `options`."""
    from kvconvert.recipes.recipe import gathered, parse_change

    typed = [f"{key}={value}" for name, key in _SHORT.items() if (value := options.pop(name)) is not None]
    return gathered(parse_change(text) for text in (*typed, *options.pop("changes")))


@click.command()
@click.argument("recipe", metavar="[PRESET|FILE.toml]", required=False)
@recipe_changes
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def recipes(recipe: str | None, as_json: bool, **changes: Any) -> None:
    """List the presets, or show one recipe with every value, as a file that calibrate --recipe takes.

    Values that differ from the defaults have a comment that says what they are.
    """
    stated = changes_of(changes)
    if recipe is None and stated:
        raise UsageError("Which recipe is to be changed is not said; name a preset or a file, for instance default.")
    from kvconvert.recipes.recipe import Recipe

    loaded = None if recipe is None else Recipe.load(recipe, stated)
    from kvconvert.recipes.text import list_recipes, recipe_rows, recipe_toml

    if as_json:
        click.echo(json.dumps(recipe_rows() if loaded is None else tomllib.loads(recipe_toml(loaded)), indent=2))
    elif loaded is None:
        click.echo(list_recipes())
    else:
        click.echo(recipe_toml(loaded), nl=False)
