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

from kvconvert.kernels import device as devices
from kvconvert.kernels.attention import Scoring, StreamingSoftmax, capped
from kvconvert.kernels.chunked_prefill.parts import StoredPart, Workspace
from kvconvert.kernels.decode.plan import StoredTokens
from kvconvert.kernels.page_formats import PAGE_SIZE, LayerFormat, TokenNorm

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
KERNEL_BITS = (2, 4)
MOST_CHANNELS, MOST_ROPE_CHANNELS = 512, 128


def unsupported(format: LayerFormat, dtype: torch.dtype, on: torch.device) -> str | None:
    """Why no kernel decodes over latents stored so; None if one does.

    Args:
        format: the format of pages with latents as keys and RoPE parts as values.
        dtype: the dtype of queries and of stored full-precision tokens.
        on: where they are.
    """
    reason = devices.unsupported(on)
    if reason is not None:
        return reason
    latents, rope = format.keys, format.values
    if dtype not in KERNEL_DTYPES:
        return f"there is no kernel for {dtype}"
    sizes = ((latents.head_dim, MOST_CHANNELS), (rope.head_dim, MOST_ROPE_CHANNELS))
    if any(size % 8 or size > limit for size, limit in sizes):
        return (
            f"latents of {latents.head_dim} channels with RoPE parts of {rope.head_dim} are not multiples of 8 up to "
            f"{MOST_CHANNELS} and {MOST_ROPE_CHANNELS}"
        )
    if latents.page_size != PAGE_SIZE:
        return f"pages of {latents.page_size} tokens have no kernel"
    if latents.bits == rope.bits == 16:
        return None
    if latents.bits not in KERNEL_BITS or rope.bits != 8:
        return f"latents of {latents.bits} bits with RoPE parts of {rope.bits} have no kernel"
    if not latents.by_token:
        return "latents whose words hold codes of a channel have no kernel"
    if latents.group_size != PAGE_SIZE or rope.group_size != rope.head_dim:
        return "several groups of a channel, or of a RoPE part, have no kernel"
    if latents.scale_bits != 16 or rope.scale_bits != 16 or latents.token_norm is not TokenNorm.NONE:
        return "scales of 8 bits and token norms have no kernel"
    return None


def latent_decode(
    latent_queries: torch.Tensor,
    rope_queries: torch.Tensor,
    stored: StoredTokens,
    format: LayerFormat,
    scaling: float,
) -> torch.Tensor:
    """Attention of each sequence's newest token over all that is stored, by the kernel; for what `unsupported` accepts.

    Args:
        latent_queries: [B, Hq, R], q_nope W_UK in the coordinates in which latents are stored, channels contiguous.
        rope_queries: [B, Hq, r], of the same dtype.
        stored: latents as keys and RoPE parts as values.
        format: the format of the pages.
        scaling: factor of the scores.

    Returns:
        float32 [B, Hq, R], sums of latents in the same coordinates; zeros for sequences without tokens.
    """
    from kvconvert.kernels.latent.triton import launch

    device = latent_queries.device
    shape = launch.latent_shape(format, latent_queries.shape[1], device)
    tables, windows = stored.page_tables(launch.programs_for(device, shape)), stored.residual_windows()
    return launch.latent_decode(latent_queries, rope_queries, tables, windows, shape, scaling)


def latent_attention(
    latent_queries: torch.Tensor,
    rope_queries: torch.Tensor,
    parts: Sequence[StoredPart],
    scoring: Scoring,
    workspace_tokens: int | None = None,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a sequence's newest tokens over all that is stored, tile by tile with a streaming softmax.

    Args:
        latent_queries: [Hq, T, R], q_nope W_UK in the coordinates in which latents are stored.
        rope_queries: [Hq, T, r].
        parts: everything stored, oldest first, the T tokens themselves at the end, in full precision: latents
            [1, n, R] as keys and RoPE parts [1, n, r] as values.
        scoring: the layer's scoring, without a window.
        workspace_tokens: tokens of a tile, at least a page's; None for as many as fit
            `chunked_prefill.parts.WORKSPACE_BYTES`.
        visible: bool [T, n], which of all tokens each query attends to; None for all up to its own.

    Returns:
        float32 [Hq, T, R], sums of latents in the same coordinates.
    """
    scaling, softcap, sink_logits, _ = scoring
    latent_queries, rope_queries = latent_queries.float() * scaling, rope_queries.float() * scaling
    _, length, rank = latent_queries.shape
    sizes = 1, rank, rope_queries.shape[2]
    workspace = Workspace(latent_queries.device, *sizes, torch.float32, workspace_tokens)
    # The newest token that each query sees.
    newest = sum(part.tokens for part in parts) - length + torch.arange(length, device=latent_queries.device)
    softmax, begin = StreamingSoftmax(1), 0
    for count in workspace.tiles(parts):
        latents, rope = workspace.keys[0, :count], workspace.values[0, :count]
        scores = latent_queries @ latents.T + rope_queries @ rope.T
        if softcap is not None:
            scores = capped(scores, 1.0, softcap)
        if visible is not None:
            scores = scores.masked_fill_(~visible[:, begin : begin + count], -torch.inf)
        elif length > 1:
            hidden = torch.arange(begin, begin + count, device=newest.device) > newest.unsqueeze(1)
            scores = scores.masked_fill_(hidden, -torch.inf)
        softmax.add(softmax.weights(scores[None]) @ latents)
        begin += count
    return softmax.finish(None if sink_logits is None else sink_logits.float().view(1, -1, 1))[0]
