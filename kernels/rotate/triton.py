"""The rotation: rows by a matrix of signs, and a decode step's append.

A rotation moves a row in and a row out, and its product with the [d, d] matrix of signs, exact in every dtype and found
in the L2 cache, costs less than that. So it is one product, padded to a power of two, whatever the order's factors.

A decode step rotates queries, keys and values of a few rows, and stores keys and values in the sequences' buffers:
`rotate_and_append` does all of it in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvconvert.kernels.device import overlaps_launches
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.rotate.matrices import hadamard_signs
from kvconvert.kernels.rotations import Rotations

# The interpreter, for which kernels are made when they are imported, knows no product of bfloat16.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def _tile_of(size):
    """Channels of a tile: a power of two, of which matrix instructions want 16."""
    return max(16, triton.next_power_of_2(size))


@triton.constexpr_function
def _columns_of(size, dtype):
    """Columns of the matrix held at once, which must fit shared memory."""
    widest = 128 if size <= 128 else 64
    return min(_tile_of(size), widest // 2 if dtype == tl.float32 else widest)


@triton.constexpr_function
def _inner_of(size, dtype):
    """Channels of a step of the product: all, but for float32 numbers, three of which stand for one."""
    return min(_tile_of(size), 32) if dtype == tl.float32 else _tile_of(size)


@triton.jit
def product_with_signs(x, signs, total):
    """total + x signs in float32, for signs of 1, 0 and -1 in the dtype of x; every product is exact."""
    if INTERPRETED:
        x, signs = x.to(tl.float32), signs.to(tl.float32)
    # A float32 is the sum of three tf32 numbers.
    return tl.dot(x, signs, total, input_precision="tf32x3")


@triton.jit
def rotate_rows(
    sources,
    targets,
    present,
    matrix,
    normaliser,
    SIZE: tl.constexpr,
    INVERSE: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Rotate, or only copy, the rows that begin at `sources` [ROWS, 1] to `targets`, where they are `present`."""
    TILE: tl.constexpr = _tile_of(SIZE)
    if ROTATE:
        COLUMNS: tl.constexpr = _columns_of(SIZE, sources.dtype.element_ty)
        INNER: tl.constexpr = _inner_of(SIZE, sources.dtype.element_ty)
        for first in tl.static_range(0, TILE, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            rotated = tl.zeros([sources.shape[0], COLUMNS], tl.float32)
            for start in range(0, TILE, INNER):
                part = start + tl.arange(0, INNER)
                x = tl.load(sources + part[None, :], mask=present & (part < SIZE)[None, :], other=0.0)
                part = part[:, None]
                at = matrix + (part + column * SIZE if INVERSE else part * SIZE + column)
                signs = tl.load(at, mask=(part < SIZE) & (column < SIZE), other=0.0)
                rotated = product_with_signs(x, signs, rotated)
            rotated = (rotated * normaliser).to(targets.dtype.element_ty)
            tl.store(targets + column, rotated, mask=present & (column < SIZE))
    else:
        every = tl.arange(0, TILE)[None, :]
        whole = present & (every < SIZE)
        tl.store(targets + every, tl.load(sources + every, mask=whole), mask=whole)


@triton.jit
def _rotate(
    source,
    target,
    row,
    rows,
    source_stride,
    target_stride,
    matrix,
    normaliser,
    SIZE: tl.constexpr,
    INVERSE: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Rotate, or only copy, those of the rows `row` that are below `rows`."""
    rotate_rows(
        source + row[:, None] * source_stride, target + row[:, None] * target_stride, (row < rows)[:, None], matrix,
        normaliser, SIZE, INVERSE, ROTATE,
    )  # fmt: skip


@kernel(do_not_specialize=["inner", "rows"])
def rotate_kernel(
    source,
    target,
    matrix,
    normaliser,
    inner,
    rows,
    outer_stride,
    inner_stride,
    row_stride,
    target_outer_stride,
    target_inner_stride,
    target_row_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """`target = source H` (H^T with INVERSE) for ROWS of the rows that lie one `row_stride` apart."""
    blocks = tl.cdiv(rows, ROWS)
    block, place = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    outer_index, inner_index = (place // inner).to(tl.int64), (place % inner).to(tl.int64)
    source += outer_index * outer_stride + inner_index * inner_stride
    target += outer_index * target_outer_stride + inner_index * target_inner_stride
    row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    _rotate(
        source, target, row, rows, row_stride, target_row_stride, matrix, normaliser, SIZE, INVERSE, True,
    )  # fmt: skip


@triton.jit
def _append(
    program,
    source,
    target,
    table,
    first_tokens,
    matrix,
    normaliser,
    tokens,
    batch_stride,
    head_stride,
    token_stride,
    HEADS: tl.constexpr,
    COLUMN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS_ARE_HEADS: tl.constexpr,
):
    """Some keys or values into their sequence's buffer, whose columns in the table start at COLUMN."""
    rows = HEADS if ROWS_ARE_HEADS else tokens
    inner = tokens if ROWS_ARE_HEADS else HEADS
    blocks = tl.cdiv(rows, ROWS)
    row = program % blocks * ROWS + tl.arange(0, ROWS).to(tl.int64)
    place = program // blocks
    batch, other = place // inner, (place % inner).to(tl.int64)
    first = tl.load(first_tokens + batch)
    target += tl.multiple_of(tl.load(table + batch * 4 + COLUMN), 8) + first * SIZE
    rows = tl.where(first >= 0, rows, 0)
    target_head_stride = tl.multiple_of(tl.load(table + batch * 4 + COLUMN + 1), 8)
    source += batch.to(tl.int64) * batch_stride
    if ROWS_ARE_HEADS:
        source += other * token_stride
        target += other * SIZE
        _rotate(
            source, target, row, rows, head_stride, target_head_stride, matrix, normaliser, SIZE, False, ROTATE,
        )  # fmt: skip
    else:
        source += other * head_stride
        target += other * target_head_stride
        _rotate(
            source, target, row, rows, token_stride, SIZE, matrix, normaliser, SIZE, False, ROTATE,
        )  # fmt: skip


@kernel(do_not_specialize=["batch", "tokens"])
def rotate_and_append_kernel(
    queries,
    output,
    keys,
    values,
    key_base,
    value_base,
    table,
    first_tokens,
    key_matrix,
    value_matrix,
    key_normaliser,
    value_normaliser,
    batch,
    tokens,
    query_batch_stride,
    query_head_stride,
    query_stride,
    output_batch_stride,
    output_head_stride,
    output_stride,
    key_batch_stride,
    key_head_stride,
    key_stride,
    value_batch_stride,
    value_head_stride,
    value_stride,
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATE_KEYS: tl.constexpr,
    ROTATE_VALUES: tl.constexpr,
    ROWS_ARE_HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs take ROWS rows, heads of a token or tokens of a head, of keys, then of values, then of queries."""
    if DEPENDENT:
        # `center_scores_kernel` may be set up meanwhile: it waits for all of this before it reads a query.
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    programs = batch * (tl.cdiv(HEADS, ROWS) * tokens if ROWS_ARE_HEADS else tl.cdiv(tokens, ROWS) * HEADS)
    if program < programs:
        _append(
            program, keys, key_base, table, first_tokens, key_matrix, key_normaliser, tokens, key_batch_stride,
            key_head_stride, key_stride, HEADS, 0, SIZE, ROWS, ROTATE_KEYS, ROWS_ARE_HEADS,
        )  # fmt: skip
    elif program < 2 * programs:
        _append(
            program - programs, values, value_base, table, first_tokens, value_matrix, value_normaliser, tokens,
            value_batch_stride, value_head_stride, value_stride, HEADS, 2, VALUE_SIZE, ROWS, ROTATE_VALUES,
            ROWS_ARE_HEADS,
        )  # fmt: skip
    elif ROTATE_KEYS:
        program -= 2 * programs
        rows = QUERY_HEADS if ROWS_ARE_HEADS else tokens
        inner = tokens if ROWS_ARE_HEADS else QUERY_HEADS
        blocks = tl.cdiv(rows, ROWS)
        row = program % blocks * ROWS + tl.arange(0, ROWS).to(tl.int64)
        place = program // blocks
        sequence, other = (place // inner).to(tl.int64), (place % inner).to(tl.int64)
        queries += sequence * query_batch_stride + other * (query_stride if ROWS_ARE_HEADS else query_head_stride)
        output += sequence * output_batch_stride + other * (output_stride if ROWS_ARE_HEADS else output_head_stride)
        _rotate(
            queries, output, row, rows, query_head_stride if ROWS_ARE_HEADS else query_stride,
            output_head_stride if ROWS_ARE_HEADS else output_stride, key_matrix, key_normaliser, SIZE, False,
            True,
        )  # fmt: skip


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
        rows, target, matrix, normaliser, sizes[1], sizes[2], *source_strides, *target_strides, dim,
        per_program, inverse, num_warps=4,
    )  # fmt: skip
    return target.view(x.shape) if target.is_contiguous() else target.reshape(x.shape)


def rotate_and_append(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    base: torch.Tensor,
    table: torch.Tensor,
    first_tokens: torch.Tensor,
    rotations: Rotations,
) -> torch.Tensor:
    """Store new keys and values in their sequences' buffers and rotate what the scheme rotates, in one launch.

    Only for what `unsupported_append` accepts; elsewhere rotate, then copy.

    Args:
        queries: [B, Hq, T, D]; rotated as the keys are.
        keys, values: [B, H, T, D] and [B, H, T, E], any strides but channels side by side.
        base: a tensor of the same dtype, from whose address `table` counts.
        table: int64 [B, 4] on the device: of each sequence's key buffer [H, capacity, D] the offset from `base` and the
            stride from head to head, both in elements, then the same of its value buffer. Tokens of a buffer lie D and
            E elements apart.
        first_tokens: int64 [B] on the device: where in its buffer each sequence's first new token goes; negative where
            nothing is stored.
        rotations: which are rotated.

    Returns:
        the queries, rotated or as they were, [B, Hq, T, D].
    """
    batch, query_heads, tokens, dim = queries.shape
    heads, value_dim, (keys_rotate, values_rotate) = keys.shape[1], values.shape[3], rotations
    rows_are_heads = tokens < heads
    row_count = heads if rows_are_heads else tokens
    per_program = _rows_per_program(batch * tokens * (2 * heads + query_heads), row_count, keys.dtype)

    def programs(heads: int) -> int:
        return batch * (-(-heads // per_program) * tokens if rows_are_heads else -(-tokens // per_program) * heads)

    grid = 2 * programs(heads) + (programs(query_heads) if keys_rotate else 0)
    rotated = torch.empty_like(queries) if keys_rotate else queries
    matrix, normaliser = hadamard_signs(dim, keys.dtype, keys.device) if keys_rotate else (keys, 1.0)
    value_matrix, value_normaliser = (
        hadamard_signs(value_dim, keys.dtype, keys.device) if values_rotate else (values, 1.0)
    )
    rotate_and_append_kernel[(grid,)](
        queries, rotated, keys, values, base, base, table, first_tokens, matrix, value_matrix, normaliser,
        value_normaliser, batch, tokens, *queries.stride()[:3], *rotated.stride()[:3], *keys.stride()[:3],
        *values.stride()[:3], query_heads, heads, dim, value_dim, per_program, keys_rotate, values_rotate,
        rows_are_heads, overlaps_launches(keys.device), num_warps=4,
    )  # fmt: skip
    return rotated


def _rows_per_program(rows: int, along: int, dtype: torch.dtype) -> int:
    """Rows of one program, out of `rows` in all and `along` of one stride."""
    many = MANY_ROWS[dtype]
    return many if along >= many and rows > MANY_PROGRAMS * FEW_ROWS else FEW_ROWS
