"""What the bytes of a layer's spans mean, and a span as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvconvert.kernels.page_formats import PAGE_SIZE, PageFormat

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SpanFormat:
    """How a layer's spans are stored and scored.

    Attributes:
        key_bits, value_bits: width of a code: 1, 2, 3, 4 or 8.
        key_clip_ratio, value_clip_ratio: factor by which a channel's (min, max) shrinks about its midpoint.
        tau1, tau2: shift of the spans' smallest and largest score, see `shift_extremes`.
        span_tokens: tokens that share scales, for callers that divide a prompt into spans; 0 for all. A span itself is
            quantized as it comes.
    """

    key_bits: int
    value_bits: int
    key_clip_ratio: float = 1.0
    value_clip_ratio: float = 1.0
    tau1: float = 0.0
    tau2: float = 0.0
    span_tokens: int = 0

    @property
    def shifts(self) -> bool:
        """Whether scores are shifted at all."""
        return bool(self.tau1 or self.tau2)


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
