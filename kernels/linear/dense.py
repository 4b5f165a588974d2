"""The unquantized Linears of a 16-bit model on a CPU without instructions for their dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvconvert.kernels.device import product_dtype

# Up to so many rows a product reads every weight about once, which 16 bits make faster, not slower. Measured on an AVX2
# processor: with 2 rows both take the same time, with 64 the product in bfloat16 takes six times as long.
FEW_ROWS = 2
# Weights widened at a time, as in `kernels/linear/cpu.py`.
TILE_WEIGHTS = 1 << 20


class DenseLinear(nn.Linear):
    """An `nn.Linear` whose products of many rows are computed in float32 where a CPU multiplies 16-bit numbers slowly.

    The weight stays 16-bit; a few hundred of its rows are widened at a time. Sums are float32, results have the dtype
    of the input. With gradients, on other devices and in other dtypes it is `nn.Linear`.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> DenseLinear:
        """A module with the parameters of `linear` themselves, not copies."""
        module = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        module.weight, module.bias = linear.weight, linear.bias
        return module.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rows = input.reshape(-1, self.in_features)
        slow = input.device.type == "cpu" and product_dtype(input.dtype) != input.dtype == self.weight.dtype
        recorded = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if not slow or recorded or len(rows) <= FEW_ROWS:
            return super().forward(input)
        return tiled_dense_product(rows, self.weight, self.bias).view(*input.shape[:-1], self.out_features)


def tiled_dense_product(rows: Tensor, weight: Tensor, bias: Tensor | None, tile_weights: int = TILE_WEIGHTS) -> Tensor:
    """`x W^T + b` of rows [R, in] with a weight [out, in], computed in float32: [R, out] in the rows' dtype."""
    outputs, inputs = weight.shape
    step = max(1, min(outputs, tile_weights // inputs))
    wide, widened = rows.float(), torch.empty(step, inputs, dtype=torch.float32)
    y = rows.new_empty(len(rows), outputs)
    for start in range(0, outputs, step):
        part = weight[start : start + step]
        product = wide @ widened[: len(part)].copy_(part).T
        if bias is not None:
            product += bias[start : start + step].float()
        y[:, start : start + step] = product
    return y
