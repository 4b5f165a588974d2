"""Attention over whole keys and values in float64: the oracle of decoding and of prompts."""

from __future__ import annotations

import torch


def attention_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one sequence in float64.

    Args:
        queries: [Hq, T, D]; query head h reads KV head h // (Hq / H).
        keys: [H, n, D]; values: [H, n, E].
        visible: bool [T, n] or None for all.
        scaling: factor of the dot products, usually 1 / sqrt(D).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        sink_logits: [Hq] logits of a virtual token with no value (gpt-oss).

    Returns:
        float64 [Hq, T, E]; zeros where a query sees nothing.
    """
    repeat = queries.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(repeat, 0) for x in (keys, values))
    scores = queries.double() @ keys.transpose(1, 2) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights[..., : keys.shape[1]] @ values
