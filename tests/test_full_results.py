"""The slow tests' recorded results belong to the sources as they are."""

import json

from full_results import RESULTS, source_hash


def test_the_recorded_results_are_those_of_these_sources():
    recorded = json.loads(RESULTS.read_text(encoding="utf8"))
    assert set(recorded["tests"].values()) == {"passed"}
    assert recorded["sources"] == source_hash(), "the sources changed: run `make test-full` and commit its results"
