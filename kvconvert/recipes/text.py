"""Recipes as text: the list of presets, and one recipe resolved into a commented file that means the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvconvert.cache import LayerCache, ModelCache
from kvconvert.methods import (
    FIELDS,
    OPTIONS,
    PAPER_PRESETS,
    PRESETS,
    SEARCHED_FIELDS,
    WHOLE_MODEL_OPTIONS,
    KVCalibration,
    KVScheme,
    LayerShape,
    preset_calibration,
)
from kvconvert.methods.auto import CHOSEN_FIELDS, DEFAULT_CONTEXT
from kvconvert.methods.awq import WeightsRecipe, describe
from kvconvert.recipes.recipe import LayerOverride, Recipe, preset_names
from kvconvert.tables import text_table

HEADS, HEAD_DIM = 8, 128  # of the layer for which sizes are stated
LATENTS = (1, 512, 64)  # one head, channels of a latent and of its RoPE part, as in DeepSeek's models
# What each preset is for.
USES = {
    "default": "a good start: 3-bit keys, 2-bit values, every layer measured",
    "auto": "the best pages for a given size; measures every layer (needs --kv-bits)",
    "kv-only": "no weight changes; the default cache, values rotated at run time",
    "weights-only": "the cache stays as it is",
    "rtn": "quick, without a search of weights; what others are compared with",
    "oscar": "pages of rotated keys and values with token norms",
    "oscar-g128": "the smallest pages of these; with --key-bits 4 less error than oscar",
    "kivi": "plain pages, no change to the weights",
    "latent-4bit": "models with latent attention (MLA), such as DeepSeek's",
    "latent-2bit": "the same in two thirds of the bytes, with more loss",
    "kitty": "pages, an eighth of the key channels at 4 bits",
    "kitty-pro": "the same with a quarter of them",
    "minikv": "half of a long prompt thrown away with what it said, the rest in pages",
    "minikv-pyramid": "the same, lower layers keep more",
    "calibquant-1bit": "whole prompts, one scale per channel; poor on text",
    "calibquant-2bit": "whole prompts, one scale per channel; poor on text",
    "calibquant-1bit-visual": "prompts that are mostly images; text stays exact",
    "calibquant-2bit-visual": "prompts that are mostly images; text stays exact",
}


def recipe_rows() -> list[dict[str, Any]]:
    """All presets in the order of `list_recipes`: how weights and cache are stored, None for what stays as it is or, in
    the recipe auto, is asked for.
    """
    names = preset_names()
    order = [*(name for name in USES if name in names), *(name for name in names if name not in USES)]
    return [_row(Recipe.load(name)) for name in order]


def _row(recipe: Recipe) -> dict[str, Any]:
    weights = recipe.weights
    fixed = None if recipe.kv is None or recipe.auto is not None else round(bits_per_value(recipe.kv), 2)
    return {
        "recipe": recipe.name,
        "weights_method": weights.method,
        "weights_bits": weights.bits if weights.quantizes else None,
        "cache": "kept" if recipe.kv is None else "as asked" if recipe.auto is not None else "quantized",
        "cache_bits_per_value": fixed,
        "when": USES.get(recipe.name, "see docs/methods.md"),
    }


def list_recipes() -> str:
    """All presets, one line each: weights, stored bits per value of the cache, and when to take it."""
    papers = [name for name in preset_names() if name in PAPER_PRESETS]
    rows = [_columns(row) for row in recipe_rows() if row["recipe"] not in papers]
    lines = [text_table(("recipe", "weights", "cache", "when"), rows), ""]
    lines.append(
        f"cache: bits per value at {DEFAULT_CONTEXT:,} tokens, everything included ({HEADS} KV heads of {HEAD_DIM}; "
        f"latents of {LATENTS[1]} with RoPE parts of {LATENTS[2]}); 16 without kvconvert."
    )
    lines.append(f"NAME-paper and NAME-plain are what the papers describe, to compare with: {', '.join(papers)}.")
    lines.append(
        "kvconvert recipes NAME shows every value of one; kvconvert calibrate --set kv.key_bits=3 changes some."
    )
    return "\n".join(lines)


def _columns(row: dict[str, Any]) -> tuple[str, str, str, str]:
    bits, cache = row["weights_bits"], row["cache_bits_per_value"]
    weights = "kept" if bits is None else f"{bits}-bit {row['weights_method']}"
    return row["recipe"], weights, row["cache"] if cache is None else f"{cache:.2f}", row["when"]


def bits_per_value(scheme: KVScheme) -> float:
    """Bits of a layer of `HEADS` KV heads of `HEAD_DIM` channels, or of `LATENTS`, at `DEFAULT_CONTEXT` tokens."""
    latent = any(scheme == PRESETS[name] for name in ("latent-4bit", "latent-2bit"))
    shape = LATENTS if latent else (HEADS, HEAD_DIM, HEAD_DIM)
    return ModelCache((LayerCache(*shape, scheme),)).bits_per_value(DEFAULT_CONTEXT)


def _shape(scheme: KVScheme) -> LayerShape:
    return LayerShape(HEADS, HEAD_DIM, HEAD_DIM, scheme.value_group_size)


def recipe_toml(recipe: Recipe) -> str:
    """A recipe as a file that states every value, with a comment at each that differs from the default.

    Reading it gives the same conversion.
    """
    lines = [f"# {line}" for line in _explanation(recipe)]
    lines += ["", *_weights(recipe.weights), "", *_kv(recipe)]
    for layer in recipe.layers:
        table = _layer(recipe, layer)
        if len(table) > 2:  # one that says its index alone changes nothing
            lines += ["", *table]
    for table, values in (("auto", recipe.auto), ("limits", recipe.limits)):
        stated = {} if values is None else {k: v for k, v in values.model_dump().items() if v is not None}
        if values is not None and (stated or table == "auto"):
            lines += ["", f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in stated.items())]
    return "\n".join(lines) + "\n"


def _explanation(recipe: Recipe) -> list[str]:
    widths = {recipe.weights.bits, *(rule.bits for rule in recipe.weights.modules)}
    lines = [f"{recipe.name}: {describe(recipe.weights.method, widths)}."]
    if recipe.kv is None:
        return [*lines, "Cache: left to the model's own class."]
    if recipe.auto is not None:
        lines.append("Cache: widths, groups and windows of every layer are chosen by measuring, starting from")
    else:
        only = recipe.kv.only_tokens()
        share = f", of {only} tokens alone" if only else ""
        size = f"{bits_per_value(recipe.kv):.2f} bits per value at {DEFAULT_CONTEXT:,} tokens"
        lines.append(f"Cache: {size}{share} (16 without);")
    lines += [f"  - {clause}" for clause in recipe.kv.clauses(_shape(recipe.kv))]
    searched = recipe.calibration.searched(recipe.kv)
    if searched:
        lines.append(f"Calibration chooses {', '.join(searched)} of each layer.")
    used = [f"{part.method} ({part.source})" for part in recipe.kv.parts()]
    return [*lines, f"Methods: {'; '.join(used)}."]


_WEIGHTS_MEANING = {
    "method": "auto, awq, gptq, awq+gptq, rtn or none",
    "bits": "of a stored weight: 2, 3, 4 or 8",
    "group_size": "inputs that share a scale and zero point",
}


def _weights(weights: WeightsRecipe) -> list[str]:
    lines, plain = ["[weights]"], WeightsRecipe()
    for name, meaning in _WEIGHTS_MEANING.items():
        if weights.quantizes or name == "method":
            value, default = getattr(weights, name), getattr(plain, name)
            lines.append(_line(name, value, default, meaning))
    if weights.average_bits is not None:
        lines.append(f"average_bits = {_toml(weights.average_bits)}  # stored bits per weight, spent by measuring")
    if weights.kept_share is not None:
        lines.append(f"kept_share = {_toml(weights.kept_share)}  # bytes added to keep the Linears that lose most")
    for rule in weights.modules:
        stated = {name: value for name, value in rule.model_dump().items() if value is not None}
        lines += ["", "[[weights.modules]]", *(f"{name} = {_toml(value)}" for name, value in stated.items())]
    return lines


def _kv(recipe: Recipe) -> list[str]:
    if recipe.kv is None:
        return ["[kv]", 'preset = "none"']
    scheme, calibration = recipe.kv, recipe.calibration
    base = _base(scheme, calibration, {None: (KVScheme(), KVCalibration())})
    lines = ["[kv]", *([] if base is None else [f"preset = {_toml(base)}"])]
    choices = " ".join(calibration.searched(scheme))
    chosen = CHOSEN_FIELDS if recipe.auto is not None else frozenset()
    for name, value in scheme.to_dict().items():
        field = FIELDS[name]
        searched = name in SEARCHED_FIELDS and name not in calibration.given
        if name in chosen:
            lines.append(f"# {name}: chosen by [auto]")
        elif value is None or searched:
            said = "calibration chooses it" if name in choices else "not stated"
            lines.append(f"# {name}{'' if value is None else f' = {_toml(value)}'}: {said}")
        else:
            lines.append(_line(name, value, field.default, field.meaning))
    every = [(scheme, calibration), *((layer.kv, layer.calibration) for layer in recipe.layers)]
    plain = KVCalibration()
    for name in OPTIONS:
        value, search = getattr(calibration, name), WHOLE_MODEL_OPTIONS.get(name)
        if search is not None and search.unused(every) is not None:
            lines.append(f"# {name} = {_toml(value)}: means nothing here, {search.unused(every)}")
        else:
            meaning = KVCalibration.__pydantic_fields__[name].description or ""
            lines.append(_line(name, value, getattr(plain, name), meaning))
    return lines


def _layer(recipe: Recipe, layer: LayerOverride) -> list[str]:
    lines = ["[[kv.layers]]", f"index = {_toml(layer.index)}"]
    if layer.kv is None:
        return [*lines, 'preset = "none"']
    above = {} if recipe.kv is None else {None: (recipe.kv, recipe.calibration)}
    base = _base(layer.kv, layer.calibration, above)
    scheme, calibration = above[None] if base is None else (PRESETS[base], preset_calibration(base))
    lines += [] if base is None else [f"preset = {_toml(base)}"]
    known = scheme.to_dict()
    inherited = calibration.given if base is None else ()
    for name, value in layer.kv.to_dict().items():
        own = name in layer.calibration.given and name not in inherited
        if own or (value != known[name] and value is not None):
            lines.append(f"{name} = {_toml(value)}")
    for name in OPTIONS:
        value = getattr(layer.calibration, name)
        if name not in WHOLE_MODEL_OPTIONS and value != getattr(recipe.calibration, name):
            lines.append(f"{name} = {_toml(value)}")
    return lines


def _base(
    scheme: KVScheme, calibration: KVCalibration, others: dict[None, tuple[KVScheme, KVCalibration]]
) -> str | None:
    """The preset that says most of a scheme, and all of what calibration may change; None for what is without one."""
    open_fields = [name for name in SEARCHED_FIELDS if name not in calibration.given]

    def distance(known: KVScheme, options: KVCalibration) -> tuple[int, int]:
        unlike = sum(getattr(scheme, name) != getattr(known, name) for name in open_fields)
        pairs = ((scheme.to_dict(), known.to_dict()), (calibration.to_dict(), options.to_dict()))
        return unlike, sum(left[name] != right[name] for left, right in pairs for name in left)

    presets = {name: (known, preset_calibration(name)) for name, known in PRESETS.items()}
    candidates: dict[str | None, tuple[KVScheme, KVCalibration]] = presets | others
    return min(candidates, key=lambda name: distance(*candidates[name]))


def _line(name: str, value: Any, default: Any, meaning: str) -> str:
    comment = "" if value == default else f"  # default: {_toml(default)}; {meaning}"
    return f"{name} = {_toml(value)}{comment}"


def _toml(value: Any) -> str:
    """A value as TOML writes it; None, which only comments hold, is "none"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Iterable) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
