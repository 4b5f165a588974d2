"""Quantization of pages on a GPU: launches of the kernels in keys.py and values.py.

Pages are addressed by a table, int64 [N, 4] on the device: the offset of the page's first token from a base tensor, the
stride from head to head, the offset of the record from another base tensor, and the page's number of tokens. Offsets
count elements of their base, may lead to other allocations, and are multiples of 8. So one launch serves one page, the
pages of many sequences with buffers of their own, and a whole prompt.

Numbers that cannot be quantized are found on the way: kernels leave the first such page and head in a flag on the
device, which `raise_if_flagged` reads once per flush.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton

from kvconvert.errors import UsageError
from kvconvert.kernels.packing import field_bits
from kvconvert.kernels.pages.center import KeyCenter
from kvconvert.kernels.pages.formats import ChannelScales, KeyFormat, TokenNorm, ValueFormat
from kvconvert.kernels.pages.layout import ALIGNMENT, KeyLayout, ValueLayout
from kvconvert.kernels.pages.records import KeyPages, PageWrites, ValuePages
from kvconvert.kernels.pages.triton.center import launch_centers, uploaded
from kvconvert.kernels.pages.triton.feedback import PageFeedback, launch_feedback
from kvconvert.kernels.pages.triton.keys import joint_norm_kernel, key_page_kernel
from kvconvert.kernels.pages.triton.packing import halves_of
from kvconvert.kernels.pages.triton.values import copy_page_kernel, value_page_kernel
from kvconvert.kernels.rotate.matrices import hadamard_signs

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


def quantize_page_records(
    tokens: Sequence[torch.Tensor],
    pages: Sequence[KeyPages] | Sequence[ValuePages],
    flag: torch.Tensor,
    channels: torch.Tensor | None,
    static: ChannelScales | None,
    feedback: torch.Tensor | None,
) -> None:
    """`quantize_in_place` of kernels/pages/__init__.py, of tokens that `unsupported` accepts."""
    f, base, records = pages[0].format, tokens[0], pages[0].buffer
    table = page_table(tokens, base, [view.buffer for view in pages], records, f.page_size)
    if isinstance(f, KeyFormat):
        matrices = None if feedback is None else one_feedback(feedback, len(table))
        quantize_key_pages(base, base.stride(1), table, f, records, flag, channels, static, feedback=matrices)
    else:
        quantize_value_pages(base, base.stride(1), table, f, records, flag, static)


def quantize_addressed(
    writes: PageWrites,
    like: torch.Tensor,
    pages: KeyPages | ValuePages,
    flag: torch.Tensor,
    channels: torch.Tensor | None,
    static: ChannelScales | None,
    center: KeyCenter | None,
) -> None:
    """`quantize_at` of kernels/pages/__init__.py."""
    f, records = pages.format, pages.buffer
    table = np.empty((len(writes.tokens), 4), dtype=np.int64)
    table[:, 0] = (writes.tokens - like.data_ptr()) // like.element_size()
    table[:, 1] = writes.head_strides
    table[:, 2] = (writes.records - records.data_ptr()) // records.element_size()
    table[:, 3] = f.page_size
    on_device = uploaded(table, like.device)
    if isinstance(f, KeyFormat):
        if writes.centers is not None:
            bases, centers = (center.matrix, center.frequencies), writes.centers.copy()
            for column, base in enumerate(bases, 1):
                centers[:, column] = (centers[:, column] - base.data_ptr()) // base.element_size()
            on_device_centers = uploaded(centers, like.device)
            launch_centers(like, like.stride(1), on_device, on_device_centers, center, f.page_size, sign=-1)
        feedback = None
        if writes.feedback is not None:
            # Addresses of float16 numbers, counted from the records', which are of 16 bits too.
            base = records.view(torch.float16)
            feedback = PageFeedback(base, uploaded((writes.feedback - base.data_ptr()) // 2, like.device))
        quantize_key_pages(like, like.stride(1), on_device, f, records, flag, channels, static, feedback=feedback)
    else:
        quantize_value_pages(like, like.stride(1), on_device, f, records, flag, static)


def one_feedback(feedback: torch.Tensor, pages: int) -> PageFeedback:
    """One layer's matrices float16 [H, D, D], contiguous, for all pages."""
    return PageFeedback(feedback, torch.zeros(pages, dtype=torch.int64, device=feedback.device))


