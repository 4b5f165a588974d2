"""kvconvert recipes [NAME|FILE.toml]."""

from __future__ import annotations

from typing import Any

import click

from kvconvert.commands.recipe_options import changes_of, recipe_changes
from kvconvert.errors import UsageError


@click.command()
@click.argument("recipe", metavar="[PRESET|FILE.toml]", required=False)
@recipe_changes
def recipes(recipe: str | None, **changes: Any) -> None:
    """List the presets, or show one recipe with every value, as a file that calibrate --recipe takes.

    Values that differ from the defaults have a comment that says what they are.
    """
    stated = changes_of(**changes)
    from kvconvert.recipes.recipe import Recipe
    from kvconvert.recipes.text import list_recipes, recipe_toml

    if recipe is None:
        if stated:
            raise UsageError(
                "Which recipe is to be changed is not said; name a preset or a file, for instance default."
            )
        click.echo(list_recipes())
    else:
        click.echo(recipe_toml(Recipe.load(recipe, stated)), nl=False)
