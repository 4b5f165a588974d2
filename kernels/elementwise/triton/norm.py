"""RMSNorm in one pass over each row, with the residual's addition before it where there is one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.elementwise.reference import Norm


@triton.jit(do_not_specialize=["rows", "inner", "eps", "offset"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    total,
    y,
    rows,
    inner,
    columns,
    outer_stride,
    middle_stride,
    inner_stride,
    middle,
    eps,
    offset,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """y = norm(x), or total = x + residual and y = norm(total), for ROWS rows; see `Norm`.

    Rows of x are numbered by three dimensions with strides of their own; all other tensors are contiguous.
    """
    DTYPE: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    place = (row // (inner * middle)).to(tl.int64) * outer_stride
    place += (row // inner % middle).to(tl.int64) * middle_stride + (row % inner).to(tl.int64) * inner_stride
    here = row.to(tl.int64) * columns + column
    values = tl.load(x + place + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + here, mask=mask, other=0.0).to(tl.float32)
        values = values.to(DTYPE)
        tl.store(total + here, values, mask=mask)
        values = values.to(tl.float32)
    mean = tl.sum(values * values, 1)[:, None] / columns
    values = values * tl.rsqrt(mean + eps)
    if HAS_WEIGHT:
        scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32) + offset
        if ROUNDED:
            values = values.to(DTYPE).to(tl.float32)
        values = values * scale
    tl.store(y + here, values.to(DTYPE), mask=mask)


def rms_norm(x: Tensor, weight: Tensor | None, kind: Norm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The norm of x, or of x + residual, and that sum (x itself without a residual); both contiguous, if new."""
    columns = x.shape[-1]
    if residual is not None:
        x, residual = x.contiguous(), residual.contiguous()
    elif x.dim() > 4:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    rows = y.numel() // columns if columns else 0
    if rows:
        # One row is as good as contiguous.
        sizes = (1,) * (4 - x.dim()) + tuple(x.shape)
        strides = (0,) * (4 - x.dim()) + tuple(x.stride())
        block, rows_per_program, warps = shape(columns)
        rms_norm_kernel[(triton.cdiv(rows, rows_per_program),)](
            x, x if residual is None else residual, x if weight is None else weight, total, y,
            rows, sizes[2], columns, *strides[:3], sizes[1], kind.eps, kind.offset,
            ROWS=rows_per_program, COLUMNS=block, HAS_WEIGHT=weight is not None, HAS_RESIDUAL=residual is not None,
            ROUNDED=kind.rounded, num_warps=warps,
        )  # fmt: skip
    return y, total


def shape(columns: int) -> tuple[int, int, int]:
    """Columns as a power of two, rows per program (several of a head's few channels), and warps."""
    block = triton.next_power_of_2(columns)
    if block <= 256:
        return block, 1024 // max(block, 64), 4
    return block, 1, 4 if block <= 1024 else 8 if block <= 4096 else 16
