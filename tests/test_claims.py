"""What README and docs claim of the reference model, measured anew: minutes, hence `make test-full` only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.full

# Other processors round differently, and the searches and codes at the edge between two amplify it; the quickstart
# allows the same. A method that lost its effect differs by more: AWQ's KL is well below rounding's.
TOLERANCE = {"kl": 0.15, "perplexity": 0.02}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    output = tmp_path_factory.mktemp("fidelity") / "fidelity.json"
    command = [sys.executable, "benchmarks/fidelity.py", "--segments", "12", "--threads", "2", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "2"})
    return json.loads(output.read_text())


@pytest.mark.parametrize("part", ["weights", "cache"])
def test_every_method_measures_what_it_did(report, part, baseline):
    for name, row in report[part]["methods"].items():
        figures = {"kl": row["kl"]["mean"], "perplexity": row["perplexity"]["bundle"]}
        baseline.check(f"{part}: {name}", figures, TOLERANCE)


def gain(report, part: str, pair: str) -> dict:
    """Interval of the first method's KL minus the second's; above zero means that the second is better."""
    return report[part]["differences"][pair]


def test_awq_is_not_worse_than_rounding_at_four_bits_and_better_at_three(report):
    assert gain(report, "weights", "4 bits: rtn - AWQ")["high"] > 0
    assert gain(report, "weights", "3 bits: rtn - AWQ")["low"] > 0


def test_awq_searched_on_shuffled_activations_loses(report):
    assert gain(report, "weights", "4 bits: AWQ, shuffled activations - AWQ")["low"] > 0
    assert gain(report, "weights", "3 bits: AWQ, shuffled activations - AWQ")["low"] > 0


@pytest.mark.parametrize("group", [32, 128])
def test_oscar_has_a_significantly_lower_kl_than_kivi(report, group):
    assert gain(report, "cache", f"kivi - oscar, G = {group}")["low"] > 0


@pytest.mark.parametrize(("scheme", "kl"), [("kivi, G = 32", 0.035), ("oscar, G = 32", 0.022)])
def test_cache_fidelity_is_near_the_fake_quantization_probe(report, scheme, kl):
    # the probe scored other segments of the same books
    assert report["cache"]["methods"][scheme]["kl"]["mean"] == pytest.approx(kl, rel=0.25)
