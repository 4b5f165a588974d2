"""A block of columns as one launch: outputs are independent, so that a program takes some of them through all columns.

Errors of the columns before are read back from memory, where the same program has written them, several at a time lest
each wait for the one before. That is n^2 / 2 multiplications for each output, as many as to move later columns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.launches.triton import kernel

# Of one program: few, so that a weight of 4,096 outputs has a program for each multiprocessor.
OUTPUTS = 32
# Columns whose errors are read at once.
COLUMNS = 16
# Adding and subtracting it rounds a float32 below 2^22 to an integer, halves to the even one.
ROUNDER = tl.constexpr(12582912.0)


@kernel(do_not_specialize=["count"])
def round_columns_kernel(
    columns,
    scale,
    zero,
    factor,
    errors,
    count,
    outputs,
    factor_stride,
    LEVELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """See `round_columns_reference_`; tensors of columns are contiguous."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = output < outputs
    for i in range(count):
        at = i * outputs + output
        value = tl.load(columns + at, mask=mask, other=0.0)
        for first in range(0, i, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            places = errors + column[:, None] * outputs + output[None, :]
            error = tl.load(places, mask=(column < i)[:, None] & mask[None, :], other=0.0)
            share = tl.load(factor + column * factor_stride + i, mask=column < i, other=0.0)
            value -= tl.sum(error * share[:, None], 0)
        step = tl.load(scale + at, mask=mask, other=1.0)
        lowest = -tl.load(zero + at, mask=mask, other=0.0)
        position = tl.minimum(tl.maximum(value / step, lowest), lowest + LEVELS)
        nearest = ((position + ROUNDER) - ROUNDER) * step
        tl.store(errors + at, (value - nearest) / tl.load(factor + i * factor_stride + i), mask=mask)
        tl.store(columns + at, nearest, mask=mask)
        tl.debug_barrier()  # errors are in memory before they are read


def round_columns_(columns: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, levels: int) -> Tensor:
    """See `round_columns_reference_`."""
    errors, outputs = torch.empty_like(columns), columns.shape[1]
    round_columns_kernel[(triton.cdiv(outputs, OUTPUTS),)](
        columns, scale, zero, factor, errors, len(columns), outputs, factor.stride(0),
        LEVELS=levels, OUTPUTS=OUTPUTS, COLUMNS=COLUMNS, num_warps=OUTPUTS // 32,
    )  # fmt: skip
    return errors
