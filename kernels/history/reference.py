"""Attention over a history in float64, and the merge of two partial results."""

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
