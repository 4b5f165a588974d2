"""Quantization of pages on a GPU: launches of the kernels in quantize.py and feedback.py.

Pages are addressed by a table, int64 [N, 5] on the device: the offset of the page's first token from a base tensor, the
stride from head to head, the offset of the record from another base tensor, the page's number of tokens, and how many
of its first ones are hidden, whose places the next token takes. Offsets count elements of their base, may lead to other
allocations, and are multiples of 8. So one launch serves one page, the pages of many sequences with buffers of their
own, and a whole prompt.

Numbers that cannot be quantized are found on the way: kernels leave the first such page and head in a flag on the
device, which `raise_if_flagged` reads once per flush.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from kvconvert.kernels.device import upload
from kvconvert.kernels.page_formats import NO_TENSORS, PageFormat, PageLayout, SideTensors, TokenNorm
from kvconvert.kernels.pages.records import PageTensors, PageWrites
from kvconvert.kernels.pages.triton import channel_parts, halves_of, padded, tile_of
from kvconvert.kernels.pages.triton.center import launch_centers
from kvconvert.kernels.pages.triton.feedback import PageFeedback, launch_feedback
from kvconvert.kernels.pages.triton.quantize import copy_page_kernel, norm_kernel, page_kernel

# Every operation is rounded by itself, as on a CPU.
UNFUSED = {"enable_fp_fusion": False}
# Tile elements per thread.
PER_THREAD = 64
# Channels of one program of the keys, where it needs no others: a row of 128 bytes.
KEY_ROWS = 64
# Tokens of one program of the values: one warp of 2 bits and 128 channels, so that no warp waits for another.
VALUE_TOKENS = 16
# Tokens of one program of the norms.
NORM_TOKENS = 16


class PageLaunch(NamedTuple):
    """The pages that one launch writes.

    Attributes:
        base: any tensor of the tokens' dtype and device, from whose address the table counts tokens.
        token_stride: elements from one token to the next; a multiple of 8.
        table: int64 [N, 5], see the module.
        records: int16, from whose address the table counts records; of 16-bit pages, the tokens' dtype.
        flag: int32 [1], see `raise_if_flagged`.
        feedback: the pages' matrices where keys are rounded with error feedback; 16-bit keys are not rounded.
    """

    base: torch.Tensor
    token_stride: int
    table: torch.Tensor
    records: torch.Tensor
    flag: torch.Tensor
    feedback: PageFeedback | None = None


def page_launch(
    writes: PageWrites, like: torch.Tensor, pages: PageTensors, flag: torch.Tensor, tensors: Sequence[SideTensors]
) -> PageLaunch:
    """The tables of a launch on the device; arguments as for `quantize_at`."""
    records, (layers, count) = pages.buffer, writes.tokens.shape
    table = np.empty((layers, count, 5), dtype=np.int64)
    table[..., 0] = (writes.tokens - like.data_ptr()) // like.element_size()
    table[..., 1] = writes.head_strides
    table[..., 2] = (writes.records - records.data_ptr()) // records.element_size()
    table[..., 3] = pages.format.page_size
    table[..., 4] = writes.hidden
    on_device, feedback = upload(table.reshape(-1, 5), like.device), None
    if tensors[0].feedback is not None:
        # Addresses of float16 numbers, counted from the records', which are of 16 bits too.
        base = records.view(torch.float16)
        offsets = [(own.feedback.data_ptr() - base.data_ptr()) // 2 for own in tensors]
        feedback = PageFeedback(base, upload(np.repeat(offsets, count), like.device))
    return PageLaunch(like, like.stride(1), on_device, records, flag, feedback)


def quantize_at(
    writes: PageWrites, like: torch.Tensor, pages: PageTensors, flag: torch.Tensor, tensors: Sequence[SideTensors]
) -> None:
    """Quantize complete pages of many layers and sequences on a GPU and write them where they are to be stored.

    Args:
        writes: where the pages' tokens lie, which `unsupported` accepts, and where records go.
        like: some of the tokens [H, n, channels]; centers are subtracted from tokens in place.
        pages: some pages of the same storage, for their format and dtype.
        flag: what the kernels raise, see `raise_if_flagged`; from `new_flag`.
        tensors: each layer's; of several layers `LayerFormat.shares_launches` is true.
    """
    f, launch, first = pages.format, page_launch(writes, like, pages, flag, tensors), tensors[0]
    if first.center is not None:
        bases = first.center.matrix, first.center.frequencies
        own = [[side.center.matrix.data_ptr(), side.center.frequencies.data_ptr()] for side in tensors]
        offsets = (np.array(own) - [base.data_ptr() for base in bases]) // [base.element_size() for base in bases]
        positions, count = np.tile(writes.positions, len(tensors)), len(writes.positions)
        centers = upload(np.column_stack([positions, np.repeat(offsets, count, axis=0)]), like.device)
        launch_centers(like, launch.token_stride, launch.table, centers, first.center, f.page_size, sign=-1)
    quantize_pages(launch, f, first)


def quantize_listed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    records: torch.Tensor,
    f: PageFormat,
    flag: torch.Tensor,
    *,
    centers: torch.Tensor,
    tensors: SideTensors = NO_TENSORS,
) -> None:
    """Quantize complete pages of one layer on a GPU that a table there describes.

    Args:
        tokens: [H, W, channels] that `unsupported` accepts, from whose address the table counts tokens; those of pages
            may be changed.
        table: int64 [N, 5], see the module.
        records: int16, or of 16-bit pages the tokens' dtype, from whose address the table counts records.
        f: the format of the pages.
        flag: as for `quantize_at`.
        centers: int64 [N, 3], the position of each page's first token, and zeros.
        tensors: the layer's, whose center is subtracted from the tokens in place.
    """
    feedback = tensors.feedback
    matrices = None if feedback is None else PageFeedback(feedback, torch.zeros_like(table[:, 0]))
    launch = PageLaunch(tokens, tokens.stride(1), table, records, flag, matrices)
    if tensors.center is not None:
        launch_centers(tokens, launch.token_stride, table, centers, tensors.center, f.page_size, sign=-1)
    quantize_pages(launch, f, tensors)


def quantize_pages(launch: PageLaunch, f: PageFormat, tensors: SideTensors = NO_TENSORS, partial: bool = False) -> None:
    """Write pages into their records; `quantize_pages` in kernels/pages/reference.py says what.

    Args:
        launch: the pages, with the feedback of each.
        f: their format.
        tensors: the layer's boosted channels and static scales.
        partial: whether pages, of 8 bits or fewer, may have fewer tokens than `f.page_size`.
    """
    table, records, tile = launch.table, launch.records, tile_of(f.head_dim, f.bits)
    layout = PageLayout.of(f)
    if f.bits == 16:
        copy_page_kernel[(len(table) * f.heads,)](
            launch.base, records, table, launch.token_stride, layout, num_warps=warps_for(f.page_size * tile), **UNFUSED
        )
        return
    if f.token_norm is not TokenNorm.NONE:
        own = norm_constants(f)
        heads = 1 if f.token_norm is TokenNorm.JOINT else f.heads
        norm_kernel[(len(table) * heads * (f.page_size // own["TOKENS"]),)](
            launch.base, records, table, launch.flag, launch.token_stride, **own,
            num_warps=warps_for(own["TOKENS"] * tile), **UNFUSED,
        )  # fmt: skip
    constants = page_constants(f, partial)
    dynamic = f.boosted > 0 and not f.fixed_channels
    shared = {
        "tokens": launch.base,
        "records": records,
        "record_bytes": records.view(torch.uint8) if dynamic else records,
        "table": table,
        "static_scales": tensors.static.scale if f.static else records,
        "static_offsets": tensors.static.offset if f.static else records,
        "boosted": tensors.boosted if f.boosted and not dynamic else table,
        "token_stride": launch.token_stride,
    }
    factor, shrink = shrinkage(f.clip_ratio)
    rows = (f.head_dim if f.is_key else f.page_size) // channel_parts(f.bits, f.by_token)
    page_kernel[(len(table) * f.heads * triton.cdiv(rows, constants["ROW_TILE"]),)](
        **shared,
        flag=launch.flag,
        factor=factor,
        shrink=shrink,
        **constants,
        num_warps=page_warps(constants),
        **UNFUSED,
    )
    if launch.feedback is not None:
        launch_feedback(launch.feedback, len(table), shared, layout, partial)


@lru_cache(maxsize=1024)
def page_constants(f: PageFormat, partial: bool = False) -> dict[str, Any]:
    """Compile-time arguments of `page_kernel`."""
    layout, tile, halves = PageLayout.of(f), tile_of(f.head_dim, f.bits), halves_of(f.bits)
    if f.is_key:
        rows = min(tile // halves, 2 * KEY_ROWS if f.boosted else KEY_ROWS)
        if f.by_token:
            rows = min(tile, KEY_ROWS // channel_parts(f.bits, True))
        chunk = layout.lanes if f.static else max(f.group_size, layout.lanes)
    else:
        rows, chunk = min(VALUE_TOKENS, f.page_size // halves), f.head_dim
    return {"F": layout, "ROW_TILE": rows, "CHUNK": chunk, "PARTIAL": partial}


def norm_constants(f: PageFormat) -> dict[str, Any]:
    """Compile-time arguments of `norm_kernel`."""
    measure = f.token_norm_measure == "mean_abs"
    return {"F": PageLayout.of(f), "TOKENS": min(NORM_TOKENS, f.page_size), "MEAN_ABS": measure}


def shrinkage(factor: float) -> tuple[float, float]:
    """What the extent of a range is multiplied with, and its part by which the offset rises."""
    return factor, (1 - factor) / 2


def warps_for(elements: int) -> int:
    """Warps of a program whose tile has this number of elements."""
    return min(32, max(1, elements // (32 * PER_THREAD)))


def page_warps(constants: dict[str, Any]) -> int:
    """Warps of `page_kernel`: where chunks follow one another, wider or paired codes take more registers for every
    element.
    """
    layout, chunk = constants["F"], constants["CHUNK"]
    bits, lane_tile = layout.bits, padded(layout.lanes)
    elements = chunk // layout.lanes * lane_tile * constants["ROW_TILE"]
    if not layout.is_key:
        # Groups one by one, or two fields' halves, take more registers, too.
        crowded = layout.lanes != lane_tile or halves_of(bits) == 2
        return warps_for(elements * (2 if crowded else 1))
    if layout.by_token:
        # All parts are under way at once.
        return warps_for(elements * {2: 16, 4: 4}[bits])
    if chunk < layout.page_size:
        return warps_for(elements * (2 if layout.static else {1: 4, 2: 1, 3: 4, 4: 2, 8: 4}[bits]))
    if layout.boosted:
        # Ranking exchanges scores between all warps: the fewer the better, but for pairs, which take more registers.
        return warps_for(elements * 2 if bits == 1 else elements // 2)
    return warps_for(elements)
