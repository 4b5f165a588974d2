"""What all attention shares: the float64 reference, the streaming softmax of CPUs, the merge of partial results, and
which tokens queries of sparse attention attend to.

Every path and every kernel is tested against the reference. The softmax over keys that come block by block, and the
merge of two finished ones, are plain PyTorch for devices without kernels: a decoding step spends as much time on
calling torch as on computing, so a block costs as few calls as it can.

Attention functions get choices as numbers of tokens, or of blocks of tokens, among all of a sequence, counted from its
first one (DeepSeek-V3.2's lightning indexer, arXiv 2512.02556, chooses tokens, MiniMax M3's blocks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Scoring(NamedTuple):
    """What becomes of dot products before the softmax.

    Attributes:
        scaling: factor of the dot products, usually 1 / sqrt(D).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2); None for no cap.
        sink_logits: [Hq] logits of a virtual token with no value (gpt-oss); None for none.
        window: the number of tokens that a query attends to, its own included; None for all before it.
    """

    scaling: float
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None
    window: int | None = None


class ReferenceAttention(NamedTuple):
    """Attention of one sequence, in float64.

    Attributes:
        output: [Hq, T, E], zeros where a query attends to nothing; None without values.
        weights: [Hq, T, n].
        log_sum_exp: [Hq, T], of the logits and sink logits.
        mass: [H, n], the weights summed over queries and the query heads of each KV head (MiniKV, section 3.2).
    """

    output: torch.Tensor | None
    weights: torch.Tensor
    log_sum_exp: torch.Tensor
    mass: torch.Tensor


def attention_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    visible: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> ReferenceAttention:
    """Attention of one sequence in float64.

    Args:
        queries: [Hq, T, D]; query head h reads KV head h // (Hq / H).
        keys: [H, n, D]; values: [H, n, E].
        visible: bool, broadcastable to [Hq, T, n], which keys each query attends to; None for all.
        scaling, softcap, sink_logits: as in `Scoring`.
    """
    heads, tokens = keys.shape[:2]
    repeat = queries.shape[0] // heads
    logits = queries.double() @ keys.double().repeat_interleave(repeat, 0).transpose(1, 2) * scaling
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    if sink_logits is not None:
        logits = torch.cat([logits, sink_logits.double().view(-1, 1, 1).expand(-1, logits.shape[1], 1)], -1)
    weights = torch.softmax(logits, -1).nan_to_num(0.0)[..., :tokens]
    output = None if values is None else weights @ values.double().repeat_interleave(repeat, 0)
    mass = weights.unflatten(0, (heads, repeat)).sum((1, 2))
    return ReferenceAttention(output, weights, logits.logsumexp(-1), mass)


def causal_mask(
    length: int, tokens: int, window: int | None = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """bool [length, tokens], which of the tokens the last `length` of them attend to: all up to their own.

    Args:
        length, tokens: how many queries and keys.
        window: tokens that a query attends to, its own included; None for all.
        device: where the mask is made.
    """
    key = torch.arange(tokens, device=device)
    query = key[tokens - length :].unsqueeze(1)
    return (key <= query) & (key > query - (window or tokens))


LOWEST = torch.finfo(torch.float32).min


def capped(scores: torch.Tensor, scaling: float, softcap: float | None) -> torch.Tensor:
    """Dot products as logits, in place: scaled, and softcap * tanh(logits / softcap) with a soft cap (Gemma 2)."""
    return scores.mul_(scaling / softcap).tanh_().mul_(softcap) if softcap else scores.mul_(scaling)


class StreamingSoftmax:
    """The softmax of every query of a batch: maximum, sum of exponentials and weighted values so far.

    For each block of keys call `weights`, then `add` with the values that the weights give.

    Maxima begin at the lowest finite number: minus infinity minus it is minus infinity, whose exponential is 0 and not
    NaN.

    Args:
        batch: B, the number of rows.
    """

    def __init__(self, batch: int):
        self._batch = batch
        self._maximum: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._factor: torch.Tensor | None = None

    def weights(self, scores: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Count N blocks of scores float32 [N, H, R, n], which are overwritten by exp(score - maximum so far).

        Args:
            scores: minus infinity where a query does not attend to a key.
            rows: int64 [N], the batch row of each block; None where the batch has one row, or one block for each row.
        """
        own = scores.amax(-1)
        if rows is None and len(own) != self._batch:
            own = own.amax(0, keepdim=True)
        if self._maximum is None:
            if rows is None:
                self._maximum = own.clamp_(min=LOWEST)
                weights = scores.sub_(self._maximum.unsqueeze(-1)).exp_()
                self._total = self._by_row(weights.sum(-1), None)
                return weights
            self._maximum = own.new_full((self._batch, *own.shape[1:]), LOWEST)
            self._total = torch.zeros_like(self._maximum)
        if rows is None:
            merged = torch.maximum(self._maximum, own)
            shift = merged
        else:
            merged = self._maximum.scatter_reduce(0, rows.view(-1, 1, 1).expand_as(own), own, "amax")
            shift = merged[rows]
        self._factor, self._maximum = (self._maximum - merged).exp_(), merged
        weights = scores.sub_(shift.unsqueeze(-1)).exp_()
        self._total = torch.addcmul(self._by_row(weights.sum(-1), rows), self._total, self._factor)
        return weights

    def add(self, values: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Add the weighted values [N, H, R, E] of the blocks that `weights` was last given."""
        values = self._by_row(values, rows)
        if self._output is not None:
            values = torch.addcmul(values, self._output, self._factor.unsqueeze(-1))
        self._output = values

    def _by_row(self, parts: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """The sums of blocks [N, ...] over each row's: [B, ...]."""
        if rows is not None:
            return parts.new_zeros(self._batch, *parts.shape[1:]).index_add_(0, rows, parts)
        return parts if len(parts) == self._batch else parts.sum(0, keepdim=True)

    def finish(self, sink_logits: torch.Tensor | None = None) -> torch.Tensor | None:
        """The attention [B, H, R, E], zeros where a query attends to nothing; None if there was no block.

        Args:
            sink_logits: logits of a virtual key without a value, broadcastable to [B, H, R] (gpt-oss).
        """
        if self._output is None:
            return None
        output, total = self._output, self._total
        if sink_logits is not None:
            merged = torch.maximum(self._maximum, sink_logits)
            factor = (self._maximum - merged).exp_()
            output, total = output * factor.unsqueeze(-1), torch.addcmul((sink_logits - merged).exp_(), total, factor)
        return output.div_(total.clamp_(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))


def merge(
    first: torch.Tensor, first_sum: torch.Tensor, second: torch.Tensor, second_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from attention over each.

    Args:
        first, second: outputs [..., E].
        first_sum, second_sum: their log-sum-exps [...]; minus infinity where a query attends to nothing.

    Returns:
        output and log-sum-exp in float32; zeros and minus infinity where a query attends to nothing in either set.
    """
    total = torch.logaddexp(first_sum.float(), second_sum.float())
    finite = total.nan_to_num(neginf=0.0)
    weights = [(part.float() - finite).exp().unsqueeze(-1) for part in (first_sum, second_sum)]
    return first.float() * weights[0] + second.float() * weights[1], total


@dataclass(frozen=True)
class Choice:
    """What was chosen for the queries of a pass.

    Attributes:
        numbers: [B, H, T, k], of tokens or blocks, negative where there are fewer; H is 1, or the number of KV heads.
        block: tokens of a block.
    """

    numbers: Tensor
    block: int = 1

    def is_all_of(self, tokens: int) -> bool:
        """Whether the choice has room for this number of tokens, so that none is left out."""
        return self.numbers.shape[-1] * self.block >= tokens

    def of_row(self, row: int, queries: Tensor, tokens: Tensor) -> Tensor:
        """bool [H, t, n]: whether queries number `queries` [t] of a row attend to tokens number `tokens` [n]."""
        numbers = self.numbers[row, :, queries].long()
        last = int(tokens.max()) // self.block + 1 if len(tokens) else 1
        # What lies beyond, and what stands for nothing, goes to a column that is dropped.
        numbers = numbers.masked_fill((numbers < 0) | (numbers > last), last + 1)
        chosen = torch.zeros(*numbers.shape[:-1], last + 2, dtype=torch.bool, device=numbers.device)
        chosen.scatter_(-1, numbers, True)
        return chosen[..., tokens.to(numbers.device) // self.block]

    def part(self, tokens: slice, rows: int) -> Choice:
        """The choice of `tokens` of a packed pass [1, H, N, k], which are `rows` sequences of the same length."""
        own = self.numbers[0, :, tokens]
        return replace(self, numbers=own.unflatten(1, (rows, -1)).transpose(0, 1))

    def mask(self, visible: Tensor | None, query_heads: int, tokens: int) -> Tensor:
        """A mask over the `tokens` tokens of one prompt without those that were not chosen, bool [B, Hq or 1, T, n].

        Args:
            visible: the model's own mask, bool or additive and broadcast to that; None for causal attention.
            query_heads: Hq.
            tokens: n, the T queries' among them, at the end.
        """
        batch, heads, length, _ = self.numbers.shape
        device = self.numbers.device
        every = torch.arange(tokens, device=device)
        chosen = torch.stack([self.of_row(row, every[:length], every) for row in range(batch)])
        if heads > 1:
            chosen = chosen.repeat_interleave(query_heads // heads, 1)
        if visible is None:
            visible = every <= every[tokens - length :, None]
        return chosen & (visible if visible.dtype == torch.bool else visible >= 0)


def choice_of(indices: Tensor | None, block_indices: Tensor | None, block: int | None) -> Choice | None:
    """What a model of transformers hands to its attention function: tokens [B, T, k], blocks [B, H, T, k], or nothing.

    Args:
        indices, block_indices: arguments of these names.
        block: tokens of a block.
    """
    if block_indices is not None:
        return Choice(block_indices, block)
    return None if indices is None else Choice(indices.unsqueeze(1))
