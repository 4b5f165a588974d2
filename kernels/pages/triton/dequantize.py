"""Kernels that dequantize pages or span blocks into tensors of the model's dtype, for attention that reads such.

One program writes one head's part of one page. The arithmetic is that of `kernels/quantizer.py`, rounded after every
operation in float32 and then once to the dtype: kernels must be compiled without fusing products into sums. Strides of
outputs are in units of 8 elements.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from kvconvert.kernels.launches import skips_launches
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.page_formats import PageLayout
from kvconvert.kernels.pages.records import PageAddresses
from kvconvert.kernels.pages.triton import channel_parts, field_width, in_bytes, load_grid, padded
from kvconvert.kernels.pages.triton.quantize import JOINT, NO_NORM

# Tile elements per thread.
PER_THREAD = 16
# float16 saturates, as in `kernels/quantizer.py`.
LARGEST_HALF = tl.constexpr(65504.0)


@triton.jit
def _halves(units):
    """A pointer to 16-bit units as one to float16 numbers."""
    return units.to(tl.pointer_type(tl.float16))


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """float32 in the output's dtype."""
    if dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -LARGEST_HALF), LARGEST_HALF)
    return x.to(dtype)


@triton.jit
def _fields(words, shift, BITS: tl.constexpr):
    """Codes of BITS bits at `shift` of 16-bit lanes, int32."""
    return (words.to(tl.int32) >> shift) & ((1 << BITS) - 1)


@triton.jit
def _codes(words, lowest, PLANE: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr):
    """Codes of plane PLANE, int32, of the rows in HALF: at 3 bits `words` are theirs, and `lowest` those of both."""
    place = PLANE * field_width(BITS)
    if BITS == 3:
        return _fields(words, place, 2) * 2 + _fields(lowest, place + HALF, 1)
    else:
        return _fields(words, place + HALF * BITS, BITS)


@triton.jit
def _lowest_bits(words, row_words, ROWS: tl.constexpr, BITS: tl.constexpr, mask):
    """Words of the lowest bits of codes of 3 bits, ROWS being half of their rows; `words` at other widths."""
    if BITS == 3:
        return tl.load(row_words + 2 * ROWS, mask=mask, other=0)
    else:
        return words


@triton.jit
def _start(places, page, PAGE: tl.constexpr, PLACED: tl.constexpr):
    """Where a page's tokens go: one page after another, or where `places` say, negative for nowhere."""
    if PLACED:
        return tl.load(places + page).to(tl.int32)
    else:
        return page * PAGE


