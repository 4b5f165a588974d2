"""Triton kernels of the Hadamard rotation: rows by a matrix of signs on the tensor cores, and a decode step's append.

A rotation moves a row in and a row out, and its product with the [d, d] matrix of signs, exact in every dtype and found
in the L2 cache, costs less than that. So it is one product, padded to a power of two, whatever the order's factors.

A decode step rotates queries, keys and values of a few rows, and stores keys and values in the sequences' buffers:
`rotate_and_append` does all of it in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kvconvert.errors import UsageError
from kvconvert.kernels.pages.triton.affine import product_with_signs
from kvconvert.kernels.rotate import hadamard_signs
from kvconvert.kernels.variants import Variant

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
LARGEST_HEAD = 256
# Rows per program: few where there are few, so that more multiprocessors share them; else what registers hold.
FEW_ROWS = 16
MANY_ROWS = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 32}
# Programs of FEW_ROWS rows beyond which there are more rows than multiprocessors to share them.
MANY_PROGRAMS = 1024


def why_not(x: torch.Tensor) -> str | None:
    """Why these kernels cannot rotate the last axis of `x`; None if they can."""
    if x.dtype not in DTYPES:
        return f"the rotation kernels do not take {x.dtype}"
    if x.shape[-1] > LARGEST_HEAD:
        return f"the rotation kernels take head sizes up to {LARGEST_HEAD}, not {x.shape[-1]}"
    if x.requires_grad and torch.is_grad_enabled():
        return "the rotation kernels record no gradients"
    return None


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
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    INVERSE: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Rotate, or only copy, those of the rows `row` that are below `rows`."""
    present = (row < rows)[:, None]
    sources, targets = source + row[:, None] * source_stride, target + row[:, None] * target_stride
    if ROTATE:
        for first in tl.static_range(0, TILE, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            rotated = tl.zeros([row.shape[0], COLUMNS], tl.float32)
            for start in range(0, TILE, INNER):
                part = start + tl.arange(0, INNER)
                x = tl.load(sources + part[None, :], mask=present & (part < SIZE)[None, :], other=0.0)
                part = part[:, None]
                at = matrix + (part + column * SIZE if INVERSE else part * SIZE + column)
                signs = tl.load(at, mask=(part < SIZE) & (column < SIZE), other=0.0)
                rotated = product_with_signs(x, signs, rotated)
            rotated = (rotated * normaliser).to(target.dtype.element_ty)
            tl.store(targets + column, rotated, mask=present & (column < SIZE))
    else:
        every = tl.arange(0, TILE)[None, :]
        whole = present & (every < SIZE)
        tl.store(targets + every, tl.load(sources + every, mask=whole), mask=whole)


@triton.jit(do_not_specialize=["inner", "rows"])
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
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
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
        source, target, row, rows, row_stride, target_row_stride, matrix, normaliser, SIZE, TILE, COLUMNS, INNER,
        INVERSE, True,
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
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
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
            source, target, row, rows, head_stride, target_head_stride, matrix, normaliser, SIZE, TILE,
            COLUMNS, INNER, False, ROTATE,
        )  # fmt: skip
    else:
        source += other * head_stride
        target += other * target_head_stride
        _rotate(
            source, target, row, rows, token_stride, SIZE, matrix, normaliser, SIZE, TILE, COLUMNS, INNER, False,
            ROTATE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "tokens"])
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
    TILE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_INNER: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATE_KEYS: tl.constexpr,
    ROTATE_VALUES: tl.constexpr,
    ROWS_ARE_HEADS: tl.constexpr,
):
    """Programs take ROWS rows, heads of a token or tokens of a head, of keys, then of values, then of queries."""
    program = tl.program_id(0)
    programs = batch * (tl.cdiv(HEADS, ROWS) * tokens if ROWS_ARE_HEADS else tl.cdiv(tokens, ROWS) * HEADS)
    if program < programs:
        _append(
            program, keys, key_base, table, first_tokens, key_matrix, key_normaliser, tokens, key_batch_stride,
            key_head_stride, key_stride, HEADS, 0, SIZE, TILE, COLUMNS, INNER, ROWS, ROTATE_KEYS, ROWS_ARE_HEADS,
        )  # fmt: skip
    elif program < 2 * programs:
        _append(
            program - programs, values, value_base, table, first_tokens, value_matrix, value_normaliser, tokens,
            value_batch_stride, value_head_stride, value_stride, HEADS, 2, VALUE_SIZE, VALUE_TILE, VALUE_COLUMNS,
            VALUE_INNER, ROWS, ROTATE_VALUES, ROWS_ARE_HEADS,
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
            output_head_stride if ROWS_ARE_HEADS else output_stride, key_matrix, key_normaliser, SIZE, TILE,
            COLUMNS, INNER, False, True,
        )  # fmt: skip


