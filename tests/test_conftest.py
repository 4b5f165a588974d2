"""Stored figures are compared within their tolerance and written on request; grids lose all but a few cells."""

from dataclasses import replace

import pytest

TOLERANCE = {"kl": 0.15}


def test_a_figure_beyond_its_tolerance_and_a_case_without_figures_fail(baseline, tmp_path):
    stored = replace(baseline, file=tmp_path / "figures.json", update=True)
    stored.check("oscar", {"kl": 0.1}, TOLERANCE)
    compared = replace(stored, update=False)
    compared.check("oscar", {"kl": 0.114}, TOLERANCE)
    for case, figures in (("oscar", {"kl": 0.12}), ("oscar", {}), ("kitty", {"kl": 0.1})):
        with pytest.raises(AssertionError, match="make baselines"):
            compared.check(case, figures, TOLERANCE)
    assert compared.cases() == {"oscar": {"kl": 0.1}}


@pytest.mark.each_value
@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize(("first", "alike"), [(0, 0), (1, 0), (2, 0)])
def test_the_cells_of_a_grid_that_are_not_full_have_every_value(request, first, alike, second):
    full = request.node.get_closest_marker("full") is not None
    assert full == ((first, second) not in [(0, 0), (1, 1), (2, 0)])


@pytest.mark.quick("few", "2")
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("name", ["many", "few"])
def test_the_cells_that_no_word_names_are_full(request, name, count):
    assert (request.node.get_closest_marker("full") is not None) == (name == "many" and count < 2)
