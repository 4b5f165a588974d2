"""Quantization of pages on a GPU: launches of the kernels in keys.py and values.py.

Pages are addressed by a table, int64 [N, 5] on the device: the offset of the page's first token from a base tensor, the
stride from head to head, the offset of the record from another base tensor, the page's number of tokens, and how many
of its first ones are hidden, whose places the next token takes. Offsets count elements of their base, may lead to other
allocations, and are multiples of 8. So one launch serves one page, the pages of many sequences with buffers of their
own, and a whole prompt.

Numbers that cannot be quantized are found on the way: kernels leave the first such page and head in a flag on the
device, which `raise_if_flagged` reads once per flush.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from kvconvert.kernels.packing import field_bits
from kvconvert.kernels.pages.center import KeyCenter
from kvconvert.kernels.pages.formats import ChannelScales, PageFormat, TokenNorm
from kvconvert.kernels.pages.layout import PageLayout
from kvconvert.kernels.pages.records import PageTensors, PageWrites
from kvconvert.kernels.pages.triton.affine import channel_parts, halves_of
from kvconvert.kernels.pages.triton.center import launch_centers, uploaded
from kvconvert.kernels.pages.triton.feedback import PageFeedback, launch_feedback
from kvconvert.kernels.pages.triton.keys import joint_norm_kernel, key_page_kernel
from kvconvert.kernels.pages.triton.values import copy_page_kernel, value_page_kernel

# Every operation is rounded by itself, as on a CPU.
UNFUSED = {"enable_fp_fusion": False}
# Tile elements per thread.
PER_THREAD = 64
# Channels of one program of the keys, where it needs no others: a row of 128 bytes.
KEY_ROWS = 64
# Tokens of one program of the values: one warp of 2 bits and 128 channels, so that no warp waits for another.
VALUE_TOKENS = 16
# Tokens of one program of the joint norm.
NORM_TOKENS = 16


class PageLaunch(NamedTuple):
    """The pages that one launch writes.

    Attributes:
        base: any tensor of the tokens' dtype and device, from whose address the table counts tokens.
        token_stride: elements from one token to the next; a multiple of 8.
        table: int64 [N, 5], see above.
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


