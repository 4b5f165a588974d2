"""Activation of one projection times another, in one pass over both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.elementwise.reference import Gate

# Columns per program.
COLUMNS = 1024


@triton.jit
def gated_kernel(
    gate,
    up,
    y,
    columns,
    gate_stride,
    up_stride,
    alpha,
    limit,
    offset,
    ACTIVATION: tl.constexpr,
    CLAMPED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = activation(gate) (up + offset) for one row and COLUMNS columns; see `Gate`.

    The activation is computed in float32 and rounded before it is multiplied, as separate operations would.
    """
    DTYPE: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if CLAMPED:
        # A comparison lets NaN through.
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    if ACTIVATION == "silu":
        active = g / (1.0 + tl.exp(-alpha * g))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh z) / 2 = sigmoid(2 z)
        active = g / (1.0 + tl.exp(-2.0 * 0.7978845608028654 * (g + 0.044715 * g * g * g)))
    elif ACTIVATION == "gelu":
        active = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    else:
        active = tl.where(g < 0.0, 0.0, g)
    active = active.to(DTYPE).to(tl.float32)
    shifted = (u + offset).to(DTYPE).to(tl.float32)
    tl.store(y + row * columns + column, (active * shifted).to(DTYPE), mask=mask)


def gated(gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
    """`gated_reference` for [..., columns] whose last two dimensions alone may be strided; the result is contiguous."""
    shape, columns = gate.shape, gate.shape[-1]
    gate, up = gate.reshape(-1, columns), up.reshape(-1, columns)
    y = torch.empty(shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        clamped = kind.limit != float("inf")
        gated_kernel[(gate.shape[0], triton.cdiv(columns, COLUMNS))](
            gate, up, y, columns, gate.stride(0), up.stride(0), kind.alpha, kind.limit if clamped else 0.0, kind.offset,
            ACTIVATION=kind.activation, CLAMPED=clamped, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return y
