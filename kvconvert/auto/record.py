"""What a search leaves in the working directory."""

from __future__ import annotations

from pydantic import ValidationError

from kvconvert.bundle.manifest import Allocation, WeightAllocation
from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import UsageError

NAME, WEIGHTS_NAME = "allocation", "weights"


def read_allocation(directory: WorkDir) -> Allocation | None:
    """The outcome of a finished search; None where it has not finished.

    Raises:
        UsageError: the file is damaged.
    """
    values = directory.measurement(NAME)
    try:
        return None if values is None else Allocation.model_validate(values)
    except ValidationError as error:
        raise UsageError(
            f"The allocation in {directory.path} cannot be read ({str(error).splitlines()[0]}); calibrate again with "
            "`restart=True`."
        ) from error


def read_weight_allocation(directory: WorkDir) -> WeightAllocation | None:
    """The outcome of a finished search of widths; None where it has not finished."""
    values = directory.measurement(WEIGHTS_NAME)
    return None if values is None else WeightAllocation.model_validate(values)
