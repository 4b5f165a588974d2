"""The kernels of a pass over several sequences: append and copies to the workspace."""

from __future__ import annotations

import triton.language as tl

from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.ragged import tables
from kvconvert.kernels.rotate.triton.kernels import rotate_rows

TOKEN = tl.constexpr(tables.TOKEN)
COPY = tl.constexpr(tables.COPY)


@kernel(do_not_specialize=["count"])
def append_kernel(
    queries,
    output,
    keys,
    values,
    base,
    buffers,
    tokens,
    key_matrix,
    value_matrix,
    key_normaliser,
    value_normaliser,
    count,
    query_head_stride,
    query_stride,
    output_head_stride,
    output_stride,
    key_head_stride,
    key_stride,
    value_head_stride,
    value_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_INNER: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATE_KEYS: tl.constexpr,
    ROTATE_VALUES: tl.constexpr,
):
    """ROWS tokens of one head: first of keys, then of values, then of queries."""
    blocks = tl.cdiv(count, ROWS)
    line = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS).to(tl.int64)
    present = row < count
    if line < HEADS:
        sequence = tl.load(tokens + row * TOKEN, mask=present, other=0)
        index = tl.load(tokens + row * TOKEN + 1, mask=present, other=-1)
        target = tl.load(buffers + sequence * 4) + line * tl.load(buffers + sequence * 4 + 1) + index * SIZE
        rotate_rows(
            (keys + line.to(tl.int64) * key_head_stride + row * key_stride)[:, None],
            base + tl.multiple_of(target, 8)[:, None], (index >= 0)[:, None], key_matrix, key_normaliser,
            SIZE, SIZE_TILE, COLUMNS, INNER, False, ROTATE_KEYS,
        )  # fmt: skip
    elif line < 2 * HEADS:
        head = line - HEADS
        sequence = tl.load(tokens + row * TOKEN, mask=present, other=0)
        index = tl.load(tokens + row * TOKEN + 2, mask=present, other=-1)
        target = tl.load(buffers + sequence * 4 + 2) + head * tl.load(buffers + sequence * 4 + 3) + index * VALUE_SIZE
        rotate_rows(
            (values + head.to(tl.int64) * value_head_stride + row * value_stride)[:, None],
            base + tl.multiple_of(target, 8)[:, None], (index >= 0)[:, None], value_matrix, value_normaliser,
            VALUE_SIZE, VALUE_TILE, VALUE_COLUMNS, VALUE_INNER, False, ROTATE_VALUES,
        )  # fmt: skip
    elif ROTATE_KEYS:
        query_head = (line - 2 * HEADS).to(tl.int64)
        rotate_rows(
            (queries + query_head * query_head_stride + row * query_stride)[:, None],
            (output + query_head * output_head_stride + row * output_stride)[:, None], present[:, None], key_matrix,
            key_normaliser, SIZE, SIZE_TILE, COLUMNS, INNER, False, True,
        )  # fmt: skip


@kernel(do_not_specialize=["key_head_stride", "value_head_stride"])
def copy_kernel(
    base,
    buffers,
    copies,
    keys,
    values,
    key_head_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    COPIED: tl.constexpr,
):
    """One head of one stretch of full-precision tokens from its buffer to the workspace; strides in units of 8."""
    item, head = copies + tl.program_id(0) // HEADS * COPY, tl.program_id(0) % HEADS
    count = tl.load(item + 4)
    if count == 0:
        return
    buffer = buffers + tl.load(item) * 4
    first, place = tl.load(item + 2), tl.load(item + 3)
    token = tl.arange(0, COPIED)[:, None]
    if tl.load(item + 1) == 0:
        source = base + tl.multiple_of(tl.load(buffer) + head * tl.load(buffer + 1), 8) + first * SIZE
        target = keys + head.to(tl.int64) * key_head_stride * 8 + place * SIZE
        channel = tl.arange(0, SIZE_TILE)[None, :]
        mask = (token < count) & (channel < SIZE)
        at = token * SIZE + channel
        tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)
    else:
        value_source = base + tl.multiple_of(tl.load(buffer + 2) + head * tl.load(buffer + 3), 8) + first * VALUE_SIZE
        value_target = values + head.to(tl.int64) * value_head_stride * 8 + place * VALUE_SIZE
        value_channel = tl.arange(0, VALUE_TILE)[None, :]
        value_mask = (token < count) & (value_channel < VALUE_SIZE)
        value_at = token * VALUE_SIZE + value_channel
        tl.store(value_target + value_at, tl.load(value_source + value_at, mask=value_mask), mask=value_mask)
