"""Single values in the place of a recipe's own: `weights.group_size = 64` over a preset or a file."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from kvconvert.errors import RecipeError, UsageError

TABLES = ("weights", "kv", "auto", "limits")
# What a table holds before a change, where the recipe leaves it out.
_LEFT_OUT = {"kv": {"preset": "default"}}
# Means nothing where weights are kept.
_OF_QUANTIZED_WEIGHTS = ("weights.bits", "weights.average_bits", "weights.group_size", "weights.modules")


def parse_change(text: str) -> tuple[str, Any]:
    """A change as it is typed: `table.key=VALUE`, with VALUE as in TOML, but strings need no quotes (UsageError)."""
    key, sign, value = (part.strip() for part in text.partition("="))
    table, dot, name = key.partition(".")
    if not (sign and dot and name.isidentifier() and value) or table not in TABLES:
        raise UsageError(
            f"{text!r} is no change of a recipe; write it as table.key=value, for instance kv.key_bits=3, where table "
            f"is one of {', '.join(TABLES)}."
        )
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return key, value


def gathered(changes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Changes by key, in order (UsageError: one key twice)."""
    found: dict[str, Any] = {}
    for key, value in changes:
        if key in found:
            raise UsageError(f"{key} is given twice; say once what it should be.")
        found[key] = value
    return dict(sorted(found.items()))


def described(changes: Mapping[str, Any]) -> str:
    """Changes in a few words, for messages and a recipe's name."""
    return ", ".join(f"{key} = {_said(value)}" for key, value in changes.items())


def changed(tables: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A recipe's tables with some keys replaced or added.

    Raises:
        RecipeError: a change of weights that the recipe keeps.
    """
    tables = copy.deepcopy(dict(tables))
    for key, value in changes.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, dict(_LEFT_OUT.get(table, {})))[name] = value
    useless = next((key for key in _OF_QUANTIZED_WEIGHTS if key in changes), None)
    if useless is not None and tables["weights"].get("method") == "none":
        raise RecipeError(
            f'The recipe {where} sets {useless}, but its [weights] method = "none" keeps every weight; leave it out, '
            "or choose another method."
        )
    return tables


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
