"""Chunked prefill on a GPU: tiles of dequantized tokens, a backend's attention, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl

from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.chunked_prefill.parts import StoredPart, Workspace
from kvconvert.kernels.device import capability
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.prompt.triton import attention

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Stands for minus infinity, so that differences of two of them are 0 instead of NaN.
LOWEST = tl.constexpr(-1.0e30)
# Elements per thread.
PER_THREAD = 16
ROWS = 32

STRIDES = [f"{tensor}_{axis}_stride" for tensor in ("first", "second", "output") for axis in ("head", "group", "token")]


@kernel(do_not_specialize=[*STRIDES, "group", "length"])
def merge_kernel(
    first,
    first_sum,
    second,
    second_sum,
    output,
    output_sum,
    first_head_stride,
    first_group_stride,
    first_token_stride,
    second_head_stride,
    second_group_stride,
    second_token_stride,
    output_head_stride,
    output_group_stride,
    output_token_stride,
    group,
    length,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS queries of one head; `merge_partials` says the rest. Strides are in units of 8 elements."""
    blocks = tl.cdiv(length, ROWS)
    head, token = tl.program_id(0) // blocks, tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    kv_head, member = (head // group).to(tl.int64), (head % group).to(tl.int64)
    channel = tl.arange(0, TILE)[None, :]
    exists = token < length
    mask = exists[:, None] & (channel < SIZE)
    sums = head.to(tl.int64) * length + token
    x_sum = tl.maximum(tl.load(first_sum + sums, mask=exists, other=LOWEST), LOWEST)
    y_sum = tl.maximum(tl.load(second_sum + sums, mask=exists, other=LOWEST), LOWEST)
    highest = tl.maximum(x_sum, y_sum)
    x_weight, y_weight = tl.exp2((x_sum - highest) * LOG2_E), tl.exp2((y_sum - highest) * LOG2_E)
    total = x_weight + y_weight
    token = token.to(tl.int64)[:, None]
    x_rows = first + (kv_head * first_head_stride + member * first_group_stride + token * first_token_stride) * 8
    y_rows = second + (kv_head * second_head_stride + member * second_group_stride + token * second_token_stride) * 8
    x = tl.load(x_rows + channel, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_rows + channel, mask=mask, other=0.0).to(tl.float32)
    merged = x * (x_weight / total)[:, None] + y * (y_weight / total)[:, None]
    rows = output + (kv_head * output_head_stride + member * output_group_stride + token * output_token_stride) * 8
    tl.store(rows + channel, merged.to(output.dtype.element_ty), mask=mask)
    merged_sum = tl.where(highest > LOWEST, highest + tl.log2(total) * LN_2, float("-inf"))
    tl.store(output_sum + sums, merged_sum, mask=exists)


