"""Which prompt tokens a layer keeps (MiniKV): heavy hitters by their attention mass, and the newest.

A token's attention mass is the sum of the attention weights that queries give it. The Triton kernels for it share their
tiles with the prompt's attention and lie with that, in `kernels/prompt/triton`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvconvert.kernels import device, prompt
from kvconvert.kernels.prompt import BLOCK_SCORES, attention_and_log_sum_exp, is_fallback, weight_blocks


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


def blockwise_column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: Callable[[slice, slice], torch.Tensor] | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    *,
    window: int | None = None,
    block_scores: int = BLOCK_SCORES,
) -> torch.Tensor:
    """`column_sums` on every device, `block_scores` scores at a time."""
    sums = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
    for _, seen, weights in weight_blocks(
        queries, keys, visible, scaling, softcap, sink_logits, window=window, block_scores=block_scores
    ):
        sums[:, seen] += weights.sum((1, 2))
    return sums


def unsupported(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> str | None:
    """Why the Triton kernels cannot sum these queries' causal attention; None if they can."""
    return prompt.unsupported(queries, keys, None, scaling)


def column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: Callable[[slice, slice], torch.Tensor] | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    *,
    window: int | None = None,
    log_sum_exp: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention mass of each token (MiniKV, section 3.2), in float32.

    It is computed block of queries by block of queries, so that memory is linear in n; causal attention on a GPU takes
    Triton kernels.

    Args:
        queries: [Hq, T, D]; keys: [H, n, D], the T queries belonging to the last T keys.
        visible: gives bool [queries of the slice, keys of the slice]; None for causal attention.
        scaling, softcap, sink_logits: as in attention.
        window: tokens that a query sees, its own included, where `visible` is None; None for all before it.
        log_sum_exp: float32 [Hq, T], that of the same attention if it is known; it saves the kernels a pass.

    Returns:
        float32 [H, n].
    """
    reason = unsupported(queries, keys, scaling) if visible is None else None
    if visible is None and reason is None:
        from kvconvert.kernels.prompt.triton import launch

        if log_sum_exp is None:
            _, log_sum_exp = launch.attention(queries, keys, None, scaling, softcap, sink_logits, window=window)
        return launch.column_sums(queries, keys, log_sum_exp, scaling, softcap, window)
    if reason is not None and is_fallback(queries):
        device.fall_back("The attention mass of tokens", reason)
    return blockwise_column_sums(queries, keys, visible, scaling, softcap, sink_logits, window=window)


def selective_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`prompt_attention`, and the attention mass of each token (MiniKV, section 3.2).

    Arguments as there.

    Returns:
        the output [Hq, T, E], and float32 [H, n], summed over the T queries and the query heads of each KV head.
    """
    output, log_sum_exp = attention_and_log_sum_exp(queries, keys, values, scaling, softcap, sink_logits, window)
    return output, column_sums(
        queries, keys, None, scaling, softcap, sink_logits, window=window, log_sum_exp=log_sum_exp
    )
