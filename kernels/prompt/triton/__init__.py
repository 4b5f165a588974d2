"""Triton kernels for prompts: flash attention with its log-sum-exp, and the attention mass of each
token.

Both run over one sequence whose T queries belong to the last T of n keys, and skip what causality or a sliding window
hides. The first gives every query's output and log-sum-exp; the second, launched after it, gives every program a block
of keys of one query head and lets it pass over the queries once more, exp(score - log-sum-exp) being the weight. So a
weight is never stored, memory is linear in n, and the sums depend on no order of atomic additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kvconvert.errors import UsageError
from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.device import capability, compiles
from kvconvert.kernels.prompt.triton.kernels import ALIGNMENT, LOG2_E, attention_kernel, column_sums_kernel
from kvconvert.kernels.ragged.tables import TILE_QUERIES

# Bytes of one operand that programs running at the same time may share: they should find it in the L2 cache.
SHARED_BYTES = 24 << 20


@dataclass(frozen=True)
class Tiling:
    """Rows of a program's tiles of queries and keys, and how it runs.

    With `descriptors` tiles are copied by the tensor copy engine; with `in_registers` the tile that a program keeps, of
    queries for attention and of keys for column sums, is in registers instead of shared memory.
    """

    query_rows: int
    key_rows: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    in_registers: bool = False


def attention_tiling(device_capability: int, head_tile: int, value_tile: int, ragged: bool = False) -> Tiling:
    """Tiling of `attention_kernel` for heads of these padded sizes, of one sequence or of the tiles of `RaggedTables`.

    Measured on an H200; elsewhere chosen by shared memory and registers.
    """
    largest = max(head_tile, value_tile)
    if ragged:
        key_rows = 64 if largest <= 128 or _copies_tiles(device_capability) else 32
        return Tiling(TILE_QUERIES, key_rows, 4, 3) if largest <= 128 else Tiling(TILE_QUERIES, key_rows, 8, 2)
    if not _copies_tiles(device_capability):
        if largest <= 64:
            return Tiling(128, 64, 8, 3)
        return Tiling(64, 64, 4, 3) if largest <= 128 else Tiling(64, 32, 8, 2)
    if largest > 128:
        return Tiling(128, 64, 8, 2, descriptors=True)
    hopper = device_capability == 90
    # Blackwell's products pass through registers on their way, for which four warps have too few.
    return Tiling(64, 64, 4 if hopper else 8, 3, descriptors=True, in_registers=hopper)


def column_tiling(device_capability: int, head_tile: int) -> Tiling:
    """Tiling of `column_sums_kernel`: two programs should fit a multiprocessor, so that the matrix product of one hides
    the exponentials of the other.
    """
    if not _copies_tiles(device_capability):
        return Tiling(64, 128, 8, 3) if head_tile <= 128 else Tiling(32, 128, 8, 2)
    if device_capability == 90:
        if head_tile > 128:
            return Tiling(32, 128, 4, 4, descriptors=True, in_registers=True)
        return Tiling(64, 128 if head_tile > 64 else 64, 4, 3, descriptors=True, in_registers=True)
    return Tiling(64 if head_tile <= 128 else 32, 128, 8, 3, descriptors=True)


def _copies_tiles(device_capability: int) -> bool:
    """Hopper and data-center Blackwell: a tensor copy engine, and shared memory of 227 KB per program."""
    return 90 <= device_capability < 120


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    scoring: Scoring,
    *,
    tiling: Tiling | None = None,
    first_query: int | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Causal attention of the last T of n tokens, or of T tokens further on, and its log-sum-exp.

    Args:
        queries: fp16 or bf16 [Hq, T, D]; keys: [H, n, D]; values: [H, n, E], or None for the log-sum-exp alone.
        scoring: the layer's scoring; its scaling must be positive.
        tiling: instead of the one chosen for the device.
        first_query: position of the first query, counted from the first key; None for n - T. From n on, all keys lie
            before all queries, which may then be more than these.

    Returns:
        the output [Hq, T, E] in the queries' dtype (None without values) and float32 [Hq, T], the natural logarithm
        of the sum of exponentials, the sink logit's included. A query without a key has zeros and minus infinity.

    Raises:
        UsageError: shapes that do not belong together.
    """
    heads, length, size, tokens, window, first_query = _checked(queries, keys, values, scoring.window, first_query)
    value_size = 0 if values is None else values.shape[2]
    output = queries.new_empty(heads, length, value_size)
    log_sum_exp = torch.empty(heads, length, dtype=torch.float32, device=queries.device)
    tiling = tiling or attention_tiling(_capability(queries.device), tile_of(size), tile_of(value_size))
    _launch_attention(
        queries,
        keys,
        values,
        output,
        scoring._replace(window=window),
        tiling,
        log_sum_exp=log_sum_exp,
        first_query=first_query,
        together=_together(heads, heads // keys.shape[0], tokens * (size + value_size) * 2),
    )
    return (None if value_size == 0 else output), log_sum_exp


def ragged_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    output: torch.Tensor,
    scoring: Scoring,
) -> None:
    """Causal attention of the queries of many sequences, each over its own keys.

    Args:
        queries: [Hq, N, D]; keys: [H, W, D]; values: [H, W, E]; sequence after sequence.
        tiles: where each sequence's are, see `RaggedTables`.
        output: [N, Hq, E], where the result goes; what no tile has is left as it is.
        scoring: as in `attention`.
    """
    tiling = attention_tiling(_capability(queries.device), tile_of(queries.shape[2]), tile_of(values.shape[2]), True)
    group, scoring = queries.shape[0] // keys.shape[0], scoring._replace(window=scoring.window or 0)
    _launch_attention(queries, keys, values, output.transpose(0, 1), scoring, tiling, tiles=tiles, together=group)


