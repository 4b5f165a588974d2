"""Choosing tokens by sorting: the oracle, and the path without kernels.

Noise comes from a counter, not from a generator's state: the Gumbel noise of a token is a hash of the request's seed,
of how many tokens were generated before, and of the token's id. A request therefore draws the same tokens whatever
shares its batch and whichever row it is in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Sums of probabilities as integers are the same in whatever order they are added; 2 ** 40 leaves room for 2 ** 22 ids.
FIXED_POINT = 2**40
# Of a row's likeliest tokens, among which those that it may draw are looked for first.
CANDIDATES = 512
# Temperatures that a float32 holds with all its digits; beyond them a choice is the likeliest token, or any.
COLDEST, HOTTEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def gumbel_noise(seeds: Tensor, counters: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise as a function of seed, counter and token id.

    Args:
        seeds: int64 [B].
        counters: int64 [B], tokens generated before this one.
        ids: int64 [B, N] or [1, N].

    Returns:
        float32 [B, N].
    """
    key = _mix64(seeds + _mix64(counters + 1))
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    bits = _mix32(_mix32(ids.to(torch.int32) + low[:, None]) ^ high[:, None])
    # As an unsigned number; close to 0, where the largest noise comes from, a float32 holds every one of the 32 bits.
    uniform = (bits.float() + (bits < 0).float() * 2.0**32 + 0.5) * 2.0**-32
    return -(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24))).log()


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
    *,
    restrict: bool,
) -> Tensor:
    """`sample`, by sorting the vocabulary if some tokens are ruled out."""
    greedy = temperature == 0
    ordered = logits.float()
    if restrict:  # before they are divided, which may make different ones equal
        ordered, ids = ordered.sort(dim=-1, descending=True, stable=True)
    else:
        ids = torch.arange(logits.shape[1], device=logits.device)[None]
    # The largest becomes 0, so that a temperature near 0 divides nothing to infinity but what is out of the question.
    best = ordered[:, :1] if restrict else ordered.amax(-1, keepdim=True)
    scaled = _scaled(ordered, best, temperature)
    if restrict:
        scaled = scaled.masked_fill(~_allowed(scaled, top_k, top_p), -math.inf)
    drawn = (scaled + gumbel_noise(seeds, counters, ids)).argmax(-1)
    if restrict:
        drawn = ids.gather(1, drawn[:, None])[:, 0]
    return torch.where(greedy, logits.argmax(-1), drawn)


def sample_likeliest(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, counters: Tensor
) -> Tensor:
    """`sample` for rows whose allowed tokens are certainly among the CANDIDATES likeliest; -1 for others.

    On a CPU sorting a vocabulary takes longer than the layers of a small model.
    """
    every = logits.float()
    values, ids = every.topk(CANDIDATES)
    # Of equal ones the lowest ids first.
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    scaled = _scaled(values, values[:, :1], temperature)
    allowed = _allowed(scaled, top_k, top_p, _scaled(every, values[:, :1], temperature).exp().sum(-1))
    last = values.gather(1, allowed.sum(-1, keepdim=True) - 1)
    drawn = (scaled.masked_fill(~allowed, -math.inf) + gumbel_noise(seeds, counters, ids)).argmax(-1)
    restricts = ((top_k > 0) | (top_p < 1)) & (top_k < CANDIDATES)
    known = restricts & (last > values[:, -1:])[:, 0]
    tokens = torch.where(known, ids.gather(1, drawn[:, None])[:, 0], -1)
    return torch.where(temperature == 0, logits.argmax(-1), tokens)


def _scaled(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Logits [B, N] over the temperature, 0 for the best [B, 1]; those of greedy rows as they are."""
    return (logits - best) / torch.where(temperature == 0, 1, temperature.clamp(COLDEST, HOTTEST))[:, None]


def _allowed(scaled: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None = None) -> Tensor:
    """Which tokens may be drawn, bool [B, N], of descending logits: top_k first, then top_p of what it left.

    Args:
        scaled: scaled logits of the likeliest tokens, float32 [B, N]; the largest is 0.
        top_k, top_p: the limits of each row, [B].
        total: the sum of exp(scaled) over the vocabulary, [B]; None where `scaled` has it all.
    """
    places = torch.arange(scaled.shape[1], device=scaled.device)
    within_k = (places < top_k[:, None]) | (top_k == 0)[:, None]
    probabilities = scaled.masked_fill(~within_k, -math.inf).softmax(-1)
    if total is not None:  # of rows without a top_k
        probabilities = torch.where((top_k == 0)[:, None], scaled.exp() / total[:, None], probabilities)
    summed = (probabilities.double() * FIXED_POINT).long().cumsum(-1)
    before = torch.cat([torch.zeros_like(summed[:, :1]), summed[:, :-1]], 1)
    within_p = (before < (top_p.double() * FIXED_POINT).long()[:, None]) | (top_p >= 1)[:, None]
    within_p[:, 0] = True
    return within_k & within_p


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finalizer on int64; products wrap, and masks make the arithmetic shifts logical."""
    x = x * -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _mix32(x: Tensor) -> Tensor:
    """A bijective hash of int32 with little bias (lowbias32)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B
    return x ^ ((x >> 16) & 0xFFFF)
