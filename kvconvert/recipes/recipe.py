"""Recipes: what to do with a model's weights and its key-value cache, and how much fidelity it may cost.

A recipe is a preset or a TOML file. Presets are those of the methods (`kvconvert.methods`), with 4-bit weights, and the
files in `kvconvert/recipes/presets`; dropping one in extends the command line. A file looks like this:

    [weights]
    method = "auto"       # awq+gptq, in mixtures of experts awq; or awq, gptq, awq+gptq, rtn (round to nearest), none
    bits = 4              # 2, 3, 4 or 8
    group_size = "auto"   # the largest of 128, 64 and 32 that divides the inputs of every quantized Linear

    [[weights.modules]]   # Linears of another width; where several tables apply to one, the last of them counts
    match = "*.down_proj" # names as in the loaded model, * for anything; all if it is left out
    index = [0, 1]        # decoder layers; all if it is left out
    bits = 8

    [kv]
    preset = "oscar"      # a preset of kvconvert.methods, or "none" for a cache left alone; "oscar-paper" is the
                          # paper's method to the letter, of which calibration chooses only what the paper does
    key_group_size = 128  # any field of KVScheme replaces the preset's; without a preset, plain groups
    calibrate_keys = false        # compare treatments of keys by layer and take the best; the preset default does
    calibrate_clip_ratios = true  # choose both clip ratios of each layer, but for the one that is given here
    calibrate_key_rounding = true # error feedback for keys of 1 to 3 bits, unless key_rounding is given here
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
    min_passkey = 0.9              # retrieval: share of hidden numbers found

A table that is left out takes the default recipe's values: `auto` at 4 bits, the preset `default`, no limits.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from pydantic import Field, ValidationError

from kvconvert.errors import MissingError, RecipeError, UsageError, did_you_mean, first_line
from kvconvert.methods import PRESETS, KVCalibration, KVScheme, check_layers, preset_calibration, refuse_renamed
from kvconvert.methods.auto import CHOSEN_FIELDS, AutoSearch
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.recipes.tables import (
    TABLES,
    LayerOverride,
    Limits,
    Table,
    changed,
    described,
    read_kv,
    read_options,
    read_table,
)

_PRESET_FILES = Path(__file__).parent / "presets"


class Budget(TypedDict, total=False):
    """What the searches of a recipe may spend; each replaces what the recipe's tables say, None leaves that.

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


class Recipe(Table):
    """One conversion's intent; see the module's docstring for the file format.

    Attributes:
        name: of the preset, or of the file without its ending.
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
            name = first["loc"][0] if first["loc"] else next(iter(given))
            name = "auto_tokens" if name == "tokens" else name
            raise UsageError(f"`{name}` is not possible: {first['msg'].removeprefix('Value error, ')}.") from error
        if not auto.has_budget:
            raise UsageError(
                f"The recipe {recipe.name} needs to know how large the cache may be; give `kv_bits` (average stored "
                "bits per value) or `kv_bytes_per_token`, or state one in its [auto] table."
            )
        return recipe.model_copy(update={"auto": auto})

    def _with_weight_bits(self, weight_bits: float) -> Recipe:
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
        """What calibration chooses for one layer's cache."""
        return next((o.calibration for o in self.layers if index in o.index), self.calibration)

    def schemes(self) -> list[KVScheme]:
        """The distinct schemes that some layer may have."""
        every = [self.kv, *(override.kv for override in self.layers)]
        return [scheme for i, scheme in enumerate(every) if scheme is not None and scheme not in every[:i]]

    @classmethod
    def load(cls, name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
        """Read a preset by its name, or a recipe file by its path (ends in `.toml` or contains a path separator).

        Args:
            name: of the preset or the file.
            changes: values by table and key ("weights.group_size": 64), as if the file said so in place of its own;
                the recipe's name then tells of them.

        Raises:
            RecipeError: no such preset or file, not TOML, an unknown table or key, or a value that is not possible.
        """
        if name.endswith(".toml") or "/" in name or "\\" in name:
            path = Path(name)
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError as error:
                raise MissingError(
                    f"There is no recipe file {name}; check its path, or name a preset (kvconvert recipes lists them)."
                ) from error
            except (OSError, UnicodeDecodeError) as error:
                raise MissingError(f"The recipe file {name} cannot be read ({error}); check its path.") from error
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
        try:
            tables = tomllib.loads(text)
        except (
            ValueError,
            RecursionError,
        ) as error:  # numbers of thousands of digits, and deep nesting, are no TOML error
            raise RecipeError(f"The recipe {where} is not valid TOML: {error}.") from error
        for table, keys in tables.items():
            if table not in TABLES:
                what = f"[{table}]" if isinstance(keys, dict) else f"key {table}"
                raise RecipeError(
                    f"The recipe {where} has an unknown table or {what}; known are [weights], [kv], [auto] and "
                    "[limits]."
                )
            if not isinstance(keys, dict):
                raise RecipeError(f"The recipe {where} has a value named {table} where a table [{table}] belongs.")
        if changes:
            where, name = (f"{known} with {described(changes)}" for known in (where, name))
            tables = changed(tables, changes, where)
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
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """Rebuild a recipe from `to_dict()`, as a working directory or a manifest records it."""
        auto = values.get("auto")
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
            raise RecipeError(f"The recorded recipe lacks its part {error}; calibrate again.") from error
        except (TypeError, AttributeError, ValidationError) as error:
            raise RecipeError(f"The recorded recipe is damaged ({first_line(error)}); calibrate again.") from error

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


def preset_names() -> list[str]:
    """Names of the recipe presets that are installed."""
    return sorted({file.stem for file in _PRESET_FILES.glob("*.toml")} | {*PRESETS})


def _check_layers(recipe: Recipe, where: str) -> None:
    """Refuse layers that are listed twice, and schemes that one model cannot have together."""
    listed = [index for override in recipe.layers for index in override.index]
    twice = next((index for index in listed if listed.count(index) > 1), None)
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