@kernel(do_not_specialize=["offsets", "places", "scales", "boosted", "head_stride", "token_stride", "tokens"])
def dequantize_kernel(
    records,
    offsets,
    places,
    scales,
    boosted,
    output,
    head_stride,
    token_stride,
    tokens,
    F: tl.constexpr,
    PLACED: tl.constexpr,
):
    """Keys or values of one head of a page as [tokens, F.head_dim]; F is the `PageLayout`.

    Tokens begin at `places[page]` of `output` if pages are PLACED. `scales` int64 [2] leads to the layer's or span's
    scale and offset; `boosted` [F.heads, F.boosted] are the channels where these are fixed.
    """
    ROWS: tl.constexpr = F.grid_rows // channel_parts(F.bits, F.by_token)
    ROW_TILE: tl.constexpr = padded(ROWS)
    LANE_TILE: tl.constexpr = padded(F.lanes)
    HALVES: tl.constexpr = channel_parts(F.bits, F.by_token)
    PLANES: tl.constexpr = (F.page_size if F.is_key else F.head_dim) // F.lanes
    page, head = tl.program_id(0) // F.heads, tl.program_id(0) % F.heads
    start = _start(places, page, F.page_size, PLACED)
    if start < 0:
        return
    record = records + tl.load(offsets + page) * 8
    part = record + head * F.head_stride
    target = output + (head * head_stride.to(tl.int64) + start.to(tl.int64) * token_stride) * 8
    # Lanes lie along the tokens of keys and the channels of values; tiles are [tokens, channels].
    if F.is_key:
        lane, row = tl.arange(0, LANE_TILE)[:, None], tl.arange(0, ROW_TILE)[None, :]
        real = row < ROWS
    else:
        lane, row = tl.arange(0, LANE_TILE)[None, :], tl.arange(0, ROW_TILE)[:, None]
        real = lane < F.lanes
    row_words = part + lane * F.rows + row
    words = tl.load(row_words, mask=real, other=0)
    lowest = _lowest_bits(words, row_words, ROWS, F.bits, real)
    if F.static:
        scale_row = records + tl.load(scales) * 8 + head * F.head_dim
        offset_row = records + tl.load(scales + 1) * 8 + head * F.head_dim
    else:
        scale_row, offset_row = part + F.scale, part + F.offset
    norms = _halves(record + F.norm_start if F.norm == JOINT else part + F.norm_start)
    for half in tl.static_range(HALVES):
        across = half * ROWS + row
        if F.bits == 3 and half == 1:
            words = tl.load(row_words + ROWS, mask=real, other=0)
        if F.boosted > 0:
            # Which of the boosted channels a channel is, if it is one.
            number = tl.arange(0, padded(F.boosted))[:, None]
            if F.channels < 0:
                listed = tl.load(boosted + head * F.boosted + number, mask=number < F.boosted, other=-1).to(tl.int32)
            else:
                stored = (part + F.channels).to(tl.pointer_type(tl.uint8))
                listed = tl.load(stored + number, mask=number < F.boosted, other=0).to(tl.int32)
            found = (listed == across) & (number < F.boosted)
            has_more = tl.max(found.to(tl.int32), 0)[None, :] > 0
            which = tl.sum(tl.where(found, number, 0), 0)[None, :]
            upper = which // F.high_rows
            high_words = tl.load(
                part + F.high + lane * F.high_rows + which - upper * F.high_rows, mask=has_more & real, other=0
            )
        for plane in tl.static_range(PLANES):
            along = plane * F.lanes + lane
            code = _codes(words, lowest, plane, half, F.bits)
            if F.boosted > 0:
                code += _fields(high_words, plane * field_width(F.bits) + upper * F.bits, F.bits) << F.bits
            if F.is_key:
                token, channel = along, across
            else:
                token, channel = across, along
            if F.static:
                place = channel
            elif F.lanes == LANE_TILE and F.group_size % F.lanes == 0:
                place = plane * F.lanes // F.group_size * F.grid_rows + across
            else:
                place = along // F.group_size * F.grid_rows + across
            scale, offset = load_grid(scale_row + place, offset_row + place, real, in_bytes(F.scale, F.offset))
            x = code.to(tl.float32) * scale + offset
            if F.norm != NO_NORM:
                x = x * tl.load(norms + token).to(tl.float32)
            inside = real & (token < tokens - start)
            tl.store(target + token * (token_stride * 8) + channel, _rounded(x, output.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["offsets", "places", "head_stride", "token_stride", "tokens"])
def read_pages_kernel(
    records, offsets, places, output, head_stride, token_stride, tokens, F: tl.constexpr, PLACED: tl.constexpr
):
    """One head of an unquantized page, a copy."""
    page, head = tl.program_id(0) // F.heads, tl.program_id(0) % F.heads
    start = _start(places, page, F.page_size, PLACED)
    if start < 0:
        return
    source = (records + tl.load(offsets + page) * 8).to(tl.pointer_type(output.dtype.element_ty))
    target = output + (head * head_stride.to(tl.int64) + start.to(tl.int64) * token_stride) * 8
    token, channel = tl.arange(0, F.page_size)[:, None], tl.arange(0, padded(F.head_dim))[None, :]
    x = tl.load(
        source + head * F.page_size * F.head_dim + token * F.head_dim + channel, mask=channel < F.head_dim, other=0.0
    )
    inside = (channel < F.head_dim) & (token < tokens - start)
    tl.store(target + token * (token_stride * 8) + channel, x, mask=inside)


def dequantize_addressed(pages: PageAddresses, output: torch.Tensor, places: torch.Tensor | None = None) -> None:
    """Dequantize pages into `output` [H, tokens, channels], whose channels are contiguous.

    Args:
        pages: where they are.
        output: tokens lie at multiples of 8 elements; of the last ones of a page there may be no room.
        places: int64 [N], the token of `output` that each page begins at, negative for one that is left out; None puts
            one page after another.
    """
    layout, records = pages.format.layout, pages.base.view(torch.int16)
    programs = (pages.offsets.shape[0] * layout.heads,)
    # Recorded passes have room for pages where those of their rehearsal have none.
    if not programs[0] and not (skips_launches() and places is not None):
        return
    scales = pages.offsets if pages.scales is None else pages.scales
    shape = (output.stride(0) // 8, output.stride(1) // 8, output.shape[1])
    where, placed = (pages.offsets, False) if places is None else (places, True)
    if layout.bits == 16:
        read_pages_kernel[programs](
            records, pages.offsets, where, output, *shape, layout, PLACED=placed, num_warps=warps_for(layout)
        )
    else:
        boosted = pages.offsets if pages.boosted is None else pages.boosted
        dequantize_kernel[programs](
            records, pages.offsets, where, scales, boosted, output, *shape, layout,
            PLACED=placed, num_warps=warps_for(layout), enable_fp_fusion=False,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def warps_for(layout: PageLayout) -> int:
    """Warps of a program, by the size of the tile that it loads."""
    rows = layout.grid_rows // channel_parts(layout.bits, layout.by_token) if layout.bits < 16 else layout.head_dim
    columns = layout.lanes if layout.bits < 16 else layout.page_size
    return min(8, max(1, padded(columns) * padded(rows) // (32 * PER_THREAD)))
