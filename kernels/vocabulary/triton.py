"""Logits from rows of 8 bits: a code is exact in the activations' dtype, and the scale of its row follows the sum."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.device import compiles
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.linear.triton import multiply

MOST_ROWS = 128  # of the activations in a program


@kernel(do_not_specialize=["rows", "vocabulary"])
def logits_kernel(
    x, codes, scales, logits, rows, vocabulary, SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    STEP: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """ROWS rows of x [rows, SIZE] times TOKENS of the vocabulary's."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there, known = (row < rows)[:, None], (token < vocabulary)[:, None]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for begin in range(0, SIZE, STEP):
        channel = begin + tl.arange(0, STEP)
        inside = (channel < SIZE)[None, :]
        part = tl.load(x + row.to(tl.int64)[:, None] * SIZE + channel[None, :], mask=there & inside, other=0.0)
        code = tl.load(codes + token.to(tl.int64)[:, None] * SIZE + channel[None, :], mask=known & inside, other=0)
        total = multiply(part, tl.trans(code.to(tl.float32).to(part.dtype)), total, COMPILED)
    total *= tl.load(scales + token, mask=token < vocabulary, other=0.0)[None, :]
    place = logits + row.to(tl.int64)[:, None] * vocabulary + token[None, :]
    tl.store(place, total.to(logits.dtype.element_ty), mask=there & (token < vocabulary)[None, :])


def tile(rows: int) -> tuple[int, int, int]:
    """Tokens of the vocabulary in a program, channels at a time, and warps.

    Few rows of activations are limited by memory, many by the conversion of codes.
    """
    return (64, 128, 4) if rows <= 32 else (128, 64, rows // 16)


def logits(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """[n, D] times codes [V, D] and scales [V]: [n, V]."""
    found = x.new_empty(len(x), len(codes))
    if not found.numel():
        return found
    rows = min(MOST_ROWS, max(16, triton.next_power_of_2(len(x))))
    tokens, step, warps = tile(rows)
    grid = triton.cdiv(len(codes), tokens), triton.cdiv(len(x), rows)
    logits_kernel[grid](
        x, codes, scales, found, len(x), len(codes), SIZE=x.shape[1], ROWS=rows, TOKENS=tokens, STEP=step,
        COMPILED=compiles(x.device), num_warps=warps,
    )  # fmt: skip
    return found
