"""Where the parts mislead, what is measured of the whole decides."""

import random

import pytest

from kvconvert.auto.layers import SearchedLayer
from kvconvert.auto.search import TOLERANCE, PlanSearch
from kvconvert.methods import KVCalibration, KVScheme
from kvconvert.methods.auto import Candidate

KEYS = tuple(Candidate(f"K{b}", "key", {"key_bits": b}) for b in (2, 4, 16))
VALUES = tuple(Candidate(f"V{b}", "value", {"value_bits": b}) for b in (2, 4, 16))
COSTS = {c.name: c.fields[f"{c.side}_bits"] for c in KEYS + VALUES}
LAYERS = [SearchedLayer(i, KVScheme(), KVCalibration(), 1, 64, 64, KEYS, VALUES, COSTS) for i in range(3)]
# By the sum of the parts, layer 0 needs the bits most.
LOSSES = [{"K2": 1.0 / (i + 1), "K4": 0.1, "K16": 0.0, "V2": 0.2, "V4": 0.1, "V16": 0.0} for i in range(3)]
BUDGET = 3 * 4 + 2


def search(measure, repairs):
    return PlanSearch(LAYERS, LOSSES, BUDGET, measure, repairs)


def bits(plan):
    return [(key.fields["key_bits"], value.fields["value_bits"]) for key, value in plan]


def test_the_allocation_stays_where_the_parts_tell_the_truth():
    tool = search(lambda plan: tool.predicted(plan), 10)
    found = tool.run()
    assert bits(found.plan) == [(4, 2), (2, 2), (2, 2)]
    assert found.measured == found.predicted == pytest.approx(1.0 / 2 + 1.0 / 3 + 0.1 + 3 * 0.2)
    assert found.tried <= 11


def test_an_exchange_finds_what_the_parts_hide():
    """The last layer's error counts tenfold once other layers are quantized too."""

    def measure(plan):
        return tool.predicted(plan) + 9 * LOSSES[2][plan[2][0].name]

    tool = search(measure, 20)
    found = tool.run()
    assert bits(found.plan) == [(2, 2), (2, 2), (4, 2)]
    assert found.measured == measure(found.plan) < measure(tool._allocated(LOSSES))
    assert tool.cost(found.plan) <= BUDGET


@pytest.mark.parametrize("repairs", [0, 1, 5])
def test_no_more_plans_are_measured_than_allowed_and_none_is_over_budget(repairs):
    seen = []

    def measure(plan):
        seen.append(plan)
        return 1 / len(seen)  # every further plan looks better

    tool = search(measure, repairs)
    found = tool.run()
    assert found.tried == len(seen) == min(repairs + 1, 4)  # few combinations make few plans
    assert found.measured == min(1 / n for n in range(1, len(seen) + 1))
    assert all(tool.cost(plan) <= BUDGET for plan in seen)


def test_plans_are_made_of_few_combinations_at_a_fiftieth_of_the_loss():
    """Each layer's errors differ a little, so that the exact allocation takes whatever fits each best."""
    rng = random.Random(0)
    keys = tuple(Candidate(f"K{b}", "key", {"key_bits": b}) for b in (2, 2.5, 3, 3.5, 4, 8))
    values = tuple(Candidate(f"V{b}", "value", {"value_bits": b}) for b in (2, 2.5, 3, 4, 8))
    costs = {c.name: int(10 * c.fields[f"{c.side}_bits"]) for c in keys + values}
    layers = [SearchedLayer(i, KVScheme(), KVCalibration(), 1, 64, 64, keys, values, costs) for i in range(24)]
    size = [rng.lognormvariate(0, 0.8) for _ in layers]
    losses = [
        {c.name: own * 4 ** -c.fields[f"{c.side}_bits"] * rng.uniform(0.8, 1.25) for c in keys + values} for own in size
    ]
    tool = PlanSearch(layers, losses, 24 * 60, lambda plan: tool.predicted(plan), 0)
    exact = tool._best_of(losses, None)
    found = tool.run()
    assert len(set(found.plan)) <= len(set(exact)) // 2
    assert tool.predicted(exact) <= found.predicted <= (1 + TOLERANCE) * tool.predicted(exact)
    assert tool.cost(found.plan) <= tool.budget
