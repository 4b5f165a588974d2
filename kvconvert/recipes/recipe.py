"""Recipes: what to do with a model's weights and its key-value cache, and how much fidelity it may cost.

A recipe is a preset or a TOML file. Presets are those of the methods (`kvconvert.methods`), with 4-bit weights, and the
files in `kvconvert/recipes/presets`; dropping one in extends the command line. A file looks like this:

    [weights]
    method = "auto"       # awq+gptq, in mixtures of experts awq; or awq, gptq, awq+gptq, rtn (round to nearest), none
    bits = 4              # 2, 3, 4 or 8
    group_size = "auto"   # 128; 64 below a hidden size of 3584; 32 below 2048, or where these do not fit all inputs

    kept_share = 0.1      # share of the bundle's bytes added to keep the Linears that lose most at 16 bits; left out,
                          # 0.1 below a hidden size of 1024 and 0.05 below 2048 where "auto" does not make up for the
                          # layers before (Gemma), else 0

    [[weights.modules]]   # Linears of another width; where several tables apply to one, the last of them counts
    match = "*.down_proj" # names as in the loaded model, * for anything; all if it is left out
    index = [0, 1]        # decoder layers; all if it is left out
    bits = 8              # 2, 3, 4 or 8, or 16 to keep them

    [kv]
    preset = "oscar"      # a preset of kvconvert.methods, or "none" for a cache left alone; "oscar-paper" is the
                          # paper's method to the letter, of which calibration chooses only what the paper does
    key_group_size = 128  # any field of KVScheme replaces the preset's; without a preset, plain groups
    calibrate_keys = false        # compare treatments of keys by layer and take the best; the preset default does
    calibrate_clip_ratios = true  # choose both clip ratios of each layer, but for the one that is given here
    calibrate_key_rounding = true # error feedback for keys of 1 to 3 bits, unless key_rounding is given here
    window_bits = 4               # least width of layers with short sliding windows; the preset default has it
    tau_grid = [0, 1, 2, 3]       # values tried for both shifts of spans, unless one is given here
    tau_per_layer = false         # one pair for all layers

    [[kv.layers]]         # layers that differ: any of the above but the tau search, over what [kv] says
    index = [0, 1]
    key_bits = 4

    [auto]                # let kvconvert choose widths, groups and windows of every layer (kvconvert.methods.auto)
    kv_bits = 2.5         # what the cache may take, all included; context = 4096 tokens

    [limits]
    max_kl = 0.1                   # mean KL divergence from the source model, in nats per token
    max_perplexity_increase = 0.05 # relative: 0.05 allows 5%
    min_retrieval = 0.9            # retrieval: share of hidden numbers found

A table that is left out takes the default recipe's values: `auto` at 4 bits, the preset `default`, no limits.

Each table is read from plain values or refused in one sentence; single values (`weights.group_size = 64`) replace a
file's own first.
"""

from __future__ import annotations

import copy
import errno
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from kvconvert.arguments import checked
from kvconvert.bundle.figures import missed_limits
from kvconvert.errors import MissingError, RecipeError, UsageError, did_you_mean, first_line, unreadable
from kvconvert.io.records import LARGEST
from kvconvert.methods import (
    OPTIONS,
    PRESETS,
    SEARCHED_FIELDS,
    WHOLE_MODEL_OPTIONS,
    KVCalibration,
    KVScheme,
    check_layers,
    preset_calibration,
    refuse_renamed,
)
from kvconvert.methods.auto import CHOSEN_FIELDS, AutoSearch
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.methods.keys import TREATED_FIELDS
from kvconvert.methods.scheme import RECIPES

TABLES = ("weights", "kv", "auto", "limits")
# What a table holds before a change, where the recipe leaves it out.
_LEFT_OUT = {"kv": {"preset": "default"}}
# Means nothing where weights are kept.
_OF_QUANTIZED_WEIGHTS = ("weights.bits", "weights.average_bits", "weights.group_size", "weights.modules")


class RecipeTable(BaseModel):
    """A recipe, or a table of one: fields that cannot change, without unknown ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


class LayerOverride(RecipeTable):
    """Layers whose cache differs from the recipe's: `index` lists them; the rest is as in `Recipe`."""

    index: list[int] = Field(min_length=1)
    kv: KVScheme | None
    calibration: KVCalibration