def page_launch(writes: PageWrites, like: torch.Tensor, pages: PageTensors, flag: torch.Tensor) -> PageLaunch:
    """The tables of a launch on the device; arguments as for `quantize_at` of kernels/pages/__init__.py."""
    records = pages.buffer
    table = np.empty((len(writes.tokens), 5), dtype=np.int64)
    table[:, 0] = (writes.tokens - like.data_ptr()) // like.element_size()
    table[:, 1] = writes.head_strides
    table[:, 2] = (writes.records - records.data_ptr()) // records.element_size()
    table[:, 3] = pages.format.page_size
    table[:, 4] = 0 if writes.hidden is None else writes.hidden
    on_device, feedback = uploaded(table, like.device), None
    if writes.feedback is not None:
        # Addresses of float16 numbers, counted from the records', which are of 16 bits too.
        base = records.view(torch.float16)
        feedback = PageFeedback(base, uploaded((writes.feedback - base.data_ptr()) // 2, like.device))
    return PageLaunch(like, like.stride(1), on_device, records, flag, feedback)


def quantize_at(
    writes: PageWrites,
    like: torch.Tensor,
    pages: PageTensors,
    flag: torch.Tensor,
    channels: torch.Tensor | None,
    static: ChannelScales | None,
    center: KeyCenter | None,
) -> None:
    """`quantize_at` of kernels/pages/__init__.py."""
    f, launch = pages.format, page_launch(writes, like, pages, flag)
    if not f.is_key:
        quantize_value_pages(launch, f, static)
        return
    if writes.centers is not None:
        bases, centers = (center.matrix, center.frequencies), writes.centers.copy()
        for column, base in enumerate(bases, 1):
            centers[:, column] = (centers[:, column] - base.data_ptr()) // base.element_size()
        on_device = uploaded(centers, like.device)
        launch_centers(like, launch.token_stride, launch.table, on_device, center, f.page_size, sign=-1)
    quantize_key_pages(launch, f, channels, static)


def quantize_listed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    records: torch.Tensor,
    f: PageFormat,
    flag: torch.Tensor,
    centers: torch.Tensor,
    channels: torch.Tensor | None,
    static: ChannelScales | None,
    feedback: torch.Tensor | None,
    center: KeyCenter | None,
) -> None:
    """`quantize_listed` of kernels/pages/__init__.py."""
    matrices = None if feedback is None else PageFeedback(feedback, torch.zeros_like(table[:, 0]))
    launch = PageLaunch(tokens, tokens.stride(1), table, records, flag, matrices)
    if not f.is_key:
        quantize_value_pages(launch, f, static)
        return
    if center is not None:
        launch_centers(tokens, launch.token_stride, table, centers, center, f.page_size, sign=-1)
    quantize_key_pages(launch, f, channels, static)


def quantize_key_pages(
    launch: PageLaunch, f: PageFormat, channels: torch.Tensor | None = None, static: ChannelScales | None = None
) -> None:
    """Write full key pages into their records; `quantize_keys` in kernels/pages/reference.py says what.

    Args:
        launch: the pages.
        f: their format.
        channels: int64 [H, boosted], where the format fixes them.
        static: the layer's scales, where `f.static`.
    """
    base, stride, table, records, flag, _ = launch
    pages, tile = table.shape[0], tile_of(f.head_dim, f.bits)
    if f.bits == 16:
        _copy_pages(launch, f)
        return
    layout = PageLayout.of(f)
    mean_abs = f.token_norm_measure == "mean_abs"
    if f.token_norm is TokenNorm.JOINT:
        tokens = min(NORM_TOKENS, f.page_size)
        joint_norm_kernel[(pages * (f.page_size // tokens),)](
            base, records, table, flag, stride, f.heads, f.head_dim, tile, f.page_size, tokens, layout.joint_norm,
            mean_abs, num_warps=warps_for(tokens * tile), **UNFUSED,
        )  # fmt: skip
    launch_keys(launch, f, channels, static, partial=False)


def _copy_pages(launch: PageLaunch, f: PageFormat) -> None:
    tile = tile_of(f.head_dim, f.bits)
    copy_page_kernel[(launch.table.shape[0] * f.heads,)](
        launch.base, launch.records, launch.table, launch.token_stride, f.heads, f.head_dim, tile, f.page_size,
        num_warps=warps_for(f.page_size * tile), **UNFUSED,
    )  # fmt: skip


def launch_keys(
    launch: PageLaunch,
    f: PageFormat,
    channels: torch.Tensor | None,
    static: ChannelScales | None,
    partial: bool,
) -> None:
    """Write key pages of 8 bits or fewer, whose joint norms are there; `partial` pages may have fewer tokens."""
    table, records = launch.table, launch.records
    dynamic = f.boosted > 0 and not f.fixed_channels
    constants = key_constants(f, partial)
    blocks = triton.cdiv(f.head_dim // channel_parts(f.bits, f.by_token), constants["ROW_TILE"])
    shared = {
        "keys": launch.base,
        "records": records,
        "record_bytes": records.view(torch.uint8) if dynamic else records,
        "table": table,
        "static_scales": static.scale if f.static else records,
        "static_zero_points": static.zero_point if f.static else records,
        "boosted": channels if f.boosted and not dynamic else table,
        "token_stride": launch.token_stride,
    }
    factor, shrink = shrinkage(f.clip_ratio)
    key_page_kernel[(table.shape[0] * f.heads * blocks,)](
        **shared, flag=launch.flag, factor=factor, shrink=shrink, **constants, num_warps=key_warps(constants), **UNFUSED
    )
    if launch.feedback is not None:
        launch_feedback(launch.feedback, table.shape[0], shared, constants)


@lru_cache(maxsize=1024)
def key_constants(f: PageFormat, partial: bool) -> dict[str, Any]:
    """Compile-time arguments of `key_page_kernel`."""
    layout, tile = PageLayout.of(f), tile_of(f.head_dim, f.bits)
    whole, most = tile // halves_of(f.bits), KEY_ROWS
    if f.by_token:
        most = KEY_ROWS // channel_parts(f.bits, True)
    elif f.boosted or f.token_norm is TokenNorm.PER_HEAD:
        most = 2 * KEY_ROWS
    chunk = layout.lanes if f.static else max(f.group_size, layout.lanes)
    return {
        "HEADS": f.heads,
        "HEAD_SIZE": f.head_dim,
        "TILE": tile,
        "ROW_TILE": min(whole, most),
        "PAGE": f.page_size,
        "CHUNK": chunk,
        "BITS": f.bits,
        "GROUP": chunk if f.static else f.group_size,
        "NORM": f.token_norm.mode,
        "MEAN_ABS": f.token_norm_measure == "mean_abs",
        "BOOSTED": f.boosted,
        "SLOTS": max(16, triton.next_power_of_2(f.boosted)),
        "DYNAMIC": not f.fixed_channels,
        "STATIC": f.static,
        "BY_TOKEN": f.by_token,
        "PARTIAL": partial,
        "HEAD_STRIDE": layout.head_stride,
        "LANES": layout.lanes,
        "STORED_ROWS": layout.rows,
        "HIGH": layout.high,
        "SCALE": layout.scale,
        "ZERO_POINT": layout.zero_point,
        "PER_HEAD_NORM": layout.norm,
        "CHANNELS": layout.channels,
        "JOINT_NORM": layout.joint_norm,
    }


def quantize_value_pages(launch: PageLaunch, f: PageFormat, static: ChannelScales | None = None) -> None:
    """Write full value pages into their records; arguments as for `quantize_key_pages`."""
    if f.bits == 16:
        _copy_pages(launch, f)
    else:
        launch_values(launch, f, static, partial=False)


def launch_values(launch: PageLaunch, f: PageFormat, static: ChannelScales | None, partial: bool) -> None:
    """Write value pages of 8 bits or fewer; `partial` pages may have fewer tokens."""
    constants, records = value_constants(f, partial), launch.records
    blocks = f.page_size // halves_of(f.bits) // constants["TOKENS"]
    value_page_kernel[(launch.table.shape[0] * f.heads * blocks,)](
        launch.base,
        records,
        launch.table,
        static.scale if f.static else records,
        static.zero_point if f.static else records,
        launch.flag,
        launch.token_stride,
        *shrinkage(f.clip_ratio),
        **constants,
        num_warps=value_warps(constants),
        **UNFUSED,
    )


@lru_cache(maxsize=1024)
def value_constants(f: PageFormat, partial: bool) -> dict[str, Any]:
    """Compile-time arguments of `value_page_kernel`."""
    layout = PageLayout.of(f)
    return {
        "HEADS": f.heads,
        "HEAD_SIZE": f.head_dim,
        "PAGE": f.page_size,
        "TOKENS": min(VALUE_TOKENS, f.page_size // halves_of(f.bits)),
        "BITS": f.bits,
        "GROUP": f.group_size,
        "STATIC": f.static,
        "PARTIAL": partial,
        "HEAD_STRIDE": layout.head_stride,
        "LANES": layout.lanes,
        "STORED_ROWS": layout.rows,
        "LANE_TILE": triton.next_power_of_2(layout.lanes),
        "SCALE": layout.scale,
        "ZERO_POINT": layout.zero_point,
    }


def shrinkage(factor: float) -> tuple[float, float]:
    """What the extent of a range is multiplied with, and its part by which the zero point rises."""
    return factor, (1 - factor) / 2


@lru_cache(maxsize=1024)
def tile_of(dim: int, bits: int) -> int:
    """Channels of a tile: a power of two, of which matrix instructions want 16 in each half of `halves_of`."""
    return max(16 * halves_of(bits), triton.next_power_of_2(dim))


def warps_for(elements: int) -> int:
    """Warps of a program whose tile has this number of elements."""
    return min(32, max(1, elements // (32 * PER_THREAD)))


def key_warps(constants: dict[str, Any]) -> int:
    """Warps of `key_page_kernel`."""
    elements = constants["CHUNK"] * constants["ROW_TILE"]
    if constants["BY_TOKEN"]:
        # All parts are under way at once.
        return warps_for(elements * {2: 16, 4: 4}[constants["BITS"]])
    # Where chunks follow one another, wider or paired codes take more registers for every element.
    if constants["CHUNK"] < constants["PAGE"]:
        return warps_for(elements * (2 if constants["STATIC"] else {1: 4, 2: 1, 3: 4, 4: 2, 8: 4}[constants["BITS"]]))
    if constants["BOOSTED"]:
        # Ranking exchanges scores between all warps: the fewer the better, but for pairs, which take more registers.
        return warps_for(elements * 2 if constants["BITS"] == 1 else elements // 2)
    return warps_for(elements)


def value_warps(constants: dict[str, Any]) -> int:
    """Warps of `value_page_kernel`."""
    planes = 16 // field_bits(constants["BITS"])
    elements = planes * constants["TOKENS"] * constants["LANE_TILE"]
    # Groups one by one, or two fields' halves, take more registers for every element.
    crowded = constants["LANES"] != constants["LANE_TILE"] or halves_of(constants["BITS"]) == 2
    return warps_for(elements * (2 if crowded else 1))
