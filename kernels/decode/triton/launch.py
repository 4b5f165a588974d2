"""Decode attention on a GPU: how the kernels are specialised, and their launch."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.decode.plan import MOST_ROWS, MOST_SLOTS, PageTables, ResidualWindows, Visibility, WorkPlan
from kvconvert.kernels.decode.triton import DecodeShape, block_of, query_columns, query_rows
from kvconvert.kernels.decode.triton.center import launch_center_scores, workspace_dtype
from kvconvert.kernels.decode.triton.kernel import decode_kernel, extremes_kernel
from kvconvert.kernels.decode.triton.softmax import combine_kernel
from kvconvert.kernels.device import compiles, multiprocessors, overlaps_launches
from kvconvert.kernels.launches import skips_launches
from kvconvert.kernels.page_formats import PAGE_SIZE, LayerFormat

# Registers of a thread, and how many one-warp programs with that many fit a multiprocessor, whose four parts hold
# 16,384 registers each: two or three programs. Where three would spill, two are faster.
FEW_REGISTERS, ALL_REGISTERS = 168, 255
PROGRAMS_PER_MULTIPROCESSOR = {FEW_REGISTERS: 12, ALL_REGISTERS: 8}
STAGES = 2
TILE = 16


def programs_for(device: torch.device, format: LayerFormat, group: int, queries: int) -> int:
    """How many work items run side by side for each KV head and block of queries."""
    block = queries_per_program(group, queries)
    shape = decode_shape(format, torch.bfloat16, group, block)
    side_by_side = multiprocessors(device) * PROGRAMS_PER_MULTIPROCESSOR[registers_for(shape)] // warps_for(shape)
    return max(1, side_by_side // (format.keys.heads * -(-queries // block)))


@lru_cache(maxsize=1024)
def registers_for(shape: DecodeShape) -> int:
    """The limit of registers per thread that a specialisation is compiled with."""
    one_group = shape.keys.groups <= 1 and shape.values.groups <= 1
    small = max(shape.keys.head_dim, shape.values.head_dim) <= 128 and query_rows(shape) * query_columns(shape) <= 8
    plain = shape.half_quantized == 0 and not shape.split_query and max(shape.keys.bits, shape.values.bits) <= 2
    plain = plain and not shape.masked and not shape.softcap
    return FEW_REGISTERS if one_group and small and plain and not shape.keys.boosted else ALL_REGISTERS


def queries_per_program(group: int, queries: int) -> int:
    """Queries that one program takes, so that its rows are at most `MOST_ROWS`."""
    block = 1
    while block < queries and 2 * block * group <= MOST_ROWS:
        block *= 2
    return block


def centered_queries(room: int, entries: int, heads: int, group: int, queries: torch.Tensor) -> int:
    """Queries of one launch, such that what a key center adds to their scores fits into `room` bytes if it can.

    Args:
        room: bytes.
        entries: how many entries the page tables have.
        heads, group: KV heads, and query heads of each.
        queries: [..., T, D].
    """
    count = queries.shape[-2]
    block = queries_per_program(group, count)
    numbers = entries * heads * triton.next_power_of_2(group * block) * PAGE_SIZE
    return block * max(1, room // (numbers * workspace_dtype(queries.dtype).itemsize))


def decode_shape(
    format: LayerFormat,
    dtype: torch.dtype,
    group: int,
    queries: int,
    *,
    half_quantized: int = 0,
    masked: bool = False,
    softcap: bool = False,
    placed: bool = False,
    inline_asm: bool = True,
) -> DecodeShape:
    """The specialisation for a layer."""
    span = format.span
    ragged, tau = format.sink_tokens > 0 or span is not None, span is not None and span.shifts
    layouts, centered = [side.layout for side in format.stored], format.key_tensors.center is not None
    about = group, queries, dtype == torch.float32, half_quantized, masked, ragged, softcap, tau, centered, placed
    return _shape(*layouts, *about, TILE, inline_asm)


# Every layer of every pass asks for few of them.
_shape = lru_cache(maxsize=1024)(DecodeShape)


def decode_attention(
    queries: torch.Tensor,
    tables: PageTables,
    windows: ResidualWindows,
    format: LayerFormat,
    scoring: Scoring,
    *,
    visibility: Visibility | None = None,
    clamped_rows: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries over pages or spans and residual windows: one launch for parts, one to merge
    them.

    With tau (CalibQuant) a third launch comes first, for the smallest and the largest score of each query's spans; with
    a key center, for what it adds to the scores.

    Args:
        queries: [B, Hq, T, D], rotated if the keys are; the last dimension contiguous.
        tables, windows: what is stored.
        format: how.
        scoring: the layer's scoring, without its window.
        visibility: which tokens are seen; None for all.
        clamped_rows: as in `SpanTokens`.
        output: where the result goes; made if not given.

    Returns:
        [B, Hq, T, E] in the queries' dtype; zeros where a query attends to nothing.
    """
    batch, query_heads, count, _ = queries.shape
    (scaling, softcap, sink_logits, _), heads, dtype = scoring, format.keys.heads, queries.dtype
    group = query_heads // heads
    block = queries_per_program(group, count)
    blocks = -(-count // block)
    shape = decode_shape(
        format,
        dtype,
        group,
        block,
        half_quantized=format.half_quantized,
        masked=visibility is not None,
        softcap=bool(softcap),
        placed=windows.places is not None,
        inline_asm=compiles(queries.device),
    )
    plan, value_dim, device = tables.plan, format.values.head_dim, queries.device
    slots = plan.slots * blocks, heads, rows_of(shape)
    partial = torch.empty(*slots, value_dim, dtype=torch.float32, device=device)
    stats = torch.empty(*slots, 2, dtype=torch.float32, device=device)
    unused = plan.item_rows
    mask, mask_row, mask_head, mask_query = unused, 0, 0, 0
    if visibility is not None:
        mask, mask_row, mask_head, mask_query = visibility.mask, visibility.row, visibility.head, visibility.query
    extremes, counter = stats, unused
    arguments = {
        "queries": queries,
        "key_base": tables.key_base.view(torch.int16),
        "key_table": tables.keys,
        "items": plan.items,
        "shared": unused if tables.shared is None else tables.shared,
        "query_row": queries.stride(0),
        "query_head": queries.stride(1),
        "query_token": queries.stride(2),
        "count": count,
        "scaling": scaling,
        "softcap": softcap or 0.0,
        "F": shape,
        "num_warps": warps_for(shape),
        "num_stages": STAGES,
        "maxnreg": registers_for(shape),
    }
    grid = (plan.items.shape[0], heads, blocks)
    dependent = overlaps_launches(device)
    overlapped = {"launch_pdl": True} if dependent else {}
    rest, mean = stats, stats
    if shape.centered:
        rest, mean = launch_center_scores(queries, tables, scaling, blocks, shape, dependent)
    if shape.tau:
        extremes = torch.empty(grid[0] * blocks, *slots[1:], 2, dtype=torch.float32, device=device)
        counter = torch.zeros((), dtype=torch.int64, device=device) if clamped_rows is None else clamped_rows
        extremes_kernel[grid](**arguments, extremes=extremes, STAGES=STAGES)
    decode_kernel[grid](
        **arguments,
        out=partial,
        stats=stats,
        value_base=tables.value_base.view(torch.int16),
        value_table=tables.values,
        rows=windows.rows,
        residual=windows.base,
        places=unused if windows.places is None else windows.places,
        boosted=unused if tables.boosted is None else tables.boosted,
        mask=mask,
        extremes=extremes,
        center_rest=rest,
        center_mean=mean,
        item_rows=plan.item_rows,
        clamped_rows=counter,
        mask_row=mask_row,
        mask_head=mask_head,
        mask_query=mask_query,
        place_row=0 if windows.places is None else windows.places.stride(0),
        tau1=format.span.tau1 if shape.tau else 0.0,
        tau2=format.span.tau2 if shape.tau else 0.0,
        STAGES=STAGES,
        DEPENDENT=dependent,
        **(overlapped if shape.centered else {}),
    )
    out = queries.new_empty(batch, query_heads, count, value_dim) if output is None else output
    merge_slots(partial, stats, plan, out, group, block, heads, sink_logits)
    return out


def merge_slots(
    partial: torch.Tensor,
    stats: torch.Tensor,
    plan: WorkPlan,
    out: torch.Tensor,
    group: int,
    queries: int,
    heads: int,
    sink_logits: torch.Tensor | None = None,
) -> None:
    """Merge partial results into what a sequence's queries get.

    Args:
        partial, stats: see `combine_kernel`.
        plan: whose slots they are.
        out: [B, Hq, T, E], any strides but for the last dimension's.
        group, queries: query heads that rows of a program belong to, and queries of each.
        heads: groups of query heads.
        sink_logits: [Hq].
    """
    batch, query_heads, count, size = out.shape
    dependent = overlaps_launches(out.device)
    # Which form it is depends on lengths, of which a rehearsal has few.
    for most_slots in MOST_SLOTS if skips_launches() else (plan.most_slots,):
        slots, channels = combine_block(most_slots, size)
        combine_kernel[(batch * -(-size // channels), query_heads, count)](
            partial, stats, plan.slot_rows, plan.item_rows if sink_logits is None else sink_logits, out,
            *out.stride()[:3], count, GROUP=group, QUERIES=queries, ROWS=partial.shape[-2], VALUE_DIM=size,
            BLOCK_DIM=channels, BLOCK_SLOTS=slots, SINK_LOGITS=sink_logits is not None, HEADS=heads,
            DEPENDENT=dependent, num_warps=combine_warps(slots, channels),
            **({"launch_pdl": True} if dependent else {}),
        )  # fmt: skip


@lru_cache(maxsize=1024)
def combine_block(most_slots: int, value_dim: int) -> tuple[int, int]:
    """Slots and channels of one step of the merge: few slots need one step; many are divided by channels, too."""
    few, some, _ = MOST_SLOTS
    if most_slots <= few:
        return 16, min(128, block_of(value_dim))
    return (64 if most_slots <= some else 256), 16


def combine_warps(slots: int, channels: int) -> int:
    """Warps of a merging program: sixteen numbers per thread."""
    return max(1, slots * channels // 512)


rows_of = lru_cache(maxsize=1024)(query_rows)


@lru_cache(maxsize=1024)
def warps_for(shape: DecodeShape) -> int:
    """Warps of a program: one for every eight columns, and two for large heads, so that registers suffice."""
    warps = max(1, query_rows(shape) * query_columns(shape) // 8)
    return warps * (2 if max(shape.keys.head_dim, shape.values.head_dim) > 128 else 1)
