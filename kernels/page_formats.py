"""What the bytes of a layer's cache mean, and where the parts of a page lie in memory; no torch, unless calibration has
measured bounds.

All fields of a page lie in one record of 16-bit units, so that one base pointer and one offset address everything a
kernel reads of it:

    key record   = of each head: [codes | high | scale | offset | norm (per head) | channels], then [norm (joint)]
    value record = of each head: [codes | scale | offset]

A scale and an offset of 8 bits share a unit, so that `offset` begins where `scale` does. Every field begins at
a multiple of 8 units (16 bytes), and so does every record. Codes lie lane after lane, scales and offsets group
after group, so that what one step of a product needs of all channels (of keys) or tokens (of values) is read at once;
at 3 bits a lane is followed by its lane of the second plane (`kernels/packing.py`). Pages of 16 bits have no record:
they are tensors of the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from kvconvert.errors import UsageError
from kvconvert.kernels.code_bits import CODE_BITS, field_bits, packed_rows
from kvconvert.kernels.rotations import NO_ROTATION, Rotations

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

    from kvconvert.kernels.pages.center import KeyCenter

# Tokens of a page in every preset, of a span's block, and of what the decode kernels read at a time.
PAGE_SIZE = 128


class TokenNorm(StrEnum):
    """What keys are divided by before they are quantized: one norm of a token over all heads, or one of each head."""

    NONE = "none"
    JOINT = "joint"
    PER_HEAD = "per_head"

    @property
    def mode(self) -> int:
        """The number by which kernels know it."""
        return list(TokenNorm).index(self)


class ChannelScales(NamedTuple):
    """One scale and offset for each channel of each head of a layer: float16 [H, channels], finite."""

    scale: torch.Tensor
    offset: torch.Tensor


@dataclass(frozen=True)
class PageFormat:
    """The meaning of the bytes of one layer's pages of keys or of values.

    Keys are quantized per channel over groups of tokens and packed along the tokens, values per token over groups of
    channels and packed along the channels.

    Attributes:
        is_key: whether pages hold keys.
        heads, head_dim: KV heads and channels of the layer's keys or values.
        page_size: tokens per page.
        bits: 1, 2, 3, 4, 8, or 16 for unquantized.
        group_size: tokens per group of keys, which divide `page_size`; channels per group of values, which divide
            `head_dim`.
        token_norm: what keys are divided by before quantization.
        token_norm_measure: root mean square ("l2") or mean magnitude.
        clip_ratio: factor applied to each group's (min, max) about its midpoint.
        boosted: channels per head that get twice the bits (Kitty), which 3 bits do not have; of keys.
        fixed_channels: the boosted channels are the layer's own, given to `quantize_pages`; otherwise each page ranks
            channels by mean magnitude and stores their indices.
        static: the layer's `ChannelScales` describe every page, which holds none of its own. `clip_ratio` then has no
            part in quantization, a group is the whole page or head, and there is no norm and no boost.
        scale_bits: width of a scale and of an offset: 16, or 8 with codes of at most 4 bits (`quantizer.pack_grid`).
        by_token: codes of a token share words, as the decode kernel over latents reads them; otherwise those of a
            channel do. Keys of 2 and 4 bits, without boost and error feedback.
    """

    is_key: bool
    heads: int
    head_dim: int
    page_size: int
    bits: int
    group_size: int
    token_norm: TokenNorm = TokenNorm.NONE
    token_norm_measure: Literal["l2", "mean_abs"] = "l2"
    clip_ratio: float = 1.0
    boosted: int = 0
    fixed_channels: bool = False
    static: bool = False
    scale_bits: int = 16
    by_token: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_norm", TokenNorm(self.token_norm))  # its name is taken, too

    @cached_property
    def layout(self) -> PageLayout:
        """Where the parts of a page lie."""
        return PageLayout.of(self)

    @classmethod
    def keys(cls, *attributes: Any, **named: Any) -> Self:
        """The format of keys; other attributes in their order or by name."""
        return cls(True, *attributes, **named)

    @classmethod
    def values(cls, heads: int, head_dim: int, page_size: int, bits: int, group_size: int, **named: Any) -> Self:
        """The format of values; attributes that they share with keys by name."""
        return cls(False, heads, head_dim, page_size, bits, group_size, **named)


class ChannelBounds(NamedTuple):
    """Smallest and largest value of each channel of a layer's keys or values: float32 [H, channels]."""

    low: torch.Tensor
    high: torch.Tensor

    def scales(self, bits: int, clip_ratio: float) -> ChannelScales:
        """The grid from `low` to `high`, shrunk about its midpoint by `clip_ratio`."""
        from kvconvert.kernels.quantizer import affine_grid

        return ChannelScales(*affine_grid(self.low, self.high, bits, clip_ratio))


