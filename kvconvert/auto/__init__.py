"""The allocation of a budget: one option for every layer, so that costs fit and the sum of losses is smallest.

A multiple-choice knapsack. It is solved exactly: layer by layer, of all selections so far only those are kept that no
other beats in cost and loss at once. Their number is bounded by the number of different sums of costs, a few thousand
for byte counts that have large common factors.

What a search found is committed with its measurements, under `NAME` and `WEIGHTS_NAME`, and read from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from kvconvert.bundle.manifest import Allocation, WeightAllocation
from kvconvert.errors import MissingError, first_line

NAME, WEIGHTS_NAME, KEPT_NAME = "allocation", "weights", "kept"


class KeptLinears(BaseModel):
    """The Linears that a search keeps at 16 bits, by their names in the loaded model."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    linears: list[str]


_Found = TypeVar("_Found", Allocation, WeightAllocation, KeptLinears)


class Measurements(Protocol):
    """Where measurements survive a kill: a working store."""

    path: Path

    def measurement(self, name: str) -> dict[str, Any] | None:
        """A measurement that an earlier run committed, or None."""

    def commit_measurement(self, name: str, values: dict[str, Any]) -> None:
        """Write a measurement; once this returns it survives a kill."""


def read_allocation(store: Measurements) -> Allocation | None:
    """The outcome of a finished search; None where it has not finished.

    Raises:
        UsageError: the file is damaged.
    """
    return _read(store, NAME, Allocation)


def read_weight_allocation(store: Measurements) -> WeightAllocation | None:
    """The outcome of a finished search of widths; None where it has not finished. Raises as `read_allocation` does."""
    return _read(store, WEIGHTS_NAME, WeightAllocation)


def read_kept(store: Measurements) -> KeptLinears | None:
    """The Linears that stay at 16 bits; None where their search has not finished. Raises as `read_allocation` does."""
    return _read(store, KEPT_NAME, KeptLinears)


def _read(store: Measurements, name: str, record: type[_Found]) -> _Found | None:
    values = store.measurement(name)
    try:
        return None if values is None else record.model_validate(values)
    except ValidationError as error:
        raise MissingError(
            f"The {name} in {store.path} cannot be read ({first_line(error)}); calibrate again with `restart=True`."
        ) from error


class Option(NamedTuple):
    """One way to store a layer.

    Attributes:
        cost: bytes, a whole number.
        loss: what is minimised in sum.
    """

    cost: int
    loss: float


class Selection(NamedTuple):
    """An option for every layer: indices, and the sums."""

    options: tuple[int, ...]
    cost: int
    loss: float


def allocate(layers: Sequence[Sequence[Option]], budget: int) -> Selection | None:
    """The selection of smallest loss within the budget.

    Args:
        layers: the options of each layer.
        budget: the costs may not add up to more.

    Returns:
        the selection, of smallest cost among equal ones; None where even the cheapest does not fit.
    """
    kept = [_efficient(options) for options in layers]
    # What the layers still to come cost at least.
    cheapest = np.array([min(options[i].cost for i in chosen) for options, chosen in zip(layers, kept, strict=True)])
    rest = np.append(np.cumsum(cheapest[::-1])[::-1], 0)[1:]
    costs, losses = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    for options, chosen, later in zip(layers, kept, rest, strict=True):
        added = np.array([options[i].cost for i in chosen], np.int64)
        lost = np.array([options[i].loss for i in chosen])
        sums, totals = (costs[:, None] + added).ravel(), (losses[:, None] + lost).ravel()
        fits = np.flatnonzero(sums + later <= budget)
        order = fits[np.lexsort((totals[fits], sums[fits]))]
        if not len(order):
            return None
        best = np.minimum.accumulate(totals[order])
        order = order[np.append(True, totals[order][1:] < best[:-1])]
        steps.append((order // len(chosen), np.array(chosen)[order % len(chosen)]))
        costs, losses = sums[order], totals[order]
    at = len(costs) - 1  # the largest cost has the smallest loss
    picked = []
    for before, choice in reversed(steps):
        picked.append(int(choice[at]))
        at = before[at]
    return Selection(tuple(reversed(picked)), int(costs[-1]), float(losses[-1]))


def _efficient(options: Sequence[Option]) -> list[int]:
    """The options that no other one beats in cost and loss, by rising cost."""
    order = sorted((o.cost, o.loss, i) for i, o in enumerate(options))
    kept: list[int] = []
    for _, loss, index in order:
        if not kept or loss < options[kept[-1]].loss:
            kept.append(index)
    return kept
