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
from kvconvert.kernels.page_formats import PageFormat, PageLayout, TokenNorm
from kvconvert.kernels.pages.records import PageAddresses
from kvconvert.kernels.pages.triton import channel_parts, field_width, in_bytes, load_grid
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
    IS_KEY: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    BOOSTED: tl.constexpr,
    BOOST_TILE: tl.constexpr,
    FIXED: tl.constexpr,
    NORM: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    LANES: tl.constexpr,
    LANE_TILE: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    HIGH_ROWS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HIGH: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLACED: tl.constexpr,
):
    """Keys or values of one head of a page as [tokens, HEAD_SIZE]. LANES to CHANNELS are fields of `PageLayout`
    (STORED_ROWS its `rows`, ROWS those of one of `channel_parts`), NORMS that of the norm that NORM says there is.

    Tokens begin at `places[page]` of `output` if pages are PLACED. `scales` int64 [2] leads to the layer's or span's
    scale and offset; `boosted` [HEADS, BOOSTED] are the channels where these are FIXED.
    """
    HALVES: tl.constexpr = channel_parts(BITS, BY_TOKEN)
    PLANES: tl.constexpr = (PAGE if IS_KEY else HEAD_SIZE) // LANES
    page, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = _start(places, page, PAGE, PLACED)
    if start < 0:
        return
    record = records + tl.load(offsets + page) * 8
    part = record + head * HEAD_STRIDE
    target = output + (head * head_stride.to(tl.int64) + start.to(tl.int64) * token_stride) * 8
    # Lanes lie along the tokens of keys and the channels of values; tiles are [tokens, channels].
    if IS_KEY:
        lane, row = tl.arange(0, LANE_TILE)[:, None], tl.arange(0, ROW_TILE)[None, :]
        real = row < ROWS
    else:
        lane, row = tl.arange(0, LANE_TILE)[None, :], tl.arange(0, ROW_TILE)[:, None]
        real = lane < LANES
    row_words = part + lane * STORED_ROWS + row
    words = tl.load(row_words, mask=real, other=0)
    lowest = _lowest_bits(words, row_words, ROWS, BITS, real)
    if STATIC:
        scale_row = records + tl.load(scales) * 8 + head * HEAD_SIZE
        offset_row = records + tl.load(scales + 1) * 8 + head * HEAD_SIZE
    else:
        scale_row, offset_row = part + SCALE, part + OFFSET
    norms = _halves(record + NORMS if NORM == JOINT else part + NORMS)
    for half in tl.static_range(HALVES):
        across = half * ROWS + row
        if BITS == 3 and half == 1:
            words = tl.load(row_words + ROWS, mask=real, other=0)
        if BOOSTED > 0:
            # Which of the boosted channels a channel is, if it is one.
            number = tl.arange(0, BOOST_TILE)[:, None]
            if FIXED:
                listed = tl.load(boosted + head * BOOSTED + number, mask=number < BOOSTED, other=-1).to(tl.int32)
            else:
                stored = (part + CHANNELS).to(tl.pointer_type(tl.uint8))
                listed = tl.load(stored + number, mask=number < BOOSTED, other=0).to(tl.int32)
            found = (listed == across) & (number < BOOSTED)
            has_more = tl.max(found.to(tl.int32), 0)[None, :] > 0
            which = tl.sum(tl.where(found, number, 0), 0)[None, :]
            upper = which // HIGH_ROWS
            high_words = tl.load(
                part + HIGH + lane * HIGH_ROWS + which - upper * HIGH_ROWS, mask=has_more & real, other=0
            )
        for plane in tl.static_range(PLANES):
            along = plane * LANES + lane
            code = _codes(words, lowest, plane, half, BITS)
            if BOOSTED > 0:
                code += _fields(high_words, plane * field_width(BITS) + upper * BITS, BITS) << BITS
            if IS_KEY:
                token, channel = along, across
            else:
                token, channel = across, along
            if STATIC:
                place = channel
            elif LANES == LANE_TILE and GROUP % LANES == 0:
                place = plane * LANES // GROUP * (HEAD_SIZE if IS_KEY else PAGE) + across
            else:
                place = along // GROUP * (HEAD_SIZE if IS_KEY else PAGE) + across
            scale, offset = load_grid(scale_row + place, offset_row + place, real, in_bytes(SCALE, OFFSET))
            x = code.to(tl.float32) * scale + offset
            if NORM != NO_NORM:
                x = x * tl.load(norms + token).to(tl.float32)
            inside = real & (token < tokens - start)
            tl.store(target + token * (token_stride * 8) + channel, _rounded(x, output.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["offsets", "places", "head_stride", "token_stride", "tokens"])
def read_pages_kernel(
    records,
    offsets,
    places,
    output,
    head_stride,
    token_stride,
    tokens,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    PLACED: tl.constexpr,
):
    """One head of an unquantized page, a copy."""
    page, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = _start(places, page, PAGE, PLACED)
    if start < 0:
        return
    source = (records + tl.load(offsets + page) * 8).to(tl.pointer_type(output.dtype.element_ty))
    target = output + (head * head_stride.to(tl.int64) + start.to(tl.int64) * token_stride) * 8
    token, channel = tl.arange(0, PAGE)[:, None], tl.arange(0, TILE)[None, :]
    x = tl.load(source + head * PAGE * HEAD_SIZE + token * HEAD_SIZE + channel, mask=channel < HEAD_SIZE, other=0.0)
    inside = (channel < HEAD_SIZE) & (token < tokens - start)
    tl.store(target + token * (token_stride * 8) + channel, x, mask=inside)


def dequantize_addressed(pages: PageAddresses, output: torch.Tensor, places: torch.Tensor | None = None) -> None:
    """Dequantize pages into `output` [H, tokens, channels], whose channels are contiguous.

    Args:
        pages: where they are.
        output: tokens lie at multiples of 8 elements; of the last ones of a page there may be no room.
        places: int64 [N], the token of `output` that each page begins at, negative for one that is left out; None puts
            one page after another.
    """
    f, records = pages.format, pages.base.view(torch.int16)
    programs = (len(pages.offsets) * f.heads,)
    # Recorded passes have room for pages where those of their rehearsal have none.
    if not programs[0] and not (skips_launches() and places is not None):
        return
    scales = pages.offsets if pages.scales is None else pages.scales
    shape = (output.stride(0) // 8, output.stride(1) // 8, output.shape[1])
    where, placed = (pages.offsets, False) if places is None else (places, True)
    if f.bits == 16:
        constants = copy_constants(f)
        read_pages_kernel[programs](
            records, pages.offsets, where, output, *shape, **constants, PLACED=placed, num_warps=warps_for(constants)
        )
    else:
        constants = dequantize_constants(f)
        boosted = pages.offsets if pages.boosted is None else pages.boosted
        dequantize_kernel[programs](
            records, pages.offsets, where, scales, boosted, output, *shape,
            **constants, PLACED=placed, num_warps=warps_for(constants), enable_fp_fusion=False,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def dequantize_constants(f: PageFormat) -> dict[str, int | bool]:
    """Compile-time arguments of `dequantize_kernel`."""
    layout = PageLayout.of(f)
    rows = layout.grid_rows // channel_parts(f.bits, f.by_token)
    return {
        "IS_KEY": f.is_key,
        "HEADS": f.heads,
        "HEAD_SIZE": f.head_dim,
        "PAGE": f.page_size,
        "BITS": f.bits,
        "GROUP": f.group_size,
        "STATIC": f.static,
        "BOOSTED": f.boosted,
        "BOOST_TILE": triton.next_power_of_2(max(f.boosted, 1)),
        "FIXED": f.fixed_channels,
        "NORM": f.token_norm.mode,
        "BY_TOKEN": f.by_token,
        "LANES": layout.lanes,
        "LANE_TILE": triton.next_power_of_2(layout.lanes),
        "STORED_ROWS": layout.rows,
        "ROWS": rows,
        "ROW_TILE": triton.next_power_of_2(rows),
        "HIGH_ROWS": max(layout.high_rows, 1),
        "HEAD_STRIDE": layout.head_stride,
        "HIGH": layout.high,
        "SCALE": layout.scale,
        "OFFSET": layout.offset,
        "NORMS": layout.joint_norm if f.token_norm is TokenNorm.JOINT else layout.norm,
        "CHANNELS": layout.channels,
    }


def copy_constants(f: PageFormat) -> dict[str, int]:
    """Compile-time arguments of `read_pages_kernel`."""
    tile = triton.next_power_of_2(f.head_dim)
    return {"HEADS": f.heads, "HEAD_SIZE": f.head_dim, "TILE": tile, "PAGE": f.page_size}


def warps_for(constants: dict[str, int | bool]) -> int:
    """Warps of a program, by the size of the tile that it loads."""
    rows, columns = ("LANE_TILE", "ROW_TILE") if "LANE_TILE" in constants else ("PAGE", "TILE")
    return min(8, max(1, constants[rows] * constants[columns] // (32 * PER_THREAD)))