class Limits(RecipeTable):
    """Limits on a bundle's loss against its source; None leaves a figure unlimited.

    Attributes:
        max_kl: mean KL divergence, nats per token; on text, and on text about images where these were measured.
        max_perplexity_increase: relative to the source's perplexity (0.05 = 5%).
        min_retrieval: retrieval: the share of hidden numbers that the bundle finds, 0 to 1.
    """

    max_kl: float | None = Field(default=None, ge=0, le=LARGEST)
    max_perplexity_increase: float | None = Field(default=None, ge=0, le=LARGEST)
    # Bundles made before 1.0 record it as min_passkey.
    min_retrieval: float | None = Field(
        default=None, ge=0, le=1, validation_alias=AliasChoices("min_retrieval", "min_passkey")
    )

    def as_set(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    def missed(self, report: dict[str, Any]) -> list[str]:
        """One clause per limit that a fidelity report misses; a figure not measured, or NaN, misses its limit."""
        return missed_limits(self.as_set(), report)


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
    return RecipeError(f"{wrong}, which is not possible: {first['msg'].removeprefix('Value error, ')}.")


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
        if "index" not in entry:
            raise RecipeError(
                f"The recipe {where} has [[kv.layers]] without index; list the numbers of the layers there, from 0."
            )
        index = entry.pop("index")
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
        values: the table's values.
        base: fields, where the table names no preset.
        calibration: the calibration options of [kv], where the table is a layer's.
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
    if not isinstance(preset, str | None):
        raise RecipeError(f"The recipe {where} asks for {table} preset = {preset!r}, which is no name of one.")
    refuse_renamed(preset)
    if preset in RECIPES:
        raise RecipeError(
            f"The recipe {where} asks for {table} preset = {preset!r}, which names a whole recipe; choose a preset of "
            "the cache, such as default."
        )
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
    if {*fields} & {"key_bits", "value_bits"}:
        options.setdefault("window_bits", 0)
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
        if not name:
            raise RecipeError(
                f"The recipe {where} has the key {key!r} in `changes`; write table.key, as in kv.key_bits."
            )
        found.setdefault(table, dict(_LEFT_OUT.get(table, {})))[name] = value
    useless = next((key for key in _OF_QUANTIZED_WEIGHTS if key in changes), None)
    if useless is not None and found["weights"].get("method") == "none":
        raise RecipeError(
            f'The recipe {where} sets {useless}, but its [weights] method = "none" keeps every weight; leave it out, '
            "or choose another method."
        )
    return found


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=repr)


_PRESET_FILES = Path(__file__).parent / "presets"


class Budget(TypedDict, total=False):
    """Limits for the searches of a recipe; each replaces what the recipe's tables say, None leaves that.

    Attributes:
        kv_bits, kv_bytes_per_token: size of the cache, as average stored bits per value or as bytes per token.
        context: tokens of the sequence that this holds for.
        auto_tokens: held-out tokens on which candidates are measured.
        weight_bits: average stored bits per quantized weight, scales and zero points included, which are spent on the
            Linears that need them (`[weights] average_bits`).
    """

    kv_bits: float | None
    kv_bytes_per_token: float | None
    context: int | None
    auto_tokens: int | None
    weight_bits: float | None


# The keys of a recipe that each of them replaces.
_REPLACED = {
    **dict.fromkeys(("kv_bits", "kv_bytes_per_token"), ("auto.kv_bits", "auto.kv_bytes_per_token")),
    "context": ("auto.context",),
    "auto_tokens": ("auto.tokens",),
    "weight_bits": ("weights.average_bits", "weights.bits", "weights.modules"),
}


def check_said_once(changes: Mapping[str, Any], budget: Mapping[str, Any]) -> None:
    """Refuse (UsageError) changes of a recipe that a limit given beside them, see `Budget`, would replace."""
    for name, keys in _REPLACED.items():
        key = next((key for key in keys if key in changes), None)
        if budget.get(name) is not None and key is not None:
            raise UsageError(f"`{name}` would replace the value that is set of {key}; give one of them.")


