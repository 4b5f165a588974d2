"""Rounding columns of a weight one after another, so that those not yet rounded make up for each one's error (GPTQ).

`kvconvert.calibration.gptq` says what is computed and why; here is a block of its columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.kernels import device as devices


def round_columns_(columns: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, levels: int) -> Tensor:
    """Round a block of columns in place, each after the errors of those before it; see `round_columns_reference_`."""
    if devices.unsupported(columns.device) is not None:
        return round_columns_reference_(columns, scale, zero, factor, levels)
    from kvconvert.kernels.compensation import triton as launch

    return launch.round_columns_(columns, scale, zero, factor, levels)


def round_columns_reference_(columns: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, levels: int) -> Tensor:
    """Round columns in their order to (q - zero) scale, q = 0 ... levels, in place.

    With e_i = (w_i - Q(w_i)) / U_ii, which is returned, every later column j of the block loses e_i U_ij before it is
    rounded.

    Args:
        columns: float32 [n, outputs], a column of the weight in each row.
        scale, zero: float32 [n, outputs], the grid of each; zeros are integers.
        factor: float32 [n, n], U; what is below its diagonal is not read.
        levels: the largest code.

    Returns:
        float32 [n, outputs]: e, by which columns beyond the block are corrected.
    """
    errors = torch.empty_like(columns)
    for i in range(len(columns)):
        codes = (columns[i] / scale[i]).round_().add_(zero[i]).clamp_(0, levels)
        nearest = codes.sub_(zero[i]).mul_(scale[i])
        errors[i] = (columns[i] - nearest) / factor[i, i]
        columns[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
        columns[i] = nearest
    return errors
