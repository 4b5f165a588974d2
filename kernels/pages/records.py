"""Pages as tensors: records, one after another, and the views of their fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from kvconvert.kernels.page_formats import LayerFormat, PageFormat, PageLayout, TokenNorm
from kvconvert.kernels.quantizer import all_finite, pack_grid, unpack_grid

# What a page stores, by the names of `PageTensors`.
FIELDS = ("codes", "scale", "offset", "grid", "norm", "high", "channels")


class PageWrites(NamedTuple):
    """Where N complete pages of each of L layers lie and where they go, int64.

    Attributes:
        tokens: [L, N] byte addresses of each page's first token, at multiples of 16; tokens of a head lie side by side.
        head_strides: [L, N] elements from head to head.
        records: [L, N] byte addresses of the records.
        positions: [N] of each page's first token among its sequence's.
        hidden: [N], how many of each page's first tokens are stored elsewhere, see `quantize_pages`.
    """

    tokens: np.ndarray
    head_strides: np.ndarray
    records: np.ndarray
    positions: np.ndarray
    hidden: np.ndarray

    @staticmethod
    def side_by_side(parts: Sequence[PageWrites]) -> PageWrites:
        """The pages of several layers, as many as each has, as those of one."""
        return PageWrites(*(np.concatenate(part, -1) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class PageTensors:
    """N pages of H heads, P tokens and D channels of keys, or E of values, as tensors; absent parts are None.

    Attributes:
        codes: int16 of keys [N, H, P * bits / 16, D] ([N, H, P / 8, D / 2] at 1 bit, [N, H, P / 8, 3 D / 2] at 3, see
            `kernels/packing.py`), of values with E in the place of P and P in that of D; or the model's dtype [N, H, P,
            D or E] at 16 bits.
        format: what the bytes mean.
        scale, offset: float16 of keys [N, H, D, P / group_size], of values [N, H, P, E / group_size], group after
            group in memory; None at 16 bits or where scales are static, or in `grid`.
        scales: both of them as one, float16 [N, H, 2, groups, D or P]; None where they are.
        grid: int16 of the shape of a scale, scale and offset of 8 bits (`quantizer.pack_grid`); None elsewhere.
        norm: float16 [N, H or 1, P], None without a token norm.
        high: int16 [N, H, P * bits / 16, boosted], the upper bits of boosted channels ([N, H, P / 8, boosted / 2] at
            1 bit, boosted rounded up to an even number), None without boost.
        channels: uint8 [N, H, boosted], which channels those are, ascending; None where they are fixed per layer.
        record: int16 [N, units], of which all others are views, see `PageLayout`; None at 16 bits.
    """

    codes: torch.Tensor
    format: PageFormat
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    grid: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    high: torch.Tensor | None = None
    channels: torch.Tensor | None = None
    record: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.codes.shape[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that this format has, with their names."""
        for name in FIELDS:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def select(self, index: slice | torch.Tensor) -> PageTensors:
        """Some of the pages: views for a slice, a copy for an index tensor."""
        return pages_of(self.buffer[index], self.format)

    @property
    def group_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and offset of each group, float16, of pages that have their own."""
        return (self.scale, self.offset) if self.grid is None else unpack_grid(self.grid)

    def is_sound(self) -> bool:
        """Whether every number is finite and every boosted channel is one of the head's, as quantization leaves them:
        kernels look neither up.
        """
        numbers = [tensor for _, tensor in self.tensors() if tensor.is_floating_point()]
        numbers += [] if self.grid is None else self.group_scales
        channels = self.channels
        exist = channels is None or not channels.numel() or int(channels.max()) < self.format.head_dim
        return exist and all(map(all_finite, numbers))

    @property
    def buffer(self) -> torch.Tensor:
        """What holds one page after another: the records, int16 [N, units], or 16-bit codes."""
        return self.codes if self.record is None else self.record

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, the padding of their records included."""
        return self.buffer.nbytes


