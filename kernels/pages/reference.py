"""Quantization of pages in plain PyTorch, on every device, and its inverse."""

from __future__ import annotations

from typing import Literal

import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.packing import pack_codes, unpack_codes
from kvconvert.kernels.pages.feedback import round_with_feedback
from kvconvert.kernels.pages.formats import ChannelScales, PageFormat, TokenNorm
from kvconvert.kernels.pages.records import PageTensors, record_of
from kvconvert.kernels.quantizer import dequantize, quantize, quantize_static

FIRST = slice(0, 1)


def token_norms(keys: torch.Tensor, scope: TokenNorm | str, measure: Literal["l2", "mean_abs"]) -> torch.Tensor:
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


def normalised_keys(keys: torch.Tensor, f: PageFormat) -> torch.Tensor:
    """Keys [N, H, P, D] divided by their token norms where the format has them, without the norms' rounding to float16.

    Tokens of norm zero are zeros.
    """
    if f.token_norm is TokenNorm.NONE:
        return keys
    norms = token_norms(keys, f.token_norm, f.token_norm_measure).unsqueeze(3)
    return torch.where(norms > 0, keys / norms, 0.0)


def rank_channels(keys: torch.Tensor, count: int, hidden: int = 0, firsts: slice = FIRST) -> torch.Tensor:
    """The `count` channels of largest mean magnitude per page and head: int64 [N, H, count], ascending.

    From keys [N, H, P, D] without the `hidden` first tokens of the pages `firsts`; Kitty's score (page-wise mean |K|),
    ties to the lower index.
    """
    # In float64 the sum is exact, or as good as: in float32 equal channels would differ by the order of their sums.
    score = keys.abs().sum(2, dtype=torch.float64)
    if hidden:
        score[firsts] = keys[firsts, :, hidden:].abs().sum(2, dtype=torch.float64)
    order = torch.sort(score, dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(-1).values


def shown_tokens(tokens: torch.Tensor, hidden: int, firsts: slice = FIRST) -> torch.Tensor:
    """Pages' tokens [N, H, P, channels] with the first one that is not hidden in the places of those that are.

    Of a group that has both, minimum and maximum are then those of the others.
    """
    if not hidden:
        return tokens
    tokens = tokens.clone()
    tokens[firsts, :, :hidden] = tokens[firsts, :, hidden, None]
    return tokens


def quantize_keys(
    keys: torch.Tensor,
    f: PageFormat,
    channels: torch.Tensor | None = None,
    static: ChannelScales | None = None,
    feedback: torch.Tensor | None = None,
    hidden: int = 0,
    firsts: slice = FIRST,
    clip_ratios: torch.Tensor | None = None,
) -> PageTensors:
    """Quantize whole pages of keys [N, H, P, D], any float dtype, after RoPE and the scheme's rotation.

    Args:
        keys: what to store.
        f: how.
        channels: int64 [H, boosted], the channels to boost where the format fixes them.
        static: the layer's scales, where `f.static`.
        feedback: float16 [H, D, D], with which channels are rounded one after another (`pages/feedback.py`); None
            rounds each number to its nearest code.
        hidden: how many of the first page's first tokens, fewer than all, are stored elsewhere in full precision: the
            page's scales are those of its other tokens, and what it holds in their places is not to be read.
        firsts: the pages, of those given, that are the first of a sequence.
        clip_ratios: float64 [N], in place of the format's, of pages without static scales.

    Returns:
        N pages. Codes are computed from the stored norm, scale and zero point. A boosted channel's scale and zero point
        are those of its own finer grid.

    Raises:
        NumericError: NaN, infinity, or a norm, scale or zero point beyond float16.
    """
    keys = shown_tokens(keys, hidden, firsts)
    if f.bits == 16:
        return PageTensors(keys.contiguous(), f)
    if f.static:
        codes = quantize_static(keys, f.bits, static.scale.unsqueeze(1), static.zero_point.unsqueeze(1))
        if feedback is not None:
            grid = (part.expand(len(keys), -1, -1).unsqueeze(3) for part in static)
            codes = round_with_feedback(keys.transpose(2, 3), *grid, 2**f.bits - 1, feedback).transpose(2, 3)
        return record_of(f, codes=_packed(codes, f))
    norm = None
    if f.token_norm is not TokenNorm.NONE:
        norm = token_norms(keys, f.token_norm, f.token_norm_measure).half()
        # Zero-norm tokens (all-zero keys, or below float16's range) store zeros and come back as zeros.
        keys = keys.float() * torch.where(norm > 0, norm.float().reciprocal(), 0.0).unsqueeze(3)
    transposed = keys.transpose(2, 3)
    ratio = f.clip_ratio if clip_ratios is None else clip_ratios
    grid = {"group_size": f.group_size, "dim": 3, "clip_ratio": ratio, "scale_bits": f.scale_bits}
    plain = quantize(transposed, f.bits, **grid)
    if not f.boosted:
        codes = plain.codes
        if feedback is not None:
            codes = round_with_feedback(transposed, plain.scale, plain.zero_point, 2**f.bits - 1, feedback)
        codes = _packed(codes.transpose(2, 3), f)
        return record_of(f, codes=codes, scale=plain.scale, zero_point=plain.zero_point, norm=norm)
    ranked = not f.fixed_channels
    chosen = rank_channels(keys, f.boosted, hidden, firsts) if ranked else channels.expand(len(keys), -1, -1)

    def rows_of(tensor: torch.Tensor) -> torch.Tensor:
        return chosen.unsqueeze(3).expand(-1, -1, -1, tensor.shape[3])

    fine = quantize(transposed.gather(2, rows_of(transposed)), 2 * f.bits, **grid)
    low_mask = 2**f.bits - 1
    scale = plain.scale.scatter(2, rows_of(plain.scale), fine.scale)
    zero_point = plain.zero_point.scatter(2, rows_of(plain.zero_point), fine.zero_point)
    codes = plain.codes.scatter(2, rows_of(plain.codes), fine.codes)
    if feedback is not None:
        largest = torch.full(codes.shape[:3], low_mask, device=codes.device).scatter_(2, chosen, 4**f.bits - 1)
        codes = round_with_feedback(transposed, scale, zero_point, largest, feedback)
    high = codes.gather(2, rows_of(codes)) >> f.bits
    return record_of(
        f,
        codes=pack_codes((codes & low_mask).transpose(2, 3), f.bits, dim=2, across=3),
        scale=scale,
        zero_point=zero_point,
        norm=norm,
        high=pack_codes(high.transpose(2, 3), f.bits, dim=2, across=3),
        channels=chosen,
    )


def quantize_values(
    values: torch.Tensor,
    f: PageFormat,
    static: ChannelScales | None = None,
    hidden: int = 0,
    firsts: slice = FIRST,
    clip_ratios: torch.Tensor | None = None,
) -> PageTensors:
    """Quantize whole pages of values [N, H, P, E], any float dtype. Other arguments and NumericError as for keys."""
    values = shown_tokens(values, hidden, firsts)
    if f.bits == 16:
        return PageTensors(values.contiguous(), f)
    if f.static:
        codes = quantize_static(values, f.bits, static.scale.unsqueeze(1), static.zero_point.unsqueeze(1))
        return record_of(f, codes=pack_codes(codes.transpose(2, 3), f.bits, dim=2, across=3))
    ratio = f.clip_ratio if clip_ratios is None else clip_ratios
    quantized = quantize(values, f.bits, f.group_size, dim=3, clip_ratio=ratio, scale_bits=f.scale_bits)
    codes = pack_codes(quantized.codes.transpose(2, 3), f.bits, dim=2, across=3)
    return record_of(f, codes=codes, scale=quantized.scale, zero_point=quantized.zero_point)


def _packed(codes: torch.Tensor, f: PageFormat) -> torch.Tensor:
    """Words of codes uint8 [N, H, P, D], along the axis that the format packs."""
    return pack_codes(codes, f.bits, dim=3, across=2) if f.by_token else pack_codes(codes, f.bits, dim=2, across=3)


def key_codes(pages: PageTensors, f: PageFormat, channels: torch.Tensor | None = None) -> torch.Tensor:
    """Unpacked codes, uint8 [N, H, D, P], boosted channels with their upper bits."""
    if f.by_token:
        return unpack_codes(pages.codes, f.bits, 3, f.head_dim, across=2).transpose(2, 3)
    codes = unpack_codes(pages.codes, f.bits, 2, f.page_size, across=3)
    if not f.boosted:
        return codes.transpose(2, 3)
    high = unpack_codes(pages.high, f.bits, 2, f.page_size, across=3)[..., : f.boosted] << f.bits
    chosen = pages.channels.long() if pages.channels is not None else channels.expand(len(pages), -1, -1)
    return codes.scatter_add(3, chosen.unsqueeze(2).expand_as(high), high).transpose(2, 3)


def value_codes(pages: PageTensors, f: PageFormat) -> torch.Tensor:
    """Unpacked codes, uint8 [N, H, P, E]."""
    return unpack_codes(pages.codes, f.bits, 2, f.head_dim, across=3).transpose(2, 3)


def key_scales(pages: PageTensors, static: ChannelScales | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of the pages' groups, float16 [N or 1, H, D, groups]; those of the
    layer make one group of a page.
    """
    if static is None:
        return pages.group_scales
    return static.scale[None, :, :, None], static.zero_point[None, :, :, None]


def dequantize_keys(
    pages: PageTensors, f: PageFormat, channels: torch.Tensor | None = None, static: ChannelScales | None = None
) -> torch.Tensor:
    """Dequantized keys, float32 [N, H, D, P], token norms applied."""
    if f.bits == 16:
        return pages.codes.float().transpose(2, 3)
    keys = dequantize(key_codes(pages, f, channels), *key_scales(pages, static), f.group_size, 3)
    return keys if pages.norm is None else keys * pages.norm.float().unsqueeze(2)


def dequantize_values(pages: PageTensors, f: PageFormat, static: ChannelScales | None = None) -> torch.Tensor:
    """Dequantized values, float32 [N, H, P, E]."""
    if f.bits == 16:
        return pages.codes.float()
    codes = value_codes(pages, f)
    if f.static:
        # Per channel over the tokens: along that axis a page is one group.
        return dequantize(codes, static.scale[None, :, None], static.zero_point[None, :, None], f.page_size, 2)
    return dequantize(codes, *pages.group_scales, f.group_size, 3)
