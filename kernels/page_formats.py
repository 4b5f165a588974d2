"""What the bytes of a layer's pages mean; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

if TYPE_CHECKING:
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

    @classmethod
    def keys(cls, *attributes: Any, **named: Any) -> Self:
        """The format of keys; other attributes in their order or by name."""
        return cls(True, *attributes, **named)

    @classmethod
    def values(cls, heads: int, head_dim: int, page_size: int, bits: int, group_size: int, **named: Any) -> Self:
        """The format of values; attributes that they share with keys by name."""
        return cls(False, heads, head_dim, page_size, bits, group_size, **named)


@dataclass(frozen=True)
class LayerFormat:
    """How one layer's pages are read.

    Attributes:
        keys, values: their formats.
        boosted: int64 [H, boosted], the key channels with more bits where these are fixed for the layer.
        static_keys, static_values: the scales of all pages, where the formats say that these are static.
        key_feedback: float16 [H, D, D], with which keys are rounded (`pages/feedback.py`); None rounds to nearest. It
            says how codes came about, not what they mean.
        key_center: what pages of keys leave out and attention adds (`pages/center.py`); None for whole keys.
    """

    keys: PageFormat
    values: PageFormat
    boosted: torch.Tensor | None = None
    static_keys: ChannelScales | None = None
    static_values: ChannelScales | None = None
    key_feedback: torch.Tensor | None = None
    key_center: KeyCenter | None = None
