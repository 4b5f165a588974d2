"""Confidence intervals by resampling segments: tokens of one segment are not independent, segments nearly are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvconvert.errors import UsageError

RESAMPLES = 10_000  # times that the segments are drawn with replacement
CONFIDENCE = 0.95
_RESAMPLES_AT_ONCE = 1_000  # bounds the table of drawn indices


@dataclass(frozen=True)
class Interval:
    """A mean over segments with its percentile-bootstrap confidence interval.

    Attributes:
        mean: the mean of the segments' values.
        low, high: bounds of the interval; both None with a single segment, which says nothing of the spread.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """`low` and `high`; None with a single segment."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.low is not None and self.low > 0

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval lies below 0."""
        return self.high is not None and self.high < 0


def bootstrap_mean(values: torch.Tensor, seed: int, confidence: float = CONFIDENCE) -> Interval:
    """The mean of one value per segment and its interval.

    For a paired comparison of two methods on the same segments, pass the difference of their values.

    Args:
        values: [segments], any real dtype.
        seed: the seed of the resampling.
        confidence: share of the resampled means inside the interval.

    Raises:
        UsageError: no segment, or a value that is not finite.
    """
    values = values.double()
    count = values.numel()
    if count == 0 or not values.isfinite().all():
        raise UsageError(
            f"A confidence interval needs finite values of one segment or more, not {values.tolist()[:8]}."
        )
    if count == 1:
        return Interval(float(values[0]), None, None)
    generator = torch.Generator().manual_seed(seed)
    means = torch.cat(
        [
            values[torch.randint(count, (min(_RESAMPLES_AT_ONCE, RESAMPLES - done), count), generator=generator)].mean(
                1
            )
            for done in range(0, RESAMPLES, _RESAMPLES_AT_ONCE)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(float(values.mean()), low, high)
