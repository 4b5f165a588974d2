"""Every model type of transformers with keys and values converts as recorded, or is refused in one sentence."""

import json
import re

import pytest
from record_sweep import RESULTS
from sweep import outcome
from tiny.every_type import UNTRIED, WITHOUT, names

RECORDED = json.loads(RESULTS.read_text(encoding="utf8"))
QUICK = ("gpt_neo", "recurrent_gemma")
CONVERTED = ("weights and cache", "weights and cache, no Engine", "weights")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in RECORDED]
)
def test_a_type_converts_as_recorded(name, tmp_path):
    assert outcome(name, tmp_path) == RECORDED[name]


def test_every_type_with_keys_and_values_was_tried_or_has_no_tiny_configuration():
    assert {*RECORDED}.isdisjoint(UNTRIED)
    assert {*RECORDED, *UNTRIED} == {*names()} - WITHOUT.keys()


def test_most_convert_and_the_others_are_refused_in_one_sentence():
    refused = {name: said for name, said in RECORDED.items() if said not in CONVERTED}
    assert len(RECORDED) - len(refused) >= 150
    for said in refused.values():
        assert not said.startswith("CRASH")
        assert "\n" not in said
        assert re.search(r"[.)\"]$", said)
        # What is said to be possible was tried.
        assert said.startswith("cache alone: ") == said.endswith('[weights] method = "none" only.')
