"""The rotation as one matrix product, on every device, or on a CPU as two small ones where these are faster."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.kernels.rotate.matrices import paley_order, power_of_two_in, shared_matrix


def hadamard_reference(x: Tensor, inverse: bool = False) -> Tensor:
    """`x H` or `x H^T` as one matrix product; arguments and result as for `hadamard_transform`."""
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    matrix = shared_matrix(x.shape[-1], x.device, accumulate)
    return (x.to(accumulate) @ (matrix.T if inverse else matrix)).to(x.dtype)


def factored_transform(x: Tensor, orders: tuple[int, int], inverse: bool) -> Tensor:
    """`x (A kron B)` as A^T X B, each row of x read as an [a, b] matrix X."""
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    left, right = (shared_matrix(order, x.device, accumulate) for order in orders)
    rows = x.to(accumulate).reshape(-1, *orders)
    if inverse:
        left, right = left.T, right.T
    return (left.T @ (rows @ right)).view(x.shape).to(x.dtype)


def factor_orders(d: int) -> tuple[int, int] | None:
    """Orders (a, b) with H_d = H_a kron H_b where two small products are faster than a large one, else None.

    Measured on a CPU with 1 to 4096 rows: from size 128 on, where the right factor is at least 16 wide, they take
    half the time (192, 256: a third and a quarter). Below, and for 112 and 160, the one product wins; a butterfly
    loses everywhere.
    """
    order = paley_order(d)
    if order:
        right = d // order
    elif d == power_of_two_in(d):
        right = 1 << (d.bit_length() // 2)
    else:
        return None
    return (d // right, right) if d >= 128 and right >= 16 else None
