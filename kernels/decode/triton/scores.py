"""From products of queries and keys to weights: factors, caps, shifts, masks and the running softmax.

Scores are kept times log2(e), so that exponentials are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconvert.kernels.decode.triton.shape import query_rows
from kvconvert.kernels.decode.triton.tiles import exp2

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def residual_finish(x, factor, softcap, F: tl.constexpr):
    """`finish_scores` of tokens outside of spans."""
    x = x * factor[None, :, None]
    if F.softcap:
        x = capped(x, softcap)
    if F.softcap or F.tau:
        x = x * LOG2_E
    return x


@triton.jit
def capped(x, softcap):
    """softcap tanh(x / softcap), as 1 - 2 / (exp(2 z) + 1) with a limit beyond which fp32 knows no difference."""
    z = tl.minimum(tl.maximum(x / softcap, -15.0), 15.0)
    return softcap * (1.0 - 2.0 / (tl.exp2(z * (2.0 * LOG2_E)) + 1.0))


@triton.jit
def finish_scores(x, factor, softcap, slope, shift, F: tl.constexpr):
    """Scores [M, rows, P] from products: times factor [rows], capped, shifted (CalibQuant), and times log2(e)."""
    return shaped_scores(x * factor[None, :, None], softcap, slope, shift, F)


@triton.jit
def shaped_scores(x, softcap, slope, shift, F: tl.constexpr):
    """What `finish_scores` does to products that were multiplied with its factor."""
    if F.softcap:
        x = capped(x, softcap)
    if F.tau:
        x = x * slope[None, :, None] + shift[None, :, None]
    if F.softcap or F.tau:
        x = x * LOG2_E
    return x


@triton.jit
def product_factor(unit, scaling, F: tl.constexpr):
    """What products of queries divided by `unit` are multiplied with, log2(e) included unless it has to come later."""
    if F.softcap or F.tau:
        return unit * scaling
    else:
        return unit * (scaling * LOG2_E)


@triton.jit
def hide(x, token, first, limit, mask, mask_query, F: tl.constexpr):
    """Scores [M, rows, P] with minus infinity for tokens [M, P] before `first`, beyond `limit` or masked (uint8, 0
    hides)."""
    if F.ragged:
        x = tl.where(((token >= first) & (token < limit))[:, None, :], x, float("-inf"))
    if F.masked:
        row = tl.arange(0, query_rows(F))
        where = mask + (row % F.queries)[None, :, None] * mask_query + token[:, None, :]
        real = (token < limit)[:, None, :] & (row < F.group * F.queries)[None, :, None]
        x = tl.where(tl.load(where, mask=real, other=0) > 0, x, float("-inf"))
    return x


@triton.jit
def softmax_step(x, maximum, F: tl.constexpr):
    """Weights of scores [M, rows, P], the new maximum [rows], and the factor for what was summed before."""
    highest = tl.maximum(maximum, tl.max(tl.max(x, 2), 0))
    alpha = exp2(maximum - highest, F.inline_asm)
    return exp2(x - highest[None, :, None], F.inline_asm), highest, alpha


@triton.jit
def extremes_reduced(extremes, item_rows, row, block, blocks, head, heads, tau1, tau2, F: tl.constexpr):
    """Slope and shift [rows] of CalibQuant's map from the smallest and largest score of all items of a row."""
    r = tl.arange(0, query_rows(F))
    low = tl.full([query_rows(F)], float("inf"), tl.float32)
    high = tl.full([query_rows(F)], float("-inf"), tl.float32)
    for item in range(tl.load(item_rows + row), tl.load(item_rows + row + 1)):
        where = extremes + (((item * blocks + block) * heads + head) * query_rows(F) + r) * 2
        low = tl.minimum(low, tl.load(where))
        high = tl.maximum(high, tl.load(where + 1))
    width = high - low
    slope = tl.where(width > 0, tl.maximum(1.0 - (tau2 - tau1) / tl.maximum(width, 1e-37), 0.0), 0.0)
    return slope, low - tau1 - low * slope, (width > 0) & (width <= tau2 - tau1)
