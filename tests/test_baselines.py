"""Stored figures are compared within their tolerance, and written only when that is asked for."""

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
