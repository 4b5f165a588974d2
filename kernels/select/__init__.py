"""Which prompt tokens a layer keeps (MiniKV): heavy hitters by their attention mass, and the newest.

A token's attention mass is the sum of the attention weights that queries give it. The Triton kernels for it share their
tiles with the prompt's attention and lie with that, in `kernels/prompt/triton`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvconvert.kernels import device, prompt
from kvconvert.kernels.prompt import attention_and_log_sum_exp, is_fallback
from kvconvert.kernels.select.cpu import blockwise_column_sums
from kvconvert.kernels.select.reference import column_sums_reference, select_tokens

__all__ = [
    "column_sums",
    "column_sums_reference",
    "select_tokens",
    "selective_attention",
    "unsupported",
]


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
    """`column_sums_reference` in float32, block of queries by block of queries, so that memory is linear in n.

    On a GPU causal attention takes Triton kernels.

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
