"""Causal attention of a prompt over itself and what is in full precision before it, and what each token receives.

The T queries belong to the last T of n tokens, so a prompt may come in chunks. `attention_reference` and
`column_sums_reference` are the oracles. On a CPU torch's own attention serves plain prompts and blocks of queries serve
the rest; on a GPU the kernels of `kernels/prompt/triton/launch.py` do, and their log-sum-exp is reused for what tokens receive.
Memory is linear in n. torch's fastest attention on a GPU, cuDNN's, is not used: it is about a tenth faster for long
prompts, but takes some 60 ms to prepare for every new length.
"""

from __future__ import annotations

import torch

from kvconvert.kernels.device import fall_back
from kvconvert.kernels.select import column_sums, no_kernel, weight_blocks


def prompt_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence's last T of n tokens.

    Sequences of one length may share a call: their heads, and sink_logits, one after another.

    Args:
        queries: [Hq, T, D], T <= n; query head h reads KV head h // (Hq / H).
        keys: [H, n, D]; values: [H, n, E].
        scaling: factor of the dot products, usually 1 / sqrt(D).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        sink_logits: [Hq] logits of a virtual token with no value (gpt-oss).
        window: tokens that a query sees, its own included; None for all before it.

    Returns:
        [Hq, T, E] in the queries' dtype.
    """
    return _attend(queries, keys, values, scaling, softcap, sink_logits, window)[0]


def selective_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`prompt_attention`, and the attention that each token receives (MiniKV, section 4).

    Arguments as there.

    Returns:
        the output [Hq, T, E], and float32 [H, n], summed over the T queries and the query heads of each KV head.
    """
    output, log_sum_exp = _attend(queries, keys, values, scaling, softcap, sink_logits, window)
    return output, column_sums(queries, keys, None, scaling, softcap, sink_logits, window, log_sum_exp)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output, and the log-sum-exp [Hq, T] where the path gives it."""
    reason = no_kernel(queries, keys, values, scaling)
    if reason is None:
        from kvconvert.kernels.prompt.triton import launch as kernels

        return kernels.attention(queries, keys, values, scaling, softcap, sink_logits, window)
    if reason:
        fall_back("The attention of prompts", reason)
    if not softcap and sink_logits is None and window is None and queries.shape[1] == keys.shape[1]:
        grouped = queries.shape[0] != keys.shape[0]
        if reason and grouped:
            # Only torch's attention without groups has linear memory in float32 and on old GPUs.
            repeat, grouped = queries.shape[0] // keys.shape[0], False
            keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
        output = torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=scaling, enable_gqa=grouped
        )[0]
        return output, None
    heads = keys.shape[0]
    output = queries.new_empty(*queries.shape[:2], values.shape[2])
    grouped, values = output.unflatten(0, (heads, -1)), values.float()
    for block, seen, weights in weight_blocks(queries, keys, None, scaling, softcap, sink_logits, window):
        grouped[:, :, block] = (weights @ values[:, None, seen]).to(output.dtype)
    return output, None