class Recipe(RecipeTable):
    """One conversion's intent; see the module's docstring for the file format.

    Attributes:
        name: the name of the preset, or of the file without its ending.
        weights, limits: see there.
        kv: scheme of every layer's cache, or None where the cache is left alone.
        calibration: what calibration chooses for it.
        layers: layers that differ.
        auto: how widths, groups and windows of every layer are searched; None where `kv` and `layers` state them.
    """

    name: str = "default"
    weights: WeightsRecipe = WeightsRecipe()
    kv: KVScheme | None = PRESETS["default"]
    calibration: KVCalibration = preset_calibration("default")
    layers: list[LayerOverride] = Field(default_factory=list)
    limits: Limits = Limits()
    auto: AutoSearch | None = None

    if not TYPE_CHECKING:  # editors and type checkers know the fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                first = error.errors()[0]
                name = ".".join(map(str, first["loc"]))
                wrong = f"cannot have this `{name}`: {first['msg']}."
                if first["type"] == "extra_forbidden" and name in fields:
                    wrong = f"has no field `{name}`; {did_you_mean(name, type(self).model_fields)}"
                raise RecipeError(f"A Recipe {wrong}") from error

    @checked
    def with_budget(
        self,
        *,
        kv_bits: float | None = None,
        kv_bytes_per_token: float | None = None,
        context: int | None = None,
        auto_tokens: int | None = None,
        weight_bits: float | None = None,
    ) -> Recipe:
        """The recipe with these options of its searches in the place of its own, see `Budget`.

        Raises:
            UsageError: the recipe searches nothing and an option of a search is given, a value that is not possible, or
                a search without a budget.
        """
        recipe = self if weight_bits is None else self._with_weight_bits(weight_bits)
        options = {
            "kv_bits": kv_bits,
            "kv_bytes_per_token": kv_bytes_per_token,
            "context": context,
            "auto_tokens": auto_tokens,
        }
        given = {name: value for name, value in options.items() if value is not None}
        if recipe.auto is None:
            if given:
                raise UsageError(
                    f"`{next(iter(given))}` belongs to recipes that search, and {recipe.name} states what each layer's "
                    "cache is; choose the `recipe` auto, or leave it out."
                )
            return recipe
        fields = recipe.auto.model_dump()
        if "kv_bits" in given or "kv_bytes_per_token" in given:
            fields |= {"kv_bits": None, "kv_bytes_per_token": None}
        try:
            auto = AutoSearch(**fields | {name.removeprefix("auto_"): value for name, value in given.items()})
        except ValidationError as error:
            first = error.errors()[0]
            said = f"{first['msg'].removeprefix('Value error, ')}."
            for name in first["loc"]:  # of none it is how several go together
                said = f"`{'auto_tokens' if name == 'tokens' else name}` is not possible: {said}"
            raise UsageError(said) from error
        if not auto.has_budget:
            raise UsageError(
                f"The recipe {recipe.name} needs to know how large the cache may be; give `kv_bits` (average stored "
                "bits per value) or `kv_bytes_per_token`, or state one in its [auto] table."
            )
        return recipe.model_copy(update={"auto": auto})

    def _with_weight_bits(self, weight_bits: float) -> Recipe:
        if not self.weights.quantizes:
            raise UsageError(
                f"`weight_bits` is not possible here: the recipe {self.name} keeps every weight; leave it out, or "
                "choose another recipe."
            )
        update = {"average_bits": weight_bits, "modules": [], "bits": 4}
        weights = self.weights.model_copy(update=update)
        fault = weights.fault()
        if fault is not None:
            raise UsageError(f"`weight_bits` is not possible here: the recipe {self.name} {fault}.")
        return self.model_copy(update={"weights": weights})

    def scheme(self, index: int) -> KVScheme | None:
        """The scheme of one layer's cache."""
        return next((override.kv for override in self.layers if index in override.index), self.kv)

    def calibration_of(self, index: int) -> KVCalibration:
        """The calibration passes of one layer's cache."""
        return next((o.calibration for o in self.layers if index in o.index), self.calibration)

    def schemes(self) -> list[KVScheme]:
        """The distinct schemes that some layer may have."""
        every = [self.kv, *(override.kv for override in self.layers)]
        return [scheme for i, scheme in enumerate(every) if scheme is not None and scheme not in every[:i]]

    @classmethod
    @checked
    def of(cls, recipe: RecipeNamed) -> Recipe:
        """A recipe, or what `load` reads; UsageError for anything else, RecipeError for what `load` would refuse."""
        return cls._checked(recipe, recipe.name) if isinstance(recipe, cls) else cls.load(str(recipe))

    @classmethod
    @checked
    def load(
        cls,
        name: Annotated[str | Path, "a preset's name, or the path of a recipe file"],
        changes: Annotated[Mapping[str, Any], 'values by table and key, as in {"kv.key_bits": 3}'] | None = None,
    ) -> Recipe:
        """Read a preset by its name, or a recipe file by its path (ends in `.toml` or contains a path separator).

        Args:
            name: the name of the preset or the file.
            changes: values by table and key ("weights.group_size": 64), as if the file said so in place of its own;
                the recipe's name then tells of them.

        Raises:
            RecipeError: no such preset or file, not TOML, an unknown table or key, or a value that is not possible.
            UsageError: an argument of another type.
        """
        name = str(name)
        if name.endswith(".toml") or "/" in name or "\\" in name:
            path = Path(name)
            try:
                # Of a shell, a pipe has no place in a folder, and somebody writes to it.
                if path.is_fifo() and "/proc" not in map(str, path.resolve().parents):
                    raise OSError(errno.EINVAL, "it is a pipe, whose end may never come", name)
                with path.open(encoding="utf-8-sig") as stream:
                    text = stream.read(_MOST_TEXT + 1)
            except FileNotFoundError as error:
                raise MissingError(
                    f"There is no recipe file {name}; check its path, or name a preset (kvconvert recipes lists them)."
                ) from error
            except OSError as error:
                raise MissingError(f"The recipe file {unreadable(path, error)}") from error
            except UnicodeDecodeError as error:
                raise RecipeError(f"The recipe file {name} is not text in UTF-8; save it as that.") from error
            if len(text) > _MOST_TEXT:
                raise RecipeError(f"The recipe file {name} has more than {_MOST_TEXT:,} characters; check its path.")
            return cls._parse(text, where=name, name=path.stem, changes=changes or {})
        refuse_renamed(name)
        if name not in preset_names():
            raise RecipeError(
                f"There is no recipe preset {name!r}, and a recipe file's name ends in .toml; "
                f"{did_you_mean(name, preset_names())}"
            )
        file = _PRESET_FILES / f"{name}.toml"
        text = file.read_text(encoding="utf-8") if file.is_file() else f'[kv]\npreset = "{name}"\n'
        return cls._parse(text, where=f"preset {name}", name=name, changes=changes or {})

    @classmethod
    def _parse(cls, text: str, where: str, name: str, changes: Mapping[str, Any]) -> Recipe:
        dots, line = max((line.count("."), number) for number, line in enumerate(text.split("\n"), 1))
        if dots > _MOST_DOTS:
            raise RecipeError(
                f"The recipe {where} has {dots} dots in line {line}, and no more than {_MOST_DOTS} are read; divide it."
            )
        try:
            tables = tomllib.loads(text)
        except (
            ValueError,
            RecursionError,
        ) as error:  # numbers of thousands of digits, and deep nesting, are no TOML error
            raise RecipeError(f"The recipe {where} is not valid TOML: {error}.") from error
        _check_size(tables, where)
        _check_size(changes, f"{where} with changes")
        _check_tables(tables, where)
        if changes:
            where, name = (f"{known} with {described(changes)}" for known in (where, name))
            tables = changed(tables, changes, where)
            _check_tables(tables, where)
        weights = read_table(WeightsRecipe, tables.get("weights", {}), "weights", where)
        kv, calibration, layers = read_kv(tables.get("kv", {"preset": "default"}), where)
        limits = read_table(Limits, tables.get("limits", {}), "limits", where)
        auto = read_table(AutoSearch, tables["auto"], "auto", where) if "auto" in tables else None
        chosen = sorted(CHOSEN_FIELDS & {*tables.get("kv", {})})
        if auto is not None and chosen:
            raise RecipeError(
                f"The recipe {where} has [kv] {chosen[0]} beside [auto], which chooses it for every layer; remove one."
            )
        recipe = cls(
            name=name, weights=weights, kv=kv, calibration=calibration, layers=layers, limits=limits, auto=auto
        )
        return cls._checked(recipe, where)

    @classmethod
    def _checked(cls, recipe: Recipe, where: str) -> Recipe:
        fault = recipe.weights.fault()
        if fault is not None:
            raise RecipeError(f"The recipe {where} {fault}.")
        if not recipe.weights.quantizes and not recipe.schemes():
            raise RecipeError(
                f"The recipe {where} leaves both the weights and the cache alone, so there is nothing to convert; set "
                '[weights] method = "awq" or a [kv] preset.'
            )
        _check_layers(recipe, where)
        if recipe.auto is not None:
            _check_auto(recipe, where)
        return recipe

    @classmethod
    @checked
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """Rebuild a recipe from `to_dict()`, as a working directory or a manifest records it."""
        _check_size(values, "recorded")
        auto, again = values.get("auto"), "calibrate again with `restart=True`."
        try:
            return cls._checked(
                cls(
                    name=values["name"],
                    weights=read_table(WeightsRecipe, values["weights"], "weights", "recorded"),
                    kv=_recorded_scheme(values["kv"]),
                    calibration=read_options(values["calibration"], "kv", "recorded"),
                    layers=[
                        LayerOverride(
                            index=layer["index"],
                            kv=_recorded_scheme(layer["kv"]),
                            calibration=read_options(layer["calibration"], "kv.layers", "recorded"),
                        )
                        for layer in values["layers"]
                    ],
                    limits=read_table(Limits, values["limits"], "limits", "recorded"),
                    auto=None if auto is None else read_table(AutoSearch, auto, "auto", "recorded"),
                ),
                "recorded",
            )
        except KeyError as error:
            raise RecipeError(f"The recorded recipe lacks its part {error}; {again}") from error
        except (TypeError, AttributeError, ValidationError) as error:
            raise RecipeError(f"The recorded recipe is damaged ({first_line(error)}); {again}") from error

    def to_dict(self) -> dict[str, Any]:
        """The whole recipe as plain values, for the working directory and the manifest."""
        return {
            "name": self.name,
            "weights": self.weights.model_dump(),
            "kv": None if self.kv is None else self.kv.to_dict(),
            "calibration": self.calibration.to_dict(),
            "layers": [
                {
                    "index": layer.index,
                    "kv": None if layer.kv is None else layer.kv.to_dict(),
                    "calibration": layer.calibration.to_dict(),
                }
                for layer in self.layers
            ],
            "limits": self.limits.model_dump(),
            "auto": None if self.auto is None else self.auto.model_dump(),
        }


