"""Spans: a whole prompt's keys and values with one scale per channel (CalibQuant).

Keys and values are quantized per channel over all tokens of the span, so that scales and offsets cost nothing
per token and leave both products: q k becomes (q * scale) codes + q zero, and w v becomes (w codes) * scale + sum(w)
zero (CalibQuant, section 4.1, "post-scaling", equation 6). At 1 and 2 bits the scores of the span are then mapped onto
a smaller interval (section 4.2), see `shift_extremes`.

Codes lie in blocks of PAGE_SIZE tokens, packed as those of pages are, so that one decode kernel reads both.
"""

from __future__ import annotations

import torch

from kvconvert.kernels import device, pages
from kvconvert.kernels.packing import pack_codes, unpack_codes
from kvconvert.kernels.page_formats import PAGE_SIZE, Span, SpanFormat, SpanSide, key_blocks, span_lengths, value_blocks
from kvconvert.kernels.pages.reference import round_with_feedback
from kvconvert.kernels.quantizer import dequantize, quantize


def unsupported(keys: torch.Tensor, values: torch.Tensor) -> str | None:
    """Why the Triton kernels cannot quantize a span of such keys and values; None if they can.

    Blocks of a span are pages to them, whose limits are theirs.
    """
    return pages.unsupported(keys) or pages.unsupported(values)


def quantize_span(
    keys: torch.Tensor, values: torch.Tensor, f: SpanFormat, feedback: torch.Tensor | None = None
) -> Span:
    """Quantize all tokens of a span: keys [H, n, D], values [H, n, E], n at least 1.

    `feedback` float16 [H, D, D] rounds keys as `pages/reference.py` does; None rounds to nearest.

    Raises:
        NumericError: NaN, infinity, or a scale or offset beyond float16.
    """
    reason = unsupported(keys, values)
    if reason is None:
        from kvconvert.kernels.spans.triton import quantize_span as quantize_by_kernels

        return quantize_by_kernels(keys, values, f, feedback)
    if device.runs_triton(keys.device):
        device.fall_back("Quantization of a span", reason)
    return quantize_span_reference(keys, values, f, feedback)


# Blocks unpacked at a time.
TILE_BLOCKS = 64


def quantize_span_reference(
    keys: torch.Tensor, values: torch.Tensor, f: SpanFormat, feedback: torch.Tensor | None = None
) -> Span:
    """`quantize_span` in plain PyTorch, on every device."""
    key_side = _quantized_side(keys, f.key_bits, f.key_clip_ratio, True, feedback)
    return Span(keys.shape[1], key_side, _quantized_side(values, f.value_bits, f.value_clip_ratio, False))


def _quantized_side(
    x: torch.Tensor, bits: int, clip_ratio: float, is_key: bool, feedback: torch.Tensor | None = None
) -> SpanSide:
    """Keys or values [H, n, channels] of a span."""
    n = x.shape[1]
    codes, scale, offset = quantize(x, bits, n, dim=1, clip_ratio=clip_ratio)
    if feedback is not None:
        grid = [part.transpose(1, 2).unsqueeze(0) for part in (scale, offset)]
        parts = x.transpose(1, 2).unsqueeze(0).split(TILE_BLOCKS * PAGE_SIZE, dim=3)
        codes = torch.cat([round_with_feedback(part, *grid, 2**bits - 1, feedback) for part in parts], 3)
        codes = codes[0].transpose(1, 2)
    # The last block is filled up with code 0; whoever unpacks it cuts the padding off.
    blocks = torch.nn.functional.pad(codes, (0, 0, 0, -n % PAGE_SIZE)).unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
    words = pack_codes(blocks if is_key else blocks.transpose(2, 3), bits, dim=2, across=3)
    return SpanSide(words, scale[:, 0].contiguous(), offset[:, 0].contiguous())


def span_keys(span: Span, f: SpanFormat) -> torch.Tensor:
    """Dequantized keys, float32 [H, n, D]."""
    codes = _key_codes(span, f).transpose(1, 2)
    return dequantize(codes, span.keys.scale.unsqueeze(1), span.keys.offset.unsqueeze(1), span.tokens, 1)


