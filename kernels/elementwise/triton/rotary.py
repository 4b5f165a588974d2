"""Rotary positions of queries and keys in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Heads per program.
HEADS = 8


@triton.jit
def _rotate(source, target, cos, sin, heads, head_stride, size, head_size, first,
            HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """Heads `first` and following of one token; products are rounded before they are added, as separately."""
    DTYPE: tl.constexpr = target.dtype.element_ty
    head = first + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    half = size // 2
    inside = column < half
    mask = (head < heads) & inside
    here = source + head.to(tl.int64) * head_stride + column
    there = target + head * head_size + column
    low = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(here + half, mask=mask, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + column, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + half + column, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + column, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + half + column, mask=inside, other=0.0).to(tl.float32)
    turned_low = (low * cos_low).to(DTYPE).to(tl.float32) - (high * sin_low).to(DTYPE).to(tl.float32)
    turned_high = (high * cos_high).to(DTYPE).to(tl.float32) + (low * sin_high).to(DTYPE).to(tl.float32)
    tl.store(there, turned_low.to(DTYPE), mask=mask)
    tl.store(there + half, turned_high.to(DTYPE), mask=mask)
    if REST > 0:
        rest = size + tl.arange(0, REST)[None, :]
        mask = (head < heads) & (rest < head_size)
        values = tl.load(source + head.to(tl.int64) * head_stride + rest, mask=mask, other=0.0)
        tl.store(target + head * head_size + rest, values, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def rotary_kernel(
    q,
    k,
    cos,
    sin,
    q_output,
    k_output,
    tokens,
    q_heads,
    k_heads,
    size,
    head_size,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """HEADS heads of one token's queries or keys; outputs are [B, T, heads, head_size]."""
    place = tl.program_id(0)
    batch, token = (place // tokens).to(tl.int64), (place % tokens).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = (q_heads + HEADS - 1) // HEADS
    cos += batch * cos_batch_stride + token * cos_token_stride
    sin += batch * sin_batch_stride + token * sin_token_stride
    if block < q_blocks:
        source = q + batch * q_batch_stride + token * q_token_stride
        target = q_output + place.to(tl.int64) * q_heads * head_size
        _rotate(source, target, cos, sin, q_heads, q_head_stride, size, head_size, block * HEADS, HEADS, HALF, REST)
    else:
        source = k + batch * k_batch_stride + token * k_token_stride
        target = k_output + place.to(tl.int64) * k_heads * head_size
        first = (block - q_blocks) * HEADS
        _rotate(source, target, cos, sin, k_heads, k_head_stride, size, head_size, first, HEADS, HALF, REST)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary_reference`; the results are [B, heads, T, D] by shape and lie in memory as [B, T, heads, D]."""
    batch, q_heads, tokens, head_size = q.shape
    k_heads, size = k.shape[1], cos.shape[-1]
    outputs = [torch.empty(batch, tokens, x.shape[1], head_size, dtype=q.dtype, device=q.device) for x in (q, k)]
    if batch * tokens:
        tables = [0 if table.shape[0] == 1 else table.stride(0) for table in (cos, sin)]
        rotary_kernel[(batch * tokens, triton.cdiv(q_heads, HEADS) + triton.cdiv(k_heads, HEADS))](
            q, k, cos, sin, *outputs, tokens, q_heads, k_heads, size, head_size, *q.stride()[:3], *k.stride()[:3],
            tables[0], cos.stride(1), tables[1], sin.stride(1),
            HEADS=HEADS, HALF=triton.next_power_of_2(size // 2),
            REST=triton.next_power_of_2(head_size - size) if head_size > size else 0, num_warps=4,
            # Products would otherwise be added before they are rounded.
            enable_fp_fusion=False,
        )  # fmt: skip
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)