def rotate(x: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """`hadamard_transform` of kernels/rotate/__init__.py: x H or x H^T of [..., d], products summed in float32."""
    _check(x)
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
        rows, target, matrix, normaliser, sizes[1], sizes[2], *source_strides, *target_strides, dim, _tile(dim),
        _columns(dim, x.dtype), _inner(dim, x.dtype), per_program, inverse, num_warps=4,
    )  # fmt: skip
    return target.view(x.shape) if target.is_contiguous() else target.reshape(x.shape)


def append_table(
    keys: list[torch.Tensor], key_base: torch.Tensor, values: list[torch.Tensor], value_base: torch.Tensor
) -> torch.Tensor:
    """Where `rotate_and_append` finds buffers [H, capacity, channels] of each sequence: int64 [B, 4] on the device.

    Columns: offset of the key buffer from `key_base` in elements, its stride from head to head, the same of the values.
    """
    rows = [
        (_offset(key, key_base), key.stride(0), _offset(value, value_base), value.stride(0))
        for key, value in zip(keys, values, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64).to(key_base.device, non_blocking=True)


def _offset(tensor: torch.Tensor, base: torch.Tensor) -> int:
    if not _aligned(tensor) or base.data_ptr() % 16:
        raise UsageError("A buffer of keys or values has rows that do not start at multiples of 16 bytes.")
    return (tensor.data_ptr() - base.data_ptr()) // base.element_size()


def rotate_and_append(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_base: torch.Tensor,
    value_base: torch.Tensor,
    table: torch.Tensor,
    first_tokens: torch.Tensor,
    rotate_keys: bool,
    rotate_values: bool,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store new keys and values in their sequences' buffers and rotate what the scheme rotates, in one launch.

    Args:
        queries: [B, Hq, T, D]; with `rotate_keys` they are rotated as the keys are.
        keys, values: [B, H, T, D] and [B, H, T, E], any strides but channels side by side.
        key_base, value_base: tensors of the same dtype whose addresses `table` counts from.
        table: int64 [B, 4], see `append_table`. Tokens of a buffer lie `D` and `E` elements apart.
        first_tokens: int64 [B] on the device: where in its buffer each sequence's first new token goes; negative where
            nothing is stored.
        rotate_keys, rotate_values: which are rotated.
        output: for the rotated queries; made if not given.

    Returns:
        the queries, rotated or as they were, [B, Hq, T, D].
    """
    batch, query_heads, tokens, dim = queries.shape
    heads, value_dim = keys.shape[1], values.shape[3]
    for x in (queries, keys, values):
        _check(x)
        if x.dtype != key_base.dtype or x.stride(3) != 1 or not _aligned(x):
            raise UsageError("New keys, values and queries need the buffers' dtype and rows at multiples of 16 bytes.")
    output = torch.empty_like(queries) if rotate_keys and output is None else output
    rows_are_heads = tokens < heads
    row_count = heads if rows_are_heads else tokens
    per_program = _rows_per_program(batch * tokens * (2 * heads + query_heads), row_count, keys.dtype)

    def programs(heads: int) -> int:
        return batch * (-(-heads // per_program) * tokens if rows_are_heads else -(-tokens // per_program) * heads)

    grid = 2 * programs(heads) + (programs(query_heads) if rotate_keys else 0)
    rotated = output if rotate_keys else queries
    matrix, normaliser = hadamard_signs(dim, keys.dtype, keys.device) if rotate_keys else (keys, 1.0)
    value_matrix, value_normaliser = (
        hadamard_signs(value_dim, keys.dtype, keys.device) if rotate_values else (values, 1.0)
    )
    rotate_and_append_kernel[(grid,)](
        queries, rotated, keys, values, key_base, value_base, table, first_tokens, matrix, value_matrix, normaliser,
        value_normaliser, batch, tokens, *queries.stride()[:3], *rotated.stride()[:3], *keys.stride()[:3],
        *values.stride()[:3], query_heads, heads, dim, _tile(dim), value_dim, _tile(value_dim),
        _columns(dim, keys.dtype), _inner(dim, keys.dtype), _columns(value_dim, keys.dtype),
        _inner(value_dim, keys.dtype), per_program, rotate_keys, rotate_values,
        rows_are_heads, num_warps=4,
    )  # fmt: skip
    return rotated


def _check(x: torch.Tensor) -> None:
    reason = why_not(x)
    if reason:
        raise UsageError(f"Tensors of {x.dtype} and shape {tuple(x.shape)} cannot be rotated here: {reason}.")


def _aligned(x: torch.Tensor) -> bool:
    """Whether every row starts at a multiple of 8 elements and of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1])


