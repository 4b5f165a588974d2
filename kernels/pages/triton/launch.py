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
from typing import Any

import numpy as np
import torch

from kvconvert.kernels.device import upload
from kvconvert.kernels.page_formats import NO_TENSORS, PageFormat, PageLayout, SideTensors, TokenNorm
from kvconvert.kernels.pages.records import PageWrites
from kvconvert.kernels.pages.triton import channel_parts, halves_of, padded, tile_of
from kvconvert.kernels.pages.triton.center import launch_centers
from kvconvert.kernels.pages.triton.feedback import CHANNEL_BLOCK, feedback_warps, key_feedback_kernel, program_lanes
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


def listed(
    writes: PageWrites, like: torch.Tensor, records: torch.Tensor, f: PageFormat, tensors: Sequence[SideTensors]
) -> dict[str, Any]:
    """The tables on the device that `quantize_listed` takes; arguments as for `quantize_at`."""
    table = np.empty((*writes.tokens.shape, 5), dtype=np.int64)
    table[..., 0] = (writes.tokens - like.data_ptr()) // like.element_size()
    table[..., 1] = writes.head_strides
    table[..., 2] = (writes.records - records.data_ptr()) // records.element_size()
    table[..., 3] = f.page_size
    table[..., 4] = writes.hidden
    return {"table": upload(table.reshape(-1, 5), like.device)} | tables_of(tensors, writes.positions, like.device)


def tables_of(tensors: Sequence[SideTensors], positions: np.ndarray, device: torch.device) -> dict[str, torch.Tensor]:
    """Where `quantize_listed` finds what belongs to each layer.

    Args:
        tensors: those of each layer.
        positions: the position of the first token of each page, the same in every layer.
        device: where the tables go.
    """
    found, first = {}, tensors[0]
    if first.feedback is not None:
        offsets = [(own.feedback.data_ptr() - first.feedback.data_ptr()) // 2 for own in tensors]
        found["matrices"] = upload(np.repeat(offsets, len(positions)), device)
    if first.center is not None:
        bases = first.center.matrix, first.center.frequencies
        own = [[side.center.matrix.data_ptr(), side.center.frequencies.data_ptr()] for side in tensors]
        offsets = (np.array(own) - [base.data_ptr() for base in bases]) // [base.element_size() for base in bases]
        centers = np.column_stack([np.tile(positions, len(tensors)), np.repeat(offsets, len(positions), axis=0)])
        found["centers"] = upload(centers, device)
    return found


def quantize_at(
    writes: PageWrites,
    like: torch.Tensor,
    records: torch.Tensor,
    f: PageFormat,
    flag: torch.Tensor,
    tensors: Sequence[SideTensors],
) -> None:
    """Quantize complete pages of many layers and sequences on a GPU and write them where they are to be stored.

    Args:
        writes: where the pages' tokens lie, which `unsupported` accepts, and where records go.
        like: some of the tokens [H, n, channels]; centers are subtracted from tokens in place.
        records: some of the storage, for its dtype.
        f: the format of the pages.
        flag: what the kernels raise, see `raise_if_flagged`; from `new_flag`.
        tensors: each layer's; of several layers `LayerFormat.shares_launches` is true.
    """
    tables = listed(writes, like, records, f, tensors)
    quantize_listed(like, records=records, f=f, flag=flag, tensors=tensors[0], **tables)


def quantize_listed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    records: torch.Tensor,
    f: PageFormat,
    flag: torch.Tensor,
    *,
    tensors: SideTensors = NO_TENSORS,
    centers: torch.Tensor | None = None,
    matrices: torch.Tensor | None = None,
    partial: bool = False,
) -> None:
    """Quantize pages on a GPU that a table there describes; `quantize_pages` in kernels/pages/reference.py says what.

    Args:
        tokens: [H, W, channels] that `unsupported` accepts, from whose address the table counts tokens; those of pages
            may be changed.
        table: int64 [N, 5], see the module.
        records: int16, or of 16-bit pages the tokens' dtype, from whose address the table counts records.
        f: the format of the pages.
        flag: as for `quantize_at`.
        tensors: a layer's, whose center is subtracted from the tokens in place.
        centers: int64 [N, 3], the position of each page's first token, and where its layer's center is, see
            `center_kernel`; for keys with a center.
        matrices: int64 [N], where each page's matrix of error feedback is, in elements from the layer's; None for that.
        partial: whether pages, of 8 bits or fewer, may have fewer tokens than `f.page_size`.
    """
    layout, stride, count = f.layout, tokens.stride(1), table.shape[0]
    if tensors.center is not None:
        launch_centers(tokens, stride, table, centers, tensors.center, f.page_size, sign=-1)
    if f.bits == 16:
        copy_page_kernel[(count * f.heads,)](
            tokens, records, table, stride, layout, num_warps=token_warps(f, f.page_size), **UNFUSED
        )
        return
    if f.token_norm is not TokenNorm.NONE:
        own = norm_constants(f)
        heads = 1 if f.token_norm is TokenNorm.JOINT else f.heads
        norm_kernel[(count * heads * (f.page_size // own["TOKENS"]),)](
            tokens, records, table, flag, stride, **own, num_warps=token_warps(f, own["TOKENS"]), **UNFUSED
        )
    constants, blocks, warps = page_launch(f, partial)
    shared = {
        "tokens": tokens,
        "records": records,
        "record_bytes": records if layout.channels < 0 else records.view(torch.uint8),
        "table": table,
        "static_scales": tensors.static.scale if f.static else records,
        "static_offsets": tensors.static.offset if f.static else records,
        "boosted": tensors.boosted if f.boosted and layout.channels < 0 else table,
        "token_stride": stride,
        "F": layout,
        "PARTIAL": partial,
    }
    factor, shrink = shrinkage(f.clip_ratio)
    programs = count * f.heads
    page_kernel[(programs * blocks,)](
        **shared | constants, flag=flag, factor=factor, shrink=shrink, num_warps=warps, **UNFUSED
    )
    if tensors.feedback is None:
        return
    divisions = layout.lanes // program_lanes(layout)
    programs *= divisions
    room = programs * CHANNEL_BLOCK * (f.page_size // divisions + 1)
    matrices = torch.zeros_like(table[:, 0]) if matrices is None else matrices
    key_feedback_kernel[(programs,)](
        **shared, feedback=tensors.feedback, feedback_table=matrices,
        scratch=tokens.new_empty(room, dtype=torch.float32), BLOCK=CHANNEL_BLOCK, num_warps=feedback_warps(layout),
        **UNFUSED,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def page_launch(f: PageFormat, partial: bool) -> tuple[dict[str, Any], int, int]:
    """Compile-time arguments of `page_kernel`, its programs for one head of a page, and their warps."""
    constants = page_constants(f, partial)
    rows = f.layout.grid_rows // channel_parts(f.bits, f.by_token)
    return constants, -(-rows // constants["ROW_TILE"]), page_warps(constants)


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


@lru_cache(maxsize=1024)
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


@lru_cache(maxsize=1024)
def token_warps(f: PageFormat, tokens: int) -> int:
    """Warps of a program that takes this number of one head's tokens."""
    return warps_for(tokens * tile_of(f.head_dim, f.bits))


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
