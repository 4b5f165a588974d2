"""Packed states, and a token of the rules that read them, in Triton, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.states.reference import EPSILON, LARGEST_CODE

if TYPE_CHECKING:
    from kvconvert.kernels.states import PackedStates

_LARGEST = tl.constexpr(LARGEST_CODE)
_EPSILON = tl.constexpr(EPSILON)
# Numbers that a program packs or unpacks.
NUMBERS = 4096


@triton.jit
def _load(high, low, scales, row, exists, CHANNELS: tl.constexpr):
    """float32 [rows, CHANNELS] of rows [rows, 1]."""
    ROWS: tl.constexpr = row.shape[0]
    half = tl.arange(0, CHANNELS // 2)[None, :]
    channel = tl.arange(0, CHANNELS)[None, :]
    below = tl.load(low + row * (CHANNELS // 2) + half, mask=exists, other=0).to(tl.int32)
    below = tl.reshape(tl.join(below & 15, below >> 4), [ROWS, CHANNELS])
    above = tl.load(high + row * CHANNELS + channel, mask=exists, other=0).to(tl.int32)
    return (above * 16 + below).to(tl.float32) * tl.load(scales + row, mask=exists, other=0.0)


@triton.jit
def _store(states, high, low, scales, row, exists, CHANNELS: tl.constexpr):
    """Pack float32 [rows, CHANNELS] into rows [rows, 1]."""
    ROWS: tl.constexpr = row.shape[0]
    half = tl.arange(0, CHANNELS // 2)[None, :]
    channel = tl.arange(0, CHANNELS)[None, :]
    # Comparisons with what is not a number are false, so that such a row's scale would be its largest number.
    finite = tl.sum(states * 0.0, 1)[:, None]
    scale = tl.max(tl.abs(states), 1)[:, None] / _LARGEST + finite
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    code = tl.floor(states * inverse + 0.5)
    code = tl.where(code == code, code, 0.0)
    code = tl.minimum(tl.maximum(code, -_LARGEST), _LARGEST).to(tl.int32)
    below = tl.reshape(code & 15, [ROWS, CHANNELS // 2, 2])
    even, odd = tl.split(below)
    tl.store(high + row * CHANNELS + channel, (code >> 4).to(tl.int8), mask=exists)
    tl.store(low + row * (CHANNELS // 2) + half, (even | (odd << 4)).to(tl.uint8), mask=exists)
    tl.store(scales + row, scale, mask=exists)


@kernel(do_not_specialize=["rows"])
def pack_kernel(states, high, low, scales, rows, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    exists = row < rows
    value = tl.load(states + row * CHANNELS + tl.arange(0, CHANNELS)[None, :], mask=exists, other=0.0)
    _store(value, high, low, scales, row, exists, CHANNELS)


@kernel(do_not_specialize=["rows"])
def unpack_kernel(states, high, low, scales, rows, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    exists = row < rows
    value = _load(high, low, scales, row, exists, CHANNELS)
    tl.store(states + row * CHANNELS + tl.arange(0, CHANNELS)[None, :], value, mask=exists)


@kernel
def gated_delta_kernel(
    query,
    key,
    value,
    decay,
    beta,
    high,
    low,
    scales,
    output,
    query_stride,
    key_stride,
    value_stride,
    decay_stride,
    beta_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """One head of one sequence. Strides are those of sequences; heads lie side by side."""
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = ((sequence * HEADS + head) * KEY_DIM + tl.arange(0, KEY_DIM))[:, None]
    exists = row >= 0
    channel, place = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    shared = (head // SHARED) * KEY_DIM + channel
    q = tl.load(query + sequence * query_stride + shared).to(tl.float32)
    k = tl.load(key + sequence * key_stride + shared).to(tl.float32)
    v = tl.load(value + sequence * value_stride + head * VALUE_DIM + place).to(tl.float32)
    if BY_CHANNEL:
        kept = tl.exp(tl.load(decay + sequence * decay_stride + head * KEY_DIM + channel).to(tl.float32))[:, None]
    else:
        kept = tl.exp(tl.load(decay + sequence * decay_stride + head).to(tl.float32))
    rate = tl.load(beta + sequence * beta_stride + head).to(tl.float32)
    q = q / (tl.sqrt(tl.sum(q * q) + _EPSILON) * tl.sqrt(KEY_DIM * 1.0))
    k = k / tl.sqrt(tl.sum(k * k) + _EPSILON)
    state = _load(high, low, scales, row, exists, VALUE_DIM) * kept
    change = (v - tl.sum(state * k[:, None], 0)) * rate
    state += k[:, None] * change[None, :]
    found = tl.sum(state * q[:, None], 0)
    tl.store(output + (sequence * HEADS + head) * VALUE_DIM + place, found.to(output.dtype.element_ty))
    _store(state, high, low, scales, row, exists, VALUE_DIM)


@kernel
def selective_kernel(
    x,
    dt,
    decay,
    b,
    c,
    d,
    dt_bias,
    gate,
    high,
    low,
    scales,
    output,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    gate_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """One head of one sequence. Strides are those of sequences; heads lie side by side."""
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel, place = tl.arange(0, HEAD_DIM), tl.arange(0, STATE)
    row = ((sequence * HEADS + head) * HEAD_DIM + channel)[:, None]
    exists = row >= 0
    value = tl.load(x + sequence * x_stride + head * HEAD_DIM + channel).to(tl.float32)
    step = tl.load(dt + sequence * dt_stride + head).to(tl.float32)
    if HAS_BIAS:
        step += tl.load(dt_bias + head).to(tl.float32)
    step = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    kept = tl.exp(step * tl.load(decay + head).to(tl.float32))
    own = (head // SHARED) * STATE + place
    written = tl.load(b + sequence * b_stride + own).to(tl.float32)
    read = tl.load(c + sequence * c_stride + own).to(tl.float32)
    state = _load(high, low, scales, row, exists, STATE) * kept + (step * value)[:, None] * written[None, :]
    found = tl.sum(state * read[None, :], 1)
    if HAS_D:
        found += tl.load(d + head).to(tl.float32) * value
    if HAS_GATE:
        open_ = tl.load(gate + sequence * gate_stride + head * HEAD_DIM + channel).to(tl.float32)
        found = found * open_ / (1.0 + tl.exp(-open_))
    tl.store(output + (sequence * HEADS + head) * HEAD_DIM + channel, found.to(output.dtype.element_ty))
    _store(state, high, low, scales, row, exists, STATE)


def _rows(packed: PackedStates) -> tuple[int, int, int]:
    """Rows, channels, and rows of a program."""
    channels = packed.high.shape[-1]
    return packed.scales.numel(), channels, max(1, NUMBERS // channels)


def pack(states: Tensor, packed: PackedStates) -> None:
    """`pack_reference` into `packed`; states contiguous."""
    rows, channels, together = _rows(packed)
    pack_kernel[(triton.cdiv(rows, together),)](
        states, *packed, rows, CHANNELS=channels, ROWS=together, num_warps=4
    )  # fmt: skip


def unpack(packed: PackedStates) -> Tensor:
    """`unpack_reference`."""
    rows, channels, together = _rows(packed)
    states = torch.empty(packed.high.shape, dtype=torch.float32, device=packed.high.device)
    unpack_kernel[(triton.cdiv(rows, together),)](
        states, *packed, rows, CHANNELS=channels, ROWS=together, num_warps=4
    )  # fmt: skip
    return states


def _side_by_side(x: Tensor) -> Tensor:
    """A tensor [B, ...] of which what belongs to a sequence lies side by side."""
    return x if x[0].is_contiguous() else x.contiguous()


def gated_delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, packed: PackedStates
) -> Tensor:
    """`gated_delta_step_reference` over packed states."""
    count, heads, key_dim, value_dim = packed.high.shape
    query, key, value, decay, beta = map(_side_by_side, (query, key, value, decay, beta))
    output = torch.empty(count, 1, heads, value_dim, dtype=value.dtype, device=value.device)
    gated_delta_kernel[(heads, count)](
        query, key, value, decay, beta, *packed, output,
        query.stride(0), key.stride(0), value.stride(0), decay.stride(0), beta.stride(0),
        HEADS=heads, SHARED=heads // query.shape[2], KEY_DIM=key_dim, VALUE_DIM=value_dim, BY_CHANNEL=decay.ndim == 4,
        num_warps=8 if key_dim * value_dim > 8192 else 4,
    )  # fmt: skip
    return output


def selective_step(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    gate: Tensor | None,
    packed: PackedStates,
) -> Tensor:
    """`selective_step_reference` over packed states."""
    count, heads, head_dim, state = packed.high.shape
    x, dt, b, c = map(_side_by_side, (x, dt, b, c))
    gate = x if gate is None else _side_by_side(gate)
    parameters = [decay if value is None else value.contiguous() for value in (decay, d, dt_bias)]
    output = torch.empty(count, heads, head_dim, dtype=x.dtype, device=x.device)
    selective_kernel[(heads, count)](
        x, dt, parameters[0], b, c, *parameters[1:], gate, *packed, output,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), gate.stride(0),
        HEADS=heads, SHARED=heads // b.shape[1], HEAD_DIM=head_dim, STATE=state,
        HAS_D=d is not None, HAS_BIAS=dt_bias is not None, HAS_GATE=gate is not x, num_warps=4,
    )  # fmt: skip
    return output
