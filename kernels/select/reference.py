"""Which prompt tokens a layer keeps, in plain PyTorch: their attention mass in float64, and the choice by it."""

from __future__ import annotations

import torch


def column_sums_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention mass of each token: weights summed over queries and the query heads of its KV head.

    MiniKV, section 3.2.

    Args:
        queries: [Hq, T, D]; keys: [H, n, D].
        visible: bool [T, n].
        scaling, softcap, sink_logits: as in attention.

    Returns:
        float64 [H, n].
    """
    heads = keys.shape[0]
    scores = queries.double() @ keys.double().repeat_interleave(queries.shape[0] // heads, 0).transpose(1, 2) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : keys.shape[1]]
    return weights.unflatten(0, (heads, -1)).sum((1, 2))


def select_tokens(scores: torch.Tensor, heavy: int, recent: int, sink_tokens: int = 0) -> torch.Tensor:
    """The tokens that each KV head keeps: int64 [H, kept], ascending.

    The first `sink_tokens`, the newest `recent`, and of the others the `heavy` with the highest score [H, n], ties to
    the older token. Counts that exceed what there is keep everything.
    """
    heads, n = scores.shape
    sink_tokens = min(sink_tokens, n)
    recent = min(recent, n - sink_tokens)
    heavy = min(heavy, n - sink_tokens - recent)
    middle = scores[:, sink_tokens : n - recent]
    order = torch.sort(middle, dim=-1, descending=True, stable=True).indices[:, :heavy] + sink_tokens
    every = torch.arange(n, device=scores.device).expand(heads, n)
    return torch.cat([every[:, :sink_tokens], order.sort(-1).values, every[:, n - recent :]], 1)
