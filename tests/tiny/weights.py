"""Random quantized weights, and the exact product that kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight, quantize_weight


def random_weight(
    inputs: int, outputs: int, group_size: int, bits: int = 4, device: torch.device | str = "cpu"
) -> AwqWeight:
    """A weight whose outputs have means of their own."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    weight = torch.randn(outputs, inputs, generator=generator) + torch.randn(outputs, 1, generator=generator)
    return AwqWeight(*(tensor.to(device) for tensor in quantize_weight(weight, bits, group_size)))


def random_rows(rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Inputs [rows, inputs]."""
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(device, dtype)


def relative_error(y: Tensor, exact: Tensor) -> float:
    """Of a whole output."""
    return float((y.double() - exact).norm() / exact.norm())


def product_error(y: Tensor, x: Tensor, weight: AwqWeight) -> float:
    """Relative error of `y` as the product of rows and a weight."""
    return relative_error(y, x.double() @ dequantize_weight(weight, torch.float64).T)
