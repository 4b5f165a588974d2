"""Attention over whole keys and values in float64: what every path and every kernel of attention is tested against."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
        scaling: factor of the dot products, usually 1 / sqrt(D).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        sink_logits: [Hq] logits of a virtual token with no value (gpt-oss).
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