@dataclass(frozen=True)
class PageAddresses:
    """Key or value pages, or span blocks, anywhere on a device, as kernels address them.

    Attributes:
        format: what the bytes mean; of span blocks, a static format.
        base: any 16-byte aligned tensor of the device, from which offsets count.
        offsets: int64 [N] of the pages, in units of 16 bytes.
        scales: int64 [2] offsets, in the same units, of scale and offset, float16 [H, channels], where pages have
            none of their own.
        boosted: integers [H, n], contiguous, the boosted key channels where the format fixes them.
    """

    format: PageFormat
    base: torch.Tensor
    offsets: torch.Tensor
    scales: torch.Tensor | None = None
    boosted: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    def select(self, index: slice) -> PageAddresses:
        """Some of the pages."""
        return replace(self, offsets=self.offsets[index])


def static_offsets(format: LayerFormat, base: torch.Tensor) -> list[int] | None:
    """Where scale and offset of keys and of values lie, in units of 16 bytes from `base`, zeros for a side whose pages
    have scales of their own; None where both do.
    """
    sides = format.key_tensors.static, format.value_tensors.static
    if not any(sides):
        return None
    parts = [part for scales in sides for part in scales or (None, None)]
    return [0 if part is None else (part.data_ptr() - base.data_ptr()) // 16 for part in parts]


def pages_of(buffer: torch.Tensor, f: PageFormat) -> PageTensors:
    """The pages that a buffer holds, as views: records int16 [N, units], or the codes of 16-bit pages."""
    return PageTensors(buffer, f) if f.bits == 16 else PageTensors(format=f, record=buffer, **_fields(buffer, f))


def empty_pages(count: int, f: PageFormat, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised room for `count` pages, as `pages_of` takes it; `dtype` is the model's, used by 16-bit codes."""
    if f.bits == 16:
        return torch.empty(count, f.heads, f.page_size, f.head_dim, dtype=dtype, device=device)
    return torch.empty(count, f.layout.record, dtype=torch.int16, device=device)


def new_pages(count: int, f: PageFormat, dtype: torch.dtype, device: torch.device) -> PageTensors:
    """Uninitialised room for `count` pages in one buffer, see `empty_pages`."""
    return pages_of(empty_pages(count, f, dtype, device), f)


def record_of(f: PageFormat, **tensors: torch.Tensor | None) -> PageTensors:
    """Pages whose tensors were computed one by one, in records of their own; padding is zero."""
    codes = tensors["codes"]
    if f.scale_bits == 8:
        tensors["grid"] = pack_grid(tensors["scale"], tensors["offset"])
    pages = pages_of(codes.new_zeros(len(codes), f.layout.record), f)
    for name, tensor in tensors.items():
        target = getattr(pages, name)
        if target is not None:
            target.copy_(tensor)
    return pages


def _fields(record: torch.Tensor, f: PageFormat) -> dict[str, torch.Tensor]:
    """The fields that the format has, views of records int16 [N, record] in the shapes of `PageTensors`."""
    layout = f.layout
    heads = record[:, : layout.heads * layout.head_stride].unflatten(1, (layout.heads, layout.head_stride))
    found = {"codes": heads[..., : layout.rows * layout.lanes].unflatten(2, (layout.lanes, layout.rows))}
    if layout.groups:
        found |= _grid(layout, heads)
    if f.token_norm is not TokenNorm.NONE:
        whole = record[:, None] if f.token_norm is TokenNorm.JOINT else heads
        found["norm"] = whole[..., layout.norm_start : layout.norm_start + f.page_size].view(torch.float16)
    if f.boosted:
        high = heads[..., layout.high : layout.high + layout.high_rows * layout.lanes]
        found["high"] = high.unflatten(2, (layout.lanes, layout.high_rows))
        if not f.fixed_channels:
            found["channels"] = heads[..., layout.channels :].view(torch.uint8)[..., : f.boosted]
    return found


def _grid(layout: PageLayout, heads: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scale and offset of every head's part int16 [N, heads, head_stride], which lie group after group."""
    strides = (*heads.stride()[:2], layout.offset - layout.scale, layout.grid_rows, 1)
    shape, start = (*heads.shape[:2], 2, layout.groups, layout.grid_rows), heads.storage_offset() + layout.scale
    both = heads.as_strided(shape, strides, start)
    if layout.scale == layout.offset:
        return {"grid": both[:, :, 0].transpose(2, 3)}
    both = both.view(torch.float16)
    scale, offset = both.transpose(3, 4).unbind(2)
    return {"scale": scale, "offset": offset, "scales": both}
