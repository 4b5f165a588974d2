"""The matrix's results, docs/models.json, and the page that shows them, docs/models.md.

python tests/test_matrix/models_page.py             write docs/models.md from docs/models.json
python tests/test_matrix/models_page.py --record    run the whole matrix first (some minutes) and write both
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs" / "models.json", ROOT / "docs" / "models.md"
WORDS = {
    "sliding": "sliding windows",
    "chunked": "chunked attention",
    "softcap": "soft caps",
    "sinks": "attention sinks",
    "partial_rotary": "rotary positions on part of a head",
    "no_rotary": "layers without rotary positions",
    "learned_positions": "learned positions",
    "alibi": "ALiBi",
    "kv_sharing": "layers that read earlier layers' keys and values",
    "qk_norm": "norms of queries and keys",
    "moe": "mixture of experts",
    "mla": "latent attention (MLA)",
    "linear_attention": "linear attention, Mamba or convolutions beside attention",
    "parallel": "attention and MLP in parallel",
    "fused_projections": "fused projections",
    "no_pre_norm": "no norm before attention and MLP",
    "values_are_keys": "keys that serve as values",
}
OTHERS = {"dummy": "sharing layers", "linear_attention": "linear layers", "conv": "convolutions"}
INTRODUCTION = """# Models

What works with which architecture, as a test of each one found it. This page is written by
`python tests/test_matrix/models_page.py` from [models.json](models.json); `make test` compares it with what it
finds for a few models that have every feature between them, and `make test-full` for all. A model that is missing here:
[adding an architecture](adding-an-architecture.md).

A row is a tiny model with random weights that has the architecture's features (some hundred kilobytes, two to four
layers), taken through the whole path:

- **Weights.** Calibrated with AWQ in groups of {group}, exported and loaded. After folding and scaling the logits are
  the source's (difference over all rows at most {preserved:.0e} of the largest logit). The coverage names every Linear
  and every expert once, and nothing of the source is missing. The loaded bundle's logits are those of the dequantized
  weights, and what it generates through its pages is what transformers' eager attention generates from fake-quantized
  keys and values.
- **KV cache.** Generation in a left-padded batch through 16-bit pages is that of transformers' own cache. Through
  {presets}
  it is that of an independent reference, and a padded row is that row alone (difference at most {error:.0e} of what
  quantizing changes). The prompts of vision-language and audio-language models hold an image or a recording; spans
  of such tokens alone (`modality`) have tests of their own on the same models
  (`tests/test_runtime/test_modality.py`).

