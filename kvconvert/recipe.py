"""Recipes: what to do with a model's weights and its key-value cache, and how much fidelity it may cost.

A recipe is a preset (a file in `kvconvert/presets`; dropping one in extends the command line) or a TOML file:

    [weights]
    method = "awq"        # awq, rtn (round to nearest) or none
    bits = 4
    group_size = 128

    [kv]
    preset = "oscar"      # a preset of kvconvert.bundle.scheme, or "none" for a cache left alone
    key_group_size = 128  # any field of KVScheme replaces the preset's; without a preset, plain groups

    [limits]
    max_kl = 0.1                   # mean KL divergence from the source model, in nats per token
    max_perplexity_increase = 0.05 # relative: 0.05 allows 5 %
    min_passkey = 0.9              # share of passkeys found

A table that is left out takes the default recipe's values: AWQ at 4 bits in groups of 128, `oscar`, no limits.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvconvert.bundle.scheme import PRESETS, KVScheme
from kvconvert.bundle.summary import figure
from kvconvert.errors import RecipeError

WEIGHT_GROUP_SIZES = (16, 32, 64, 128, 256)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class WeightsRecipe(_Table):
    """How Linears are quantized; `bits` and `group_size` (inputs per scale and zero) mean nothing for "none"."""

    method: Literal["awq", "rtn", "none"] = "awq"
    bits: int = 4
    group_size: int = 128


class Limits(_Table):
    """What a bundle may lose against its source; None leaves a figure unlimited.

    Attributes:
        max_kl: mean KL divergence, nats per token.
        max_perplexity_increase: relative to the source's perplexity (0.05 = 5 %).
        min_passkey: share of passkeys that the bundle finds, 0 to 1.
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
        check("max_perplexity_increase", self.max_perplexity_increase, "the perplexity's increase", increase, True)
        check("min_passkey", self.min_passkey, "the share of passkeys found", figure(report, "passkey.bundle"), False)
        return missed


class Recipe(_Table):
    """One conversion's intent; see the module's docstring for the file format.

    Attributes:
        name: of the preset, or of the file without its ending.
        weights, limits: see there.
        kv: scheme of every layer's cache, or None where the cache is left alone.
    """

    name: str = "default"
    weights: WeightsRecipe = WeightsRecipe()
    kv: KVScheme | None = PRESETS["oscar"]
    limits: Limits = Limits()

    @classmethod
    def load(cls, name: str) -> Recipe:
        """Read a preset by its name, or a recipe file by its path (ends in `.toml` or contains a path separator).

        Raises:
            RecipeError: no such preset or file, not TOML, an unknown table or key, or a value that is not possible.
        """
        if name.endswith(".toml") or "/" in name or "\\" in name:
            path = Path(name)
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise RecipeError(f"The recipe file {name} cannot be read ({error}); check its path.") from error
            return cls._parse(text, where=name, name=path.stem)
        if name not in preset_names():
            raise RecipeError(
                f"There is no recipe preset {name!r}; choose one of {', '.join(preset_names())}, or give the path of "
                "a .toml file."
            )
        text = (resources.files("kvconvert") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
        return cls._parse(text, where=f"preset {name}", name=name)

    @classmethod
    def _parse(cls, text: str, where: str, name: str) -> Recipe:
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"The recipe {where} is not valid TOML: {error}.") from error
        for table, keys in tables.items():
            if table not in ("weights", "kv", "limits"):
                what = f"[{table}]" if isinstance(keys, dict) else f"key {table}"
                raise RecipeError(
                    f"The recipe {where} has an unknown table or {what}; known are [weights], [kv] and [limits]."
                )
            if not isinstance(keys, dict):
                raise RecipeError(f"The recipe {where} has a value named {table} where a table [{table}] belongs.")
        weights = _table(WeightsRecipe, tables.get("weights", {}), "weights", where)
        kv = _kv(tables["kv"], where) if "kv" in tables else PRESETS["oscar"]
        limits = _table(Limits, tables.get("limits", {}), "limits", where)
        return cls._checked(cls(name=name, weights=weights, kv=kv, limits=limits), where)

    @classmethod
    def _checked(cls, recipe: Recipe, where: str) -> Recipe:
        weights = recipe.weights
        if weights.method != "none" and weights.bits != 4:
            raise RecipeError(
                f"The recipe {where} asks for [weights] bits = {weights.bits}, but bundles hold 4-bit weights in this "
                "version: kvconvert's own layout for other widths is not available yet; set bits = 4."
            )
        if weights.method != "none" and weights.group_size not in WEIGHT_GROUP_SIZES:
            raise RecipeError(
                f"The recipe {where} asks for [weights] group_size = {weights.group_size}, which is not possible; "
                f"choose one of {', '.join(map(str, WEIGHT_GROUP_SIZES))}."
            )
        if weights.method == "none" and recipe.kv is None:
            raise RecipeError(
                f"The recipe {where} leaves both the weights and the cache alone, so there is nothing to convert; set "
                '[weights] method = "awq" or a [kv] preset.'
            )
        return recipe

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """Rebuild a recipe from `to_dict()`, as a working directory or a manifest records it."""
        try:
            kv = values["kv"]
            return cls._checked(
                cls(
                    name=values["name"],
                    weights=_table(WeightsRecipe, values["weights"], "weights", "recorded"),
                    kv=None if kv is None else KVScheme.from_dict(kv),
                    limits=_table(Limits, values["limits"], "limits", "recorded"),
                ),
                "recorded",
            )
        except KeyError as error:
            raise RecipeError(f"The recorded recipe lacks its part {error}; calibrate again.") from error

    def to_dict(self) -> dict[str, Any]:
        """The whole recipe as plain values, for the working directory and the manifest."""
        return {
            "name": self.name,
            "weights": self.weights.model_dump(),
            "kv": None if self.kv is None else self.kv.to_dict(),
            "limits": self.limits.model_dump(),
        }


def preset_names() -> list[str]:
    """Names of the recipe presets that are installed."""
    folder = resources.files("kvconvert") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


T = TypeVar("T", bound=_Table)


def _table(model: type[T], values: dict[str, Any], table: str, where: str) -> T:
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(model.model_fields)
            raise RecipeError(
                f"The recipe {where} has an unknown key {key} in [{table}]; known are {known}."
            ) from error
        raise RecipeError(
            f"The recipe {where} has [{table}] {key} = {first['input']!r}, which is not possible: {first['msg']}."
        ) from error


def _kv(values: dict[str, Any], where: str) -> KVScheme | None:
    fields = dict(values)
    preset = fields.pop("preset", None)
    if preset == "none":
        if fields:
            raise RecipeError(
                f'The recipe {where} sets [kv] {next(iter(fields))} beside preset = "none", which leaves the '
                "cache alone; remove one of them."
            )
        return None
    if preset is not None and preset not in PRESETS:
        raise RecipeError(
            f"The recipe {where} asks for [kv] preset = {preset!r}, which is not available; choose one of none, "
            f"{', '.join(PRESETS)}."
        )
    base = KVScheme() if preset is None else PRESETS[preset]
    try:
        return KVScheme.from_dict({**base.to_dict(), **fields})
    except RecipeError as error:
        raise RecipeError(f"The recipe {where} cannot be used: {error}") from error
