"""Choosing the next token of every row of a batch, on the device, each row by its own parameters and random stream.

Noise comes from a counter, not from a generator's state: the Gumbel noise of a token is a hash of the request's seed,
of how many tokens were generated before, and of the token's id. A request therefore draws the same tokens whatever
shares its batch and whichever row it is in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvconvert.bundle.generation import PROCESSED
from kvconvert.errors import UsageError, did_you_mean

# Sums of probabilities as integers are the same in whatever order they are added; 2 ** 40 leaves room for 2 ** 22 ids.
FIXED_POINT = 2**40
# Of a row's likeliest tokens, among which those that it may draw are looked for first.
CANDIDATES = 512
# Temperatures that a float32 holds with all its digits; beyond them a choice is the likeliest token, or any.
COLDEST, HOTTEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token, whatever the other fields say.
        top_k: only the k most likely tokens may be drawn; 0 allows all.
        top_p: of these, only the most likely ones whose probabilities sum up to top_p; 1 allows all.
        seed: of the request's random stream, a 64-bit number; None draws one when the request is added.
        settings: what else changes which token is chosen, by transformers' names: `repetition_penalty`, `min_p`,
            `bad_words_ids`, and others (`kvconvert.bundle.generation.PROCESSED`).

    Raises:
        UsageError: a value outside its range, or an unknown setting.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf):
            raise UsageError(f"temperature = {self.temperature} cannot be used; it is 0 (greedy) or a positive number.")
        if not isinstance(self.top_k, int) or not 0 <= self.top_k < 2**63:
            raise UsageError(f"top_k = {self.top_k} cannot be used; it is 0 (all tokens) or a positive integer.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p = {self.top_p} cannot be used; it is above 0 and at most 1 (all tokens).")
        if self.seed is not None and not (isinstance(self.seed, int) and -(2**63) <= self.seed < 2**63):
            raise UsageError(f"seed = {self.seed} cannot be used; it is an integer of 64 bits.")
        if unknown := set(self.settings) - {*PROCESSED}:
            name = min(unknown)
            raise UsageError(f"`settings` has {name}, which cannot be applied; {did_you_mean(name, PROCESSED)}")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def restricts(self) -> bool:
        """Whether some tokens may not be drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


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


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
    *,
    restrict: bool = True,
) -> Tensor:
    """One token per row.

    Args:
        logits: [B, V], of any floating-point dtype.
        temperature, top_p: float32 [B]; rows of temperature 0 take the most likely token, the lowest id among equals.
        top_k: int64 [B], 0 for all.
        seeds, counters: int64 [B], see `gumbel_noise`.
        restrict: False where no row has a top_k or top_p, which saves sorting the vocabulary.

    Returns:
        int64 [B].
    """
    if not restrict or logits.device.type != "cpu" or logits.shape[1] <= 4 * CANDIDATES:
        return _sample(logits, temperature, top_k, top_p, seeds, counters, restrict=restrict)
    # What a row draws must not depend on the others, so that each is decided for itself.
    tokens = _sample_likeliest(logits, temperature, top_k, top_p, seeds, counters)
    left = tokens < 0
    if left.any():
        own = [column[left] for column in (logits, temperature, top_k, top_p, seeds, counters)]
        tokens[left] = _sample(*own, restrict=True)
    return tokens


def _sample(
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


def _sample_likeliest(
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


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was by the model's logits, before any setting changed them.

    Attributes:
        chosen: natural logarithm of the token's probability.
        likeliest: ids of the likeliest tokens, the likeliest first, each with the logarithm of its probability.
    """

    chosen: float
    likeliest: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, packed: list[float], count: int) -> TokenLogprobs:
        """What `log_probabilities` packed of one row, with so many of the likeliest tokens."""
        most = len(packed) // 2
        return cls(packed[0], tuple((int(packed[1 + n]), packed[1 + most + n]) for n in range(count)))


def log_probabilities(logits: Tensor, chosen: Tensor, most: int) -> Tensor:
    """Logarithms of the probabilities of the chosen and of the likeliest tokens, in one tensor that is fetched at once.

    Args:
        logits: [B, V], of any floating-point dtype.
        chosen: int64 [B].
        most: how many of the likeliest tokens.

    Returns:
        float64 [B, 1 + 2 * most]: of the chosen token, then the ids of the likeliest ones, then theirs.
    """
    logs = logits.float().log_softmax(-1)
    values, ids = logs.topk(most, dim=-1)
    return torch.cat([logs.gather(1, chosen[:, None]).double(), ids.double(), values.double()], 1)


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
