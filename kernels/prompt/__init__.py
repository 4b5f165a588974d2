"""Causal attention of a prompt over itself and what is in full precision before it.

The T queries belong to the last T of n tokens, so a prompt may come in chunks. `attention_reference` of
`kernels/decode/reference.py` is the oracle. On a GPU Triton kernels serve prompts, and their log-sum-exp is reused for
the attention mass of tokens (`kernels/select/__init__.py`); elsewhere `blockwise_attention` does.
"""

from __future__ import annotations

import torch

from kvconvert.kernels import device
from kvconvert.kernels.prompt.cpu import blockwise_attention

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
    return attention_and_log_sum_exp(queries, keys, values, scaling, softcap, sink_logits, window)[0]


def attention_and_log_sum_exp(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`prompt_attention`, and the log-sum-exp of each query's scores, float32 [Hq, T], where the path has it."""
    reason = unsupported(queries, keys, values, scaling)
    if reason is None:
        from kvconvert.kernels.prompt.triton.launch import attention

        return attention(queries, keys, values, scaling, softcap, sink_logits, window=window)
    if is_fallback(queries):
        device.fall_back("The attention of prompts", reason)
    return blockwise_attention(queries, keys, values, scaling, softcap, sink_logits, window=window), None
