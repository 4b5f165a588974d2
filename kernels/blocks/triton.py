"""The kernels over blocks, and their launches."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl

from kvconvert.kernels.blocks import tables
from kvconvert.kernels.blocks.tables import BlockGeometry, DecodePlaces
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.page_formats import PAGE_SIZE
from kvconvert.kernels.pages.triton import padded

ROW = tl.constexpr(tables.ROW)
PAGE = tl.constexpr(PAGE_SIZE)
# Pages of one program of `locate_kernel`, and tokens of one of `copy_tokens_kernel`.
PAGES = 256
TOKENS = 16


@kernel(do_not_specialize=["row_stride", "entries", "lines"])
def locate_kernel(
    block_table,
    rows,
    geometries,
    found,
    row_stride,
    entries,
    lines,
    SINK_BLOCKS: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr,
    SINKS: tl.constexpr,
    TOKEN_UNITS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    PAGES: tl.constexpr,
):
    """One sequence in blocks of one geometry: its full-precision tokens, or PAGES of its pages."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    geometry = geometries + tl.program_id(2) * 4
    per_block, block_units = tl.load(geometry), tl.load(geometry + 1)
    places = found + tl.load(geometry + 3)
    targets = places + tl.num_programs(0).to(tl.int64) * CAPACITY
    about = rows + row * ROW
    tokens, both, half = tl.load(about), tl.load(about + 1), tl.load(about + 2)
    table = block_table + tl.load(about + 5) * row_stride
    if part == 0:
        exists = (tokens > 0).to(tl.int64)
        last = tl.maximum(tokens - 1, 0)
        # Before there is a page, sink tokens lie with the others.
        sinks = tl.minimum((both + half) * PAGE, SINKS)
        place = tl.arange(0, padded(CAPACITY))
        position = tl.maximum(tl.minimum(both * PAGE + place - sinks, last), 0)
        is_sink = place < sinks
        slot = tl.where(is_sink, place, position % (TOKEN_BLOCKS * per_block))
        entry = tl.where(is_sink, 0, SINK_BLOCKS) + slot // per_block
        block = tl.load(table + entry, mask=place < CAPACITY, other=0).to(tl.int64)
        unit = block * block_units + slot % per_block * TOKEN_UNITS
        tl.store(places + row * CAPACITY + place, unit * exists, mask=place < CAPACITY)
        slot = last % (TOKEN_BLOCKS * per_block)
        block = tl.load(table + SINK_BLOCKS + slot // per_block).to(tl.int64)
        target = (block * block_units + slot % per_block * TOKEN_UNITS) * UNIT * exists
        tl.store(targets + row * 4, target)
        tl.store(targets + row * 4 + 1, SIZE)
        tl.store(targets + row * 4 + 2, target + HEADS * SIZE)
        tl.store(targets + row * 4 + 3, VALUE_SIZE)
    else:
        number = (part - 1) * PAGES + tl.arange(0, PAGES)
        # A rehearsed length may need more entries than there are.
        there = number < tl.minimum(tl.load(about + 3), entries - (SINK_BLOCKS + TOKEN_BLOCKS))
        page = tl.load(table + SINK_BLOCKS + TOKEN_BLOCKS + number, mask=there, other=0).to(tl.int64) * block_units
        line = targets + tl.num_programs(0) * 4 + tl.load(about + 4) + number
        tl.store(line, page, mask=there)
        tl.store(line + lines, page + tl.load(geometry + 2), mask=there)


def locate(
    block_table: torch.Tensor,
    rows: torch.Tensor,
    most_pages: int,
    geometry: BlockGeometry,
    geometries: torch.Tensor,
    head_sizes: tuple[int, int, int],
    dtype: torch.dtype,
    found: DecodePlaces,
) -> None:
    """Write where everything lies that sequences with one new token read and write, in blocks of several sizes.

    Args:
        block_table: int32 [rows, entries].
        rows: int64 [B, 6] of each sequence: its tokens, the new one included, 0 for none; pages quantized on both
            sides; half-quantized ones; all of these; where they begin in the tables; its row of the block table.
        most_pages: pages that a sequence has at most.
        geometry: how blocks are divided, but for their sizes.
        geometries: int64 [G, 4], see `geometry_table`.
        head_sizes: KV heads, and channels of their keys and values.
        dtype: the dtype of full-precision tokens.
        found: those of the first geometry for B sequences; what a sequence without tokens gets is block 0.
    """
    locate_kernel[(len(rows), 1 + -(-most_pages // PAGES), len(geometries))](
        block_table, rows, geometries, found.places, block_table.stride(0), block_table.shape[1],
        len(found.key_pages), **locate_constants(geometry, head_sizes, dtype, found.places.shape[1]), num_warps=4,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def locate_constants(
    geometry: BlockGeometry, head_sizes: tuple[int, int, int], dtype: torch.dtype, capacity: int
) -> dict[str, int]:
    """Compile-time arguments of `locate_kernel`."""
    heads, size, value_size = head_sizes
    return {
        "SINK_BLOCKS": geometry.sink_blocks,
        "TOKEN_BLOCKS": geometry.token_blocks,
        "SINKS": geometry.sink_tokens,
        "TOKEN_UNITS": geometry.token_units,
        "HEADS": heads,
        "SIZE": size,
        "VALUE_SIZE": value_size,
        "UNIT": 16 // dtype.itemsize,
        "CAPACITY": capacity,
        "PAGES": PAGES,
    }


@kernel(do_not_specialize=["count"])
def copy_tokens_kernel(
    records,
    places,
    words,
    keys,
    values,
    count,
    key_head_stride,
    key_stride,
    value_head_stride,
    value_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    TO_BLOCKS: tl.constexpr,
):
    """TOKENS tokens of one head of one side. Strides are in elements."""
    head, side = (tl.program_id(1) % HEADS).to(tl.int64), tl.program_id(1) // HEADS
    number = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = ((tl.load(places + number * 2 + 1, mask=number < count, other=0) >> side) & 1) > 0
    record = tl.load(records + number, mask=there, other=0) * UNIT
    place = tl.load(places + number * 2, mask=there, other=0)
    if side == 0:
        channel = tl.arange(0, padded(SIZE))[None, :]
        mask = there[:, None] & (channel < SIZE)
        stored = words + record[:, None] + head * SIZE + channel
        laid = keys + head * key_head_stride + place[:, None] * key_stride + channel
        if TO_BLOCKS:
            tl.store(stored, tl.load(laid, mask=mask), mask=mask)
        else:
            tl.store(laid, tl.load(stored, mask=mask), mask=mask)
    else:
        value_channel = tl.arange(0, padded(VALUE_SIZE))[None, :]
        value_mask = there[:, None] & (value_channel < VALUE_SIZE)
        value_stored = words + record[:, None] + HEADS * SIZE + head * VALUE_SIZE + value_channel
        value_laid = values + head * value_head_stride + place[:, None] * value_stride + value_channel
        if TO_BLOCKS:
            tl.store(value_stored, tl.load(value_laid, mask=value_mask), mask=value_mask)
        else:
            tl.store(value_laid, tl.load(value_stored, mask=value_mask), mask=value_mask)


def copy_tokens(
    records: torch.Tensor,
    places: torch.Tensor,
    words: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    to_blocks: bool,
) -> None:
    """Copy full-precision tokens between blocks and a workspace.

    Args:
        records: int64 [n], offset of each token's record.
        places: int64 [n, 2], each token's place in the workspace, and 1 for its keys alone, 2 for its values alone, 3
            for both.
        words: the layer's blocks in any dtype.
        keys, values: [H, W, D] and [H, W, E], channels side by side.
        to_blocks: from the workspace.
    """
    count = records.shape[0]
    if not count:
        return
    (heads, _, size), value_size = keys.shape, values.shape[2]
    copy_tokens_kernel[(-(-count // TOKENS), 2 * heads)](
        records, places, words.view(keys.dtype), keys, values, count, *keys.stride()[:2], *values.stride()[:2],
        **copy_constants((heads, size, value_size), keys.dtype, to_blocks), num_warps=4,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def copy_constants(head_sizes: tuple[int, int, int], dtype: torch.dtype, to_blocks: bool) -> dict[str, int]:
    """Compile-time arguments of `copy_tokens_kernel`."""
    sizes = dict(zip(("HEADS", "SIZE", "VALUE_SIZE"), head_sizes, strict=True))
    return sizes | {"UNIT": 16 // dtype.itemsize, "TOKENS": TOKENS, "TO_BLOCKS": to_blocks}