def merge_partials(
    first: torch.Tensor,
    first_sum: torch.Tensor,
    second: torch.Tensor,
    second_sum: torch.Tensor,
    output: torch.Tensor,
    output_sum: torch.Tensor,
) -> None:
    """`merge` of `kernels/attention.py` into `output` and `output_sum`, which may be those of either part.

    Args:
        first, second, output: [H, G, T, E] of any float dtype, rows of contiguous channels at multiples of 8 elements.
        first_sum, second_sum, output_sum: float32 [H, G, T], contiguous.
    """
    heads, group, length, size = first.shape
    constants = merge_constants(size)
    strides = [stride // 8 for tensor in (first, second, output) for stride in tensor.stride()[:3]]
    merge_kernel[(heads * group * triton.cdiv(length, ROWS),)](
        first, first_sum, second, second_sum, output, output_sum, *strides, group, length,
        **constants, num_warps=merge_warps(constants),
    )  # fmt: skip


def merge_constants(size: int) -> dict[str, int]:
    """Compile-time arguments of `merge_kernel`."""
    return {"SIZE": size, "TILE": triton.next_power_of_2(size), "ROWS": ROWS}


def merge_warps(constants: dict[str, int]) -> int:
    """Warps of `merge_kernel`."""
    return max(1, constants["ROWS"] * constants["TILE"] // (32 * PER_THREAD))


Backend = Literal["triton", "flash", "cudnn"]
# cuDNN takes some 60 ms to prepare for every new shape, so it gets whole tiles and queries in multiples of this.
CUDNN_QUERIES = 512
# Output [H, G, T, E] and float32 log-sum-exp [H, G, T] of attention over some of the keys.
Partial = tuple[torch.Tensor, torch.Tensor]


def fastest_backend(length: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Backend:
    """What attends to whole tiles of stored tokens that every query sees.

    cuDNN's attention is about an eighth faster than `kernels/prompt` on an H200, where it takes these tensors.

    Args:
        length: the chunk's length.
        queries: [H, G T, D]; keys: [H, n, D]; values: [H, n, E].
    """
    if length % CUDNN_QUERIES or not queries.is_cuda or capability(queries.device) < (9, 0):
        return "triton"
    backends = torch.backends.cuda
    parameters = backends.SDPAParams(queries[None], keys[None], values[None], None, 0.0, False, False)
    return "cudnn" if backends.cudnn_sdp_enabled() and backends.can_use_cudnn_attention(parameters) else "triton"


def tiled_attention(
    queries: torch.Tensor,
    parts: Sequence[StoredPart],
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    backend: Backend | None = None,
    workspace_tokens: int | None = None,
) -> torch.Tensor:
    """`chunk_attention` of arguments that `unsupported` accepts.

    The chunk itself, with what is left of the stored tokens if both fit the workspace, is attended to by
    `kernels/prompt`, as is everything under a softcap or a window, and what fills no whole tile.
    """
    (heads, length, _), value_dim = keys.shape, values.shape[2]
    before = sum(part.tokens for part in parts)
    total = before + length
    workspace, grouped = None, queries
    if parts:
        workspace = Workspace(queries.device, heads, keys.shape[2], value_dim, queries.dtype, workspace_tokens)
        if scoring.softcap or (scoring.window is not None and scoring.window < total):
            backend = "triton"
        else:
            # Where all queries see all keys, those of one KV head are rows of one matrix [G T, D].
            grouped = queries.reshape(heads, -1, queries.shape[2])
            backend = backend or fastest_backend(length, grouped, workspace.keys, workspace.values)
            # In any order; pages first, so that tiles of nothing but pages are whole ones.
            parts = sorted(parts, key=lambda part: part.step, reverse=True)

    def attend(stored: tuple[torch.Tensor, torch.Tensor], begin: int, last: bool) -> Partial:
        """Attention over consecutive tokens from number `begin` on."""
        own = scoring if last else scoring._replace(sink_logits=None)
        output, log_sum_exp = attention(queries, *stored, own, first_query=before - begin)
        return output.unflatten(0, (heads, -1)), log_sum_exp.unflatten(0, (heads, -1))

    merged: Partial | None = None
    begin = 0
    for tokens in workspace.tiles(parts) if parts else ():
        joins = begin + tokens == before and tokens + length <= workspace.capacity
        if joins:
            workspace.write(StoredPart(length, keys, values), 0, length, tokens)
        tile = tuple(side[:, : tokens + joins * length] for side in (workspace.keys, workspace.values))
        if joins or backend == "triton" or tokens < workspace.capacity:
            part = attend(tile, begin, last=joins)
        else:
            part = _torch_attention(backend, grouped, *tile, scoring.scaling)
            part = tuple(result.unflatten(1, (-1, length)) for result in part)
        begin += tokens + joins * length
        if begin == total:
            return _finish(merged, part, queries, value_dim)
        merged = part if merged is None else _add(merged, part)
    return _finish(merged, attend((keys, values), before, last=True), queries, value_dim)


def _add(merged: Partial, part: Partial) -> Partial:
    """The merge of two results in float32, in the place of the first if that is float32."""
    output, log_sum_exp = merged
    if output.dtype != torch.float32:
        output = torch.empty(output.shape, dtype=torch.float32, device=output.device)
    merge_partials(*merged, *part, output, log_sum_exp)
    return output, log_sum_exp


def _finish(merged: Partial | None, part: Partial, queries: torch.Tensor, value_dim: int) -> torch.Tensor:
    """The merge of the last two results: [Hq, T, E] in the queries' dtype."""
    if merged is None:
        return part[0].flatten(0, 1)
    output = queries.new_empty(*merged[0].shape[:3], value_dim)
    merge_partials(*merged, *part, output, part[1])
    return output.flatten(0, 1)


def _torch_attention(
    backend: Backend, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> Partial:
    """Attention of all queries [H, n, D] over all keys by one of torch's operators: [H, n, E] and [H, n]."""
    arguments = (queries[None], keys[None], values[None])
    if backend == "flash":
        found = torch.ops.aten._scaled_dot_product_flash_attention(*arguments, 0.0, False, False, scale=scaling)
    else:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *arguments, None, True, 0.0, False, False, scale=scaling
        )
    return found[0][0], found[1].reshape(queries.shape[:2]).contiguous()
