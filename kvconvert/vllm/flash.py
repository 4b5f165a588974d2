"""vLLM's FlashAttention 3 over the workspace of a pass's prompts, on GPUs of Hopper's, where it is the fastest."""

from __future__ import annotations

import torch
from vllm.platforms import current_platform

from kvconvert.vllm.prompts import Flash

VERSION = 3


def flash_attention(dtype: torch.dtype, head_dim: int, value_dim: int, version: int | None = None) -> Flash | None:
    """What attends in prompts instead of our kernel; None where vLLM would not take FlashAttention 3 for such heads.

    Args:
        dtype: of queries, keys, and values.
        head_dim, value_dim: channels of keys and of values.
        version: what vLLM's setting `flash_attn_version` says.
    """
    if not current_platform.is_cuda() or dtype == torch.float32 or head_dim != value_dim:
        return None
    if version not in (None, VERSION):
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    if get_flash_attn_version(head_size=head_dim) != VERSION:
        return None

    def attend(
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        most_queries: int,
        most_keys: int,
        scaling: float,
        output: torch.Tensor,
    ) -> None:
        flash_attn_varlen_func(
            queries, keys, values, most_queries, query_ends, most_keys, key_ends, softmax_scale=scaling, causal=True,
            out=output, fa_version=VERSION,
        )  # fmt: skip

    return attend