def _tile(dim: int) -> int:
    """Channels of a tile: a power of two, of which matrix instructions want 16."""
    return max(16, triton.next_power_of_2(dim))


def _columns(dim: int, dtype: torch.dtype) -> int:
    """Columns of the matrix held at once, which must fit shared memory."""
    widest = 128 if dim <= 128 else 64
    return min(_tile(dim), widest // 2 if dtype == torch.float32 else widest)


def _inner(dim: int, dtype: torch.dtype) -> int:
    """Channels of a step of the product: all, but for float32 numbers, three of which stand for one."""
    return min(_tile(dim), 32) if dtype == torch.float32 else _tile(dim)


def _rows_per_program(rows: int, along: int, dtype: torch.dtype) -> int:
    """Rows of one program, out of `rows` in all and `along` of one stride."""
    many = MANY_ROWS[dtype]
    return many if along >= many and rows > MANY_PROGRAMS * FEW_ROWS else FEW_ROWS


def variants(capability: int) -> Iterator[Variant]:
    """Every specialisation that the dispatch chooses for the usual models."""
    for dtype, name in DTYPES.items():
        for dim in (64, 80, 96, 128, 256):
            for rows in (FEW_ROWS, MANY_ROWS[dtype]):
                parts = {"COLUMNS": _columns(dim, dtype), "INNER": _inner(dim, dtype)}
                shared = {"SIZE": dim, "TILE": _tile(dim), "ROWS": rows} | parts
                axes = {"dtype": name, "head_size": dim, "rows": rows}
                for inverse in (False, True):
                    yield _rotate_variant(name, shared, axes, inverse)
                for rotate_values in (False, True):
                    yield _append_variant(name, shared, axes, rotate_values)


def _rotate_variant(name: str, shared: dict[str, int], axes: dict[str, object], inverse: bool) -> Variant:
    strides = [f"{side}{stride}_stride" for side in ("", "target_") for stride in ("outer", "inner", "row")]
    return Variant(
        f"rotate-{name}-{shared['SIZE']}-{shared['ROWS']}{'-inverse' * inverse}",
        rotate_kernel,
        dict.fromkeys(("source", "target", "matrix"), f"*{name}")
        | {"normaliser": "fp32"}
        | dict.fromkeys(("inner", "rows", *strides), "i32"),
        shared | {"INVERSE": inverse},
        num_warps=4,
        num_stages=3,
        axes=axes | {"inverse": inverse},
        tensor_cores=True,
        spills="two registers outside of the loop" if name == "fp32" and shared["SIZE"] == 64 else "",
    )


def _append_variant(name: str, shared: dict[str, int], axes: dict[str, object], rotate_values: bool) -> Variant:
    pointers = ("queries", "output", "keys", "values", "key_base", "value_base", "key_matrix", "value_matrix")
    sides = ("query", "output", "key", "value")
    strides = [f"{side}{stride}" for side in sides for stride in ("_batch_stride", "_head_stride", "_stride")]
    return Variant(
        f"append-{name}-{shared['SIZE']}-{shared['ROWS']}{'-values' * rotate_values}",
        rotate_and_append_kernel,
        dict.fromkeys(pointers, f"*{name}")
        | dict.fromkeys(("table", "first_tokens"), "*i64")
        | dict.fromkeys(("key_normaliser", "value_normaliser"), "fp32")
        | dict.fromkeys(("batch", "tokens", *strides), "i32"),
        shared
        | {
            "QUERY_HEADS": 32,
            "HEADS": 8,
            "VALUE_SIZE": shared["SIZE"],
            "VALUE_TILE": shared["TILE"],
            "VALUE_COLUMNS": shared["COLUMNS"],
            "VALUE_INNER": shared["INNER"],
            "ROTATE_KEYS": True,
            "ROTATE_VALUES": rotate_values,
            "ROWS_ARE_HEADS": shared["ROWS"] == FEW_ROWS,
        },
        num_warps=4,
        num_stages=3,
        axes=axes | {"rotate_values": rotate_values},
        tensor_cores=True,
    )
