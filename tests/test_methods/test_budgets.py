"""MiniKV's budgets: pyramids, and what happens where a layer is full."""

from dataclasses import replace
from itertools import pairwise

import pytest

from kvconvert.errors import RecipeError
from kvconvert.methods import KVScheme, clamp_ratios, pyramid_ratios, spread_ratios


def test_pyramids_follow_the_papers_formula_and_keep_the_mean():
    ratios = pyramid_ratios(0.25, 7, 7)
    assert ratios[0] == pytest.approx(0.5 - 0.25 / 7)
    assert ratios[-1] == pytest.approx(0.25 / 7)
    steps = [a - b for a, b in pairwise(ratios)]
    assert steps == pytest.approx([steps[0]] * 6)
    assert sum(ratios) / 7 == pytest.approx(0.25)
    assert pyramid_ratios(0.3, 1, 7) == [0.3]


@pytest.mark.parametrize(
    ("ratios", "recent", "expected"),
    [
        ([0.9, 0.3, 0.1], 0.5, [0.5, 0.5, 0.3]),  # 0.4 too much: 0.3 and 0.1 share it 3 to 1, the first is full again
        ([0.2, 0.2], 0.5, [0.2, 0.2]),
        ([0.9, 0.9], 0.5, [0.5, 0.5]),  # all saturated: everything is kept
        ([1.0, 0.0], 0.5, [0.5, 0.5]),
        ([0.4], 1.0, [0.0]),
    ],
)
def test_excess_goes_to_the_layers_that_have_room_in_proportion(ratios, recent, expected):
    got = clamp_ratios(ratios, recent)
    assert got == pytest.approx(expected)
    assert sum(got) == pytest.approx(min(sum(ratios), (1 - recent) * len(ratios)))


def test_a_pyramid_is_spread_over_the_layers_that_have_it():
    pyramid, plain = KVScheme.preset("minikv-pyramid"), KVScheme.preset("kivi")
    spread = spread_ratios([pyramid, None, pyramid, plain, pyramid])
    assert (spread[1], spread[3]) == (None, plain)
    ratios = [spread[i].heavy_ratio for i in (0, 2, 4)]
    assert ratios == pytest.approx(pyramid_ratios(0.25, 3, 7.0))
    assert {spread[i].allocation for i in (0, 2, 4)} == {"uniform"}


def test_an_allocation_that_needs_calibration_cannot_be_spread_without_it():
    scheme = replace(KVScheme.preset("minikv"), allocation="calibrated")
    with pytest.raises(RecipeError, match="allocation = 'calibrated'"):
        spread_ratios([scheme])
