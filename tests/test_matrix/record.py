"""Run the matrix and record what it finds in tests/test_matrix/models.json, which docs/models.md shows.

python tests/test_matrix/record.py [NAME ...]    all architectures (some minutes), or these; then `make docs`
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("models.json")


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
    parser.add_argument("names", nargs="*", metavar="NAME")
    results = record(parser.parse_args().names)
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
