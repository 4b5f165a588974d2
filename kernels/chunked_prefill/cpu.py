"""Chunked prefill on a CPU: torch's flash attention for CPUs, which returns its log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconvert.kernels.attention import merge
from kvconvert.kernels.chunked_prefill.parts import StoredPart, Workspace


def tiled_attention(
    queries: torch.Tensor,
    parts: Sequence[StoredPart],
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    sink_logits: torch.Tensor | None = None,
    workspace_tokens: int | None = None,
) -> torch.Tensor:
    """`chunk_attention` of plain causal attention: float32 [Hq, T, E].

    Everything is computed in float32, which every processor is fast in.
    """
    queries = queries.float()
    output, log_sum_exp = _flash(queries, keys.float(), values.float(), scaling, is_causal=True)
    if parts:
        workspace = Workspace(
            queries.device, keys.shape[0], keys.shape[2], values.shape[2], torch.float32, workspace_tokens
        )
        # Every query sees every stored token, so that those which share a KV head are rows of one matrix.
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
