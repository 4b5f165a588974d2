"""Decoding over latents on a GPU: how the kernel is specialised, and its launch."""

from __future__ import annotations

from typing import Any

import torch

from kvconvert.kernels.decode.plan import PageTables, ResidualWindows
from kvconvert.kernels.decode.triton.launch import merge_slots
from kvconvert.kernels.device import capability, compiles, multiprocessors, overlaps_launches
from kvconvert.kernels.latent.triton import LatentShape, chunk_columns
from kvconvert.kernels.latent.triton.kernel import latent_decode_kernel
from kvconvert.kernels.page_formats import LayerFormat, PageLayout

# Query heads of a program: the rows of a matrix instruction, or, from this many on, those of a group of warps.
FEW_HEADS, MANY_HEADS = 16, 64
# Words of a token that are read at a time: as many as registers hold.
CHUNK = 64


def latent_shape(format: LayerFormat, heads: int, device: torch.device) -> LatentShape:
    """The specialisation for a layer whose keys are latents and whose values are RoPE parts.

    Args:
        format: the format of its pages.
        heads: query heads.
        device: where it is launched. Before Hopper shared memory does not hold queries of many heads.
    """
    holds_many = not compiles(device) or capability(device) >= (9, 0)
    return shape_for(format, heads, heads >= MANY_HEADS and holds_many, compiles(device))


def shape_for(format: LayerFormat, heads: int, many: bool, compiled: bool = True) -> LatentShape:
    """`latent_shape` for programs of `MANY_HEADS` if `many`, else of `FEW_HEADS`."""
    key, value = format.keys, format.values
    offsets = dict.fromkeys(("scale", "offset", "rope_scale", "rope_offset"), -1)
    if key.bits < 16:
        latents, rope = PageLayout.of(key), PageLayout.of(value)
        offsets = {"scale": latents.scale, "offset": latents.offset}
        offsets |= {"rope_scale": rope.scale, "rope_offset": rope.offset}
    return LatentShape(
        bits=key.bits,
        rank=key.head_dim,
        rope=value.head_dim,
        heads=heads,
        block=MANY_HEADS if many else FEW_HEADS,
        dequantizes=many and key.bits < 16,
        chunk=CHUNK,
        **offsets,
        compiled=compiled,
    )


def launch_options(shape: LatentShape) -> dict[str, Any]:
    """Arguments of a launch: tokens that are read at a time, warps, and stages of loads."""
    if shape.block == MANY_HEADS:
        return {"TILE": 64, "num_warps": 8, "num_stages": 2}
    if shape.bits == 16:
        return {"TILE": 64, "num_warps": 4, "num_stages": 2}
    # A warp takes at least eight of a chunk's channels.
    return {"TILE": 32, "num_warps": min(4, chunk_columns(shape) // 8), "num_stages": 2}


def side_by_side(shape: LatentShape) -> int:
    """How many programs share a multiprocessor: registers and shared memory hold two that multiply codes."""
    return 2 if shape.bits < 16 and not shape.dequantizes else 1


def programs_for(device: torch.device, shape: LatentShape) -> int:
    """How many work items run side by side for a block of heads."""
    return max(1, side_by_side(shape) * multiprocessors(device) // -(-shape.heads // shape.block))


def latent_decode(
    queries: torch.Tensor,
    rope_queries: torch.Tensor,
    tables: PageTables,
    windows: ResidualWindows,
    shape: LatentShape,
    scaling: float,
) -> torch.Tensor:
    """One launch for parts of every sequence and block of heads, one to merge them.

    Args:
        queries: [B, Hq, R] in the coordinates of stored latents; rope_queries: [B, Hq, r], of the same dtype.
        tables, windows: where latents lie as keys and RoPE parts as values.
        shape: `latent_shape` of their format.
        scaling: factor of the scores.

    Returns:
        float32 [B, Hq, R], sums of latents; zeros for sequences without tokens.
    """
    batch, heads, rank = queries.shape
    device, plan = queries.device, tables.plan
    blocks, rows = -(-heads // shape.block), shape.block
    partial = torch.empty(plan.slots * blocks, rows, rank, dtype=torch.float32, device=device)
    stats = torch.empty(plan.slots * blocks, rows, 2, dtype=torch.float32, device=device)
    dependent = overlaps_launches(device)
    latent_decode_kernel[(plan.items.shape[0], blocks)](
        queries,
        rope_queries,
        partial,
        stats,
        tables.key_base.view(torch.int16),
        tables.value_base.view(torch.int16),
        tables.keys,
        tables.values,
        plan.items,
        windows.rows,
        windows.base,
        *queries.stride()[:2],
        *rope_queries.stride()[:2],
        scaling,
        F=shape,
        DEPENDENT=dependent,
        **launch_options(shape),
    )
    out = torch.empty(batch, heads, 1, rank, dtype=torch.float32, device=device)
    merge_slots(partial, stats, plan, out, rows, 1, blocks)
    return out.squeeze(2)
