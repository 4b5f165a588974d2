"""The product with a quantized weight, by dequantizing all of it: the oracle, and what other devices take."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight


def w4a16_reference(x: Tensor, weight: AwqWeight, bias: Tensor | None = None) -> Tensor:
    """Dequantize the whole weight and multiply: [..., in] to [..., out].

    The arithmetic is float32 (float64 for float64), the result in the dtype of `x`.
    """
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(accumulate) @ dequantize_weight(weight, accumulate).T
    if bias is not None:
        y += bias.to(accumulate)
    return y.to(x.dtype)
