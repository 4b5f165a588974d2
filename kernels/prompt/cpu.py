"""Causal attention without a kernel of our own: torch's for plain prompts, blocks of queries for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

# Scores held at once, in numbers: bounds memory whatever the prompt's length.
BLOCK_SCORES = 1 << 22


def blockwise_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    *,
    window: int | None = None,
    block_scores: int = BLOCK_SCORES,
) -> torch.Tensor:
    """`prompt_attention` on every device; memory is linear in n, `block_scores` scores at a time.

    Plain prompts take torch's own attention. cuDNN's, its fastest on a GPU, is about a tenth faster for long prompts
    but takes some 60 ms to prepare for every new length.
    """
    if not softcap and sink_logits is None and window is None and queries.shape[1] == keys.shape[1]:
        grouped = queries.shape[0] != keys.shape[0]
        if grouped and queries.device.type != "cpu":
            # Only torch's attention without groups has linear memory in float32 and on old GPUs.
            repeat, grouped = queries.shape[0] // keys.shape[0], False
            keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
        return torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=scaling, enable_gqa=grouped
        )[0]
    heads = keys.shape[0]
    output = queries.new_empty(*queries.shape[:2], values.shape[2])
    grouped, values = output.unflatten(0, (heads, -1)), values.float()
    for block, seen, weights in weight_blocks(
        queries, keys, None, scaling, softcap, sink_logits, window=window, block_scores=block_scores
    ):
        grouped[:, :, block] = (weights @ values[:, None, seen]).to(output.dtype)
    return output


def weight_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: Callable[[slice, slice], torch.Tensor] | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    *,
    window: int | None = None,
    block_scores: int = BLOCK_SCORES,
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Attention weights of one block of queries after another, for paths without a kernel; arguments as in
    `column_sums`.

    Yields:
        which queries, over which keys, and float32 [H, Hq / H, queries, keys]; zeros where a query sees nothing.
    """
    heads, n, _ = keys.shape
    length = queries.shape[1]
    grouped = queries.float().unflatten(0, (heads, -1))
    keys = keys.float()
    step = max(1, block_scores // (queries.shape[0] * n))
    for start in range(0, length, step):
        block = slice(start, min(start + step, length))
        # Causal blocks need no keys beyond their last query's own, nor any before their first query's window.
        seen = (
            slice(0, n) if visible else slice(max(0, n - length + start + 1 - (window or n)), n - length + block.stop)
        )
        scores = grouped[:, :, block] @ keys[:, None, seen].transpose(2, 3) * scaling
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if visible is None:
            own = torch.arange(n - length + start, n - length + block.stop, device=keys.device).unsqueeze(1)
            columns = torch.arange(seen.start, seen.stop, device=keys.device)
            hidden = columns > own
            if window is not None:
                hidden |= columns <= own - window
        else:
            hidden = ~visible(block, seen)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sink_logits is None:
            weights = scores.softmax(-1).nan_to_num(0.0)
        else:
            logits = sink_logits.float().view(heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, logits], -1).softmax(-1)[..., :-1]
        yield block, seen, weights
