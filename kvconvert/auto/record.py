"""What a search leaves where it commits its measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from kvconvert.bundle.manifest import Allocation, WeightAllocation
from kvconvert.errors import UsageError

NAME, WEIGHTS_NAME = "allocation", "weights"


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
    values = store.measurement(NAME)
    try:
        return None if values is None else Allocation.model_validate(values)
    except ValidationError as error:
        raise UsageError(
            f"The allocation in {store.path} cannot be read ({str(error).splitlines()[0]}); calibrate again with "
            "`restart=True`."
        ) from error


def read_weight_allocation(store: Measurements) -> WeightAllocation | None:
    """The outcome of a finished search of widths; None where it has not finished."""
    values = store.measurement(WEIGHTS_NAME)
    return None if values is None else WeightAllocation.model_validate(values)
