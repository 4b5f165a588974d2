"""Triton kernels for prompts: flash attention with its log-sum-exp, and the attention that each token receives.

Both run over one sequence whose T queries belong to the last T of n keys, and skip what causality or a sliding window
hides. The first gives every query's output and log-sum-exp; the second, launched after it, gives every program a block
of keys of one query head and lets it pass over the queries once more, exp(score - log-sum-exp) being the weight. So a
weight is never stored, memory is linear in n, and the sums depend on no order of atomic additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kvconvert.errors import UsageError
from kvconvert.kernels.gpu.device import capability

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below every score, yet finite, so that a row whose keys are all hidden so far gives no NaN.
LOWEST = tl.constexpr(-1.0e30)
# Rows of the log-sum-exp, and the tiles read from them, start at multiples of this many numbers.
ALIGNMENT = tl.constexpr(16)

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
LARGEST_HEAD = 256
# Bytes of one operand that programs running at the same time may share: they should find it in the L2 cache.
SHARED_BYTES = 24 << 20


@triton.jit
def _rows(
    source,
    head,
    first,
    count,
    head_stride,
    row_stride,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Rows first .. first + ROWS of one head as [ROWS, TILE], zeros beyond `count` rows and SIZE columns.

    Strides are in units of 8 elements, which tells the compiler that rows start at multiples of 16 bytes. Without
    BOUNDED all rows must exist.
    """
    if DESCRIPTORS:
        tile = source.load([head, first, 0]).reshape(ROWS, TILE)
    else:
        row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, TILE)[None, :]
        base = source + (head.to(tl.int64) * head_stride + first * row_stride.to(tl.int64)) * 8
        pointers = base + row * (row_stride * 8) + column
        if BOUNDED:
            inside = row < count - first
            if SIZE != TILE:
                inside &= column < SIZE
            tile = tl.load(pointers, mask=inside, other=0.0)
        elif SIZE != TILE:
            tile = tl.load(pointers, mask=column < SIZE, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _product(left, right, accumulated, INTERPRETED: tl.constexpr):
    """Matrix product with float32 sums; the interpreter knows no bfloat16 in it."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, accumulated)


@triton.jit
def _capped(scores, scaling, softcap):
    """Dot products to capped logits in units of log 2, by tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both ends."""
    grown = tl.exp2(scores * (scaling * 2.0 * LOG2_E / softcap))
    return (softcap * LOG2_E) * (1.0 - 2.0 / (1.0 + grown))


LENGTHS = [
    "query_head_stride",
    "query_stride",
    "key_head_stride",
    "key_stride",
    "value_head_stride",
    "value_stride",
    "query_count",
    "key_count",
    "sum_stride",
    "group",
    "together",
    "window",
]


@triton.jit(do_not_specialize=LENGTHS)
def attention_kernel(
    queries,
    keys,
    values,
    sinks,
    output,
    log_sum_exp,
    query_head_stride,
    query_stride,
    key_head_stride,
    key_stride,
    value_head_stride,
    value_stride,
    query_count,
    key_count,
    group,
    together,
    window,
    scaling,
    softcap,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOWED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile of queries of one head: `output` [Hq, T, E] and `log_sum_exp` [Hq, T].

    The log-sum-exp is natural, that of the scaled and capped scores with the sink.

    Programs run head by head in sections of `together` query heads, whose keys and values the L2 cache can hold, and
    within a section the tiles with the most keys first, so that the short ones fill the end. VALUE_SIZE 0 leaves the
    output out.
    """
    blocks = tl.cdiv(query_count, QUERY_ROWS)
    section, place = tl.program_id(0) // (blocks * together), tl.program_id(0) % (blocks * together)
    head, block = section * together + place % together, blocks - 1 - place // together
    key_head = head // group

    first = block * QUERY_ROWS
    shift = key_count - query_count
    rows = first + tl.arange(0, QUERY_ROWS)
    query_columns = rows + shift
    query = _rows(
        queries, head, first, query_count, query_head_stride, query_stride,
        QUERY_ROWS, HEAD_SIZE, HEAD_TILE, DESCRIPTORS, True,
    )  # fmt: skip

    if SINKS:
        # A virtual token that every query sees and that has no value: what the running softmax starts from.
        maximum = tl.zeros([QUERY_ROWS], tl.float32) + tl.load(sinks + head) * LOG2_E
        total = tl.zeros([QUERY_ROWS], tl.float32) + 1.0
    else:
        maximum = tl.zeros([QUERY_ROWS], tl.float32) + LOWEST
        total = tl.zeros([QUERY_ROWS], tl.float32)
    accumulated = tl.zeros([QUERY_ROWS, VALUE_TILE], tl.float32)

    # Keys start .. inner: some hidden by the window; inner .. diagonal: all visible; diagonal .. stop: some in future.
    stop = tl.minimum(key_count, first + QUERY_ROWS + shift)
    diagonal = (first + shift + 1) // KEY_ROWS * KEY_ROWS
    start, inner = 0, 0
    if WINDOWED:
        start = tl.maximum(0, first + shift + 1 - window) // KEY_ROWS * KEY_ROWS
        inner = tl.cdiv(tl.maximum(0, first + QUERY_ROWS + shift - window), KEY_ROWS) * KEY_ROWS
        inner = tl.minimum(inner, diagonal)
    for phase in tl.static_range(0 if WINDOWED else 1, 3):
        masked = phase != 1
        begin, end = inner, diagonal
        if phase == 0:
            begin, end = start, inner
        if phase == 2:
            begin, end = diagonal, stop
        for first_key in range(begin, end, KEY_ROWS):
            key = _rows(
                keys, key_head, first_key, key_count, key_head_stride, key_stride,
                KEY_ROWS, HEAD_SIZE, HEAD_TILE, DESCRIPTORS, masked,
            )  # fmt: skip
            scores = _product(query, key.T, tl.zeros([QUERY_ROWS, KEY_ROWS], tl.float32), INTERPRETED)
            factor = scaling * LOG2_E
            if SOFTCAP:
                scores = _capped(scores, scaling, softcap)
                factor = 1.0
            if masked:
                columns = first_key + tl.arange(0, KEY_ROWS)[None, :]
                visible = columns <= query_columns[:, None]
                if WINDOWED:
                    visible &= columns > query_columns[:, None] - window
                scores = tl.where(visible, scores, float("-inf"))
            # The factor is positive, so it commutes with the maximum, and one instruction scales and subtracts.
            risen = tl.maximum(maximum, tl.max(scores, 1) * factor)
            weights = tl.exp2(tl.fma(scores, factor, -risen[:, None]))
            shrink = tl.exp2(maximum - risen)
            total = total * shrink + tl.sum(weights, 1)
            maximum = risen
            if VALUE_SIZE > 0:
                value = _rows(
                    values, key_head, first_key, key_count, value_head_stride, value_stride,
                    KEY_ROWS, VALUE_SIZE, VALUE_TILE, DESCRIPTORS, masked,
                )  # fmt: skip
                accumulated = _product(weights.to(value.dtype), value, accumulated * shrink[:, None], INTERPRETED)

    place_of_first = head.to(tl.int64) * query_count + first
    tl.store(
        log_sum_exp + place_of_first + tl.arange(0, QUERY_ROWS),
        (maximum + tl.log2(total)) * LN_2,
        mask=rows < query_count,
    )
    if VALUE_SIZE > 0:
        column = tl.arange(0, VALUE_TILE)[None, :]
        own_output = output + place_of_first * VALUE_SIZE
        tl.store(
            own_output + tl.arange(0, QUERY_ROWS)[:, None] * VALUE_SIZE + column,
            (accumulated / total[:, None]).to(output.dtype.element_ty),
            mask=(rows < query_count)[:, None] & (column < VALUE_SIZE),
        )


@triton.jit(do_not_specialize=LENGTHS)
def column_sums_kernel(
    queries,
    keys,
    log_sum_exp,
    sums,
    query_head_stride,
    query_stride,
    key_head_stride,
    key_stride,
    sum_stride,
    query_count,
    key_count,
    group,
    together,
    window,
    scaling,
    softcap,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """What one block of keys receives from all queries of one head: `sums` float32 [Hq, n].

    `log_sum_exp` is in units of log 2, its rows `sum_stride` apart in units of ALIGNMENT. Keys are the rows of the
    product, so a sum over queries runs along a thread's own registers. Order of programs as in `attention_kernel`:
    the first keys, which the most queries see, come first.
    """
    blocks = tl.cdiv(key_count, KEY_ROWS)
    section, place = tl.program_id(0) // (blocks * together), tl.program_id(0) % (blocks * together)
    head, block = section * together + place % together, place // together

    first = block * KEY_ROWS
    shift = key_count - query_count
    key_columns = first + tl.arange(0, KEY_ROWS)
    key = _rows(
        keys, head // group, first, key_count, key_head_stride, key_stride,
        KEY_ROWS, HEAD_SIZE, HEAD_TILE, DESCRIPTORS, True,
    )  # fmt: skip
    own_sums = log_sum_exp + head.to(tl.int64) * sum_stride * ALIGNMENT
    received = tl.zeros([KEY_ROWS], tl.float32)

    # Queries start .. inner: some before some key; inner .. outer: all see all keys; outer .. stop: some beyond the
    # window's end or the last.
    start = tl.maximum(0, first - shift) // ALIGNMENT * ALIGNMENT
    inner = start + tl.cdiv(tl.maximum(0, first + KEY_ROWS - 1 - shift - start), QUERY_ROWS) * QUERY_ROWS
    stop = query_count
    last = query_count
    if WINDOWED:
        stop = tl.minimum(stop, first + KEY_ROWS - 1 - shift + window)
        last = tl.minimum(last, first - shift + window)
    outer = tl.maximum(inner, start + tl.maximum(0, last - start) // QUERY_ROWS * QUERY_ROWS)
    for phase in tl.static_range(3):
        masked = phase != 1
        begin, end = inner, outer
        if phase == 0:
            begin, end = start, tl.minimum(inner, stop)
        if phase == 2:
            begin, end = outer, stop
        for first_query in range(begin, end, QUERY_ROWS):
            query = _rows(
                queries, head, first_query, query_count, query_head_stride, query_stride,
                QUERY_ROWS, HEAD_SIZE, HEAD_TILE, DESCRIPTORS, masked,
            )  # fmt: skip
            place_of_first = own_sums + tl.multiple_of(first_query, ALIGNMENT)
            rows = tl.arange(0, QUERY_ROWS)
            if masked:
                normalizer = tl.load(place_of_first + rows, mask=rows < query_count - first_query, other=0.0)
            else:
                normalizer = tl.load(place_of_first + rows)
            scores = _product(key, query.T, tl.zeros([KEY_ROWS, QUERY_ROWS], tl.float32), INTERPRETED)
            factor = scaling * LOG2_E
            if SOFTCAP:
                scores = _capped(scores, scaling, softcap)
                factor = 1.0
            weights = tl.exp2(tl.fma(scores, factor, -normalizer[None, :]))
            if masked:
                query_columns = first_query + rows[None, :] + shift
                visible = (key_columns[:, None] <= query_columns) & (query_columns < key_count)
                if WINDOWED:
                    visible &= key_columns[:, None] > query_columns - window
                weights = tl.where(visible, weights, 0.0)
            received += tl.sum(weights, 1)
    tl.store(sums + head.to(tl.int64) * key_count + key_columns, received, mask=key_columns < key_count)


@dataclass(frozen=True)
class Tiling:
    """Rows of a program's tiles of queries and keys, and how it runs.

    With `descriptors` tiles are copied by the tensor copy engine (Hopper and later); `max_registers` per thread, so
    that two programs fit a multiprocessor.
    """

    query_rows: int
    key_rows: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    max_registers: int | None = None


def attention_tiling(device_capability: int, head_tile: int, value_tile: int) -> Tiling:
    """Tiling of `attention_kernel` for heads of these padded sizes; chosen by shared memory and registers."""
    largest = max(head_tile, value_tile)
    if device_capability >= 90:
        return Tiling(128, 128, 8, 2) if largest <= 128 else Tiling(128, 64, 8, 2)
    if largest <= 64:
        return Tiling(128, 64, 4, 3)
    if largest <= 128:
        return Tiling(128, 64, 8, 2)
    return Tiling(64, 32, 4, 2)


def column_tiling(device_capability: int, head_tile: int) -> Tiling:
    """Tiling of `column_sums_kernel`; twice its programs should fit a multiprocessor, so that one's matrix product
    hides another's exponentials.
    """
    if device_capability >= 90:
        return Tiling(128, 128, 8, 2) if head_tile <= 128 else Tiling(64, 128, 8, 2)
    if head_tile <= 128:
        return Tiling(64, 128, 8, 2)
    return Tiling(32, 64, 4, 2)


def unsupported(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, scaling: float) -> str | None:
    """Why the kernels cannot serve this call, or None if they can."""
    if queries.dtype not in DTYPES:
        return f"{str(queries.dtype).removeprefix('torch.')} is neither float16 nor bfloat16"
    if keys.dtype != queries.dtype or (values is not None and values.dtype != queries.dtype):
        return "queries, keys and values differ in dtype"
    for size in {keys.shape[2], keys.shape[2] if values is None else values.shape[2]}:
        if size % 8 or not 16 <= size <= LARGEST_HEAD:
            return f"heads of size {size} are not a multiple of 8 from 16 to {LARGEST_HEAD}"
    return None if scaling > 0 else f"a scaling of {scaling} is not positive"


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    tiling: Tiling | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Causal attention of the last T of n tokens and its log-sum-exp.

    Args:
        queries: fp16 or bf16 [Hq, T, D]; keys: [H, n, D]; values: [H, n, E], or None for the log-sum-exp alone.
        scaling, softcap, sinks: as in `attention_reference`; scaling must be positive.
        window: tokens that a query sees, its own included; None for all before it.
        tiling: instead of the one chosen for the device.

    Returns:
        the output [Hq, T, E] in the queries' dtype (None without values) and float32 [Hq, T], the natural logarithm
        of the sum of exponentials, the sink's included.

    Raises:
        UsageError: `unsupported` says why, or shapes that do not belong together.
    """
    heads, length, size, tokens, window = _checked(queries, keys, values, scaling, window)
    value_size = 0 if values is None else values.shape[2]
    output = queries.new_empty(heads, length, value_size)
    log_sum_exp = torch.empty(heads, length, dtype=torch.float32, device=queries.device)
    head_tile, value_tile = _tile(size), _tile(value_size)
    tiling = tiling or attention_tiling(_capability(queries.device), head_tile, value_tile)
    queries, keys = _aligned(queries), _aligned(keys)
    values = keys if values is None else _aligned(values)
    together = _together(heads, heads // keys.shape[0], tokens * (size + value_size) * 2)
    attention_kernel[(triton.cdiv(length, tiling.query_rows) * heads,)](
        _tiles(queries, tiling.query_rows, tiling),
        _tiles(keys, tiling.key_rows, tiling),
        _tiles(values, tiling.key_rows, tiling),
        log_sum_exp if sinks is None else sinks.float().contiguous(),
        output,
        log_sum_exp,
        *_strides(queries),
        *_strides(keys),
        *_strides(values),
        length,
        tokens,
        heads // keys.shape[0],
        together,
        window,
        float(scaling),
        float(softcap or 1.0),
        QUERY_ROWS=tiling.query_rows,
        KEY_ROWS=tiling.key_rows,
        HEAD_SIZE=size,
        HEAD_TILE=head_tile,
        VALUE_SIZE=value_size,
        VALUE_TILE=value_tile,
        SOFTCAP=bool(softcap),
        SINKS=sinks is not None,
        WINDOWED=window > 0,
        DESCRIPTORS=tiling.descriptors,
        INTERPRETED=queries.device.type == "cpu",
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
    )
    return (None if value_size == 0 else output), log_sum_exp


def column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Attention that each token receives, summed over queries and over the query heads of its KV head.

    Args:
        queries, keys, scaling, softcap, window, tiling: as in `attention`.
        log_sum_exp: float32 [Hq, T], what `attention` returned for the same arguments and the layer's sinks.

    Returns:
        float32 [H, n].

    Raises:
        UsageError: as in `attention`.
    """
    heads, length, size, tokens, window = _checked(queries, keys, None, scaling, window)
    if log_sum_exp.shape != (heads, length):
        raise UsageError(f"A log-sum-exp of shape {tuple(log_sum_exp.shape)} does not fit {heads} x {length} queries.")
    head_tile = _tile(size)
    tiling = tiling or column_tiling(_capability(queries.device), head_tile)
    group = heads // keys.shape[0]
    stride = triton.cdiv(length, ALIGNMENT.value)
    # In units of log 2, and padded so that every row starts at a multiple of 64 bytes.
    normalizers = torch.empty(heads, stride * ALIGNMENT.value, dtype=torch.float32, device=queries.device)
    torch.mul(log_sum_exp, LOG2_E.value, out=normalizers[:, :length])
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=queries.device)
    queries, keys = _aligned(queries), _aligned(keys)
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
        float(scaling),
        float(softcap or 1.0),
        QUERY_ROWS=tiling.query_rows,
        KEY_ROWS=tiling.key_rows,
        HEAD_SIZE=size,
        HEAD_TILE=head_tile,
        SOFTCAP=bool(softcap),
        WINDOWED=window > 0,
        DESCRIPTORS=tiling.descriptors,
        INTERPRETED=queries.device.type == "cpu",
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
    )
    return sums.unflatten(0, (-1, group)).sum(1)


def _checked(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, scaling: float, window: int | None
) -> tuple[int, int, int, int, int]:
    """Hq, T, D, n and the window, which is 0 where it hides nothing."""
    reason = unsupported(queries, keys, values, scaling)
    if reason is not None:
        raise UsageError(f"The prompt's attention kernels cannot run: {reason}.")
    (heads, length, size), (key_heads, tokens, key_size) = queries.shape, keys.shape
    fits = size == key_size and heads % key_heads == 0 and 0 < length <= tokens
    if not fits or (values is not None and values.shape[:2] != keys.shape[:2]):
        shapes = [tuple(x.shape) for x in (queries, keys, values) if x is not None]
        raise UsageError(f"Queries, keys and values of shapes {shapes} do not belong together.")
    if window is not None and window < 1:
        raise UsageError(f"A sliding window of {window} tokens shows a query not even itself.")
    return heads, length, size, tokens, 0 if window is None or window >= tokens else window


def _tile(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _capability(device: torch.device) -> int:
    major, minor = capability(device)
    return 10 * major + minor


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where its rows are not contiguous and at multiples of 16 bytes."""
    if tensor.stride(2) == 1 and not (tensor.stride(0) % 8 or tensor.stride(1) % 8 or tensor.data_ptr() % 16):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _tiles(tensor: torch.Tensor, rows: int, tiling: Tiling) -> torch.Tensor | TensorDescriptor:
    """What a kernel reads tiles of so many rows from."""
    if not tiling.descriptors:
        return tensor
    return TensorDescriptor(tensor, tensor.shape, tensor.stride(), [1, rows, _tile(tensor.shape[2])])


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
