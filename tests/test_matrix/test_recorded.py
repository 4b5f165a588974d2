"""What docs/models.md is made from is what the matrix finds, for every architecture of it."""

import json

import pytest
from facts import LIMITS, cache_facts, identity
from kv_cells import RECIPES
from record import RESULTS
from tiny.models import ARCHITECTURES
from tiny.structures import REFUSED_WEIGHTS

ANEW = "record it anew: python tests/test_matrix/record.py"


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text(encoding="utf8"))


def test_every_architecture_is_recorded_with_every_recipe(results):
    assert list(results["models"]) == list(ARCHITECTURES), ANEW
    for entry in results["models"].values():
        assert "refused" in entry["cache"] or list(entry["cache"]["recipes"]) == list(RECIPES), ANEW


@pytest.mark.quick("gemma4", "gpt", "deepseek", "qwen3_next", "opt", "bamba", "qwen2_5", "llama4")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_was_recorded_is_still_so(results, name):
    entry, recorded = ARCHITECTURES[name], results["models"][name]
    assert identity(entry).items() <= recorded.items(), ANEW
    assert cache_facts(entry).items() <= recorded["cache"].items(), ANEW
    # That these are refused and others found is tested with weights, and in tests/test_models/test_discovery.py.
    refused = name in REFUSED_WEIGHTS
    assert recorded["weights"] == {"refused": REFUSED_WEIGHTS[name]} if refused else "quantized" in recorded["weights"]
    for figures in (recorded["weights"], *recorded["cache"].get("recipes", {}).values()):
        assert all(figures[kind] is None or figures[kind] < LIMITS[kind] for kind in LIMITS if kind in figures)
