"""Options that change single values of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_SHORT = {
    "weights": "weights.method",
    "group_size": "weights.group_size",
    "key_bits": "kv.key_bits",
    "value_bits": "kv.value_bits",
}


def recipe_changes(command: Callable[..., None]) -> Callable[..., None]:
    """The options, for a command that gives them to `changes_of`."""
    options = (
        click.option(
            "--weights", metavar="METHOD", help="The recipe's weights.method: awq, gptq, awq+gptq, rtn or none."
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
    for option in reversed(options):
        command = option(command)
    return command


def changes_of(changes: tuple[str, ...], **short: str | None) -> dict[str, Any]:
    """What the options change, by table and key."""
    from kvconvert.recipes.tables import gathered, parse_change

    typed = [f"{_SHORT[name]}={value}" for name, value in short.items() if value is not None]
    return gathered(parse_change(text) for text in (*typed, *changes))
