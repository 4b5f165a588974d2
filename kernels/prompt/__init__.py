"""Causal attention of a prompt over itself and what is in full precision before it.

The T queries belong to the last T of n tokens, so a prompt may come in chunks. `attention_reference` of
`kernels/attention.py` is the oracle. On a GPU Triton kernels serve prompts, and their log-sum-exp is reused
for the attention mass of tokens (`kernels/select.py`); elsewhere `blockwise_attention` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvconvert.kernels import device
from kvconvert.kernels.attention import Scoring, capped

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256


def unsupported(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, scaling: float) -> str | None:
    """Why the Triton kernels cannot serve attention, or without values its log-sum-exp; None if they can."""
    reason = device.unsupported(queries.device)
    if reason is not None:
        return reason
    if not queries.shape[1]:
        return "there are no queries"
    if queries.dtype not in KERNEL_DTYPES:
        return f"{str(queries.dtype).removeprefix('torch.')} is neither float16 nor bfloat16"
    if keys.dtype != queries.dtype or (values is not None and values.dtype != queries.dtype):
        return "queries, keys and values differ in dtype"
    for size in {keys.shape[2], keys.shape[2] if values is None else values.shape[2]}:
        if size % 8 or not 16 <= size <= LARGEST_HEAD:
            return f"heads of size {size} are not a multiple of 8 from 16 to {LARGEST_HEAD}"
    return None if scaling > 0 else f"a scaling of {scaling} is not positive"


def is_fallback(queries: torch.Tensor) -> bool:
    """Whether queries that the kernels do not serve are worth a warning: not on a CPU, nor where there are none."""
    return bool(queries.shape[1]) and (queries.device.type != "cpu" or device.runs_triton(queries.device))


def prompt_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention of one sequence's last T of n tokens.

    Sequences of one length may share a call: their heads, and sink_logits, one after another.

    Args:
        queries: [Hq, T, D], T <= n; query head h reads KV head h // (Hq / H).
        keys: [H, n, D]; values: [H, n, E].
        scoring: the layer's scoring.

    Returns:
        [Hq, T, E] in the queries' dtype, and the log-sum-exp of each query's scores, float32 [Hq, T], where the path
        has it.
    """
    reason = unsupported(queries, keys, values, scoring.scaling)
    if reason is None:
        from kvconvert.kernels.prompt.triton import attention

        return attention(queries, keys, values, scoring)
    if is_fallback(queries):
        device.fall_back("The attention of prompts", reason)
    return blockwise_attention(queries, keys, values, scoring), None


# Scores held at once, in numbers: bounds memory whatever the prompt's length.
BLOCK_SCORES = 1 << 22


def blockwise_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    *,
    block_scores: int = BLOCK_SCORES,
) -> torch.Tensor:
    """The output of `prompt_attention` on every device; memory is linear in n, `block_scores` scores at a time.

    Plain prompts take torch's own attention. cuDNN's, its fastest on a GPU, is about a tenth faster for long prompts
    but takes some 60 ms to prepare for every new length.
    """
    scaling, softcap, sink_logits, window = scoring
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
    for block, seen, weights in weight_blocks(queries, keys, None, scoring, block_scores):
        grouped[:, :, block] = (weights @ values[:, None, seen]).to(output.dtype)
    return output


def weight_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: Callable[[slice, slice], torch.Tensor] | None,
    scoring: Scoring,
    block_scores: int = BLOCK_SCORES,
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Attention weights of one block of queries after another, for paths without a kernel; arguments as in
    `column_sums`.

    Yields:
        which queries, over which keys, and float32 [H, Hq / H, queries, keys]; zeros where a query attends to nothing.
    """
    scaling, softcap, sink_logits, window = scoring
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
        scores = capped(grouped[:, :, block] @ keys[:, None, seen].transpose(2, 3), scaling, softcap)
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
