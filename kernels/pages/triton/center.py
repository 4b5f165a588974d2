"""The constant part of keys on a GPU: taken away before keys are quantized, added to what pages dequantize to."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvconvert.kernels.device import compiles, upload
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.pages.center import KeyCenter
from kvconvert.kernels.pages.triton import TABLE_COLUMNS

# Frequencies and channels of one matrix product, and registers of a thread with which two programs fit a
# multiprocessor; those of exact sines are more.
FREQUENCIES = 16
CHANNELS = 64
FEW_REGISTERS = 128
LARGEST_HALF = tl.constexpr(65504.0)
# 2 pi in fp32, and what it is less than that.
TURN = tl.constexpr(6.2831854820251465)
TURN_REST = tl.constexpr(-1.7484556000744883e-07)


@triton.jit
def cos_and_sin(angle, FAST: tl.constexpr):
    """Both of any angle in fp32; FAST for results that are rounded to 16 bits, to an error of 2^-20.

    The first step of the reduction by multiples of 2 pi is exact, and the hardware's instructions have that error
    between -pi and pi, and larger ones elsewhere.
    """
    if FAST:
        turns = tl.floor(angle * (1.0 / TURN) + 0.5)
        angle = tl.fma(turns, -TURN, angle)
        angle = tl.fma(turns, -TURN_REST, angle)
        cos = tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $1;", "=r,r", [angle], dtype=tl.float32, is_pure=True, pack=1
        )
        sin = tl.inline_asm_elementwise(
            "sin.approx.f32 $0, $1;", "=r,r", [angle], dtype=tl.float32, is_pure=True, pack=1
        )
        return cos, sin
    else:
        return tl.cos(angle), tl.sin(angle)


@kernel
def center_kernel(
    tokens,
    table,
    centers,
    matrices,
    frequencies,
    token_stride,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    SIGN: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FAST: tl.constexpr,
):
    """Add SIGN c(t), in float32, to one page's tokens of one head and block of channels, but for hidden ones.

    `table` int64 [N, 5] is that of kernels/pages/triton/launch.py; `centers` int64 [N, 3] are the position of each
    page's first token and the offsets of its layer's matrix [H, D, 2F] and frequencies [F]. Pages of no tokens are left
    out.
    """
    COUNT: tl.constexpr = HEAD_SIZE // 2
    page = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    if tl.load(table + page * TABLE_COLUMNS + 3) == 0:
        return
    first = tl.load(centers + page * 3).to(tl.float32)
    matrix = matrices + tl.load(centers + page * 3 + 1) + head * HEAD_SIZE * 2 * COUNT
    speeds = frequencies + tl.load(centers + page * 3 + 2)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.arange(0, PAGE)
    center = tl.zeros([PAGE, BLOCK_D], tl.float32)
    for begin in range(0, COUNT, BLOCK_F):
        f = begin + tl.arange(0, BLOCK_F)
        w = tl.load(speeds + f, mask=f < COUNT, other=0.0)
        start = first * w
        step = token.to(tl.float32)[:, None] * w[None, :]
        cos_start, sin_start = cos_and_sin(start[None, :], FAST)
        cos_step, sin_step = cos_and_sin(step, FAST)
        # Stored channel by channel; of pairs beyond the last one the matrix has zeros here.
        here = matrix + channel[None, :] * 2 * COUNT + f[:, None]
        known = (f < COUNT)[:, None] & (channel < HEAD_SIZE)[None, :]
        of_cos = tl.load(here, mask=known, other=0.0).to(tl.float32)
        of_sin = tl.load(here + COUNT, mask=known, other=0.0).to(tl.float32)
        center = tl.dot(cos_start * cos_step - sin_start * sin_step, of_cos, center, input_precision="tf32x3")
        center = tl.dot(sin_start * cos_step + cos_start * sin_step, of_sin, center, input_precision="tf32x3")
    line = table + page * TABLE_COLUMNS
    offset = tl.load(line) + head * tl.load(line + 1)
    where = tokens + offset + token[:, None] * token_stride + channel[None, :]
    mask = (channel < HEAD_SIZE)[None, :] & (token >= tl.load(line + 4))[:, None]
    sum = tl.load(where, mask=mask, other=0.0).to(tl.float32) + SIGN * center
    if SIGN > 0 and tokens.dtype.element_ty == tl.float16:
        # As dequantized tokens do; what is to be quantized has to stay what it is, to be refused.
        sum = tl.minimum(tl.maximum(sum, -LARGEST_HALF), LARGEST_HALF)
    tl.store(where, sum.to(tokens.dtype.element_ty), mask=mask)


def launch_centers(
    base: torch.Tensor,
    token_stride: int,
    table: torch.Tensor,
    centers: torch.Tensor,
    like: KeyCenter,
    page_size: int,
    sign: int,
) -> None:
    """Add sign * c(t) to pages' tokens where they lie.

    Args:
        base: any tensor of the keys' dtype and device, from whose address `table` counts.
        token_stride: elements from one token to the next.
        table, centers: see `center_kernel`; offsets of centers count from the matrix and frequencies of `like`.
        like: a layer's center, of the same shapes as all.
        page_size: tokens of a page.
        sign: 1 or -1.
    """
    heads, dim, _ = like.matrix.shape
    fast = compiles(base.device) and base.dtype != torch.float32
    center_kernel[(len(table) * heads, triton.cdiv(dim, CHANNELS))](
        base,
        table,
        centers,
        like.matrix,
        like.frequencies,
        token_stride,
        **center_constants(heads, dim, page_size, sign),
        FAST=fast,
        num_warps=center_warps(page_size),
        maxnreg=FEW_REGISTERS if fast else None,
        # Every operation is rounded by itself, as on a CPU.
        enable_fp_fusion=False,
    )


def center_constants(heads: int, dim: int, page_size: int, sign: int) -> dict[str, int]:
    """Compile-time arguments of `center_kernel`."""
    return {
        "HEADS": heads,
        "HEAD_SIZE": dim,
        "PAGE": page_size,
        "SIGN": sign,
        "BLOCK_F": FREQUENCIES,
        "BLOCK_D": CHANNELS,
    }


def center_warps(page_size: int) -> int:
    """Warps of `center_kernel`."""
    return max(1, page_size // 16)


def add_to_pages(tokens: torch.Tensor, position: int, page_size: int, center: KeyCenter, sign: int) -> None:
    """`add_centers` of kernels/pages/__init__.py, of whole pages."""
    count = tokens.shape[1] // page_size
    table, centers = np.zeros((count, 5), dtype=np.int64), np.zeros((count, 3), dtype=np.int64)
    first = page_size * np.arange(count)
    table[:, 0], table[:, 1], table[:, 3] = first * tokens.stride(1), tokens.stride(0), page_size
    centers[:, 0] = position + first
    launch_centers(
        tokens,
        tokens.stride(1),
        upload(table, tokens.device),
        upload(centers, tokens.device),
        center,
        page_size,
        sign,
    )
