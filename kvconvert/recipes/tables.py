"""The tables of a recipe file: each read from plain values or refused in one sentence, single values put in the place
of a file's own (`weights.group_size = 64`) first.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvconvert.bundle.figures import figure
from kvconvert.errors import RecipeError, UsageError, did_you_mean
from kvconvert.methods import (
    OPTIONS,
    PRESETS,
    SEARCHED_FIELDS,
    WHOLE_MODEL_OPTIONS,
    KVCalibration,
    KVScheme,
    preset_calibration,
    refuse_renamed,
)
from kvconvert.methods.key_treatments import TREATED_FIELDS

TABLES = ("weights", "kv", "auto", "limits")
# What a table holds before a change, where the recipe leaves it out.
_LEFT_OUT = {"kv": {"preset": "default"}}
# Means nothing where weights are kept.
_OF_QUANTIZED_WEIGHTS = ("weights.bits", "weights.average_bits", "weights.group_size", "weights.modules")


class Table(BaseModel):
    """What a recipe or a part of one is: fields that cannot change, without unknown ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class LayerOverride(Table):
    """Layers whose cache differs from the recipe's: `index` lists them; the rest is as in `Recipe`."""

    index: list[int] = Field(min_length=1)
    kv: KVScheme | None
    calibration: KVCalibration