def page_table(
    tokens: Sequence[torch.Tensor],
    base: torch.Tensor,
    records: Sequence[torch.Tensor],
    record_base: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """The table of pages that lie anywhere on the bases' device.

    Args:
        tokens: [H, n P, channels], the tokens of n pages each.
        base: what addresses of tokens count from.
        records: [m, ...], the records of m pages each, in the tokens' order.
        record_base: what addresses of records count from.
        page_size: P.

    Raises:
        UsageError: tokens or records do not lie at multiples of 16 bytes.
    """
    sources, targets = [], []
    for part in tokens:
        distance, stride = part.data_ptr() - base.data_ptr(), part.stride(1)
        if distance % 16 or part.stride(0) % ALIGNMENT or stride % ALIGNMENT:
            raise UsageError("The tokens of pages do not lie at multiples of 16 bytes; copy them first.")
        first = distance // base.element_size()
        sources += [(first + token * stride, part.stride(0)) for token in range(0, part.shape[1], page_size)]
    for part in records:
        distance = part.data_ptr() - record_base.data_ptr()
        if distance % 16:
            raise UsageError("The records of pages do not lie at multiples of 16 bytes.")
        first = distance // record_base.element_size()
        targets += [first + page * part.stride(0) for page in range(part.shape[0])]
    rows = [(*source, target, page_size) for source, target in zip(sources, targets, strict=True)]
    return torch.tensor(rows, dtype=torch.int64).to(base.device, non_blocking=True)


def quantize_key_pages(
    base: torch.Tensor,
    token_stride: int,
    table: torch.Tensor,
    f: KeyFormat,
    records: torch.Tensor,
    flag: torch.Tensor,
    channels: torch.Tensor | None = None,
    static: ChannelScales | None = None,
    rotate: bool = False,
    feedback: PageFeedback | None = None,
) -> None:
    """Write key pages into their records; `quantize_keys` in kernels/pages/reference.py says what.

    Args:
        base: any tensor of the keys' dtype and device, from whose address the table counts.
        token_stride: elements from one token to the next; a multiple of 8.
        table: int64 [N, 4], see above. Every page is full.
        f: their format.
        records: int16, from whose address the table counts records; of 16-bit pages, the keys' dtype.
        flag: int32 [1], see `raise_if_flagged`.
        channels: int64 [H, boosted], where the format fixes them.
        static: of the layer, where `f.static`.
        rotate: keys are not rotated yet; a Hadamard rotation, rounded to their dtype as a stored key is, goes first.
        feedback: the pages' matrices where keys are rounded with error feedback; 16-bit keys are not rounded.
    """
    pages, tile = table.shape[0], tile_of(f.head_dim, f.bits)
    matrix, normaliser = hadamard_signs(f.head_dim, base.dtype, base.device) if rotate else (base, 1.0)
    if f.bits == 16:
        copy_page_kernel[(pages * f.heads,)](
            base, records, table, matrix, token_stride, normaliser, f.heads, f.head_dim, tile, f.page_size,
            rotate, num_warps=warps_for(f.page_size * tile), **UNFUSED,
        )  # fmt: skip
        return
    layout = KeyLayout.of(f)
    mean_abs = f.token_norm_measure == "mean_abs"
    if f.token_norm is TokenNorm.JOINT:
        tokens = min(NORM_TOKENS, f.page_size)
        joint_norm_kernel[(pages * (f.page_size // tokens),)](
            base, records, table, matrix, flag, token_stride, normaliser, f.heads, f.head_dim, tile, f.page_size,
            tokens, layout.joint_norm, mean_abs, rotate, num_warps=warps_for(tokens * tile), **UNFUSED,
        )  # fmt: skip
    launch_keys(base, token_stride, table, f, records, flag, channels, static, rotate, False, feedback)


def launch_keys(
    base: torch.Tensor,
    token_stride: int,
    table: torch.Tensor,
    f: KeyFormat,
    records: torch.Tensor,
    flag: torch.Tensor,
    channels: torch.Tensor | None,
    static: ChannelScales | None,
    rotate: bool,
    partial: bool,
    feedback: PageFeedback | None = None,
) -> None:
    """Write key pages of 8 bits or fewer, whose joint norms are there; `partial` pages may have fewer tokens."""
    tile = tile_of(f.head_dim, f.bits)
    matrix, normaliser = hadamard_signs(f.head_dim, base.dtype, base.device) if rotate else (base, 1.0)
    dynamic = f.boosted > 0 and not f.fixed_channels
    constants = key_constants(f, tile, rotate, partial)
    blocks = triton.cdiv(f.head_dim // halves_of(f.bits), constants["ROW_TILE"])
    shared = {
        "keys": base,
        "records": records,
        "record_bytes": records.view(torch.uint8) if dynamic else records,
        "table": table,
        "static_scales": static.scale if f.static else records,
        "static_zero_points": static.zero_point if f.static else records,
        "boosted": channels if f.boosted and not dynamic else table,
        "matrix": matrix,
        "token_stride": token_stride,
        "normaliser": normaliser,
    }
    factor, shrink = shrinkage(f.clip_ratio)
    key_page_kernel[(table.shape[0] * f.heads * blocks,)](
        **shared, flag=flag, factor=factor, shrink=shrink, **constants, num_warps=key_warps(constants), **UNFUSED
    )
    if feedback is not None:
        launch_feedback(feedback, table.shape[0], shared, constants)


def key_constants(f: KeyFormat, tile: int, rotate: bool, partial: bool) -> dict[str, Any]:
    """Compile-time arguments of `key_page_kernel`."""
    layout = KeyLayout.of(f)
    whole = tile // halves_of(f.bits)
    chunk = layout.lanes if f.static else max(f.group_size, layout.lanes)
    return {
        "HEADS": f.heads,
        "HEAD_SIZE": f.head_dim,
        "TILE": tile,
        "ROW_TILE": min(whole, 2 * KEY_ROWS if f.boosted or f.token_norm is TokenNorm.PER_HEAD else KEY_ROWS),
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
        "ROTATE": rotate,
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


def quantize_value_pages(
    base: torch.Tensor,
    token_stride: int,
    table: torch.Tensor,
    f: ValueFormat,
    records: torch.Tensor,
    flag: torch.Tensor,
    static: ChannelScales | None = None,
) -> None:
    """Write value pages into their records; arguments as for `quantize_key_pages`."""
    pages = table.shape[0]
    if f.bits == 16:
        tile = tile_of(f.head_dim, f.bits)
        copy_page_kernel[(pages * f.heads,)](
            base, records, table, base, token_stride, 1.0, f.heads, f.head_dim, tile, f.page_size, False,
            num_warps=warps_for(f.page_size * tile), **UNFUSED,
        )  # fmt: skip
        return
    launch_values(base, token_stride, table, f, records, flag, static, partial=False)


def launch_values(
    base: torch.Tensor,
    token_stride: int,
    table: torch.Tensor,
    f: ValueFormat,
    records: torch.Tensor,
    flag: torch.Tensor,
    static: ChannelScales | None,
    partial: bool,
) -> None:
    """Write value pages of 8 bits or fewer; `partial` pages may have fewer tokens."""
    constants = value_constants(f, partial)
    blocks = f.page_size // halves_of(f.bits) // constants["TOKENS"]
    value_page_kernel[(table.shape[0] * f.heads * blocks,)](
        base,
        records,
        table,
        static.scale if f.static else records,
        static.zero_point if f.static else records,
        flag,
        token_stride,
        *shrinkage(f.clip_ratio),
        **constants,
        num_warps=value_warps(constants),
        **UNFUSED,
    )


def value_constants(f: ValueFormat, partial: bool) -> dict[str, Any]:
    """Compile-time arguments of `value_page_kernel`."""
    layout = ValueLayout.of(f)
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


def tile_of(dim: int, bits: int) -> int:
    """Channels of a tile: a power of two, of which matrix instructions want 16 in each half of `halves_of`."""
    return max(16 * halves_of(bits), triton.next_power_of_2(dim))


def warps_for(elements: int) -> int:
    """Warps of a program whose tile has so many elements."""
    return min(32, max(1, elements // (32 * PER_THREAD)))


def key_warps(constants: dict[str, Any]) -> int:
    """Warps of `key_page_kernel`."""
    elements = constants["CHUNK"] * constants["ROW_TILE"]
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
