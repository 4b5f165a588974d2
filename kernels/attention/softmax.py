"""A softmax over keys that come block by block, and the merge of two finished ones, in plain PyTorch.

Both are for devices without kernels. A decoding step spends as much time on calling torch as on computing, so a block
costs as few calls as it can.
"""

from __future__ import annotations

import torch

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