class Limits(Table):
    """What a bundle may lose against its source; None leaves a figure unlimited.

    Attributes:
        max_kl: mean KL divergence, nats per token; on text, and on text about images where these were measured.
        max_perplexity_increase: relative to the source's perplexity (0.05 = 5%).
        min_passkey: retrieval: the share of hidden numbers that the bundle finds, 0 to 1.
    """

    max_kl: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_perplexity_increase: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    min_passkey: float | None = Field(default=None, ge=0, le=1)

    def as_set(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    def missed(self, report: dict[str, Any]) -> list[str]:
        """One clause per limit that a fidelity report misses; a figure not measured, or NaN, misses its limit."""
        missed = []

        def check(limit: str, bound: float | None, words: str, found: float | None, at_most: bool) -> None:
            if bound is None:
                return
            if found is None:
                missed.append(f"{words} could not be measured, {limit} is {bound:g}")
            elif not (found <= bound if at_most else found >= bound):
                missed.append(f"{words} is {found:.4g}, {limit} is {bound:g}")

        before, after = figure(report, "perplexity.source"), figure(report, "perplexity.bundle")
        increase = None if before is None or after is None else after / before - 1
        check("max_kl", self.max_kl, "the mean KL divergence", figure(report, "kl.mean"), True)
        seen = figure(report, "images.kl")
        if seen is not None:
            check("max_kl", self.max_kl, "the mean KL divergence on text about images", seen, True)
        check("max_perplexity_increase", self.max_perplexity_increase, "the perplexity's increase", increase, True)
        check("min_passkey", self.min_passkey, "retrieval", figure(report, "passkey.bundle"), False)
        return missed


T = TypeVar("T", bound=BaseModel)


def read_table(model: type[T], values: dict[str, Any], table: str, where: str) -> T:
    """A table as its model; `table` and `where` name it in messages (RecipeError)."""
    try:
        return model(**values)
    except ValidationError as error:
        raise _refusal(error, list(model.model_fields), table, where) from error


def read_options(values: dict[str, Any], table: str, where: str) -> KVCalibration:
    """The options of calibration, see `read_table`."""
    try:
        return KVCalibration(**values)
    except ValidationError as error:
        raise _refusal(error, list(OPTIONS), table, where) from error


def _refusal(error: ValidationError, known: list[str], table: str, where: str) -> RecipeError:
    """The first thing that pydantic found, in one sentence."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return RecipeError(f"The recipe {where} has an unknown key {key} in [{table}]; {did_you_mean(key, known)}")
    wrong = f"The recipe {where} has [{table}] {key} = {first['input']!r}"
    if first["type"] == "literal_error":
        return RecipeError(f"{wrong}, which is not possible; choose {first['ctx']['expected']}.")
    return RecipeError(f"{wrong}, which is not possible: {first['msg']}.")


def read_kv(values: dict[str, Any], where: str) -> tuple[KVScheme | None, KVCalibration, list[LayerOverride]]:
    """The [kv] table with its [[kv.layers]]."""
    values = dict(values)
    entries = values.pop("layers", [])
    base = {} if "preset" in values else KVScheme().to_dict()
    stated = {name: value for name, value in values.items() if name in OPTIONS}
    kv, calibration = _kv(values, base, KVCalibration(), {}, "[kv]", where)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RecipeError(f"The recipe {where} has kv.layers where [[kv.layers]] tables belong.")
    layers = []
    for entry in entries:
        entry = dict(entry)
        index = entry.pop("index", None)
        whole = isinstance(index, list) and all(type(i) is int and i >= 0 for i in index)
        if not whole or not index:
            raise RecipeError(
                f"The recipe {where} has [[kv.layers]] index = {index!r}; list the numbers of the layers, from 0."
            )
        for field in WHOLE_MODEL_OPTIONS:
            if field in entry:
                raise RecipeError(
                    f"The recipe {where} sets {field} in [[kv.layers]]; it belongs to [kv], for all layers."
                )
        if not entry:
            raise RecipeError(f"The recipe {where} has a [[kv.layers]] table that changes nothing; remove it.")
        fields = {} if kv is None else kv.to_dict()
        if kv is None and "preset" not in entry:
            raise RecipeError(
                f'The recipe {where} has [[kv.layers]] without a preset, and [kv] preset = "none" has no fields to '
                "change; give a preset."
            )
        scheme, choices = _kv(entry, fields, calibration, stated, "[[kv.layers]]", where)
        layers.append(LayerOverride(index=index, kv=scheme, calibration=choices))
    searched = [(kv, calibration), *((layer.kv, layer.calibration) for layer in layers)]
    for option, search in WHOLE_MODEL_OPTIONS.items():
        reason = search.unused(searched) if option in values else None
        if reason is not None:
            raise RecipeError(f"The recipe {where} sets [kv] {option}, but nothing searches it: {reason}.")
    return kv, calibration, layers


def _kv(
    values: dict[str, Any],
    base: dict[str, Any],
    calibration: KVCalibration,
    above: dict[str, Any],
    table: str,
    where: str,
) -> tuple[KVScheme | None, KVCalibration]:
    """A scheme and what is calibrated, from one table over what holds without it.

    Args:
        values: of the table.
        base: fields, where the table names no preset.
        calibration: of [kv], where the table is a layer's.
        above: options that [kv] states, which no layer's preset changes.
        table, where: for messages.
    """
    fields = dict(values)
    preset = fields.pop("preset", None)
    options = {name: fields.pop(name) for name in OPTIONS if name in fields}
    if preset == "none":
        if fields or options:
            raise RecipeError(
                f'The recipe {where} sets {table} {next(iter(fields or options))} beside preset = "none", which leaves '
                "the cache alone; remove one of them."
            )
        return None, calibration
    refuse_renamed(preset)
    if preset is not None and preset not in PRESETS:
        raise RecipeError(
            f"The recipe {where} asks for {table} preset = {preset!r}, which is not available; "
            f"{did_you_mean(str(preset), ['none', *PRESETS])}"
        )
    given = {*fields} & {*SEARCHED_FIELDS}
    if preset is None:  # a layer's own table adds to what [kv] states
        given |= {*calibration.given}
    own = {} if preset is None else preset_calibration(preset).to_dict()
    if table != "[kv]":
        own = {name: value for name, value in own.items() if name not in WHOLE_MODEL_OPTIONS}
    known = base if preset is None else PRESETS[preset].to_dict()
    treated = next((name for name in TREATED_FIELDS if name in fields and fields[name] != known.get(name)), None)
    if treated is not None:
        if options.get("calibrate_keys"):
            raise RecipeError(
                f"The recipe {where} sets {table} {treated} beside calibrate_keys = true, which chooses it; remove one."
            )
        # What is stated is not chosen.
        options["calibrate_keys"] = False
    stated = calibration.to_dict() | own | above | options | {"given": sorted(given)}
    choices = read_options(stated, table.strip("[]"), where)
    try:
        scheme = KVScheme.from_dict({**(base if preset is None else PRESETS[preset].to_dict()), **fields})
    except RecipeError as error:
        raise RecipeError(f"The recipe {where} cannot be used: {error}") from error
    return scheme, choices


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
    except (ValueError, KeyError, RecursionError):
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
    found = copy.deepcopy(dict(tables))
    for key, value in changes.items():
        table, _, name = key.partition(".")
        found.setdefault(table, dict(_LEFT_OUT.get(table, {})))[name] = value
    useless = next((key for key in _OF_QUANTIZED_WEIGHTS if key in changes), None)
    if useless is not None and found["weights"].get("method") == "none":
        raise RecipeError(
            f'The recipe {where} sets {useless}, but its [weights] method = "none" keeps every weight; leave it out, '
            "or choose another method."
        )
    return found


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
