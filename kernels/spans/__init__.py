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
from kvconvert.kernels.page_formats import Span, SpanFormat, SpanSide, key_blocks, span_lengths, value_blocks
from kvconvert.kernels.spans.reference import quantize_span_reference, shift_extremes, span_keys, span_values


def unsupported(keys: torch.Tensor, values: torch.Tensor) -> str | None:
    """Why the Triton kernels cannot quantize a span of such keys and values; None if they can.

    Blocks of a span are pages to them, whose limits are theirs.
    """
    return pages.unsupported(keys) or pages.unsupported(values)


def quantize_span(
    keys: torch.Tensor, values: torch.Tensor, f: SpanFormat, feedback: torch.Tensor | None = None
) -> Span:
    """Quantize all tokens of a span: keys [H, n, D], values [H, n, E], n at least 1.

    `feedback` float16 [H, D, D] rounds keys as `pages/feedback.py` does; None rounds to nearest.

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
