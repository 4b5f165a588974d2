"""Causal attention of a prompt chunk over itself and everything stored before it.

What is stored is dequantized once for all queries of the chunk, tile by tile into a workspace of bounded size.
Attention over each tile comes with its log-sum-exp, by which the results are merged in float32. The backend of this
attention is `kernels/prompt` or one of torch's operators on a GPU, and torch's flash attention on a CPU. Few queries
are better off with `kernels/decode`, which dequantizes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvconvert.kernels import device, prompt
from kvconvert.kernels.attention import Scoring, merge
from kvconvert.kernels.chunked_prefill.parts import PageReader, StoredPart, Workspace, stored_parts
from kvconvert.kernels.pages import LayerFormat, unsupported_dequantization

if TYPE_CHECKING:
    from kvconvert.kernels.chunked_prefill.triton import Backend

# For this many queries of a chunk or fewer, attention over pages as they are stored is faster: measured on a CPU,
# estimated for GPUs, where a tile needs some hundred query rows to keep all multiprocessors busy.
FEWEST_QUERIES = {"cpu": 32, "cuda": 256}
# What key centers add to the scores of so few queries fits into little room, see `kernels/decode`.
FEWEST_CENTERED = 16


def unsupported(
    queries: torch.Tensor,
    format: LayerFormat,
    dtype: torch.dtype,
    scoring: Scoring,
) -> str | None:
    """Why `chunk_attention` does not serve queries [..., T, D] over a layer; None if it does.

    Args:
        queries: those of one sequence or a batch.
        format: the format of the layer's pages, or with spans that of pages of these heads.
        dtype: the dtype of stored full-precision tokens.
        scoring: the layer's scoring.
    """
    on, keys, values = queries.device, format.keys, format.values
    if on.type == "cpu" and not device.runs_triton(on):
        if scoring.softcap or scoring.window is not None:
            return "the attention of CPUs knows no soft caps and no sliding windows"
        if keys.head_dim != values.head_dim:
            return "the attention of CPUs wants keys and values of one head size"
        return None
    return unsupported_by_kernels(queries.reshape(-1, *queries.shape[-2:])[:1], format, dtype, scoring.scaling)


def unsupported_by_kernels(
    queries: torch.Tensor, format: LayerFormat, dtype: torch.dtype, scaling: float
) -> str | None:
    """Why no kernel attends to dequantized pages from queries like these [1, T, D]; other arguments as above."""
    sides = format.keys, format.values
    tokens = [queries.new_empty(1, 1, side.head_dim, dtype=dtype, device="meta") for side in sides]
    reasons = [unsupported_dequantization(side, dtype, queries.device) for side in sides]
    reasons.append(prompt.unsupported(queries, *tokens, scaling))
    return next((reason for reason in reasons if reason is not None), None)


def chunk_attention(
    queries: torch.Tensor,
    parts: Sequence[StoredPart],
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    *,
    backend: Backend | None = None,
    workspace_tokens: int | None = None,
) -> torch.Tensor:
    """Attention of a chunk's queries over stored tokens and, causally, over the chunk's own.

    Args:
        queries: [Hq, T, D], rotated if the keys are; `unsupported` accepts them.
        parts: stored tokens, oldest first: on a GPU addresses of pages, on a CPU readers, and full-precision tokens.
        keys: [H, T, D]; values: [H, T, E]: the chunk itself.
        scoring: the layer's scoring; where it has a window, all stored tokens and the chunk's are consecutive.
        backend: what attends to whole tiles of stored tokens on a GPU where every query sees all of them; None for the
            fastest that is known to serve these tensors. Whatever else there is takes Triton's.
        workspace_tokens: tokens of a tile, at least a page's; None for as many as `parts.WORKSPACE_BYTES` hold.

    Returns:
        [Hq, T, E] in the queries' dtype, or float32 on a CPU.
    """
    if queries.device.type == "cpu" and not device.runs_triton(queries.device):
        return tiled_attention(queries, parts, keys, values, scoring, workspace_tokens)
    from kvconvert.kernels.chunked_prefill import triton as launch

    return launch.tiled_attention(queries, parts, keys, values, scoring, backend, workspace_tokens)


def tiled_attention(
    queries: torch.Tensor,
    parts: Sequence[StoredPart],
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    workspace_tokens: int | None = None,
) -> torch.Tensor:
    """`chunk_attention` of plain causal attention: float32 [Hq, T, E].

    Everything is computed in float32, which every processor is fast in.
    """
    queries, scaling, sink_logits = queries.float(), scoring.scaling, scoring.sink_logits
    output, log_sum_exp = _flash(queries, keys.float(), values.float(), scaling, is_causal=True)
    if parts:
        workspace = Workspace(
            queries.device, keys.shape[0], keys.shape[2], values.shape[2], torch.float32, workspace_tokens
        )
        # Every query attends to every stored token, so that those which share a KV head are rows of one matrix.
        grouped = queries.reshape(keys.shape[0], -1, queries.shape[2])
        for tokens in workspace.tiles(parts):
            part, part_sum = _flash(grouped, workspace.keys[:, :tokens], workspace.values[:, :tokens], scaling)
            output, log_sum_exp = merge(
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
