"""Quantization of pages in plain PyTorch, on every device, and its inverse."""

from __future__ import annotations

from typing import Literal

import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.packing import pack_codes, unpack_codes
from kvconvert.kernels.page_formats import NO_TENSORS, PageFormat, SideTensors, TokenNorm
from kvconvert.kernels.pages.feedback import round_with_feedback
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


def quantize_pages(
    tokens: torch.Tensor,
    f: PageFormat,
    tensors: SideTensors = NO_TENSORS,
    hidden: int = 0,
    firsts: slice = FIRST,
    clip_ratios: torch.Tensor | None = None,
) -> PageTensors:
    """Quantize whole pages of tokens [N, H, P, channels], any float dtype.

    Args:
        tokens: values, or keys after RoPE and the scheme's rotation.
        f: how.
        tensors: the layer's; keys come without their center.
        hidden: how many of the first page's first tokens, fewer than all, are stored elsewhere in full precision: the
            page's scales are those of its other tokens, and what it holds in their places is not to be read.
        firsts: the pages, of those given, that are the first of a sequence.
        clip_ratios: float64 [N], in place of the format's, of pages without static scales.

    Returns:
        N pages. Codes are computed from the stored norm, scale and offset. A boosted channel's scale and offset
        are those of its own finer grid.

    Raises:
        NumericError: NaN, infinity, or a norm, scale or offset beyond float16.
    """
    tokens = shown_tokens(tokens, hidden, firsts)
    if f.bits == 16:
        return PageTensors(tokens.contiguous(), f)
    norm = chosen = high = None
    if f.token_norm is not TokenNorm.NONE:
        norm = token_norms(tokens, f.token_norm, f.token_norm_measure).half()
        # Zero-norm tokens (all-zero keys, or below float16's range) store zeros and come back as zeros.
        tokens = tokens.float() * torch.where(norm > 0, norm.float().reciprocal(), 0.0).unsqueeze(3)
    rows = _rows(tokens, f)
    if f.static:
        scale, offset = (part.unsqueeze(2 if f.is_key else 1) for part in tensors.static)
        codes = quantize_static(rows, f.bits, scale, offset)
        scale, offset = (part.expand(len(rows), *part.shape) for part in (scale, offset))
    else:
        ratio = f.clip_ratio if clip_ratios is None else clip_ratios
        grid = {"group_size": f.group_size, "dim": 3, "clip_ratio": ratio, "scale_bits": f.scale_bits}
        codes, scale, offset = quantize(rows, f.bits, **grid)
    largest: int | torch.Tensor = 2**f.bits - 1
    if f.boosted:
        if f.fixed_channels:
            chosen = tensors.boosted.expand(len(tokens), -1, -1)
        else:
            chosen = rank_channels(tokens, f.boosted, hidden, firsts)

        def places(tensor: torch.Tensor) -> torch.Tensor:
            return chosen.unsqueeze(3).expand(-1, -1, -1, tensor.shape[3])

        fine = quantize(rows.gather(2, places(rows)), 2 * f.bits, **grid)
        scale = scale.scatter(2, places(scale), fine.scale)
        offset = offset.scatter(2, places(offset), fine.offset)
        codes = codes.scatter(2, places(codes), fine.codes)
        largest = torch.full(codes.shape[:3], largest, device=codes.device).scatter_(2, chosen, 4**f.bits - 1)
    if tensors.feedback is not None:
        codes = round_with_feedback(rows, scale, offset, largest, tensors.feedback)
    if f.boosted:
        high = pack_codes((codes.gather(2, places(codes)) >> f.bits).transpose(2, 3), f.bits, dim=2, across=3)
        codes = codes & 2**f.bits - 1
    dim, across = (3, 2) if f.by_token else (2, 3)
    words = pack_codes(codes.transpose(2, 3), f.bits, dim=dim, across=across)
    return record_of(f, codes=words, scale=scale, offset=offset, norm=norm, high=high, channels=chosen)


def _rows(tokens: torch.Tensor, f: PageFormat) -> torch.Tensor:
    """Tokens [N, H, P, channels] with the axis along which scales belong to groups last; also the way back."""
    return tokens.transpose(2, 3) if f.is_key else tokens


def page_codes(pages: PageTensors, channels: torch.Tensor | None = None) -> torch.Tensor:
    """Unpacked codes, boosted channels with their upper bits: uint8 [N, H, D, P] of keys, [N, H, P, E] of values."""
    f = pages.format
    if f.by_token:
        return unpack_codes(pages.codes, f.bits, 3, f.head_dim, across=2).transpose(2, 3)
    codes = unpack_codes(pages.codes, f.bits, 2, f.page_size if f.is_key else f.head_dim, across=3)
    if not f.boosted:
        return codes.transpose(2, 3)
    high = unpack_codes(pages.high, f.bits, 2, f.page_size, across=3)[..., : f.boosted] << f.bits
    chosen = pages.channels.long() if pages.channels is not None else channels.expand(len(pages), -1, -1)
    return codes.scatter_add(3, chosen.unsqueeze(2).expand_as(high), high).transpose(2, 3)


def dequantize_pages(pages: PageTensors, tensors: SideTensors = NO_TENSORS) -> torch.Tensor:
    """Dequantized tokens, float32 [N, H, P, channels], token norms applied, without the layer's center."""
    f = pages.format
    if f.bits == 16:
        return pages.codes.float()
    codes = page_codes(pages, tensors.boosted)
    if f.static:
        grid = (part[None, :, :, None] if f.is_key else part[None, :, None] for part in tensors.static)
        tokens = _rows(dequantize(codes, *grid, f.page_size, 3 if f.is_key else 2), f)
    else:
        tokens = _rows(dequantize(codes, *pages.group_scales, f.group_size, 3), f)
    return tokens if pages.norm is None else tokens * pages.norm.float().unsqueeze(3)
