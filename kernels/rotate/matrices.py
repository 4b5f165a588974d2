"""Orthonormal Hadamard matrices for every even head size.

Paley's matrices of order 12 and 20 are not symmetric, so H^T is not H. Sizes are built as

- a power of two: Sylvester's matrix,
- 12, 20 or 28 times a power of two: Paley's matrix of that order kron Sylvester's,
- any other even size: no Hadamard matrix is built in; Sylvester matrices of the largest power of two that divides the
  size stand along the diagonal, so that channels mix within blocks only.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvconvert.kernels.rotations import hadamard_kind, paley_order, power_of_two_in


def hadamard_matrix(d: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
    """The orthonormal matrix H of this size, entries exactly +-1/sqrt(order) rounded once to `dtype`: [d, d].

    The result is the caller's own copy.
    """
    return shared_matrix(d, torch.device(device), dtype).clone()


@lru_cache(maxsize=64)
def hadamard_signs(d: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
    """H as exact entries +-1 (and 0 between diagonal blocks) [d, d], and the factor that makes it orthonormal.

    The tensor is shared by all callers, who must not write to it.
    """
    with torch.inference_mode(False):
        signs = _signs(d)
        return signs.to(device=device, dtype=dtype), float(signs[0].abs().sum()) ** -0.5


@lru_cache(maxsize=64)
def shared_matrix(d: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`hadamard_matrix`, shared by all callers, who must not write to it."""
    # Outside inference mode: a tensor born in it could not serve a later call that records gradients.
    with torch.inference_mode(False):
        signs = _signs(d)
        order = int(signs[0].abs().sum())
        return (signs.to(torch.float64) / order**0.5).to(device=device, dtype=dtype)


def _signs(d: int) -> Tensor:
    """H without its normalisation: entries +-1, and 0 between diagonal blocks."""
    hadamard_kind(d)
    power = power_of_two_in(d)
    order = paley_order(d)
    if order:
        return torch.kron(_paley(order), _sylvester(d // order))
    return torch.kron(torch.eye(d // power, dtype=torch.int8, device="cpu"), _sylvester(power))


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
