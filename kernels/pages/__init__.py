"""Pages: a fixed number of consecutive tokens whose keys or values are quantized together and never touched again.

A page holds `page_size` tokens of every KV head of one layer. Keys and values have pages of their own, because their
full-precision windows may differ. Keys are quantized per channel over groups of tokens and packed along the tokens;
values are quantized per token over groups of channels and packed along the channels. Both are what the decode kernels
read: the axis that is contracted with the probabilities or the query is not the packed one, and neighbours along it lie
side by side.

Kitty's boosted key channels have twice the bits: their low bits lie in the plane that holds every channel's codes,
their high bits in a second plane, so that the first has one shape whatever is boosted.

Static pages have codes alone: one scale and offset per channel, keys' and values' alike, belong to the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvconvert.kernels import device
from kvconvert.kernels.launches import deferred
from kvconvert.kernels.page_formats import (
    ALIGNMENT,
    NO_TENSORS,
    PAGE_SIZE,
    ChannelScales,
    LayerFormat,
    PageFormat,
    SideTensors,
    TokenNorm,
)
from kvconvert.kernels.pages.center import KeyCenter, add_centers_reference, key_center, page_centers
from kvconvert.kernels.pages.records import (
    PageAddresses,
    PageTensors,
    PageWrites,
    empty_pages,
    new_pages,
    pages_of,
)
from kvconvert.kernels.pages.reference import dequantize_pages, normalised_keys, quantize_pages
from kvconvert.kernels.quantizer import new_flag, raise_if_flagged

if TYPE_CHECKING:
    from kvconvert.kernels.pages.triton.launch import quantize_at, quantize_listed, tables_of
else:
    names = "quantize_at", "quantize_listed", "tables_of"
    quantize_at, quantize_listed, tables_of = deferred("pages.triton.launch", *names)

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 256
LARGEST_PLAIN_KEY = 512
KERNEL_PAGE_SIZES = (16, 32, 64, 128, 256)
# Pages that the reference quantizes at a time: bounds the float32 copies that a long prompt's pages need.
REFERENCE_PAGES = 32
_HALF_RANGE = (torch.finfo(torch.float16).min, torch.finfo(torch.float16).max)


def unsupported(tokens: torch.Tensor, page_size: int = PAGE_SIZE, plain_keys: PageFormat | None = None) -> str | None:
    """Why the Triton kernels cannot quantize pages, or a span, of such tokens [..., channels]; None if they can.

    Args:
        tokens: some of them.
        page_size: tokens of a page.
        plain_keys: the format of keys that are rounded to nearest and whole; None for other tokens.
    """
    largest = LARGEST_HEAD
    if plain_keys is not None and plain_keys.bits < 16 and plain_keys.token_norm is TokenNorm.NONE:
        # A program then takes some of the channels.
        largest = LARGEST_HEAD if plain_keys.boosted else LARGEST_PLAIN_KEY
    reason = _unsupported(tokens.device, tokens.dtype, tokens.shape[-1], largest, page_size)
    if reason is not None:
        return reason
    if tokens.stride(-1) != 1 or any(s % ALIGNMENT for s in tokens.stride()[:-1]) or tokens.data_ptr() % 16:
        return "the page kernels need channels side by side and tokens at multiples of 16 bytes"
    return None


def _unsupported(on: torch.device, dtype: torch.dtype, dim: int, largest: int, page_size: int) -> str | None:
    reason = device.unsupported(on)
    if reason is not None:
        return reason
    if dtype not in KERNEL_DTYPES:
        return f"the page kernels do not take {dtype}"
    if dim % ALIGNMENT or dim > largest:
        return f"the page kernels take head sizes that are multiples of {ALIGNMENT} up to {largest}, not {dim}"
    if page_size not in KERNEL_PAGE_SIZES:
        return f"the page kernels take pages of {KERNEL_PAGE_SIZES} tokens, not {page_size}"
    return None


def add_centers(tokens: torch.Tensor, position: int, page_size: int, center: KeyCenter, sign: int = 1) -> None:
    """Add what keys lack to their pages' tokens in place, or take it away before they are quantized.

    Args:
        tokens: [H, n, D] in any float dtype, of consecutive pages.
        position: the position of the first of them.
        page_size: tokens of a page.
        center: the layer's key center.
        sign: 1 or -1.
    """
    if unsupported(tokens, page_size) is None and tokens.shape[1] % page_size == 0:
        from kvconvert.kernels.pages.triton.center import add_to_pages

        add_to_pages(tokens, position, page_size, center, sign)
        return
    add_centers_reference(tokens, position, page_size, center, sign)


def quantize_by_reference(
    tokens: Sequence[torch.Tensor],
    records: Sequence[torch.Tensor],
    f: PageFormat,
    tensors: SideTensors,
    positions: Sequence[int],
    hidden: Sequence[int],
) -> None:
    """Quantize complete pages of many sequences where no kernels do, and write them where they are to be stored.

    Args:
        tokens: views [H, n P, channels] of n >= 1 pages' tokens each, in buffers of any capacity.
        records: where these pages go, in the same order, as `pages_of` takes them; as many as there are tokens for.
        f: the format of the pages.
        tensors: the layer's.
        positions: the position of each tensor's first token in its sequence.
        hidden: as for `quantize_pages`, for the first page of each tensor.

    Raises:
        NumericError: what cannot be quantized; `index` is (page, head, ...).
    """
    rooms = (room for part in records for room in part)
    for part, position, count in zip(tokens, positions, hidden, strict=True):
        for begin in range(0, part.shape[1], REFERENCE_PAGES * f.page_size):
            some = part[:, begin : begin + REFERENCE_PAGES * f.page_size]
            if tensors.center is not None:
                some = some.clone()
                add_centers(some, position + begin, f.page_size, tensors.center, sign=-1)
            every = some.unflatten(1, (-1, f.page_size)).transpose(0, 1)
            for record in quantize_pages(every, f, tensors, 0 if begin else count).buffer:
                next(rooms).copy_(record)


def unsupported_dequantization(f: PageFormat, dtype: torch.dtype, on: torch.device) -> str | None:
    """Why the Triton kernels cannot dequantize pages of a format to a dtype; None if they can."""
    return _unsupported(on, dtype, f.head_dim, LARGEST_HEAD, f.page_size)


def dequantize_into(
    output: torch.Tensor,
    pages: PageTensors | PageAddresses,
    tensors: SideTensors = NO_TENSORS,
) -> None:
    """Write the tokens of pages, one page after another, as `dequantize_pages` gives them.

    float16 saturates at its largest number, which the rounding of a scale or norm may lift a token over.

    Args:
        output: [H, tokens, channels] in any float dtype, channels contiguous; of the last page as many tokens are
            written as there is room for.
        pages: tensors, or addresses on a device for which `unsupported_dequantization` gives None.
        tensors: the layer's, of pages given as tensors.
    """
    if isinstance(pages, PageAddresses):
        from kvconvert.kernels.pages.triton.dequantize import dequantize_addressed

        dequantize_addressed(pages, output)
        return
    size = pages.format.page_size
    for start in range(0, len(pages), REFERENCE_PAGES):
        part = pages.select(slice(start, start + REFERENCE_PAGES))
        tokens = dequantize_pages(part, tensors).transpose(0, 1)
        if output.dtype == torch.float16:
            tokens = tokens.clamp(*_HALF_RANGE)
        target = output[:, start * size : start * size + len(part) * size]
        target.copy_(tokens.flatten(1, 2)[:, : target.shape[1]])
