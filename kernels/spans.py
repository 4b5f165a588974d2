"""Spans: a whole prompt's keys and values with one scale per channel (CalibQuant).

Keys and values are quantized per channel over all tokens of the span, so that scales and minima cost nothing per token
and leave both products: q k becomes (q * scale) codes + q minimum, and w v becomes (w codes) * scale + sum(w) minimum
(CalibQuant, section 4.2, "post-scaling"). At 1 and 2 bits the scores of the span are then mapped onto a smaller
interval (section 4.3), see `shift_extremes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvconvert.kernels.packing import codes_per_lane, pack_codes, unpack_codes
from kvconvert.kernels.quantizer import dequantize, quantize

# Tokens unpacked at a time.
TILE_TOKENS = 8192


@dataclass(frozen=True)
class SpanFormat:
    """The meaning of a layer's span bytes: bits (1, 2, 4 or 8) and range factors of keys and values."""

    key_bits: int
    value_bits: int
    key_range: float = 1.0
    value_range: float = 1.0


@dataclass(frozen=True)
class Span:
    """One quantized span of n tokens, H KV heads, D key and E value channels.

    Attributes:
        tokens: n.
        key_codes: int16 [H, D, lanes], packed along the tokens, which are padded to whole lanes.
        key_scale, key_minimum: float16 [H, D].
        value_codes: int16 [H, n, E * bits / 16], packed along the channels.
        value_scale, value_minimum: float16 [H, E].
    """

    tokens: int
    key_codes: torch.Tensor
    key_scale: torch.Tensor
    key_minimum: torch.Tensor
    value_codes: torch.Tensor
    value_scale: torch.Tensor
    value_minimum: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.key_codes, self.key_scale, self.key_minimum)
        parts += (self.value_codes, self.value_scale, self.value_minimum)
        return sum(tensor.nbytes for tensor in parts)


def quantize_span(keys: torch.Tensor, values: torch.Tensor, f: SpanFormat) -> Span:
    """Quantize all tokens of a span: keys [H, n, D], values [H, n, E], n at least 1.

    Raises:
        NumericError: NaN, infinity, or a scale or minimum beyond float16.
    """
    n = keys.shape[1]
    key = quantize(keys, f.key_bits, n, dim=1, value_range=f.key_range)
    value = quantize(values, f.value_bits, n, dim=1, value_range=f.value_range)
    # Lanes are filled up with code 0; whoever unpacks them cuts the padding off.
    padding = -n % codes_per_lane(f.key_bits)
    codes = torch.nn.functional.pad(key.codes.transpose(1, 2), (0, padding))
    return Span(
        n,
        pack_codes(codes, f.key_bits, dim=2),
        key.scale[:, 0],
        key.minimum[:, 0],
        pack_codes(value.codes, f.value_bits, dim=2),
        value.scale[:, 0],
        value.minimum[:, 0],
    )


def span_keys(span: Span, f: SpanFormat) -> torch.Tensor:
    """Dequantized keys, float32 [H, n, D]."""
    codes = _key_codes(span, f).transpose(1, 2)
    return dequantize(codes, span.key_scale.unsqueeze(1), span.key_minimum.unsqueeze(1), span.tokens, 1)


def span_values(span: Span, f: SpanFormat) -> torch.Tensor:
    """Dequantized values, float32 [H, n, E]."""
    codes = unpack_codes(span.value_codes, f.value_bits, 2, span.value_scale.shape[1])
    return dequantize(codes, span.value_scale.unsqueeze(1), span.value_minimum.unsqueeze(1), span.tokens, 1)


def _key_codes(span: Span, f: SpanFormat) -> torch.Tensor:
    """Unpacked key codes, uint8 [H, D, n]."""
    padded = span.key_codes.shape[2] * codes_per_lane(f.key_bits)
    return unpack_codes(span.key_codes, f.key_bits, 2, padded)[..., : span.tokens]


def span_scores(queries: torch.Tensor, span: Span, f: SpanFormat) -> torch.Tensor:
    """Dot products of queries [H, R, D] with the span's keys, float32 [H, R, n]."""
    scaled = queries * span.key_scale.float().unsqueeze(1)
    offset = queries @ span.key_minimum.float().unsqueeze(2)
    return (scaled @ _key_codes(span, f).float()).add_(offset)


def weighted_span_values(weights: torch.Tensor, span: Span, f: SpanFormat) -> torch.Tensor:
    """Sum of the span's values by weights [H, R, n], float32 [H, R, E]."""
    output = 0.0
    for start in range(0, span.tokens, TILE_TOKENS):
        part = slice(start, start + TILE_TOKENS)
        codes = unpack_codes(span.value_codes[:, part], f.value_bits, 2, span.value_scale.shape[1]).float()
        output = output + weights[..., part] @ codes
    offset = weights.sum(-1, keepdim=True) * span.value_minimum.float().unsqueeze(1)
    return output * span.value_scale.float().unsqueeze(1) + offset


def shift_extremes(scores: torch.Tensor, tau1: float, tau2: float) -> torch.Tensor:
    """CalibQuant's calibration of pre-softmax scores [..., n] (section 4.3), linear in each score.

    With gamma = min and delta = max of the last dimension, maps [gamma, delta] onto [gamma - tau1, delta - tau2]. Where
    delta - gamma <= tau2 - tau1 the slope would not be positive: it is clamped at 0, so that all become gamma - tau1.
    Equal scores (delta = gamma) become x - tau1.
    """
    gamma, delta = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
    width = delta - gamma
    slope = torch.where(width > 0, 1 - (tau2 - tau1) / width.clamp(min=torch.finfo(width.dtype).tiny), 0.0)
    return (scores - gamma) * slope.clamp(min=0.0) + (gamma - tau1)


def flattened(scores: torch.Tensor, tau1: float, tau2: float) -> torch.Tensor:
    """Where `shift_extremes` has to clamp its slope at 0 and makes different scores equal: bool [...] for [..., n]."""
    width = scores.amax(-1) - scores.amin(-1)
    return (width > 0) & (width <= tau2 - tau1)
