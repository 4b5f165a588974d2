"""Packed states, and a token of the rules that read them, in Triton, and their launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.states.reference import EPSILON, LARGEST_CODE, SelectiveToken, channels_of

_LARGEST = tl.constexpr(LARGEST_CODE)
_EPSILON = tl.constexpr(EPSILON)
# 1.5 * 2^23: added to a number it leaves its integer in the lowest bits, without instructions that convert types.
_SHIFT, _SHIFT_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
# Numbers that a program packs or unpacks, and channels of a key that the kernel of the delta rule reads at once.
NUMBERS, TILE = 4096, 16
# From which on programs of the delta rule have half as many threads: about four for each of an H200's multiprocessors.
MANY_PROGRAMS = 512


@triton.jit
def _load(high, low, scales, row, CHANNELS: tl.constexpr):
    """float32 codes of rows [rows, 1]: their first and their second halves, and the rows' scales."""
    HALF: tl.constexpr = CHANNELS // 2
    place = tl.arange(0, HALF)[None, :]
    below = tl.load(low + row * HALF + place).to(tl.int32)
    first = tl.load(high + row * CHANNELS + place).to(tl.int32)
    second = tl.load(high + row * CHANNELS + HALF + place).to(tl.int32)
    first = ((first * 16 + (below & 15)) + _SHIFT_BITS).to(tl.float32, bitcast=True) - _SHIFT
    second = ((second * 16 + (below >> 4)) + _SHIFT_BITS).to(tl.float32, bitcast=True) - _SHIFT
    return first, second, tl.load(scales + row)


