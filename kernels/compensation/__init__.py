"""Rounding columns of a weight one after another, so that those not yet rounded make up for each one's error (GPTQ).

`kvconvert.calibration.gptq` says what is computed and why; here is a block of its columns.
"""

from __future__ import annotations

from torch import Tensor

from kvconvert.kernels import device as devices
from kvconvert.kernels.compensation.reference import round_columns_reference_


def round_columns_(columns: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, levels: int) -> Tensor:
    """Round a block of columns in place, each after the errors of those before it; see `round_columns_reference_`."""
    if devices.unsupported(columns.device) is not None:
        return round_columns_reference_(columns, scale, zero, factor, levels)
    from kvconvert.kernels.compensation import triton as launch

    return launch.round_columns_(columns, scale, zero, factor, levels)