def span_values(span: Span, f: SpanFormat) -> torch.Tensor:
    """Dequantized values, float32 [H, n, E]."""
    codes = _value_codes(span, f, slice(None))
    return dequantize(codes, span.values.scale.unsqueeze(1), span.values.offset.unsqueeze(1), span.tokens, 1)


def _key_codes(span: Span, f: SpanFormat) -> torch.Tensor:
    """Unpacked key codes, uint8 [H, D, n]."""
    codes = unpack_codes(span.keys.codes, f.key_bits, 2, PAGE_SIZE, across=3)
    return codes.permute(1, 3, 0, 2).contiguous().flatten(2)[..., : span.tokens]


def _value_codes(span: Span, f: SpanFormat, blocks: slice) -> torch.Tensor:
    """Unpacked value codes of some blocks, uint8 [H, their tokens, E]."""
    codes = unpack_codes(span.values.codes[blocks], f.value_bits, 2, span.values.scale.shape[1], across=3)
    return codes.permute(1, 0, 3, 2).contiguous().flatten(1, 2)[:, : span.tokens - (blocks.start or 0) * PAGE_SIZE]


def span_scores(queries: torch.Tensor, span: Span, f: SpanFormat) -> torch.Tensor:
    """Dot products of queries [H, R, D] with the span's keys, float32 [H, R, n]."""
    scaled = queries * span.keys.scale.float().unsqueeze(1)
    offset = queries @ span.keys.offset.float().unsqueeze(2)
    return (scaled @ _key_codes(span, f).float()).add_(offset)


def weighted_span_values(
    weights: torch.Tensor, span: Span, f: SpanFormat, tile_blocks: int = TILE_BLOCKS
) -> torch.Tensor:
    """Sum of the span's values by weights [H, R, n], float32 [H, R, E]; `tile_blocks` are unpacked at a time."""
    output = 0.0
    for block in range(0, len(span.values.codes), tile_blocks):
        codes = _value_codes(span, f, slice(block, block + tile_blocks)).float()
        output = output + weights[..., block * PAGE_SIZE : (block + tile_blocks) * PAGE_SIZE] @ codes
    offset = weights.sum(-1, keepdim=True) * span.values.offset.float().unsqueeze(1)
    return output * span.values.scale.float().unsqueeze(1) + offset


def shift_extremes(scores: torch.Tensor, tau1: float, tau2: float) -> torch.Tensor:
    """CalibQuant's calibration of pre-softmax scores [..., n] (section 4.2, equation 7), linear in each score.

    With gamma = min and delta = max of the last dimension, maps [gamma, delta] onto [gamma - tau1, delta - tau2]. Where
    delta - gamma <= tau2 - tau1 the slope would not be positive: it is clamped at 0, so that all become gamma - tau1.
    Equal scores (delta = gamma) become x - tau1.
    """
    gamma, delta = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
    width = delta - gamma
    slope = torch.where(width > 0, 1 - (tau2 - tau1) / width.clamp(min=torch.finfo(width.dtype).tiny), 0.0)
    return (scores - gamma) * slope.clamp(min=0.0) + (gamma - tau1)


def shift_scores(scores: torch.Tensor, f: SpanFormat, clamped: torch.Tensor | None) -> torch.Tensor:
    """Scores [..., n] of all spans of a sequence as the format shifts them; counts clamped rows into `clamped`."""
    if not f.shifts:
        return scores
    if clamped is not None:
        clamped.add_(clamped_rows(scores, f.tau1, f.tau2).sum())
    return shift_extremes(scores, f.tau1, f.tau2)


def clamped_rows(scores: torch.Tensor, tau1: float, tau2: float) -> torch.Tensor:
    """Where `shift_extremes` has to clamp its slope at 0 and makes different scores equal: bool [...] for [..., n]."""
    width = scores.amax(-1) - scores.amin(-1)
    return (width > 0) & (width <= tau2 - tau1)
