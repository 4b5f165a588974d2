"""Choosing tokens in Triton without sorting: the least logit that may be drawn is searched for, three bits a pass.

Logits are compared as integers of the same order, their keys. Of a top_k the tokens with keys of at least t are
counted, of a top_p their weights exp((logit - best) / temperature) are summed, as integers, so that sums do not depend
on their order. The threshold is the largest t whose sum reaches the limit; of the tokens that have just this key only
the first may be drawn, as many as it takes. A pass divides the keys that are still possible into 8 bins. A row's
vocabulary is divided among programs, each of which finds out by itself, from the sums of all in the pass before, where
the next pass looks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.sampling.reference import COLDEST, FIXED_POINT, HOTTEST

_COLDEST, _HOTTEST, _ONE = tl.constexpr(COLDEST), tl.constexpr(HOTTEST), tl.constexpr(float(FIXED_POINT))
# Parts of larger tensors, aligned or not.
_COLUMNS = ["temperature", "top_k", "top_p", "seeds", "counters"]
# Bits of a key that a pass decides, and the bins that this takes.
BITS, BINS = 3, 8
_BITS, _BINS = tl.constexpr(BITS), tl.constexpr(BINS)
# Lines of a tile, each of one thread's 16 bytes, and tokens of a row that are one program's.
LINES, PART = 128, 8192
# Tokens of a tile where one is drawn.
TILE = 1024


@triton.jit
def _keys(x):
    """uint32 keys of numbers, of which -0 is 0; those of 16 bits have keys of 16 bits."""
    SIZE: tl.constexpr = x.dtype.primitive_bitwidth
    if SIZE == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(bits == -32768, 0, bits)
        return ((bits ^ ((bits >> 15) & 0x7FFF)) + 32768).to(tl.uint32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(bits == -2147483648, 0, bits)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _number(key, DTYPE: tl.constexpr):
    """The number of one key."""
    if DTYPE.primitive_bitwidth == 16:
        bits = key.to(tl.int32) - 32768
        return (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    else:
        bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, best, temperature):
    """int64 weights of float32 logits, 2^40 for the best."""
    return (tl.exp((x - best) / temperature) * _ONE).to(tl.int64)


@triton.jit
def _best(extremes, row, parts, PARTS: tl.constexpr):
    """The largest logit of a row."""
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(extremes + row * parts + part, mask=part < parts, other=-float("inf")))


@triton.jit
def _temperature(temperature, row):
    """A row's temperature, and whether it draws at all."""
    value = tl.load(temperature + row)
    return tl.minimum(tl.maximum(value, _COLDEST), _HOTTEST), value != 0


@triton.jit
def _bounds(sums, bounds, number, row, rows, parts, target, shift, PARTS: tl.constexpr):
    """Where pass `number` looks: the least possible key, and the sum of all keys above the possible ones.

    Args:
        sums: int64 [passes, rows, parts, 8], of each pass, of each part by bin.
        bounds: int64 [passes, rows, 2], what this returned for each pass before.
        shift: the number of low bits of a key that the previous pass left out.
    """
    low, above = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if number > 0:
        place = (number - 1) * rows + row
        low, above = tl.load(bounds + place * 2), tl.load(bounds + place * 2 + 1)
        part, bin_ = tl.arange(0, PARTS)[:, None], tl.arange(0, _BINS)[None, :]
        found = tl.load(sums + (place * parts + part) * _BINS + bin_, mask=part < parts, other=0)
        found, bin_ = tl.sum(found, 0), tl.arange(0, _BINS)
        reached = (above + tl.cumsum(found, reverse=True)) >= target
        digit = tl.sum((reached & (bin_ > 0)).to(tl.int32))
        above += tl.sum(tl.where(bin_ > digit, found, 0))
        low += digit.to(tl.int64) << shift
    return low, above