class SideTensors(NamedTuple):
    """The tensors with which one layer's pages of keys, or of values, are written and read, besides their format.

    Attributes:
        boosted: int64 [H, boosted], the key channels with more bits where the format fixes them.
        static: the scales of all pages, where the format says that these are static.
        feedback: float16 [H, D, D], with which channels of keys are rounded one after another (`pages/reference.py`);
            None rounds to nearest. It says how codes came about, not what they mean.
        center: what pages of keys leave out and attention adds (`pages/center.py`); None for whole keys.
        bounds: the values of static pages, as long as calibration has measured them and not fixed the scales.
    """

    boosted: torch.Tensor | None = None
    static: ChannelScales | None = None
    feedback: torch.Tensor | None = None
    center: KeyCenter | None = None
    bounds: ChannelBounds | None = None


NO_TENSORS = SideTensors()


@dataclass(frozen=True)
class SpanFormat:
    """How a layer's spans are stored and scored.

    Attributes:
        key_bits, value_bits: width of a code: 1, 2, 3, 4 or 8.
        key_clip_ratio, value_clip_ratio: factor by which a channel's (min, max) shrinks about its midpoint.
        tau1, tau2: shift of the spans' smallest and largest score, see `shift_extremes`.
        span_tokens: tokens that share scales, for callers that divide a prompt into spans; 0 for all. A span itself is
            quantized as it comes.
        modality: which of a prompt's tokens go to spans, for the same callers: "all", or those of one kind.
    """

    key_bits: int
    value_bits: int
    key_clip_ratio: float = 1.0
    value_clip_ratio: float = 1.0
    tau1: float = 0.0
    tau2: float = 0.0
    span_tokens: int = 0
    modality: str = "all"

    @property
    def shifts(self) -> bool:
        """Whether scores are shifted at all."""
        return bool(self.tau1 or self.tau2)


@dataclass(frozen=True)
class LayerFormat:
    """How one layer stores keys and values: a KV scheme in the terms of kernels.

    Attributes:
        keys, values: the formats of their pages; of a layer of spans only heads are looked at.
        key_tensors, value_tensors: what belongs to these.
        span: the format of spans where the layer stores these instead of pages (CalibQuant).
        rotations: what is rotated at run time, after RoPE.
        sink_tokens: the number of first tokens that stay in full precision besides.
        key_window, value_window: the number of newest keys, and of newest values, that stay in full precision besides
            the page being filled.
    """

    keys: PageFormat
    values: PageFormat
    key_tensors: SideTensors = NO_TENSORS
    value_tensors: SideTensors = NO_TENSORS
    span: SpanFormat | None = None
    rotations: Rotations = NO_ROTATION
    sink_tokens: int = 0
    key_window: int = 0
    value_window: int = 0

    def side(self, is_key: bool) -> tuple[PageFormat, SideTensors]:
        """Keys or values."""
        return (self.keys, self.key_tensors) if is_key else (self.values, self.value_tensors)

    @property
    def stored(self) -> tuple[PageFormat, PageFormat]:
        """The formats of what tables of addresses lead to: pages, or the blocks of spans."""
        if self.span is None:
            return self.keys, self.values
        keys = key_blocks(self.keys.heads, self.keys.head_dim, self.span.key_bits)
        return keys, value_blocks(self.values.heads, self.values.head_dim, self.span.value_bits)

    def window(self, is_key: bool) -> int:
        """`key_window` or `value_window`."""
        return self.key_window if is_key else self.value_window

    def static_scales(self, is_key: bool, clip_ratio: float) -> ChannelScales | None:
        """Scales of one side's static pages with this clip ratio, as bounds were measured; None for other pages."""
        f, tensors = self.side(is_key)
        return None if tensors.bounds is None else tensors.bounds.scales(f.bits, clip_ratio)

    @property
    def half_quantized(self) -> int:
        """1 where pages may have their values still in full precision, 2 where their keys, 0 where neither."""
        return 0 if self.key_window == self.value_window else 1 if self.key_window < self.value_window else 2

    @property
    def kind(self) -> Hashable:
        """The same for layers whose pages the same kernels write and read."""
        tensors = (*self.key_tensors, *self.value_tensors)
        return self.keys, self.values, tuple(tensor is None for tensor in tensors)

    @property
    def shares_launches(self) -> bool:
        """Whether one launch can write pages of several layers of this kind.

        Matrices of error feedback and key centers are found by their addresses, and so may be each layer's own.
        """
        return not any(side.boosted is not None or side.static for side in (self.key_tensors, self.value_tensors))


def span_lengths(tokens: int, span_tokens: int) -> tuple[int, ...]:
    """How many tokens each span of a prompt gets; a `span_tokens` of 0 makes it one span."""
    size = span_tokens or max(tokens, 1)
    return tuple(min(size, tokens - start) for start in range(0, tokens, size))


def key_blocks(heads: int, head_dim: int, bits: int) -> PageFormat:
    """The codes of a span's keys, block by block, as static pages."""
    return PageFormat.keys(heads, head_dim, PAGE_SIZE, bits, PAGE_SIZE, static=True)


def value_blocks(heads: int, head_dim: int, bits: int) -> PageFormat:
    """The same of its values."""
    return PageFormat.values(heads, head_dim, PAGE_SIZE, bits, head_dim, static=True)


