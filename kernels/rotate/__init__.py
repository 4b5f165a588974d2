"""Orthonormal Hadamard matrices for every head size, and the rotation of a tensor's last axis by them.

Convention: tensors hold row vectors and rotate as `x' = x H`, back as `x = x' H^T`. Paley's matrices of order 12 and 20
are not symmetric, so H^T is not H. Sizes are built as

- a power of two: Sylvester's matrix,
- 12, 20 or 28 times a power of two: Paley's matrix of that order kron Sylvester's,
- any other even size: no Hadamard matrix is built in; Sylvester matrices of the largest power of two that divides the
  size stand along the diagonal, so that channels mix within blocks only.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.kernels.device import fall_back, runs_triton

_PALEY_ORDERS = (12, 20, 28)


def hadamard_kind(d: int) -> str:
    """How `hadamard_matrix(d)` is built, as the manifest says it.

    For instance "sylvester(64)", "paley(12) x sylvester(4)" or "block_diagonal(8) x 9".
    "a x b" is the Kronecker product of a and b; "block_diagonal(b) x n" stands for n Sylvester blocks of order b.
    """
    power = _power_of_two_in(d)
    if d == power:
        return f"sylvester({d})"
    order = _paley_order(d)
    if order:
        return f"paley({order}) x sylvester({d // order})"
    if power == 1:
        raise UsageError(f"A head size of {d} is odd, so no rotation mixes its channels; set rotations to none.")
    return f"block_diagonal({power}) x {d // power}"


def hadamard_matrix(d: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
    """The orthonormal matrix H of this size, entries exactly +-1/sqrt(order) rounded once to `dtype`: [d, d].

    The result is the caller's own copy.
    """
    return _cached_matrix(d, torch.device(device), dtype).clone()


@lru_cache(maxsize=64)
def hadamard_signs(d: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
    """H as exact entries +-1 (and 0 between diagonal blocks) [d, d], and the factor that makes it orthonormal.

    The tensor is shared by all callers, who must not write to it.
    """
    with torch.inference_mode(False):
        signs = _signs(d)
        return signs.to(device=device, dtype=dtype), float(signs[0].abs().sum()) ** -0.5


def hadamard_transform(x: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last axis: `x H`, or `x H^T` when `inverse`; the one entry point on every device.

    On a GPU it is the kernel in kernels/rotate/triton/launch.py. On a CPU, sizes that split into two suitable factors take
    `_factored_transform`; everything else is one matrix product. Which path a size takes does not depend on the number
    of rows.

    Args:
        x: [..., d], any float dtype, any number of rows.

    Returns:
        the same shape and dtype; products are accumulated in float32 (float64 for float64).
    """
    if runs_triton(x.device):
        from kvconvert.kernels.rotate.triton import launch as rotate

        reason = rotate.why_not(x)
        if reason is None:
            return rotate.rotate(x, inverse)
        fall_back("A Hadamard rotation", reason)
    factors = _factor_orders(x.shape[-1]) if x.device.type == "cpu" else None
    return _factored_transform(x, factors, inverse) if factors else hadamard_reference(x, inverse)


def hadamard_reference(x: Tensor, inverse: bool = False) -> Tensor:
    """`x H` or `x H^T` as one matrix product; arguments and result as for `hadamard_transform`."""
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    matrix = _cached_matrix(x.shape[-1], x.device, accumulate)
    return (x.to(accumulate) @ (matrix.T if inverse else matrix)).to(x.dtype)


def _factored_transform(x: Tensor, orders: tuple[int, int], inverse: bool) -> Tensor:
    """`x (A kron B)` as A^T X B, each row of x read as an [a, b] matrix X."""
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    left, right = (_cached_matrix(order, x.device, accumulate) for order in orders)
    rows = x.to(accumulate).reshape(-1, *orders)
    if inverse:
        left, right = left.T, right.T
    return (left.T @ (rows @ right)).view(x.shape).to(x.dtype)


def _factor_orders(d: int) -> tuple[int, int] | None:
    """Orders (a, b) with H_d = H_a kron H_b where two small products are faster than a large one, else None.

    Measured on a CPU with 1 to 4096 rows: from size 128 on, where the right factor is at least 16 wide, they take
    half the time (192, 256: a third and a quarter). Below, and for 112 and 160, the one product wins; a butterfly
    loses everywhere.
    """
    order = _paley_order(d)
    if order:
        right = d // order
    elif d == _power_of_two_in(d):
        right = 1 << (d.bit_length() // 2)
    else:
        return None
    return (d // right, right) if d >= 128 and right >= 16 else None


@lru_cache(maxsize=64)
def _cached_matrix(d: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Outside inference mode: a tensor born in it could not serve a later call that records gradients.
    with torch.inference_mode(False):
        signs = _signs(d)
        order = int(signs[0].abs().sum())
        return (signs.to(torch.float64) / order**0.5).to(device=device, dtype=dtype)


def _signs(d: int) -> Tensor:
    """H without its normalisation: entries +-1, and 0 between diagonal blocks."""
    hadamard_kind(d)
    power = _power_of_two_in(d)
    order = _paley_order(d)
    if order:
        return torch.kron(_paley(order), _sylvester(d // order))
    return torch.kron(torch.eye(d // power, dtype=torch.int8, device="cpu"), _sylvester(power))


def _power_of_two_in(d: int) -> int:
    if d < 1:
        raise UsageError(f"A Hadamard rotation of size {d} does not exist; sizes start at 1.")
    return d & -d


def _paley_order(d: int) -> int | None:
    for order in _PALEY_ORDERS:
        if d % order == 0 and d // order == _power_of_two_in(d // order):
            return order
    return None


def _sylvester(d: int) -> Tensor:
    index = torch.arange(d, device="cpu")
    common = index[:, None] & index[None, :]
    parity = torch.zeros_like(common)
    while bool(common.any()):
        parity ^= common & 1
        common >>= 1
    return (1 - 2 * parity).to(torch.int8)


def _paley(order: int) -> Tensor:
    """Paley's first construction for 12 = 11 + 1 and 20 = 19 + 1, his second for 28 = 2 (13 + 1)."""
    prime = order - 1 if order != 28 else 13
    squares = {(i * i) % prime for i in range(1, prime)}
    character = torch.tensor([0] + [1 if i in squares else -1 for i in range(1, prime)], dtype=torch.int8, device="cpu")
    index = torch.arange(prime, device="cpu")
    jacobsthal = character[(index[:, None] - index[None, :]) % prime]
    core = torch.zeros(prime + 1, prime + 1, dtype=torch.int8, device="cpu")
    core[1:, 1:] = jacobsthal
    core[0, 1:] = 1
    core[1:, 0] = -1 if prime % 4 == 3 else 1
    identity = torch.eye(prime + 1, dtype=torch.int8, device="cpu")
    if prime % 4 == 3:
        return core + identity
    plus = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8, device="cpu")
    minus = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8, device="cpu")
    return torch.kron(core, plus) + torch.kron(identity, minus)
