"""The attention mass of tokens without a Triton kernel, block of queries by block of queries."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvconvert.kernels.prompt.cpu import BLOCK_SCORES, weight_blocks


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
