"""Pages: fixed runs of tokens whose keys or values are quantized together and never touched again.

A page holds `page_size` tokens of every KV head of one layer. Keys and values have pages of their own, because their
full-precision windows may differ. Keys are quantized per channel over groups of tokens and packed along the tokens;
values are quantized per token over groups of channels and packed along the channels. Both are what the decode kernels
read: the axis that is contracted with the probabilities or the query is not the packed one, and neighbours along it lie
side by side.

Kitty's boosted key channels have twice the bits: their low bits lie in the dense plane with everybody's, their high
bits in a second plane, so that the dense plane has one shape whatever is boosted.

Static pages have codes alone: one scale and zero_point per channel, keys' and values' alike, belong to the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.packing import pack_codes, unpack_codes
from kvconvert.kernels.pages.layout import KeyLayout, ValueLayout
from kvconvert.kernels.quantizer import dequantize, quantize, quantize_static


class ChannelScales(NamedTuple):
    """One scale and zero_point for each channel of each head of a layer: float16 [H, channels], finite."""

    scale: torch.Tensor
    zero_point: torch.Tensor


@dataclass(frozen=True)
class KeyFormat:
    """The meaning of one layer's key-page bytes.

    Attributes:
        heads, head_dim: KV heads and channels of the layer's keys.
        page_size: tokens per page.
        bits: 1, 2, 4, 8, or 16 for unquantized.
        group_size: tokens per group; divides `page_size`.
        token_norm: whether keys are divided by a norm before quantization, over all heads jointly or each head alone.
        token_norm_measure: root mean square ("l2") or mean magnitude.
        clip_ratio: factor applied to each group's (min, max) about its midpoint.
        boosted: channels per head that get twice the bits (Kitty).
        boost_select: "dynamic" ranks channels by mean magnitude in each page and stores their indices there;
            "calibrated" takes the fixed channels given to `quantize_keys`.
        static: the layer's `ChannelScales` describe every page, which holds none of its own. `clip_ratio` then has no part
            in quantization, `group_size` is `page_size`, and there is no norm and no boost.
    """

    heads: int
    head_dim: int
    page_size: int
    bits: int
    group_size: int
    token_norm: Literal["none", "joint", "per_head"] = "none"
    token_norm_measure: Literal["l2", "mean_abs"] = "l2"
    clip_ratio: float = 1.0
    boosted: int = 0
    boost_select: Literal["dynamic", "calibrated"] = "dynamic"
    static: bool = False


@dataclass(frozen=True)
class ValueFormat:
    """The meaning of one layer's value-page bytes.

    Attributes:
        heads, head_dim: KV heads and channels of the layer's values.
        page_size, bits, clip_ratio, static: as for keys.
        group_size: channels per group; divides `head_dim`, and is `head_dim` where scales are static.
    """

    heads: int
    head_dim: int
    page_size: int
    bits: int
    group_size: int
    clip_ratio: float = 1.0
    static: bool = False


class _Pages:
    """Tensors whose first dimension counts pages; absent parts are None."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __len__(self) -> int:
        return self.codes.shape[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that this format has, with their names."""
        for name in self._fields:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def select(self, index: slice | torch.Tensor) -> Self:
        """Some of the pages: views for a slice, a copy for an index tensor."""
        return pages_of(self.buffer[index], self.format)

    @classmethod
    def cat(cls, parts: list[Self]) -> Self:
        """Pages of one format, one after another."""
        if len(parts) == 1:
            return parts[0]
        return pages_of(torch.cat([part.buffer for part in parts]), parts[0].format)

    @property
    def buffer(self) -> torch.Tensor:
        """What holds one page after another: the records, int16 [N, units], or 16-bit codes."""
        return self.codes if self.record is None else self.record

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, the padding of their records included."""
        return self.buffer.nbytes


@dataclass(frozen=True)
class KeyPages(_Pages):
    """N key pages of H heads, D channels, P tokens.

    Attributes:
        codes: int16 [N, H, P * bits / 16, D] ([N, H, P / 8, D / 2] at 1 bit, see `kernels/packing.py`), or the model's
            dtype [N, H, P, D] at 16 bits.
        scale, zero_point: float16 [N, H, D, P / group_size], group after group in memory; None at 16 bits or where scales
            are static.
        norm: float16 [N, H or 1, P], None without a token norm.
        high: int16 [N, H, P * bits / 16, boosted], the upper bits of boosted channels ([N, H, P / 8, boosted / 2] at
            1 bit, boosted rounded up to an even number), None without boost.
        channels: uint8 [N, H, boosted], which channels those are, ascending; None where they are fixed per layer.
        record: int16 [N, units], of which all others are views, see `KeyLayout`; None at 16 bits.
        format: what the bytes mean.
    """

    _fields = ("codes", "scale", "zero_point", "norm", "high", "channels")

    codes: torch.Tensor
    format: KeyFormat
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    high: torch.Tensor | None = None
    channels: torch.Tensor | None = None
    record: torch.Tensor | None = None


@dataclass(frozen=True)
class ValuePages(_Pages):
    """N value pages of H heads, P tokens, E channels.

    Attributes:
        codes: int16 [N, H, E * bits / 16, P] ([N, H, E / 8, P / 2] at 1 bit), or the model's dtype [N, H, P, E] at 16
            bits.
        scale, zero_point: float16 [N, H, P, E / group_size], group after group in memory; None at 16 bits or where scales
            are static.
        record: int16 [N, units], of which all others are views, see `ValueLayout`; None at 16 bits.
        format: what the bytes mean.
    """

    _fields = ("codes", "scale", "zero_point")

    codes: torch.Tensor
    format: ValueFormat
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    record: torch.Tensor | None = None


def pages_of(buffer: torch.Tensor, f: KeyFormat | ValueFormat) -> KeyPages | ValuePages:
    """The pages that a buffer holds, as views: records int16 [N, units], or the codes of 16-bit pages."""
    kind, layout = (KeyPages, KeyLayout) if isinstance(f, KeyFormat) else (ValuePages, ValueLayout)
    return kind(buffer, f) if f.bits == 16 else kind(format=f, record=buffer, **layout.of(f).fields(buffer, f))


def empty_keys(count: int, f: KeyFormat, dtype: torch.dtype, device: torch.device) -> KeyPages:
    """Uninitialised room for `count` key pages in one buffer; `dtype` is the model's, used by 16-bit codes."""
    shape = (f.heads, f.page_size, f.head_dim) if f.bits == 16 else (KeyLayout.of(f).record,)
    dtype = dtype if f.bits == 16 else torch.int16
    return pages_of(torch.empty(count, *shape, dtype=dtype, device=device), f)


def empty_values(count: int, f: ValueFormat, dtype: torch.dtype, device: torch.device) -> ValuePages:
    """Uninitialised room for `count` value pages in one buffer."""
    shape = (f.heads, f.page_size, f.head_dim) if f.bits == 16 else (ValueLayout.of(f).record,)
    dtype = dtype if f.bits == 16 else torch.int16
    return pages_of(torch.empty(count, *shape, dtype=dtype, device=device), f)


def _record(f: KeyFormat | ValueFormat, **tensors: torch.Tensor | None) -> KeyPages | ValuePages:
    """Pages whose tensors were computed one by one, in records of their own; padding is zero."""
    layout = KeyLayout.of(f) if isinstance(f, KeyFormat) else ValueLayout.of(f)
    codes = tensors["codes"]
    pages = pages_of(codes.new_zeros(len(codes), layout.record), f)
    for name, target in pages.tensors():
        target.copy_(tensors[name])
    return pages


def token_norms(
    keys: torch.Tensor, scope: Literal["joint", "per_head"], measure: Literal["l2", "mean_abs"]
) -> torch.Tensor:
    """The size of each key token, float32 [N, 1 or H, P], from keys [N, H, P, D].

    OScaR (section 4.2) divides by the L2 norm over all KV heads; the mean over heads and channels replaces the sum
    here, so that normalised values stay near 1 whatever the number of heads. `mean_abs` is the paper's table 10
    alternative.

    Raises:
        NumericError: a norm is not finite or does not fit float16, in which it is stored.
    """
    x = keys.float()
    dims = (1, 3) if scope == "joint" else (3,)
    norms = x.square().mean(dims).sqrt() if measure == "l2" else x.abs().mean(dims)
    norms = norms.unsqueeze(1) if scope == "joint" else norms
    if not bool((norms <= torch.finfo(torch.float16).max).all()):
        raise NumericError("the norm of a key token is not finite or exceeds float16")
    return norms


def rank_channels(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` channels of largest mean magnitude per page and head: int64 [N, H, count], ascending.

    From keys [N, H, P, D]; Kitty's score (page-wise mean |K|), ties to the lower index.
    """
    # In float64 the sum is exact, or as good as: in float32 equal channels would differ by the order of their sums.
    score = keys.abs().sum(2, dtype=torch.float64)
    order = torch.sort(score, dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(-1).values


def quantize_keys(
    keys: torch.Tensor, f: KeyFormat, channels: torch.Tensor | None = None, static: ChannelScales | None = None
) -> KeyPages:
    """Quantize whole pages of keys [N, H, P, D], any float dtype, after RoPE and the scheme's rotation.

    Args:
        keys: what to store.
        f: how.
        channels: int64 [H, boosted], the channels to boost with `boost_select="calibrated"`.
        static: of the layer, where `f.static`.

    Returns:
        N pages. Codes are computed from the stored norm, scale and zero_point. A boosted channel's scale and zero_point are
        those of its own finer grid.

    Raises:
        NumericError: NaN, infinity, or a norm, scale or zero_point beyond float16.
    """
    if f.bits == 16:
        return KeyPages(keys.contiguous(), f)
    if f.static:
        codes = quantize_static(keys, f.bits, static.scale.unsqueeze(1), static.zero_point.unsqueeze(1))
        return _record(f, codes=pack_codes(codes, f.bits, dim=2, across=3))
    norm = None
    if f.token_norm != "none":
        norm = token_norms(keys, f.token_norm, f.token_norm_measure).half()
        # Zero-norm tokens (all-zero keys, or below float16's range) store zeros and come back as zeros.
        keys = keys.float() * torch.where(norm > 0, norm.float().reciprocal(), 0.0).unsqueeze(3)
    transposed = keys.transpose(2, 3)
    plain = quantize(transposed, f.bits, f.group_size, dim=3, clip_ratio=f.clip_ratio)
    if not f.boosted:
        codes = pack_codes(plain.codes.transpose(2, 3), f.bits, dim=2, across=3)
        return _record(f, codes=codes, scale=plain.scale, zero_point=plain.zero_point, norm=norm)
    chosen = rank_channels(keys, f.boosted) if f.boost_select == "dynamic" else channels.expand(len(keys), -1, -1)

    def rows_of(tensor: torch.Tensor) -> torch.Tensor:
        return chosen.unsqueeze(3).expand(-1, -1, -1, tensor.shape[3])

    fine = quantize(transposed.gather(2, rows_of(transposed)), 2 * f.bits, f.group_size, dim=3, clip_ratio=f.clip_ratio)
    low_mask = 2**f.bits - 1
    codes = plain.codes.scatter(2, rows_of(plain.codes), fine.codes & low_mask)
    return _record(
        f,
        codes=pack_codes(codes.transpose(2, 3), f.bits, dim=2, across=3),
        scale=plain.scale.scatter(2, rows_of(plain.scale), fine.scale),
        zero_point=plain.zero_point.scatter(2, rows_of(plain.zero_point), fine.zero_point),
        norm=norm,
        high=pack_codes((fine.codes >> f.bits).transpose(2, 3), f.bits, dim=2, across=3),
        channels=chosen,
    )


def quantize_values(values: torch.Tensor, f: ValueFormat, static: ChannelScales | None = None) -> ValuePages:
    """Quantize whole pages of values [N, H, P, E], any float dtype. `static` and NumericError as for keys."""
    if f.bits == 16:
        return ValuePages(values.contiguous(), f)
    if f.static:
        codes = quantize_static(values, f.bits, static.scale.unsqueeze(1), static.zero_point.unsqueeze(1))
        return _record(f, codes=pack_codes(codes.transpose(2, 3), f.bits, dim=2, across=3))
    quantized = quantize(values, f.bits, f.group_size, dim=3, clip_ratio=f.clip_ratio)
    codes = pack_codes(quantized.codes.transpose(2, 3), f.bits, dim=2, across=3)
    return _record(f, codes=codes, scale=quantized.scale, zero_point=quantized.zero_point)


def key_codes(pages: KeyPages, f: KeyFormat, channels: torch.Tensor | None = None) -> torch.Tensor:
    """Unpacked codes, uint8 [N, H, D, P], boosted channels with their upper bits."""
    codes = unpack_codes(pages.codes, f.bits, 2, f.page_size, across=3)
    if not f.boosted:
        return codes.transpose(2, 3)
    high = unpack_codes(pages.high, f.bits, 2, f.page_size, across=3)[..., : f.boosted] << f.bits
    chosen = pages.channels.long() if pages.channels is not None else channels.expand(len(pages), -1, -1)
    return codes.scatter_add(3, chosen.unsqueeze(2).expand_as(high), high).transpose(2, 3)


def value_codes(pages: ValuePages, f: ValueFormat) -> torch.Tensor:
    """Unpacked codes, uint8 [N, H, P, E]."""
    return unpack_codes(pages.codes, f.bits, 2, f.head_dim, across=3).transpose(2, 3)


def key_scales(pages: KeyPages, static: ChannelScales | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero_point of the pages' groups, float16 [N or 1, H, D, groups]; the layer's make one group of a page."""
    if static is None:
        return pages.scale, pages.zero_point
    return static.scale[None, :, :, None], static.zero_point[None, :, :, None]


def dequantize_keys(
    pages: KeyPages, f: KeyFormat, channels: torch.Tensor | None = None, static: ChannelScales | None = None
) -> torch.Tensor:
    """Dequantized keys, float32 [N, H, D, P], token norms applied."""
    if f.bits == 16:
        return pages.codes.float().transpose(2, 3)
    keys = dequantize(key_codes(pages, f, channels), *key_scales(pages, static), f.group_size, 3)
    return keys if pages.norm is None else keys * pages.norm.float().unsqueeze(2)


def dequantize_values(pages: ValuePages, f: ValueFormat, static: ChannelScales | None = None) -> torch.Tensor:
    """Dequantized values, float32 [N, H, P, E]."""
    if f.bits == 16:
        return pages.codes.float()
    codes = value_codes(pages, f)
    if f.static:
        # Per channel over the tokens: along that axis a page is one group.
        return dequantize(codes, static.scale[None, :, None], static.zero_point[None, :, None], f.page_size, 2)
    return dequantize(codes, pages.scale, pages.zero_point, f.group_size, 3)
