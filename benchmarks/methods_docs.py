"""The tables of docs that are made from the methods themselves, and from what tests found of architectures."""

from __future__ import annotations

import re
from typing import Any

from kvconvert.cache import LayerCache, ModelCache
from kvconvert.methods.scales import PRESET_STATES
from kvconvert.methods.scheme import (
    FIELDS,
    PAPER_PRESETS,
    PARTS,
    PLAN_TENSORS,
    PRESETS,
    KVCalibration,
    KVScheme,
    preset_calibration,
)
from kvconvert.tables import markdown_table as table

FEATURES = {
    "kv_sharing": "layers that share keys and values",
    "values_are_keys": "keys that serve as values",
    "moe": "experts",
    "alibi": "ALiBi",
}
# Bundles record these reasons as discovery spells them.
AMERICAN = {"normalised": "normalized", "neighbouring": "neighboring"}
WHOLE = "weights and cache"
OUTCOMES = {
    "weights and cache, no Engine": "weights and cache; no Engine",
    "weights": "weights; transformers' own cache",
}
# What is kept, by a word of the reason.
KEPT = {
    "shared expert's gate": "shared experts' gates",
    "router": "routers",
    "convolution": "short convolutions",
    "few numbers": "projections to a few numbers per token",
    "not that of a Linear": "tables of routers",
    "holds the experts": "routers",
}
OTHERS = {"dummy": "sharing layers", "linear_attention": "linear layers", "conv": "convolutions"}


def scheme_fields() -> str:
    """Every field of a scheme."""
    rows = [
        (f"`{field.name}`", field.method, _value(field.default), _possible(field.rule), field.meaning)
        for field in FIELDS.values()
    ]
    return _escaped(("field", "method", "default", "possible", "meaning"), rows)


def plan_tensors() -> str:
    """Every tensor that a KV plan may hold for a layer."""
    rows = [(f"`{name}`", part.method, PLAN_TENSORS[name]) for part in PARTS for name in part.plan_tensors]
    return _escaped(("tensor", "method", "content"), rows)


def methods() -> str:
    """Every method."""
    return _escaped(("method", "what it does", "source"), [(part.method, part.summary, part.source) for part in PARTS])


def presets() -> str:
    """Every preset but the papers', with the fields in which it differs from a plain scheme with its states."""
    plain, everything = KVScheme(**PRESET_STATES).to_dict(), KVCalibration().to_dict()
    rows = []
    for name, scheme in PRESETS.items():
        if name not in PAPER_PRESETS:
            changed = _changed(scheme.to_dict(), plain) + _changed(preset_calibration(name).to_dict(), everything)
            rows.append((f"`{name}`", ", ".join(changed) or "the defaults"))
    return _escaped(("preset", "differs from the defaults in"), rows)