@triton.jit
def _mass_limit(masses, top_p, row, parts, PARTS: tl.constexpr):
    """What the weights of a row's tokens must reach."""
    part = tl.arange(0, PARTS)
    mass = tl.sum(tl.load(masses + row * parts + part, mask=part < parts, other=0))
    return tl.maximum((mass.to(tl.float64) * tl.load(top_p + row).to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _share(digit, amount, BIN: tl.constexpr):
    """The amounts of one bin, [lines]."""
    return tl.sum(tl.where(digit == BIN, amount, 0), 1)


@kernel
def extremes_kernel(logits, extremes, stride, vocabulary, LINES: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    """The largest logit of one part of a row."""
    row, begin = tl.program_id(1).to(tl.int64), tl.program_id(0) * PART
    place = begin + tl.arange(0, LINES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    best = tl.full([LINES], -float("inf"), tl.float32)
    for first in range(0, PART, LINES * WIDTH):
        token = place + first
        x = tl.load(logits + row * stride + token, mask=token < vocabulary, other=-float("inf"))
        best = tl.maximum(best, tl.max(x.to(tl.float32), 1))
    tl.store(extremes + row * tl.num_programs(0) + tl.program_id(0), tl.max(best))


@kernel(do_not_specialize=["number", "passes", *_COLUMNS[:3]])
def search_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    extremes,
    masses,
    sums,
    bounds,
    stride,
    vocabulary,
    number,
    passes,
    BY_WEIGHT: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Pass `number` over one part of a row: how much of it, by number or by weight, belongs to each bin."""
    part, row, parts, rows = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0), tl.num_programs(1)
    heat, draws = _temperature(temperature, row)
    if BY_WEIGHT:
        limited = draws & (tl.load(top_p + row) < 1)
    else:
        target = tl.load(top_k + row)
        limited = draws & (target > 0) & (target < vocabulary)
    if limited:
        shift = (passes - number) * _BITS
        if BY_WEIGHT:
            target = _mass_limit(masses, top_p, row, parts, PARTS)
            best = _best(extremes, row, parts, PARTS)
        low, above = _bounds(sums, bounds, number, row, rows, parts, target, shift, PARTS)
        here = number * rows + row
        if part == 0:
            tl.store(bounds + here * 2, low)
            tl.store(bounds + here * 2 + 1, above)
        shift -= _BITS
        lowest = (low >> shift).to(tl.int32)
        place = part * PART + tl.arange(0, LINES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        zero = tl.zeros([LINES], tl.int64 if BY_WEIGHT else tl.int32)
        a, b, c, d, e, f, g, h = zero, zero, zero, zero, zero, zero, zero, zero
        for first in range(0, PART, LINES * WIDTH):
            token = place + first
            x = tl.load(logits + row * stride + token, mask=token < vocabulary, other=0.0)
            digit = (_keys(x) >> shift.to(tl.uint32)).to(tl.int32) - lowest
            digit = tl.where(token < vocabulary, digit, _BINS)
            if BY_WEIGHT:
                amount = _weights(x.to(tl.float32), best, heat)
            else:
                amount = tl.full([LINES, WIDTH], 1, tl.int32)
            a, b = a + _share(digit, amount, 0), b + _share(digit, amount, 1)
            c, d = c + _share(digit, amount, 2), d + _share(digit, amount, 3)
            e, f = e + _share(digit, amount, 4), f + _share(digit, amount, 5)
            g, h = g + _share(digit, amount, 6), h + _share(digit, amount, 7)
        # Joined so that they are in order, and one reduction adds up the lines of all.
        even, odd = tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h))
        total = tl.sum(tl.reshape(tl.join(even, odd), [LINES, _BINS]), 0)
        tl.store(sums + (here * parts + part) * _BINS + tl.arange(0, _BINS), total.to(tl.int64))


@kernel(do_not_specialize=["passes", *_COLUMNS[:3]])
def masses_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    extremes,
    sums,
    bounds,
    masses,
    stride,
    vocabulary,
    passes,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The weights of one part of a row, of those tokens that its top_k leaves."""
    part, row, parts, rows = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0), tl.num_programs(1)
    heat, draws = _temperature(temperature, row)
    if draws & (tl.load(top_p + row) < 1):
        best, limit = _best(extremes, row, parts, PARTS), tl.load(top_k + row)
        # Least key of the tokens that are all left, and the weight of those of the key below it.
        least, rest = tl.zeros([], tl.uint32), tl.zeros([], tl.int64)
        if (limit > 0) & (limit < vocabulary):
            low, above = _bounds(sums, bounds, passes, row, rows, parts, limit, 0, PARTS)
            least = (low + 1).to(tl.uint32)
            if part == 0:
                x = _number(low.to(tl.uint32), logits.dtype.element_ty)
                rest = (limit - above) * _weights(x, best, heat)
        place = part * PART + tl.arange(0, LINES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        total = tl.zeros([LINES], tl.int64)
        for first in range(0, PART, LINES * WIDTH):
            token = place + first
            x = tl.load(logits + row * stride + token, mask=token < vocabulary, other=-float("inf"))
            counts = (token < vocabulary) & (_keys(x) >= least)
            total += tl.sum(tl.where(counts, _weights(x.to(tl.float32), best, heat), 0), 1)
        tl.store(masses + row * parts + part, tl.sum(total) + rest)


@triton.jit
def _mix64(x):
    """See `reference._mix64`."""
    x = x * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    """See `reference._mix32`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(key, token):
    """Gumbel noise of tokens, see `gumbel_noise`; key uint64."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = _mix32(_mix32(token.to(tl.uint32) + low) ^ high).to(tl.int32, bitcast=True)
    uniform = (bits.to(tl.float32) + tl.where(bits < 0, 4294967296.0, 0.0) + 0.5) * (1.0 / 4294967296.0)
    uniform = tl.minimum(uniform, 1.0 - 1.0 / 16777216.0)
    # log(1 - u), with the digits that 1 - u loses.
    rest = 1.0 - uniform
    return -tl.log(tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / (1.0 - rest))))


@kernel(do_not_specialize=["passes", *_COLUMNS])
def draw_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    seeds,
    counters,
    extremes,
    masses,
    counted,
    count_bounds,
    weighed,
    weight_bounds,
    scores,
    tokens,
    stride,
    vocabulary,
    passes,
    RESTRICT: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The token that one part of a row would choose, and its score."""
    part, row, parts, rows = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0), tl.num_programs(1)
    heat, draws = _temperature(temperature, row)
    best = _best(extremes, row, parts, PARTS)
    # Tokens of larger keys than the threshold may be drawn, and the first `left` of this part that have just this key.
    threshold, left = tl.zeros([], tl.int64), tl.zeros([], tl.int64) + vocabulary
    if RESTRICT:
        by_weight, limit = tl.load(top_p + row) < 1, tl.load(top_k + row)
        before, above = tl.arange(0, PARTS), tl.zeros([], tl.int64)
        each, target, found = above + 1, above + vocabulary, tl.zeros([PARTS], tl.int64)
        last = ((passes - 1) * rows + row) * parts
        if draws & by_weight:
            target = _mass_limit(masses, top_p, row, parts, PARTS)
            threshold, above = _bounds(weighed, weight_bounds, passes, row, rows, parts, target, 0, PARTS)
            each = _weights(_number(threshold.to(tl.uint32), logits.dtype.element_ty), best, heat)
            each = tl.maximum(each, 1)
            found = tl.load(weighed + (last + before) * _BINS + threshold % _BINS, mask=before < part, other=0)
        elif draws & (limit > 0) & (limit < vocabulary):
            target = limit
            threshold, above = _bounds(counted, count_bounds, passes, row, rows, parts, target, 0, PARTS)
            found = tl.load(counted + (last + before) * _BINS + threshold % _BINS, mask=before < part, other=0)
        left = (target - above + each - 1) // each - (tl.sum(found) + each // 2) // each
    key = _mix64(tl.load(counters + row).to(tl.uint64) + 1) + tl.load(seeds + row).to(tl.uint64)
    key = _mix64(key)
    score, chosen = tl.full([], -float("inf"), tl.float32), part * PART
    for first in range(0, PART, TILE):
        token = part * PART + first + tl.arange(0, TILE)
        exists = token < vocabulary
        x = tl.load(logits + row * stride + token, mask=exists, other=-float("inf"))
        value = x.to(tl.float32)
        if draws:
            value = (value - best) / heat + _noise(key, token)
        if RESTRICT:
            keys, least = _keys(x), threshold.to(tl.uint32)
            equal = exists & (keys == least)
            allowed = (keys > least) | (equal & (tl.cumsum(equal.to(tl.int32)) <= left))
            left -= tl.sum(equal.to(tl.int64))
            value = tl.where(allowed, value, -float("inf"))
        largest, where = tl.max(tl.where(exists, value, -float("inf")), 0, return_indices=True)
        if largest > score:
            score, chosen = largest, part * PART + first + where
    tl.store(scores + row * parts + part, score)
    tl.store(tokens + row * parts + part, tl.minimum(chosen, vocabulary - 1).to(tl.int64))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, counters: Tensor, restrict: bool
) -> Tensor:
    """`sample_reference` of logits [B, V] whose rows are contiguous."""
    (rows, vocabulary), device = logits.shape, logits.device
    parts, passes = triton.cdiv(vocabulary, PART), triton.cdiv(8 * logits.element_size(), BITS)
    columns = [column.contiguous() for column in (temperature, top_k, top_p)]
    keys = [column.contiguous() for column in (seeds, counters)]
    extremes = torch.empty(rows, parts, dtype=torch.float32, device=device)
    masses = torch.empty(rows, parts, dtype=torch.int64, device=device)
    counted, weighed = torch.empty(2, passes if restrict else 0, rows, parts, BINS, dtype=torch.int64, device=device)
    count_bounds, weight_bounds = torch.empty(2, len(counted), rows, 2, dtype=torch.int64, device=device)
    grid, stride = (parts, rows), logits.stride(0)
    tile = {"LINES": LINES, "WIDTH": 16 // logits.element_size(), "PART": PART, "num_warps": 4}
    whole = {"PARTS": triton.next_power_of_2(parts)}

    def search(sums: Tensor, bounds: Tensor, by_weight: bool) -> None:
        for number in range(passes):
            search_kernel[grid](
                logits, *columns, extremes, masses, sums, bounds, stride, vocabulary, number, passes,
                BY_WEIGHT=by_weight, **tile, **whole,
            )  # fmt: skip

    extremes_kernel[grid](logits, extremes, stride, vocabulary, **tile)
    if restrict:
        search(counted, count_bounds, by_weight=False)
        masses_kernel[grid](
            logits, *columns, extremes, counted, count_bounds, masses, stride, vocabulary, passes, **tile, **whole
        )
        search(weighed, weight_bounds, by_weight=True)
    # Zeros, for tokens are looked up even where launches are only listed.
    scores, tokens = torch.empty_like(extremes), torch.zeros_like(masses)
    draw_kernel[grid](
        logits, *columns, *keys, extremes, masses, counted, count_bounds, weighed, weight_bounds, scores, tokens,
        stride, vocabulary, passes, RESTRICT=restrict, TILE=TILE, PART=PART, **whole, num_warps=4,
    )  # fmt: skip
    return tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0]
