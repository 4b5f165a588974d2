"""Attention over a history in float64, the merge of two partial results, and a CPU's path: torch's flash attention for
CPUs, which returns its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconvert.kernels.decode.reference import attention_reference
from kvconvert.kernels.history.parts import HistoryPart, Workspace


def history_reference(
    queries: torch.Tensor,
    parts: Sequence[HistoryPart],
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    *,
    window: int | None = None,
) -> torch.Tensor:
    """`history_attention` over the whole history at once, dequantized to the keys' dtype: float64 [Hq, T, E]."""
    length, before = queries.shape[1], sum(part.tokens for part in parts)
    workspace = Workspace(
        keys.device, keys.shape[0], keys.shape[2], values.shape[2], keys.dtype, before + length + MOST_PAGE
    )
    tiles = list(workspace.tiles(parts))
    assert tiles == [before] * bool(before)
    every = [
        torch.cat([stored[:, :before], own], 1) for stored, own in ((workspace.keys, keys), (workspace.values, values))
    ]
    position = torch.arange(before + length, device=queries.device)
    own = position[before:].unsqueeze(1)
    visible = (position <= own) & (position > own - (window or before + length))
    return attention_reference(queries, *every, visible, scaling, softcap, sink_logits)


# Room beyond the tokens, so that one tile holds any part.
MOST_PAGE = 256


def merge_reference(
    first: torch.Tensor, first_sum: torch.Tensor, second: torch.Tensor, second_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from attention over each.

    Args:
        first, second: outputs [..., E].
        first_sum, second_sum: their log-sum-exps [...]; minus infinity where a query sees nothing.

    Returns:
        output and log-sum-exp in float32; zeros and minus infinity where a query sees nothing in either set.
    """
    total = torch.logaddexp(first_sum.float(), second_sum.float())
    finite = total.nan_to_num(neginf=0.0)
    weights = [(part.float() - finite).exp().unsqueeze(-1) for part in (first_sum, second_sum)]
    return first.float() * weights[0] + second.float() * weights[1], total


def tiled_attention(
    queries: torch.Tensor,
    parts: Sequence[HistoryPart],
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    sink_logits: torch.Tensor | None = None,
    workspace_tokens: int | None = None,
) -> torch.Tensor:
    """`history_attention` of plain causal attention: float32 [Hq, T, E].

    Everything is computed in float32, which every processor is fast in.
    """
    queries = queries.float()
    output, log_sum_exp = _flash(queries, keys.float(), values.float(), scaling, is_causal=True)
    if parts:
        workspace = Workspace(
            queries.device, keys.shape[0], keys.shape[2], values.shape[2], torch.float32, workspace_tokens
        )
        # Every query sees every token of the history, so that those which share a KV head are rows of one matrix.
        grouped = queries.reshape(keys.shape[0], -1, queries.shape[2])
        for tokens in workspace.tiles(parts):
            part, part_sum = _flash(grouped, workspace.keys[:, :tokens], workspace.values[:, :tokens], scaling)
            output, log_sum_exp = merge_reference(
                output, log_sum_exp, part.reshape(output.shape), part_sum.reshape(log_sum_exp.shape)
            )
    if sink_logits is not None:
        output = output * torch.sigmoid(log_sum_exp - sink_logits.float().unsqueeze(1)).unsqueeze(2)
    return output


def _flash(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Hq, T, E] and log-sum-exp [Hq, T]."""
    output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries[None], keys[None], values[None], 0.0, is_causal, scale=scaling
    )
    return output[0], log_sum_exp[0]