class SpanSide(NamedTuple):
    """Quantized keys or values of a span of n tokens and H KV heads; all tensors are contiguous.

    Attributes:
        codes: int16 [blocks, H, lanes, rows], those of pages in the format of `key_blocks` or `value_blocks`; tokens
            after the last one have code 0.
        scale, offset: float16 [H, channels].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor


@dataclass(frozen=True)
class Span:
    """One quantized span of n tokens."""

    tokens: int
    keys: SpanSide
    values: SpanSide

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for side in (self.keys, self.values) for tensor in side)


# Units of 2 bytes: what one 16-byte load reads.
ALIGNMENT = 8


def _align(units: int) -> int:
    return -(-units // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PageLayout:
    """The record of a page, and all that a kernel is specialized on: the same in every launch that writes or reads
    pages of a format. Offsets and sizes are in units of 2 bytes, offsets -1 of parts that pages lack.

    Attributes:
        is_key, heads, head_dim, page_size, bits, group_size, boosted, static, by_token: as in `PageFormat`.
        norm: the mode of the token norm.
        lanes, rows: codes of one head are int16 [lanes, rows], with which its part begins; of keys [P * bits / 16, D],
            [P / 8, D / 2] at 1 bit, [P / 8, 3 D / 2] at 3 bits, and [P, D * bits / 16] where codes of a token share
            words; of values with E in the place of P and P in that of D.
        high_rows: the upper bits of boosted channels are int16 [lanes, high_rows]: as many rows as boosted channels, at
            1 bit half as many, rounded up.
        groups, grid_rows: scale and offset of one head are float16 [groups, grid_rows], or both int16 [groups,
            grid_rows]; grid_rows is D of keys, P of values, and groups is 0 where pages have none.
        high, scale, offset, channels: offsets within a head's part; `channels` uint8 [boosted] where they are stored.
        norm_start: offset of the norms float16 [P], within a head's part, or of the joint norm within the record.
        head_stride: from one head's part to the next.
        record: size of the record; 0 at 16 bits.
    """

    is_key: bool
    heads: int
    head_dim: int
    page_size: int
    bits: int
    group_size: int
    boosted: int
    static: bool
    by_token: bool
    norm: int
    lanes: int
    rows: int
    high_rows: int
    groups: int
    grid_rows: int
    high: int = -1
    scale: int = -1
    offset: int = -1
    norm_start: int = -1
    channels: int = -1
    head_stride: int = 0
    record: int = 0

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(f: PageFormat) -> PageLayout:
        """The layout of a format.

        Raises:
            UsageError: boosted channels of a width that has no double, or codes that are not packed by token.
        """
        if f.boosted and 2 * f.bits not in CODE_BITS:
            raise UsageError(
                f"Boosted channels have twice the bits, and codes of {2 * f.bits} bits cannot be stored; boost keys of "
                "1, 2 or 4 bits."
            )
        if f.by_token and (f.bits not in (2, 4) or f.boosted):
            raise UsageError(
                f"Codes of {f.bits} bits with {f.boosted} boosted channels are not packed by token; choose 2 or 4 "
                "bits and boost no channel."
            )
        packed, grid_rows = (f.page_size, f.head_dim) if f.is_key else (f.head_dim, f.page_size)
        about = (f.is_key, f.heads, f.head_dim, f.page_size, f.bits, f.group_size, f.boosted, f.static, f.by_token)
        if f.bits == 16:
            return PageLayout(*about, 0, packed, grid_rows, 0, 0, grid_rows)
        rows, high_rows = packed_rows(grid_rows, f.bits), packed_rows(f.boosted, f.bits)
        lanes = packed * field_bits(f.bits) // 16
        if f.by_token:
            lanes, rows = f.page_size, f.head_dim * f.bits // 16
        groups = 0 if f.static else packed // f.group_size
        sizes = {
            "high": high_rows * lanes,
            "scale": grid_rows * groups,
            "offset": grid_rows * groups if f.scale_bits == 16 else 0,
            "norm_start": f.page_size if f.token_norm is TokenNorm.PER_HEAD else 0,
            "channels": 0 if f.fixed_channels else -(-f.boosted // 2),
        }
        offsets, stride = {}, _align(rows * lanes)
        for name, size in sizes.items():
            offsets[name] = stride if size else -1
            stride += _align(size)
        if f.scale_bits == 8:
            offsets["offset"] = offsets["scale"]
        record = f.heads * stride
        if f.token_norm is TokenNorm.JOINT:
            offsets["norm_start"], record = record, record + _align(f.page_size)
        sizes = f.token_norm.mode, lanes, rows, high_rows, groups, grid_rows
        return PageLayout(*about, *sizes, **offsets, head_stride=stride, record=record)


def page_bytes(f: PageFormat, number_bytes: int) -> int:
    """Bytes of one page, the padding of its record included; `number_bytes` are those of the model's dtype, which pages
    of 16 bits hold.
    """
    if f.bits == 16:
        return f.heads * f.page_size * f.head_dim * number_bytes
    return 2 * f.layout.record
