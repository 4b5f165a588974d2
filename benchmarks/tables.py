"""Markdown of results: the places in a page where tables stand, and figures with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvconvert.fidelity.scoring import Interval, bootstrap_mean


def put(page: str, name: str, text: str) -> str:
    """The page with a text in the place that two comments name (ValueError if there is none)."""
    begin, end = f"<!-- {name}: written by `make docs` -->", f"<!-- end of {name} -->"
    head, _, rest = page.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no place for the table {name!r}")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def difference(values: Sequence[float], others: Sequence[float]) -> Interval:
    """The mean of paired differences with its 95% bootstrap interval over segments."""
    return bootstrap_mean(torch.tensor(values, dtype=torch.float64) - torch.tensor(others, dtype=torch.float64), 0)


def signed(found: Interval) -> str:
    """A difference with its interval, if it has one."""
    if found.low is None:
        return f"{found.mean:+.4f}"
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


def within(values: dict[str, Any]) -> str:
    """A mean with its interval, if it has one."""
    mean = f"{values['mean']:.4f}"
    return mean if values["low"] is None else f"{mean} ({values['low']:.4f} to {values['high']:.4f})"
