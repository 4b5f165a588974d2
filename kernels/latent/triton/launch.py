"""Decoding over latents on a GPU: how the kernel is specialised, and its launch."""

from __future__ import annotations

import torch

from kvconvert.kernels.decode.stored import PageTables, ResidualWindows
from kvconvert.kernels.decode.triton.launch import MOST_SLOTS, combine_block, combine_warps
from kvconvert.kernels.decode.triton.sums import combine_kernel
from kvconvert.kernels.device import compiles, multiprocessors, overlaps_launches
from kvconvert.kernels.latent.triton.kernel import HEADS, latent_decode_kernel
from kvconvert.kernels.latent.triton.shape import LatentShape
from kvconvert.kernels.launches import skips_launches
from kvconvert.kernels.pages.formats import LayerFormat
from kvconvert.kernels.pages.layout import KeyLayout, ValueLayout

# Chunks of a latent's channels, at most; warps of a program.
CHUNKS = 4
WARPS = 8
# Full-precision tokens of a step, and steps whose loads are on their way: fewer of float32, whose numbers are larger.
TILE, STAGES = 32, 2
FLOAT32_TILE, FLOAT32_STAGES = 16, 1


def latent_shape(format: LayerFormat, heads: int, dtype: torch.dtype, compiled: bool = True) -> LatentShape:
    """The specialisation for a layer whose keys are latents and whose values are RoPE parts."""
    key, value = format.keys, format.values
    offsets = dict.fromkeys(("record", "rope_record", "scale", "zero_point", "rope_scale", "rope_zero_point"), -1)
    if key.bits < 16:
        latents, rope = KeyLayout.of(key), ValueLayout.of(value)
        offsets = {"record": latents.record, "rope_record": rope.record}
        offsets |= {"scale": latents.scale, "zero_point": latents.zero_point}
        offsets |= {"rope_scale": rope.scale, "rope_zero_point": rope.zero_point}
    chunks = CHUNKS
    while chunks > 1 and key.head_dim <= 32 * (chunks // 2):
        chunks //= 2
    return LatentShape(
        bits=key.bits,
        rank=key.head_dim,
        rope=value.head_dim,
        heads=heads,
        chunks=chunks,
        **offsets,
        exact_query=dtype == torch.float32,
        compiled=compiled,
    )


def steps_of(dtype: torch.dtype) -> dict[str, int]:
    """Arguments of a launch: full-precision tokens of a step, and stages of loads."""
    tile, stages = (FLOAT32_TILE, FLOAT32_STAGES) if dtype == torch.float32 else (TILE, STAGES)
    return {"TILE": tile, "num_stages": stages}


def programs_for(device: torch.device, heads: int) -> int:
    """How many work items run side by side for a block of heads."""
    return max(1, multiprocessors(device) // -(-heads // HEADS.value))


def latent_decode(
    queries: torch.Tensor,
    rope_queries: torch.Tensor,
    tables: PageTables,
    windows: ResidualWindows,
    format: LayerFormat,
    scaling: float,
) -> torch.Tensor:
    """One launch for parts of every sequence and block of heads, one to merge them.

    Args:
        queries: [B, Hq, R] in the coordinates of stored latents; rope_queries: [B, Hq, r], of the same dtype.
        tables, windows, format: of latents as keys and RoPE parts as values.
        scaling: factor of the scores.

    Returns:
        float32 [B, Hq, R], sums of latents; zeros for sequences without tokens.
    """
    batch, heads, rank = queries.shape
    device, plan = queries.device, tables.plan
    shape = latent_shape(format, heads, queries.dtype, compiles(device))
    blocks, rows = -(-heads // HEADS.value), HEADS.value
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
        **steps_of(queries.dtype),
        DEPENDENT=dependent,
        num_warps=WARPS,
    )
    out = torch.empty(batch, heads, rank, dtype=torch.float32, device=device)
    # Which form it is depends on lengths, of which a rehearsal has few.
    for most_slots in MOST_SLOTS if skips_launches() else (plan.most_slots,):
        slots, channels = combine_block(most_slots, rank)
        combine_kernel[(batch * -(-rank // channels), heads, 1)](
            partial,
            stats,
            plan.slot_rows,
            plan.item_rows,
            out,
            out.stride(0),
            out.stride(1),
            0,
            1,
            GROUP=rows,
            QUERIES=1,
            ROWS=rows,
            VALUE_DIM=rank,
            BLOCK_DIM=channels,
            BLOCK_SLOTS=slots,
            SINK_LOGITS=False,
            HEADS=blocks,
            DEPENDENT=dependent,
            num_warps=combine_warps(slots, channels),
            **({"launch_pdl": True} if dependent else {}),
        )
    return out
