"""The allocation is the best selection there is, compared with trying all of them."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconvert.auto import Option, allocate

OPTIONS = st.builds(Option, st.integers(0, 12), st.integers(0, 9).map(lambda n: n / 8))
LAYERS = st.lists(st.lists(OPTIONS, min_size=1, max_size=4), min_size=1, max_size=4)


def brute_force(layers, budget):
    """(loss, cost) of the best selection, or None."""
    found = [(sum(o.loss for o in chosen), sum(o.cost for o in chosen)) for chosen in product(*layers)]
    return min((f for f in found if f[1] <= budget), default=None)


@settings(deadline=None, max_examples=60)
@given(LAYERS, st.integers(0, 40))
def test_no_selection_is_better(layers, budget):
    found, best = allocate(layers, budget), brute_force(layers, budget)
    if best is None:
        assert found is None
        return
    chosen = [options[i] for options, i in zip(layers, found.options, strict=True)]
    assert (found.loss, found.cost) == pytest.approx(best)
    assert (sum(o.loss for o in chosen), sum(o.cost for o in chosen)) == (found.loss, found.cost)
    assert found.cost <= budget


def test_costs_without_a_common_factor_stay_exact():
    """A grid of rounded costs would miss the one selection that meets the budget to the byte."""
    layers = [[Option(1_000_003, 1.0), Option(1_500_041, 0.4)], [Option(999_983, 1.0), Option(1_500_007, 0.5)]]
    assert allocate(layers, 2_500_024).options == (1, 0)
    assert allocate(layers, 2_500_023).options == (0, 1)
    assert allocate(layers, 1_999_985) is None
