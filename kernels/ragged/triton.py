"""A pass over several sequences: the kernels that append and copy to the workspace, and its launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.blocks import copy_tokens
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.kernels.pages.triton import padded
from kvconvert.kernels.pages.triton.center import launch_centers
from kvconvert.kernels.pages.triton.dequantize import dequantize_addressed
from kvconvert.kernels.prompt.triton import aligned, ragged_attention
from kvconvert.kernels.ragged import tables
from kvconvert.kernels.ragged.tables import COPIED_TOKENS, RaggedTables, TokensInBlocks
from kvconvert.kernels.rotate import Rotations
from kvconvert.kernels.rotate.matrices import hadamard_signs
from kvconvert.kernels.rotate.triton import rotate_rows

TOKEN = tl.constexpr(tables.TOKEN)
COPY = tl.constexpr(tables.COPY)
COPIED = tl.constexpr(COPIED_TOKENS)


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
    VALUE_SIZE: tl.constexpr,
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
            SIZE, False, ROTATE_KEYS,
        )  # fmt: skip
    elif line < 2 * HEADS:
        head = line - HEADS
        sequence = tl.load(tokens + row * TOKEN, mask=present, other=0)
        index = tl.load(tokens + row * TOKEN + 2, mask=present, other=-1)
        target = tl.load(buffers + sequence * 4 + 2) + head * tl.load(buffers + sequence * 4 + 3) + index * VALUE_SIZE
        rotate_rows(
            (values + head.to(tl.int64) * value_head_stride + row * value_stride)[:, None],
            base + tl.multiple_of(target, 8)[:, None], (index >= 0)[:, None], value_matrix, value_normaliser,
            VALUE_SIZE, False, ROTATE_VALUES,
        )  # fmt: skip
    elif ROTATE_KEYS:
        query_head = (line - 2 * HEADS).to(tl.int64)
        rotate_rows(
            (queries + query_head * query_head_stride + row * query_stride)[:, None],
            (output + query_head * output_head_stride + row * output_stride)[:, None], present[:, None], key_matrix,
            key_normaliser, SIZE, False, True,
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
    VALUE_SIZE: tl.constexpr,
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
        channel = tl.arange(0, padded(SIZE))[None, :]
        mask = (token < count) & (channel < SIZE)
        at = token * SIZE + channel
        tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)
    else:
        value_source = base + tl.multiple_of(tl.load(buffer + 2) + head * tl.load(buffer + 3), 8) + first * VALUE_SIZE
        value_target = values + head.to(tl.int64) * value_head_stride * 8 + place * VALUE_SIZE
        value_channel = tl.arange(0, padded(VALUE_SIZE))[None, :]
        value_mask = (token < count) & (value_channel < VALUE_SIZE)
        value_at = token * VALUE_SIZE + value_channel
        tl.store(value_target + value_at, tl.load(value_source + value_at, mask=value_mask), mask=value_mask)


# Tokens of a program of the append.
ROWS = 32
# Tile elements per thread of a copy.
PER_THREAD = 32


def append(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: RaggedTables,
    format: LayerFormat,
    rotations: Rotations,
) -> torch.Tensor:
    """Store new keys and values in their sequences' buffers and rotate what the scheme rotates, in one launch.

    Args:
        queries: [Hq, N, D]; rotated as the keys are.
        keys, values: [H, N, D] and [H, N, E].
        tables: the tables of the pass.
        format: the format of the layer's pages.
        rotations: which are rotated.

    Returns:
        the queries, rotated or as they were, [Hq, N, D].
    """
    queries, keys, values = (aligned(x) for x in (queries, keys, values))
    dtype, (query_heads, count, dim), (heads, _, value_dim) = keys.dtype, queries.shape, values.shape
    output = torch.empty_like(queries) if rotations.keys else queries
    key_signs = hadamard_signs(dim, dtype, keys.device) if rotations.keys else (keys, 1.0)
    value_signs = hadamard_signs(value_dim, dtype, keys.device) if rotations.values else (values, 1.0)
    constants = append_constants(format, *rotations)
    lines = 2 * heads + (query_heads if rotations.keys else 0)
    append_kernel[(-(-count // ROWS) * lines,)](
        queries, output, keys, values, tables.base, tables.buffers, tables.tokens, key_signs[0], value_signs[0],
        key_signs[1], value_signs[1], count, *queries.stride()[:2], *output.stride()[:2], *keys.stride()[:2],
        *values.stride()[:2], **constants, num_warps=4,
    )  # fmt: skip
    return output


def attend(
    queries: torch.Tensor,
    tables: RaggedTables,
    format: LayerFormat,
    scoring: Scoring,
    *,
    workspace: tuple[torch.Tensor, torch.Tensor] | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's queries over its own stored tokens, the new ones included.

    Args:
        queries: [Hq, N, D], rotated if the keys are.
        tables: the tables of the pass.
        format: the format of the layer's pages.
        scoring: the layer's scoring; where it has a window, each sequence's tokens are consecutive.
        workspace: keys [H, capacity, D] and values [H, capacity, E] of a workspace that may hold some tokens already;
            made if not given.
        output: where the result goes, contiguous; made if not given.

    Returns:
        [N, Hq, E] in the queries' dtype; anything where no tile has the query.
    """
    (query_heads, count, _), f = queries.shape, format
    if workspace is None:
        sides = f.keys, f.values
        workspace = tuple(queries.new_empty(side.heads, tables.capacity, side.head_dim) for side in sides)
    keys, values = workspace
    fill_workspace(tables, f, keys, values)
    if output is None:
        output = queries.new_empty(count, query_heads, f.values.head_dim)
    ragged_attention(queries, keys, values, tables.tiles, output, scoring)
    return output


def fill_workspace(tables: RaggedTables, format: LayerFormat, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Put everything that the sequences have stored where `tables` say, as `attend` does before it attends.

    Args:
        tables: the tables of the pass.
        format: the format of the layer's pages.
        keys, values: the workspace, as for `attend`.
    """
    f = format
    dequantize_addressed(tables.key_pages, keys, tables.key_places)
    if f.key_tensors.center is not None and len(tables.key_pages):
        size = f.keys.page_size
        launch_centers(keys, keys.stride(1), tables.center_pages, tables.centers, f.key_tensors.center, size, sign=1)
    dequantize_addressed(tables.value_pages, values, tables.value_places)
    copies = tables.copies
    if isinstance(copies, TokensInBlocks):
        copy_tokens(copies.records, copies.places, copies.words, keys, values, to_blocks=False)
        return
    copy_kernel[(len(copies) * f.keys.heads,)](
        tables.base, tables.buffers, copies, keys, values, keys.stride(0) // 8, values.stride(0) // 8,
        **copy_constants(f), num_warps=copy_warps(f),
    )  # fmt: skip


def append_constants(format: LayerFormat, keys_rotate: bool, values_rotate: bool) -> dict[str, int]:
    """Compile-time arguments of `append_kernel`."""
    return copy_constants(format) | {"ROWS": ROWS, "ROTATE_KEYS": keys_rotate, "ROTATE_VALUES": values_rotate}


def copy_constants(format: LayerFormat) -> dict[str, int]:
    """Compile-time arguments of `copy_kernel`."""
    return {"HEADS": format.keys.heads, "SIZE": format.keys.head_dim, "VALUE_SIZE": format.values.head_dim}


def copy_warps(format: LayerFormat) -> int:
    """Warps of `copy_kernel`."""
    widest = triton.next_power_of_2(max(format.keys.head_dim, format.values.head_dim))
    return max(1, COPIED_TOKENS * widest // (32 * PER_THREAD))
