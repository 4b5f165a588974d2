"""Quantization of pages in plain PyTorch, on every device, and its inverse.

With error feedback what one channel of a key loses is made up for by the channels still to come. Attention reads a key
k only through products with queries, so that of its rounding error counts

    E_q ((k - k_hat) q)^2 = (k - k_hat) H (k - k_hat)^T        H = E[q^T q], q and k being row vectors

With H^-1 = U^T U (U upper triangular) the best later channels, given the error e_i of channel i, are lower by
e_i U_ij / U_ii. So channels are rounded in their order, and each error is subtracted from later channels before these
are rounded: LDLQ (QuIP, arXiv 2307.13304, section 3), which is GPTQ's update (arXiv 2210.17323, equation 2), there for
weights. Scales and offsets are those of the unmodified keys, and what is stored has the same form.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvconvert.errors import NumericError
from kvconvert.kernels.packing import pack_codes, unpack_codes
from kvconvert.kernels.page_formats import NO_TENSORS, PageFormat, SideTensors, TokenNorm
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


# Channels whose errors reach later ones by one product of matrices.
BLOCK = 16


def round_with_feedback_reference(
    keys: Tensor, scale: Tensor, offset: Tensor, largest: Tensor | int, feedback: Tensor
) -> Tensor:
    """Codes of keys whose channels are rounded one after another.

    Args:
        keys: [N, H, D, P], P tokens of N pages as the quantizer gets them (divided by their norms).
        scale, offset: float16 [N, H, D, groups], of the unmodified keys; consecutive tokens make a group.
        largest: the largest code, for all channels or int [N, H, D].
        feedback: [H, D, D], upper triangular with a diagonal of ones: U_ij / U_ii.

    Returns:
        uint8 [N, H, D, P].
    """
    w = keys.float().clone()
    step, zero = (part.float().repeat_interleave(w.shape[3] // part.shape[3], 3) for part in (scale, offset))
    largest = torch.as_tensor(largest, device=w.device).expand(w.shape[:3]).unsqueeze(3)
    factors = feedback.float()
    codes = torch.empty_like(w, dtype=torch.uint8)
    for i in range(w.shape[2]):
        # Dividing by infinity makes every code of a zero scale 0.
        divisor = step[:, :, i].masked_fill(step[:, :, i] == 0, torch.inf)
        code = ((w[:, :, i] - zero[:, :, i]) / divisor).round().clamp(min=0).minimum(largest[:, :, i])
        error = w[:, :, i] - (code * step[:, :, i] + zero[:, :, i])
        w[:, :, i + 1 :] -= factors[:, i, i + 1 :].unsqueeze(2) * error.unsqueeze(2)
        codes[:, :, i] = code.to(torch.uint8)
    return codes


def round_with_feedback(keys: Tensor, scale: Tensor, offset: Tensor, largest: Tensor | int, feedback: Tensor) -> Tensor:
    """`round_with_feedback_reference` for many pages at once, in blocks of channels.

    Sums are taken in another order, so that a number halfway between two codes may be rounded the other way.
    """
    count, heads, dim, tokens = keys.shape
    groups = scale.shape[3]
    # [H, D, N, groups, tokens of a group]: the numbers of one channel lie side by side.
    w = keys.permute(1, 2, 0, 3).unflatten(3, (groups, tokens // groups))
    w = w.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    step, zero = (part.permute(1, 2, 0, 3).float().contiguous().unsqueeze(4) for part in (scale, offset))
    divisor = step.masked_fill(step == 0, torch.inf)
    if isinstance(largest, Tensor):
        largest = largest.permute(1, 2, 0).to(w)[..., None, None].contiguous()
    factors = feedback.float()
    near = factors[..., None, None, None]
    codes = torch.empty_like(w, dtype=torch.uint8)
    # Views of all channels at once: on a GPU the host's calls are what takes time here.
    ws, zeros, divisors, steps, rounded = (part.unbind(1) for part in (w, zero, divisor, step, codes))
    for first in range(0, dim, BLOCK):
        stop = min(first + BLOCK, dim)
        errors = w.new_empty(heads, stop - first, count, groups, tokens // groups)
        for i, into in zip(range(first, stop), errors.unbind(1), strict=True):
            code = (ws[i] - zeros[i]).div_(divisors[i]).round_()
            code.clamp_(0, largest) if isinstance(largest, int) else code.clamp_(min=0).clamp_(max=largest[:, i])
            torch.sub(ws[i], torch.addcmul(zeros[i], code, steps[i]), out=into)
            if i + 1 < stop:
                w[:, i + 1 : stop].addcmul_(near[:, i, i + 1 : stop], into.unsqueeze(1), value=-1)
            rounded[i].copy_(code)
        if stop < dim:
            far = factors[:, first:stop, stop:].transpose(1, 2)
            w[:, stop:].view(heads, dim - stop, -1).baddbmm_(far, errors.flatten(2), alpha=-1)
    return codes.flatten(3).permute(2, 0, 1, 3)
