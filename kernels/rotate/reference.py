"""The rotation as one matrix product, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.kernels.rotate.matrices import shared_matrix


def hadamard_reference(x: Tensor, inverse: bool = False) -> Tensor:
    """`x H` or `x H^T` as one matrix product; arguments and result as for `hadamard_transform`."""
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    matrix = shared_matrix(x.shape[-1], x.device, accumulate)
    return (x.to(accumulate) @ (matrix.T if inverse else matrix)).to(x.dtype)
