"""The kernel that merges two partial results of attention by their log-sum-exps, in one pass over both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Stands for minus infinity, so that differences of two of them are 0 instead of NaN.
LOWEST = tl.constexpr(-1.0e30)
# Elements per thread.
PER_THREAD = 16
ROWS = 32

STRIDES = [f"{tensor}_{axis}_stride" for tensor in ("first", "second", "output") for axis in ("head", "group", "token")]


@triton.jit(do_not_specialize=[*STRIDES, "group", "length"])
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
    """`merge_reference` into `output` and `output_sum`, which may be those of either part.

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