RecipeNamed = Annotated[Recipe | str | Path, "a Recipe, a preset's name, or the path of a recipe file"]


def preset_names() -> list[str]:
    """Names of the recipe presets that are installed."""
    return sorted({file.stem for file in _PRESET_FILES.glob("*.toml")} | {*PRESETS})


def _check_tables(tables: Mapping[str, Any], where: str) -> None:
    for table, keys in tables.items():
        if table not in TABLES:
            what = f"table [{table}]" if isinstance(keys, dict) else f"table or key {table}"
            raise RecipeError(
                f"The recipe {where} has an unknown {what}; known are [weights], [kv], [auto] and [limits]."
            )
        if not isinstance(keys, dict):
            raise RecipeError(f"The recipe {where} has a value named {table} where a table [{table}] belongs.")


# What no recipe needs more of: characters of a name or text, values in all, and tables and lists in each other.
_MOST_CHARACTERS, _MOST_VALUES, _MOST_LEVELS = 300, 500_000, 8
_MOST_TEXT = 2**18
# In a line: of a name with n parts, tomllib keeps n^2 / 2 of them.
_MOST_DOTS = 100


def _check_size(values: Any, where: str) -> None:
    """Refuse a recipe that would take long, and numbers and texts of which no sentence can be made (RecipeError)."""
    count, level = 0, [("its names", values)]
    for _ in range(_MOST_LEVELS):
        below: list[tuple[Any, Any]] = []
        for name, value in level:
            if isinstance(value, Mapping):
                below += [*((name, key) for key in value), *value.items()]
            elif isinstance(value, list | tuple):
                below += ((name, entry) for entry in value)
            elif isinstance(value, str) and len(value) > _MOST_CHARACTERS:
                raise RecipeError(
                    f"The recipe {where} has a text of {len(value):,} characters for {name} ({value[:40]!r} ... ); "
                    "shorten it."
                )
            elif isinstance(value, int) and abs(value) >= 2**63:
                raise RecipeError(f"The recipe {where} has an integer of more than 64 bits.")
        count += len(below)
        level = below
        if count > _MOST_VALUES:
            raise RecipeError(
                f"The recipe {where} has more than {_MOST_VALUES:,} values; remove what it does not need."
            )
    if level:
        raise RecipeError(f"The recipe {where} has tables and lists in each other, more than {_MOST_LEVELS - 1} deep.")


def _check_layers(recipe: Recipe, where: str) -> None:
    """Refuse layers that are listed twice, and schemes that one model cannot have together."""
    listed = Counter(index for override in recipe.layers for index in override.index)
    twice = next((index for index, count in listed.items() if count > 1), None)
    if twice is not None:
        raise RecipeError(f"The recipe {where} lists layer {twice} twice in [[kv.layers]]; say once what it should be.")
    reason = check_layers(recipe.schemes())
    if reason is not None:
        raise RecipeError(f"The recipe {where} {reason}.")


def _check_auto(recipe: Recipe, where: str) -> None:
    """Refuse a search over what has no pages, and layers that are stated beside it."""
    if recipe.layers:
        raise RecipeError(
            f"The recipe {where} has [[kv.layers]] beside [auto], which chooses for every layer; remove one."
        )
    scheme = recipe.kv
    if scheme is None or scheme.compresses_prompts() or not scheme.group_scales:
        raise RecipeError(
            f"The recipe {where} has [auto], which chooses among page schemes with scales of their own; its [kv] has "
            "to be one, such as oscar-g128."
        )


def _recorded_scheme(values: dict[str, Any] | None) -> KVScheme | None:
    return None if values is None else KVScheme.from_dict(values)
