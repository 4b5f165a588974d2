"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) over what is stored of it: one latent vector and one RoPE part
per token, for all heads.

Keys and values are never made of stored latents: the up projections W_UK and W_UV are absorbed into queries and outputs
(section 2.1.2 there),

    score = (q_nope W_UK) . c + q_rope . k_rope        output = (sum_t p_t c_t) W_UV^T

so that every head attends to the same c, which is key and value at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconvert.kernels.history.parts import HistoryPart, Workspace


def latent_attention(
    latent_queries: torch.Tensor,
    rope_queries: torch.Tensor,
    parts: Sequence[HistoryPart],
    scaling: float,
    workspace_tokens: int | None = None,
) -> torch.Tensor:
    """Causal attention of a sequence's newest tokens over all that is stored, tile by tile with a streaming softmax.

    Args:
        latent_queries: [Hq, T, R], q_nope W_UK in the coordinates in which latents are stored.
        rope_queries: [Hq, T, r].
        parts: everything stored, oldest first, the T tokens themselves at the end, in full precision: latents
            [1, n, R] as keys and RoPE parts [1, n, r] as values.
        scaling: factor of the scores.
        workspace_tokens: of a tile, at least a page; None for as many as fit `history.parts.WORKSPACE_BYTES`.

    Returns:
        float32 [Hq, T, R], sums of latents in the same coordinates.
    """
    latent_queries, rope_queries = latent_queries.float() * scaling, rope_queries.float() * scaling
    heads, length, rank = latent_queries.shape
    sizes = 1, rank, rope_queries.shape[2]
    workspace = Workspace(latent_queries.device, *sizes, torch.float32, workspace_tokens)
    # The newest token that each query sees.
    newest = sum(part.tokens for part in parts) - length + torch.arange(length, device=latent_queries.device)
    highest = latent_queries.new_full((heads, length, 1), -torch.inf)
    total, output = torch.zeros_like(highest), torch.zeros_like(latent_queries)
    begin = 0
    for count in workspace.tiles(parts):
        latents, rope = workspace.keys[0, :count], workspace.values[0, :count]
        scores = latent_queries @ latents.T + rope_queries @ rope.T
        hidden = torch.arange(begin, begin + count, device=newest.device) > newest.unsqueeze(1)
        scores = scores.masked_fill_(hidden, -torch.inf)
        before, highest = highest, torch.maximum(highest, scores.amax(-1, keepdim=True))
        # The first tile has a token that every query sees.
        weights, kept = (scores - highest).exp_(), (before - highest).exp_()
        total = total * kept + weights.sum(-1, keepdim=True)
        output = output * kept + weights @ latents
        begin += count
    return output / total
