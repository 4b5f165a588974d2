"""Confidence intervals are honest: paired, resampled by segments, absent where there is one segment."""

import math

import pytest
import torch

from kvconvert.errors import UsageError
from kvconvert.fidelity.scoring import bootstrap_mean


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation_for_many_segments():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5
    interval = bootstrap_mean(values, seed=0)
    half = 1.96 * float(values.std()) / math.sqrt(400)
    assert interval.mean == pytest.approx(float(values.mean()), abs=1e-12)
    # 10,000 resamples leave a Monte Carlo error of about 2 % in each bound's distance.
    assert interval.mean - interval.low == pytest.approx(half, rel=0.08)
    assert interval.high - interval.mean == pytest.approx(half, rel=0.08)
    assert interval == bootstrap_mean(values, seed=0)
    assert interval != bootstrap_mean(values, seed=1)


def test_two_segments_give_the_bounds_that_can_be_counted():
    # Means of two draws from {0, 1}: 0 in a quarter of all cases, 1 in another quarter, so both lie within 95 %.
    interval = bootstrap_mean(torch.tensor([0.0, 1.0]), seed=0)
    assert (interval.low, interval.high) == (0.0, 1.0)
    # At 40 %, three tenths are cut off on either side: more than the quarter at 0 and the quarter at 1.
    narrow = bootstrap_mean(torch.tensor([0.0, 1.0]), seed=0, confidence=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_pairing_finds_a_difference_that_unpaired_intervals_hide():
    level = torch.randn(20, generator=torch.Generator().manual_seed(0)) * 10
    worse = level + 0.1 + 0.01 * torch.randn(20, generator=torch.Generator().manual_seed(1))
    assert bootstrap_mean(worse - level, seed=0).above_zero
    assert bootstrap_mean(worse, seed=0).low < bootstrap_mean(level, seed=0).high


def test_one_segment_has_no_interval_and_nan_is_refused():
    assert bootstrap_mean(torch.tensor([2.0]), seed=0).low is None
    for values in (torch.tensor([1.0, math.nan]), torch.tensor([])):
        with pytest.raises(UsageError):
            bootstrap_mean(values, seed=0)
