"""Norms, gates and rotary positions in Triton, each in one pass over its rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.elementwise.reference import Gate, Norm
from kvconvert.kernels.launches.triton import kernel


@kernel(do_not_specialize=["rows", "inner", "middle", "eps", "offset"])
def rms_norm_kernel(
    x,
    residual,
    gate,
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
    HAS_GATE: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """y = norm(x), or norm(x) silu(gate), or total = x + residual and y = norm(total), for ROWS rows; see `Norm`.

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
    if HAS_GATE:
        opened = tl.load(gate + here, mask=mask, other=0.0).to(tl.float32)
        values = values.to(DTYPE).to(tl.float32) * (opened / (1.0 + tl.exp(-opened)))
    tl.store(y + here, values.to(DTYPE), mask=mask)


def rms_norm(
    x: Tensor, weight: Tensor | None, kind: Norm, residual: Tensor | None = None, gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of x, or of x + residual, times silu(gate) if there is a gate; and that sum (x itself without a
    residual); both contiguous, if new.
    """
    columns, gate = x.shape[-1], None if gate is None else gate.contiguous()
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
            x, x if residual is None else residual, x if gate is None else gate, x if weight is None else weight, total,
            y, rows, sizes[2], columns, *strides[:3], sizes[1], kind.eps, kind.offset,
            ROWS=rows_per_program, COLUMNS=block, HAS_WEIGHT=weight is not None, HAS_RESIDUAL=residual is not None,
            HAS_GATE=gate is not None, ROUNDED=kind.rounded, num_warps=warps,
        )  # fmt: skip
    return y, total


def shape(columns: int) -> tuple[int, int, int]:
    """Columns as a power of two, rows per program (several of a head's few channels), and warps."""
    block = triton.next_power_of_2(columns)
    if block <= 256:
        return block, 1024 // max(block, 64), 4
    return block, 1, 4 if block <= 1024 else 8 if block <= 4096 else 16


# Columns per program.
COLUMNS = 1024


@kernel
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


# Heads per program.
HEADS = 8


@triton.jit
def _rotate(source, target, cos, sin, heads, head_stride, size, head_size, first,
            HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """Heads `first` and following of one token; products are rounded before they are added, as separately."""
    DTYPE: tl.constexpr = target.dtype.element_ty
    head = first + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    half = size // 2
    inside = column < half
    mask = (head < heads) & inside
    here = source + head.to(tl.int64) * head_stride + column
    there = target + head * head_size + column
    low = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(here + half, mask=mask, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + column, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + half + column, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + column, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + half + column, mask=inside, other=0.0).to(tl.float32)
    turned_low = (low * cos_low).to(DTYPE).to(tl.float32) - (high * sin_low).to(DTYPE).to(tl.float32)
    turned_high = (high * cos_high).to(DTYPE).to(tl.float32) + (low * sin_high).to(DTYPE).to(tl.float32)
    tl.store(there, turned_low.to(DTYPE), mask=mask)
    tl.store(there + half, turned_high.to(DTYPE), mask=mask)
    if REST > 0:
        rest = size + tl.arange(0, REST)[None, :]
        mask = (head < heads) & (rest < head_size)
        values = tl.load(source + head.to(tl.int64) * head_stride + rest, mask=mask, other=0.0)
        tl.store(target + head * head_size + rest, values, mask=mask)


@kernel(do_not_specialize=["tokens"])
def rotary_kernel(
    q,
    k,
    cos,
    sin,
    q_output,
    k_output,
    tokens,
    q_heads,
    k_heads,
    size,
    head_size,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """HEADS heads of one token's queries or keys; outputs are [B, T, heads, head_size]."""
    place = tl.program_id(0)
    batch, token = (place // tokens).to(tl.int64), (place % tokens).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = (q_heads + HEADS - 1) // HEADS
    cos += batch * cos_batch_stride + token * cos_token_stride
    sin += batch * sin_batch_stride + token * sin_token_stride
    if block < q_blocks:
        source = q + batch * q_batch_stride + token * q_token_stride
        target = q_output + place.to(tl.int64) * q_heads * head_size
        _rotate(source, target, cos, sin, q_heads, q_head_stride, size, head_size, block * HEADS, HEADS, HALF, REST)
    else:
        source = k + batch * k_batch_stride + token * k_token_stride
        target = k_output + place.to(tl.int64) * k_heads * head_size
        first = (block - q_blocks) * HEADS
        _rotate(source, target, cos, sin, k_heads, k_head_stride, size, head_size, first, HEADS, HALF, REST)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary_reference`; the results are [B, heads, T, D] by shape and lie in memory as [B, T, heads, D]."""
    batch, q_heads, tokens, head_size = q.shape
    k_heads, size = k.shape[1], cos.shape[-1]
    outputs = [torch.empty(batch, tokens, x.shape[1], head_size, dtype=q.dtype, device=q.device) for x in (q, k)]
    if batch * tokens:
        tables = [0 if table.shape[0] == 1 else table.stride(0) for table in (cos, sin)]
        rotary_kernel[(batch * tokens, triton.cdiv(q_heads, HEADS) + triton.cdiv(k_heads, HEADS))](
            q, k, cos, sin, *outputs, tokens, q_heads, k_heads, size, head_size, *q.stride()[:3], *k.stride()[:3],
            tables[0], cos.stride(1), tables[1], sin.stride(1),
            HEADS=HEADS, HALF=triton.next_power_of_2(size // 2),
            REST=triton.next_power_of_2(head_size - size) if head_size > size else 0, num_warps=4,
            # Products would otherwise be added before they are rounded.
            enable_fp_fusion=False,
        )  # fmt: skip
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)