Mixtures of experts are quantized expert by expert. Of vision-language and audio-language models, the language part
alone is quantized. Whatever lies outside the decoder layers (embeddings, towers, the head) is kept as it is, and the
coverage says so.
A number in brackets leads to the reason.
"""


def render(results: dict[str, Any]) -> str:
    """The page."""
    notes: dict[str, int] = {}

    def note(reason: str) -> str:
        return f"[{notes.setdefault(reason, len(notes) + 1)}](#notes)"

    models = results["models"]
    figures = [entry["weights"]["preserved"] for entry in models.values() if "preserved" in entry["weights"]]
    errors = [
        max(figure["error"], figure["padding_error"])
        for entry in models.values()
        for recipe, figure in entry["cache"].get("recipes", {}).items()
        if recipe != "exact"
    ]
    presets = next(list(entry["cache"]["recipes"]) for entry in models.values() if "recipes" in entry["cache"])
    named = ", ".join(f"`{preset}`" for preset in presets if preset != "exact")
    page = [INTRODUCTION.format(group=results["group_size"], preserved=max(figures), presets=named, error=max(errors))]
    sections = {
        "Text": [name for name, entry in models.items() if not (entry["supports_images"] or entry["supports_audio"])],
        "Images and audio": [
            name for name, entry in models.items() if entry["supports_images"] or entry["supports_audio"]
        ],
    }
    for title, names in sections.items():
        page.append(f"\n## {title}\n")
        page.append("| model type | weights | kept; not scaled | values rotated | KV cache | what is special |")
        page.append("|---|---|---|---|---|---|")
        page += [f"| {' | '.join(_row(name, models[name], note))} |" for name in names]
    page.append("\n## Notes\n")
    page += [f"{number}. {reason[0].upper()}{reason[1:]}." for reason, number in notes.items()]
    page.append("\n## Other models\n")
    page.append(
        'A model without an adapter converts its cache, uncalibrated, with `[weights] method = "none"` if its '
        "attention goes through transformers' attention interface, and is refused by name if not. Of transformers' "
        "models with ALiBi (BLOOM, MPT, Falcon) none does: each adds its biases in attention code of its own."
    )
    return "\n".join(page) + "\n"


def _row(name: str, entry: dict[str, Any], note: Any) -> list[str]:
    weights, cache = entry["weights"], entry["cache"]
    words = [WORDS[feature] for feature in entry["features"]]
    words += ["images"] * entry["supports_images"] + ["audio"] * entry["supports_audio"]
    label = f"`{entry['model_type']}`"
    if "refused" in weights:
        treated = [f"refused {note(weights['refused'])}", "", ""]
    else:
        experts = any("experts." in linear for linear in weights["quantized"])
        left = [f"`{linear.rpartition('.')[2]}` kept {note(reason)}" for linear, reason in weights["kept"].items()]
        left += [f"{pair} {note(reason)}" for pair, reason in weights["skipped"].items()]
        folded = "in the weights" if weights["folded"] else ""
        online = [f"at run time {note(reason)}" for reason in weights["not_folded"]]
        how = "AWQ, each expert by itself" if experts else "AWQ"
        treated = [how, "<br>".join(left), "<br>".join(filter(None, [folded, *online]))]
    if "refused" in cache:
        kept = f"transformers' own {note(cache['refused'])}"
    else:
        kept = "<br>".join(
            ["pages, spans, eviction", *(f"{OTHERS[k]}: transformers' own {note(r)}" for k, r in cache["own"].items())]
        )
    return [label, treated[0], treated[1], treated[2], kept, ", ".join(words)]


def record(names: list[str]) -> dict[str, Any]:
    """Run the matrix for some architectures, or for all if there are no names; others keep what is recorded."""
    sys.path.append(str(ROOT / "tests"))
    import transformers
    from facts import LIMITS, cache_facts, identity, refused_weights, weight_facts
    from kv_cells import RECIPES, kv_cell
    from tiny.models import ARCHITECTURES
    from tqdm import tqdm
    from weight_cells import GROUP, weight_cell

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    models = json.loads(RESULTS.read_text(encoding="utf8"))["models"] if names else {}
    unknown = sorted({*names} - ARCHITECTURES.keys())
    if unknown:
        sys.exit(f"There is no tiny model named {unknown[0]}.")
    for name in tqdm(names or ARCHITECTURES, unit="architecture"):
        entry = ARCHITECTURES[name]
        weights, cache = refused_weights(entry), cache_facts(entry)
        if weights is None:
            with tempfile.TemporaryDirectory() as directory:
                cell = weight_cell(entry, Path(directory))
            if cell.problems:
                sys.exit(f"{name}: {cell.problems[0]}; nothing was recorded.")
            weights = weight_facts(entry, cell.manifest)
            weights |= {kind: _rounded(getattr(cell, kind)) for kind in ("preserved", "loaded", "generated")}
        if "refused" not in cache:
            cells = {recipe: kv_cell(entry, settings) for recipe, settings in RECIPES.items()}
            largest = max(float(abs(cells["exact"].cache - cells["exact"].full).max()), 0.0)
            if largest > 1e-3:
                sys.exit(f"{name}: 16-bit pages differ by {largest}; nothing was recorded.")
            cache["recipes"] = {"exact": {"difference": _rounded(largest)}} | {
                recipe: {"error": _rounded(cell.error), "padding_error": _rounded(cell.padding_error)}
                for recipe, cell in cells.items()
                if recipe != "exact"
            }
        models[name] = identity(entry) | {"weights": weights, "cache": cache}
        for figures in (weights, *cache.get("recipes", {}).values()):
            for kind, limit in LIMITS.items():
                if figures.get(kind) is not None and not figures[kind] < limit:
                    sys.exit(f"{name}: {kind} is {figures[kind]}, its limit {limit}; nothing was recorded.")
    return {"group_size": GROUP, "models": {name: models[name] for name in ARCHITECTURES}}


def _rounded(figure: float | None) -> float | None:
    """One digit, which is all that a difference of roundings tells."""
    return None if figure is None else float(f"{figure:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="*", metavar="NAME")
    names = parser.parse_args().record
    if names is not None:
        RESULTS.write_text(json.dumps(record(names), indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    PAGE.write_text(render(json.loads(RESULTS.read_text(encoding="utf8"))), encoding="utf8")


if __name__ == "__main__":
    main()
