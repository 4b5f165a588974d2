"""Launches of the rotation's kernels.

A decode step rotates queries, keys and values of a few rows, and stores keys and values in the sequences' buffers:
`rotate_and_append` does all of it in one launch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from kvconvert.kernels.device import overlaps_launches
from kvconvert.kernels.rotate.matrices import hadamard_signs
from kvconvert.kernels.rotate.triton.kernels import rotate_and_append_kernel, rotate_kernel

# Rows per program: few where there are few, so that more multiprocessors share them; else what registers hold.
FEW_ROWS = 16
MANY_ROWS = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 32}
# Programs of FEW_ROWS rows beyond which there are more rows than multiprocessors to share them.
MANY_PROGRAMS = 1024


def rotate(x: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """`hadamard_transform` of kernels/rotate/__init__.py, of what `unsupported` accepts."""
    rows = x if x.dim() <= 4 and x.stride(-1) == 1 else x.contiguous()
    rows = rows.flatten(0, -4) if rows.dim() > 4 else rows[(None,) * (4 - rows.dim())]
    target = torch.empty_like(rows)
    if not rows.numel():
        return target.reshape(x.shape)
    # What most rows lie along; the kernel takes rows of one stride.
    source_strides, target_strides, sizes = rows.stride()[:3], target.stride()[:3], rows.shape[:3]
    if sizes[1] > sizes[2]:
        source_strides, target_strides, sizes = ((a, c, b) for a, b, c in (source_strides, target_strides, sizes))
    dim = rows.shape[3]
    per_program = _rows_per_program(rows.numel() // dim, sizes[2], x.dtype)
    matrix, normaliser = hadamard_signs(dim, x.dtype, x.device)
    rotate_kernel[(sizes[0] * sizes[1] * -(-sizes[2] // per_program),)](
        rows, target, matrix, normaliser, sizes[1], sizes[2], *source_strides, *target_strides, dim, tile_of(dim),
        columns_for(dim, x.dtype), inner_for(dim, x.dtype), per_program, inverse, num_warps=4,
    )  # fmt: skip
    return target.view(x.shape) if target.is_contiguous() else target.reshape(x.shape)


def rotate_and_append(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_base: torch.Tensor,
    value_base: torch.Tensor,
    table: torch.Tensor,
    first_tokens: torch.Tensor,
    keys_rotate: bool,
    values_rotate: bool,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store new keys and values in their sequences' buffers and rotate what the scheme rotates, in one launch.

    Args:
        queries: [B, Hq, T, D]; with `keys_rotate` they are rotated as the keys are.
        keys, values: [B, H, T, D] and [B, H, T, E], any strides but channels side by side.
        key_base, value_base: tensors of the same dtype whose addresses `table` counts from.
        table: int64 [B, 4]: offset of each sequence's key buffer from `key_base` in elements, its stride from head to
            head, the same of its value buffer. Tokens of a buffer lie `D` and `E` elements apart.
        first_tokens: int64 [B] on the device: where in its buffer each sequence's first new token goes; negative where
            nothing is stored.
        keys_rotate, values_rotate: which of them are rotated.
        output: for the rotated queries; made if not given.

    Returns:
        the queries, rotated or as they were, [B, Hq, T, D].
    """
    batch, query_heads, tokens, dim = queries.shape
    heads, value_dim = keys.shape[1], values.shape[3]
    output = torch.empty_like(queries) if keys_rotate and output is None else output
    rows_are_heads = tokens < heads
    row_count = heads if rows_are_heads else tokens
    per_program = _rows_per_program(batch * tokens * (2 * heads + query_heads), row_count, keys.dtype)

    def programs(heads: int) -> int:
        return batch * (-(-heads // per_program) * tokens if rows_are_heads else -(-tokens // per_program) * heads)

    grid = 2 * programs(heads) + (programs(query_heads) if keys_rotate else 0)
    rotated = output if keys_rotate else queries
    matrix, normaliser = hadamard_signs(dim, keys.dtype, keys.device) if keys_rotate else (keys, 1.0)
    value_matrix, value_normaliser = (
        hadamard_signs(value_dim, keys.dtype, keys.device) if values_rotate else (values, 1.0)
    )
    rotate_and_append_kernel[(grid,)](
        queries, rotated, keys, values, key_base, value_base, table, first_tokens, matrix, value_matrix, normaliser,
        value_normaliser, batch, tokens, *queries.stride()[:3], *rotated.stride()[:3], *keys.stride()[:3],
        *values.stride()[:3], query_heads, heads, dim, tile_of(dim), value_dim, tile_of(value_dim),
        columns_for(dim, keys.dtype), inner_for(dim, keys.dtype), columns_for(value_dim, keys.dtype),
        inner_for(value_dim, keys.dtype), per_program, keys_rotate, values_rotate,
        rows_are_heads, overlaps_launches(keys.device), num_warps=4,
    )  # fmt: skip
    return rotated


@lru_cache(maxsize=1024)
def tile_of(dim: int) -> int:
    """Channels of a tile: a power of two, of which matrix instructions want 16."""
    return max(16, triton.next_power_of_2(dim))


@lru_cache(maxsize=1024)
def columns_for(dim: int, dtype: torch.dtype) -> int:
    """Columns of the matrix held at once, which must fit shared memory."""
    widest = 128 if dim <= 128 else 64
    return min(tile_of(dim), widest // 2 if dtype == torch.float32 else widest)


@lru_cache(maxsize=1024)
def inner_for(dim: int, dtype: torch.dtype) -> int:
    """Channels of a step of the product: all, but for float32 numbers, three of which stand for one."""
    return min(tile_of(dim), 32) if dtype == torch.float32 else tile_of(dim)


def _rows_per_program(rows: int, along: int, dtype: torch.dtype) -> int:
    """Rows of one program, out of `rows` in all and `along` of one stride."""
    many = MANY_ROWS[dtype]
    return many if along >= many and rows > MANY_PROGRAMS * FEW_ROWS else FEW_ROWS
