"""Quantization of spans in plain PyTorch, on every device, and what attention reads of them."""

from __future__ import annotations

import torch

from kvconvert.kernels.packing import pack_codes, unpack_codes
from kvconvert.kernels.pages.feedback import round_with_feedback
from kvconvert.kernels.pages.formats import PAGE_SIZE
from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.spans.formats import Span, SpanFormat

# Blocks unpacked at a time.
TILE_BLOCKS = 64


def quantize_span_reference(
    keys: torch.Tensor, values: torch.Tensor, f: SpanFormat, feedback: torch.Tensor | None = None
) -> Span:
    """`quantize_span` in plain PyTorch, on every device."""
    n = keys.shape[1]
    key = quantize(keys, f.key_bits, n, dim=1, clip_ratio=f.key_clip_ratio)
    if feedback is not None:
        grid = [part.transpose(1, 2).unsqueeze(0) for part in (key.scale, key.offset)]
        parts = keys.transpose(1, 2).unsqueeze(0).split(TILE_BLOCKS * PAGE_SIZE, dim=3)
        codes = [round_with_feedback(part, *grid, 2**f.key_bits - 1, feedback) for part in parts]
        key = key._replace(codes=torch.cat(codes, 3)[0].transpose(1, 2))
    value = quantize(values, f.value_bits, n, dim=1, clip_ratio=f.value_clip_ratio)
    # The last block is filled up with code 0; whoever unpacks it cuts the padding off.
    key_codes, value_codes = (
        torch.nn.functional.pad(part.codes, (0, 0, 0, -n % PAGE_SIZE)).unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
        for part in (key, value)
    )
    return Span(
        n,
        pack_codes(key_codes, f.key_bits, dim=2, across=3),
        key.scale[:, 0].contiguous(),
        key.offset[:, 0].contiguous(),
        pack_codes(value_codes.transpose(2, 3), f.value_bits, dim=2, across=3),
        value.scale[:, 0].contiguous(),
        value.offset[:, 0].contiguous(),
    )


def span_keys(span: Span, f: SpanFormat) -> torch.Tensor:
    """Dequantized keys, float32 [H, n, D]."""
    codes = _key_codes(span, f).transpose(1, 2)
    return dequantize(codes, span.key_scale.unsqueeze(1), span.key_offset.unsqueeze(1), span.tokens, 1)


def span_values(span: Span, f: SpanFormat) -> torch.Tensor:
    """Dequantized values, float32 [H, n, E]."""
    codes = _value_codes(span, f, slice(None))
    return dequantize(codes, span.value_scale.unsqueeze(1), span.value_offset.unsqueeze(1), span.tokens, 1)


def _key_codes(span: Span, f: SpanFormat) -> torch.Tensor:
    """Unpacked key codes, uint8 [H, D, n]."""
    codes = unpack_codes(span.key_codes, f.key_bits, 2, PAGE_SIZE, across=3)
    return codes.permute(1, 3, 0, 2).contiguous().flatten(2)[..., : span.tokens]


def _value_codes(span: Span, f: SpanFormat, blocks: slice) -> torch.Tensor:
    """Unpacked value codes of some blocks, uint8 [H, their tokens, E]."""
    codes = unpack_codes(span.value_codes[blocks], f.value_bits, 2, span.value_scale.shape[1], across=3)
    return codes.permute(1, 0, 3, 2).contiguous().flatten(1, 2)[:, : span.tokens - (blocks.start or 0) * PAGE_SIZE]


def span_scores(queries: torch.Tensor, span: Span, f: SpanFormat) -> torch.Tensor:
    """Dot products of queries [H, R, D] with the span's keys, float32 [H, R, n]."""
    scaled = queries * span.key_scale.float().unsqueeze(1)
    offset = queries @ span.key_offset.float().unsqueeze(2)
    return (scaled @ _key_codes(span, f).float()).add_(offset)


def weighted_span_values(
    weights: torch.Tensor, span: Span, f: SpanFormat, tile_blocks: int = TILE_BLOCKS
) -> torch.Tensor:
    """Sum of the span's values by weights [H, R, n], float32 [H, R, E]; `tile_blocks` are unpacked at a time."""
    output = 0.0
    for block in range(0, len(span.value_codes), tile_blocks):
        codes = _value_codes(span, f, slice(block, block + tile_blocks)).float()
        output = output + weights[..., block * PAGE_SIZE : (block + tile_blocks) * PAGE_SIZE] @ codes
    offset = weights.sum(-1, keepdim=True) * span.value_offset.float().unsqueeze(1)
    return output * span.value_scale.float().unsqueeze(1) + offset


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