@triton.jit
def _parts(packed, matrix, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Where the bytes of a matrix [ROWS, CHANNELS] lie: upper bits, lower bits, scales."""
    high = packed + matrix.to(tl.int64) * (ROWS * (CHANNELS * 3 // 2 + 4))
    low = high + ROWS * CHANNELS
    scales = low + ROWS * (CHANNELS // 2)
    return high.to(tl.pointer_type(tl.int8)), low, scales.to(tl.pointer_type(tl.float32))


@triton.jit
def _larger(a, b):
    """The larger number; none where one is none."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store(first, second, high, low, scales, row, CHANNELS: tl.constexpr):
    """Pack rows [rows, 1], given as halves."""
    HALF: tl.constexpr = CHANNELS // 2
    place = tl.arange(0, HALF)[None, :]
    scale = tl.reduce(_larger(tl.abs(first), tl.abs(second)), 1, _larger)[:, None] / _LARGEST
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    first = (first * inverse + _SHIFT).to(tl.int32, bitcast=True)
    second = (second * inverse + _SHIFT).to(tl.int32, bitcast=True)
    tl.store(high + row * CHANNELS + place, (first >> 4).to(tl.int8))
    tl.store(high + row * CHANNELS + HALF + place, (second >> 4).to(tl.int8))
    tl.store(low + row * HALF + place, ((first & 15) | ((second & 15) << 4)).to(tl.uint8))
    tl.store(scales + row, scale)


@kernel
def pack_kernel(states, packed, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    """TILE rows of one matrix [ROWS, CHANNELS]; the last tile of a matrix begins where it ends with the matrix."""
    matrix = tl.program_id(0)
    row = (tl.minimum(tl.program_id(1) * TILE, ROWS - TILE) + tl.arange(0, TILE))[:, None]
    place = states + (matrix.to(tl.int64) * ROWS + row) * CHANNELS + tl.arange(0, CHANNELS // 2)[None, :]
    high, low, scales = _parts(packed, matrix, ROWS, CHANNELS)
    _store(tl.load(place), tl.load(place + CHANNELS // 2), high, low, scales, row, CHANNELS)


@kernel
def unpack_kernel(states, packed, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    """TILE rows of one matrix, as `pack_kernel` takes them."""
    matrix = tl.program_id(0)
    row = (tl.minimum(tl.program_id(1) * TILE, ROWS - TILE) + tl.arange(0, TILE))[:, None]
    high, low, scales = _parts(packed, matrix, ROWS, CHANNELS)
    first, second, scale = _load(high, low, scales, row, CHANNELS)
    place = states + (matrix.to(tl.int64) * ROWS + row) * CHANNELS + tl.arange(0, CHANNELS // 2)[None, :]
    tl.store(place, first * scale)
    tl.store(place + CHANNELS // 2, second * scale)


@kernel
def gated_delta_kernel(
    query,
    key,
    value,
    decay,
    beta,
    packed,
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
    TILE: tl.constexpr,
):
    """One head of one sequence, TILE channels of its key at a time. Strides are those of sequences; heads lie side by
    side.

    What the state gives for key and query is found first, of the query from the old state, which with what is added to
    it is that of the new one: so a program never holds more than a tile of numbers, and others run beside it.
    """
    HALF: tl.constexpr = VALUE_DIM // 2
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    high, low, scales = _parts(packed, sequence * HEADS + head, KEY_DIM, VALUE_DIM)
    channel, place = tl.arange(0, KEY_DIM), tl.arange(0, HALF)
    query += sequence * query_stride + (head // SHARED) * KEY_DIM
    key += sequence * key_stride + (head // SHARED) * KEY_DIM
    q, k = tl.load(query + channel).to(tl.float32), tl.load(key + channel).to(tl.float32)
    q_factor = 1.0 / (tl.sqrt(tl.sum(q * q) + _EPSILON) * tl.sqrt(KEY_DIM * 1.0))
    k_factor = 1.0 / tl.sqrt(tl.sum(k * k) + _EPSILON)
    product = tl.sum(q * k) * q_factor * k_factor
    decay += sequence * decay_stride + head * (KEY_DIM if BY_CHANNEL else 1)
    by_key_first = tl.zeros([TILE, HALF], tl.float32)
    by_key_second, by_query_first, by_query_second = by_key_first, by_key_first, by_key_first
    for begin in range(0, KEY_DIM, TILE):
        row = begin + tl.arange(0, TILE)
        first, second, scale = _load(high, low, scales, row[:, None], VALUE_DIM)
        kept = tl.exp(tl.load(decay + row * BY_CHANNEL).to(tl.float32))[:, None] * scale
        by_key = kept * (tl.load(key + row).to(tl.float32) * k_factor)[:, None]
        by_query = kept * (tl.load(query + row).to(tl.float32) * q_factor)[:, None]
        by_key_first += first * by_key
        by_key_second += second * by_key
        by_query_first += first * by_query
        by_query_second += second * by_query
    values = value + sequence * value_stride + head * VALUE_DIM + place
    rate = tl.load(beta + sequence * beta_stride + head).to(tl.float32)
    added_first = (tl.load(values).to(tl.float32) - tl.sum(by_key_first, 0)) * rate
    added_second = (tl.load(values + HALF).to(tl.float32) - tl.sum(by_key_second, 0)) * rate
    found = output + (sequence * HEADS + head) * VALUE_DIM + place
    tl.store(found, (tl.sum(by_query_first, 0) + product * added_first).to(output.dtype.element_ty))
    tl.store(found + HALF, (tl.sum(by_query_second, 0) + product * added_second).to(output.dtype.element_ty))
    for begin in range(0, KEY_DIM, TILE):
        row = begin + tl.arange(0, TILE)
        first, second, scale = _load(high, low, scales, row[:, None], VALUE_DIM)
        kept = tl.exp(tl.load(decay + row * BY_CHANNEL).to(tl.float32))[:, None] * scale
        own = (tl.load(key + row).to(tl.float32) * k_factor)[:, None]
        first = first * kept + own * added_first[None, :]
        second = second * kept + own * added_second[None, :]
        _store(first, second, high, low, scales, row[:, None], VALUE_DIM)


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
    packed,
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
    channel, place = tl.arange(0, HEAD_DIM), tl.arange(0, STATE // 2)
    high, low, scales = _parts(packed, sequence * HEADS + head, HEAD_DIM, STATE)
    row = channel[:, None]
    value = tl.load(x + sequence * x_stride + head * HEAD_DIM + channel).to(tl.float32)
    step = tl.load(dt + sequence * dt_stride + head).to(tl.float32)
    if HAS_BIAS:
        step += tl.load(dt_bias + head).to(tl.float32)
    step = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    kept = tl.exp(step * tl.load(decay + head).to(tl.float32))
    own = (head // SHARED) * STATE + place
    written, read = b + sequence * b_stride + own, c + sequence * c_stride + own
    first, second, scale = _load(high, low, scales, row, STATE)
    scale, added = scale * kept, (step * value)[:, None]
    first = first * scale + added * tl.load(written).to(tl.float32)[None, :]
    second = second * scale + added * tl.load(written + STATE // 2).to(tl.float32)[None, :]
    found = first * tl.load(read).to(tl.float32)[None, :] + second * tl.load(read + STATE // 2).to(tl.float32)[None, :]
    found = tl.sum(found, 1)
    if HAS_D:
        found += tl.load(d + head).to(tl.float32) * value
    if HAS_GATE:
        open_ = tl.load(gate + sequence * gate_stride + head * HEAD_DIM + channel).to(tl.float32)
        found = found * open_ / (1.0 + tl.exp(-open_))
    tl.store(output + (sequence * HEADS + head) * HEAD_DIM + channel, found.to(output.dtype.element_ty))
    _store(first, second, high, low, scales, row, STATE)


def _tiles(states: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Programs that pack or unpack states [B, ..., K, N], and their constants."""
    *_, rows, channels = states.shape
    tile = min(1 << (rows.bit_length() - 1), max(1, NUMBERS // channels))
    grid = states.numel() // (rows * channels), triton.cdiv(rows, tile)
    return grid, {"ROWS": rows, "CHANNELS": channels, "TILE": tile, "num_warps": 4}


def pack(states: Tensor, packed: Tensor) -> None:
    """`pack_reference` into `packed`; both contiguous."""
    grid, constants = _tiles(states)
    pack_kernel[grid](states, packed, **constants)


def unpack(packed: Tensor) -> Tensor:
    """`unpack_reference`."""
    shape = *packed.shape[:-1], channels_of(packed)
    states = torch.empty(shape, dtype=torch.float32, device=packed.device)
    grid, constants = _tiles(states)
    unpack_kernel[grid](states, packed, **constants)
    return states


def _side_by_side(x: Tensor) -> Tensor:
    """A tensor [B, ...] of which what belongs to a sequence lies side by side."""
    return x if x[0].is_contiguous() else x.contiguous()


def gated_delta_step(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, packed: Tensor) -> Tensor:
    """`gated_delta_step_reference` over packed states."""
    (count, heads, key_dim), value_dim = packed.shape[:3], channels_of(packed)
    query, key, value, decay, beta = map(_side_by_side, (query, key, value, decay, beta))
    output = torch.empty(count, 1, heads, value_dim, dtype=value.dtype, device=value.device)
    # Programs of few threads wait less for one another, and where they are few each has more to do at once.
    many = count * heads >= MANY_PROGRAMS
    gated_delta_kernel[(heads, count)](
        query, key, value, decay, beta, packed, output,
        query.stride(0), key.stride(0), value.stride(0), decay.stride(0), beta.stride(0),
        HEADS=heads, SHARED=heads // query.shape[2], KEY_DIM=key_dim, VALUE_DIM=value_dim, BY_CHANNEL=decay.ndim == 4,
        TILE=min(key_dim, TILE), num_warps=2 if many else 4,
    )  # fmt: skip
    return output


def selective_step(token: SelectiveToken, packed: Tensor) -> Tensor:
    """`selective_step_reference` over packed states."""
    x, dt, decay, b, c, d, dt_bias, gate = token
    (count, heads, head_dim), state = packed.shape[:3], channels_of(packed)
    x, dt, b, c = map(_side_by_side, (x, dt, b, c))
    gate = x if gate is None else _side_by_side(gate)
    parameters = [decay if value is None else value.contiguous() for value in (decay, d, dt_bias)]
    output = torch.empty(count, heads, head_dim, dtype=x.dtype, device=x.device)
    selective_kernel[(heads, count)](
        x, dt, parameters[0], b, c, *parameters[1:], gate, packed, output,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), gate.stride(0),
        HEADS=heads, SHARED=heads // b.shape[1], HEAD_DIM=head_dim, STATE=state,
        HAS_D=d is not None, HAS_BIAS=dt_bias is not None, HAS_GATE=gate is not x, num_warps=4,
    )  # fmt: skip
    return output