def _escaped(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return table(head, [[cell.replace("|", r"\|") for cell in row] for row in rows])


def _value(value: object) -> str:
    return "none" if value is None else f"`{value}`"


def _possible(rule: str) -> str:
    """A rule as the cell of a table: what is possible, without the verb of the message."""
    if rule.startswith("choose one of "):
        rule = rule.replace(" or ", ", ")
    return re.sub(r"^(choose one of |choose |it is )", "", rule).rstrip(",")


# Of Llama 3.1, Qwen3, and Llama 3.3: parameters of Linears and of embeddings, layers, KV heads of 128 channels.
SHAPES = {
    "8B": (6_979_000_000, 1_050_700_000, 32, 8),
    "32B": (31_206_000_000, 1_555_800_000, 64, 8),
    "70B": (68_452_000_000, 2_101_300_000, 80, 8),
}
AWQ_BITS = 4 + (16 + 4) / 128  # with a scale and a zero point of each group of 128
GPUS = (24, 48, 80)


def sizes() -> str:
    """Bytes of bundles and caches of three sizes of models, and how long a sequence may be on some GPUs."""
    rows = []
    for name, (linears, embeddings, layers, heads) in SHAPES.items():
        bundle = linears * AWQ_BITS / 8 + 2 * embeddings
        for recipe, scheme in (("default", PRESETS["default"]), ("weights-only", None)):
            cache = ModelCache((LayerCache(heads, 128, 128, scheme),) * layers)
            token = cache.bytes(32_768) / 32_768
            fits = [max(0.0, 0.9e9 * memory - bundle) / token for memory in GPUS]
            rows.append(
                (
                    f"{name}, {bundle / 1e9:.1f} GB",
                    f"`{recipe}`",
                    f"{cache.bytes(32_768) / 1e9:.2f} GB",
                    *(f"{tokens / 1000:,.0f}K" if tokens >= 1000 else "none" for tokens in fits),
                )
            )
    header = ("model, bundle", "recipe", "cache at 32K tokens", *(f"tokens in {memory} GB" for memory in GPUS))
    return table(header, rows)


def _changed(values: dict[str, object], plain: dict[str, object]) -> list[str]:
    return [f"`{key}={value!r}`" for key, value in values.items() if value != plain[key]]


def architectures(results: dict[str, Any]) -> str:
    """Architectures that are treated alike in one row: weights, cache, what is left as it is and why."""
    models = results["models"]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, entry in models.items():
        groups.setdefault(_treatment(entry), []).append(_label(name, models))
    rows = [(", ".join(dict.fromkeys(labels)), *treated) for treated, labels in groups.items()]
    changed = max(entry["weights"]["preserved"] for entry in models.values() if "preserved" in entry["weights"])
    cells = [
        (recipe, max(figures["error"], figures["padding_error"]))
        for entry in models.values()
        for recipe, figures in entry["cache"].get("recipes", {}).items()
        if recipe != "exact"
    ]
    presets = ", ".join(f"`{name}`" for name in dict.fromkeys(recipe for recipe, _ in cells))
    about = (
        f"{len(models)} architectures, as tests found them on tiny models with their features. Folding and scaling "
        f"change no logit by more than {changed:.0e} of the largest one. Generation through 16-bit pages is that of "
        f"transformers' own cache, and through {presets} that of an independent reference, padded rows included "
        f"(within {max(error for _, error in cells):.0e} of what quantizing changes). Values are rotated in the "
        "weights unless the last column says otherwise."
    )
    return f"{about}\n\n{table(('model type', 'weights', 'KV cache', 'what is left out, and why'), rows)}"


def types(outcomes: dict[str, str]) -> str:
    """How many types of transformers convert, and which do not, or not with their cache."""
    groups: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        if outcome != WHOLE:
            groups.setdefault(OUTCOMES.get(outcome, "refused"), []).append(f"`{name}`")
    whole = sum(outcome == WHOLE for outcome in outcomes.values())
    rows = [(what, ", ".join(groups[what])) for what in (*OUTCOMES.values(), "refused") if what in groups]
    about = (
        f"{whole} of {len(outcomes)} types convert with weights and cache, which the Engine serves "
        "([all](../tests/test_models/sweep.json)), not so:"
    )
    return f"{about}\n\n{table(('converted', 'types'), rows)}"


def _label(name: str, models: dict[str, Any]) -> str:
    """The model type, and what a variant has that the type's first entry has not."""
    entry = models[name]
    label = f"`{entry['model_type']}`"
    first = next(other for other in models.values() if other["model_type"] == entry["model_type"])
    more = [FEATURES[each] for each in entry["features"] if each in FEATURES and each not in first["features"]]
    return f"{label} with {' and '.join(more)}" if more else label


def _treatment(entry: dict[str, Any]) -> tuple[str, str, str]:
    weights, cache = entry["weights"], entry["cache"]
    why: dict[str, None] = {}
    if "refused" in weights:
        treated = "refused"
        why[weights["refused"]] = None
    else:
        treated = "AWQ, expert by expert" if any("experts." in name for name in weights["quantized"]) else "AWQ"
        why |= {f"not scaled: {reason}": None for reason in weights["skipped"].values()}
        kept = dict.fromkeys(
            next((short for word, short in KEPT.items() if word in r), r) for r in weights["kept"].values()
        )
        why |= {f"kept: {', '.join(kept)}": None} if kept else {}
        why |= {f"values rotated at run time: {reason}": None for reason in weights["not_folded"]}
    if "refused" in cache:
        kept = "`latent-4bit`, `latent-2bit`" if "(MLA)" in cache["refused"] else "transformers' own"
        # The name of the model is in the row's first cell.
        why["it " + reason.partition(" ")[2] if "by itself" in (reason := cache["refused"]) else reason] = None
    else:
        own = [f"{OTHERS[kind]}: transformers' own" for kind in cache["own"]]
        kept = "; ".join(["all methods", *own])
    said = "; ".join(why)
    for spelling, american in AMERICAN.items():
        said = said.replace(spelling, american)
    return treated, kept, said