def _launch_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    output: torch.Tensor,
    scoring: Scoring,
    tiling: Tiling,
    *,
    together: int,
    tiles: torch.Tensor | None = None,
    log_sum_exp: torch.Tensor | None = None,
    first_query: int = 0,
) -> None:
    """The launch of `attention_kernel`; the window is 0 where there is none."""
    (heads, length, size), value_size = queries.shape, output.shape[2]
    scaling, softcap, sink_logits, window = scoring
    tile_count = triton.cdiv(length, tiling.query_rows) if tiles is None else len(tiles)
    queries, keys = aligned(queries), aligned(keys)
    values = keys if values is None else aligned(values)
    attention_kernel[(tile_count * heads,)](
        _tiles(queries, tiling.query_rows, tiling),
        _tiles(keys, tiling.key_rows, tiling),
        _tiles(values, tiling.key_rows, tiling),
        output if sink_logits is None else sink_logits.float().contiguous(),
        output if tiles is None else tiles,
        output,
        output if log_sum_exp is None else log_sum_exp,
        *_strides(queries),
        *_strides(keys),
        *_strides(values),
        *_strides(output),
        length,
        keys.shape[1],
        first_query,
        tile_count,
        heads // keys.shape[0],
        together,
        window,
        float(scaling),
        float(softcap or 1.0),
        **attention_constants(size, value_size, tiling),
        SOFTCAP=bool(softcap),
        SINK_LOGITS=sink_logits is not None,
        WINDOWED=window > 0,
        RAGGED=tiles is not None,
        INTERPRETED=not compiles(queries.device),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def attention_constants(size: int, value_size: int, tiling: Tiling) -> dict[str, int]:
    """Compile-time arguments of `attention_kernel` that follow from heads of these sizes."""
    return {
        "QUERY_ROWS": tiling.query_rows,
        "KEY_ROWS": tiling.key_rows,
        "HEAD_SIZE": size,
        "HEAD_TILE": tile_of(size),
        "VALUE_SIZE": value_size,
        "VALUE_TILE": tile_of(value_size),
        "DESCRIPTORS": tiling.descriptors,
        "IN_REGISTERS": tiling.in_registers,
    }


def column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scoring: Scoring,
    tiling: Tiling | None = None,
    *,
    maxima: bool = False,
) -> torch.Tensor:
    """The attention mass of each token: weights summed over queries and over the query heads of its KV head.

    Args:
        queries, keys, scoring, tiling: as in `attention`.
        log_sum_exp: float32 [Hq, T], what `attention` returned for the same arguments.
        maxima: return the largest of these weights instead of their sum.

    Returns:
        float32 [H, n].

    Raises:
        UsageError: as in `attention`.
    """
    heads, length, size, tokens, window, _ = _checked(queries, keys, None, scoring.window)
    if log_sum_exp.shape != (heads, length):
        raise UsageError(f"A log-sum-exp of shape {tuple(log_sum_exp.shape)} does not fit {heads} x {length} queries.")
    head_tile = tile_of(size)
    tiling = tiling or column_tiling(_capability(queries.device), head_tile)
    group = heads // keys.shape[0]
    stride = triton.cdiv(length, ALIGNMENT.value)
    # In units of log 2, and padded so that every row starts at a multiple of 64 bytes.
    normalizers = torch.empty(heads, stride * ALIGNMENT.value, dtype=torch.float32, device=queries.device)
    torch.mul(log_sum_exp, LOG2_E.value, out=normalizers[:, :length])
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=queries.device)
    queries, keys = aligned(queries), aligned(keys)
    column_sums_kernel[(triton.cdiv(tokens, tiling.key_rows) * heads,)](
        _tiles(queries, tiling.query_rows, tiling),
        _tiles(keys, tiling.key_rows, tiling),
        normalizers,
        sums,
        *_strides(queries),
        *_strides(keys),
        stride,
        length,
        tokens,
        group,
        _together(heads, 1, length * size * 2),
        window,
        float(scoring.scaling),
        float(scoring.softcap or 1.0),
        QUERY_ROWS=tiling.query_rows,
        KEY_ROWS=tiling.key_rows,
        HEAD_SIZE=size,
        HEAD_TILE=head_tile,
        MAXIMA=maxima,
        SOFTCAP=bool(scoring.softcap),
        WINDOWED=window > 0,
        DESCRIPTORS=tiling.descriptors,
        IN_REGISTERS=tiling.in_registers,
        INTERPRETED=not compiles(queries.device),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    sums = sums.unflatten(0, (-1, group))
    return sums.amax(1) if maxima else sums.sum(1)


def _checked(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    window: int | None,
    first_query: int | None = None,
) -> tuple[int, int, int, int, int, int]:
    """Hq, T, D, n, the window, which is 0 where it hides nothing, and the position of the first query."""
    (heads, length, size), (key_heads, tokens, key_size) = queries.shape, keys.shape
    first_query = tokens - length if first_query is None else first_query
    fits = size == key_size and heads % key_heads == 0 and length > 0 and tokens <= first_query + length
    if not fits or first_query < 0 or (values is not None and values.shape[:2] != keys.shape[:2]):
        shapes = [tuple(x.shape) for x in (queries, keys, values) if x is not None]
        raise UsageError(f"Queries, keys and values of shapes {shapes} do not belong together.")
    if window is not None and window < 1:
        raise UsageError(f"A sliding window of {window:,} tokens shows a query not even itself.")
    hides = window is not None and window < first_query + length
    return heads, length, size, tokens, window if hides else 0, first_query


@lru_cache(maxsize=1024)
def tile_of(size: int) -> int:
    """A head size padded to the power of two that a tile has, at least 16."""
    return max(16, triton.next_power_of_2(size))


def _capability(device: torch.device) -> int:
    major, minor = capability(device)
    return 10 * major + minor


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor [heads, N, channels], or a copy unless channels are side by side and tokens at multiples of 16 bytes."""
    if tensor.stride(2) == 1 and not (tensor.stride(0) % 8 or tensor.stride(1) % 8 or tensor.data_ptr() % 16):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _tiles(tensor: torch.Tensor, rows: int, tiling: Tiling) -> torch.Tensor | TensorDescriptor:
    """What a kernel reads tiles of `rows` rows from."""
    if not tiling.descriptors:
        return tensor
    return TensorDescriptor(tensor, tensor.shape, tensor.stride(), [1, rows, tile_of(tensor.shape[2])])


def _strides(tensor: torch.Tensor) -> tuple[int, int]:
    """Of head and token, in units of 8 elements."""
    return tensor.stride(0) // 8, tensor.stride(1) // 8


def _together(heads: int, group: int, nbytes: int) -> int:
    """How many query heads a section holds: a divisor of their number and a multiple of `group`, whose operand takes
    `nbytes`, so that a section takes at most SHARED_BYTES where possible.
    """
    return group * max(
        part
        for part in range(1, heads // group + 1)
        if heads // group % part == 0 and (part == 1 or part * nbytes <= SHARED_BYTES)
    )
