"""The Hadamard rotation of a tensor's last axis, and a decode step's append, which rotates on the way.

Convention: tensors hold row vectors and rotate as `x' = x H`, back as `x = x' H^T`; `kernels/rotate/matrices.py` says
what H is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvconvert.kernels import device
from kvconvert.kernels.launches import deferred
from kvconvert.kernels.rotate.matrices import (
    hadamard_kind,
    hadamard_matrix,
    paley_order,
    power_of_two_in,
    shared_matrix,
)
from kvconvert.kernels.rotations import NO_ROTATION, Rotations

if TYPE_CHECKING:
    from kvconvert.kernels.rotate.triton import rotate_and_append
else:
    (rotate_and_append,) = deferred("rotate.triton", "rotate_and_append")

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 256
# Channels that are stored as they are: a latent's.
LARGEST_COPIED = 512


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


@lru_cache(maxsize=64)
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


def unsupported(x: Tensor, rotated: bool = True) -> str | None:
    """Why the Triton kernels cannot rotate the last axis of `x`, or store it as it is; None if they can."""
    reason = device.unsupported(x.device)
    if reason is not None:
        return reason
    if x.dtype not in KERNEL_DTYPES:
        return f"the rotation kernels do not take {x.dtype}"
    if x.shape[-1] > largest_appended(rotated):
        return f"the rotation kernels take head sizes up to {largest_appended(rotated)}, not {x.shape[-1]}"
    if x.requires_grad and torch.is_grad_enabled():
        return "the rotation kernels record no gradients"
    return None


def largest_appended(rotated: bool) -> int:
    """Channels of a token at most that the append kernel stores, rotated or as it is."""
    return LARGEST_HEAD if rotated else LARGEST_COPIED


def unsupported_append(
    dtype: torch.dtype, queries: Tensor, keys: Tensor, values: Tensor, rotations: Rotations
) -> str | None:
    """Why `rotate_and_append` cannot take these queries, keys and values [B, heads, T, channels]; None if it can.

    `dtype` is that of the buffers.
    """
    for x, rotated in ((queries, rotations.keys), (keys, rotations.keys), (values, rotations.values)):
        reason = unsupported(x, rotated)
        if reason is not None:
            return reason
        if x.dtype != dtype:
            return f"new tokens are {x.dtype} and stored ones {dtype}"
        batch, head, token, channel = x.stride()
        if channel != 1 or x.data_ptr() % 16 or (batch | head | token | x.shape[3]) % 8:
            return "the append kernel needs channels side by side and tokens at multiples of 16 bytes"
    return None


def hadamard_transform(x: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last axis: `x H`, or `x H^T` when `inverse`; the one entry point on every device.

    Which path a size takes does not depend on the number of rows: on a GPU a Triton kernel; on a CPU two small products
    for sizes that split into suitable factors; otherwise one matrix product.

    Args:
        x: [..., d], any float dtype, any number of rows.

    Returns:
        the same shape and dtype; products are accumulated in float32 (float64 for float64).
    """
    if device.runs_triton(x.device):
        reason = unsupported(x)
        if reason is None:
            from kvconvert.kernels.rotate.triton import rotate

            return rotate(x, inverse)
        device.fall_back("A Hadamard rotation", reason)
    factors = factor_orders(x.shape[-1]) if x.device.type == "cpu" else None
    return factored_transform(x, factors, inverse) if factors else hadamard_reference(x, inverse)


def rotate_new_tokens(
    queries: Tensor | None, keys: Tensor, values: Tensor, rotations: Rotations
) -> tuple[Tensor | None, Tensor, Tensor]:
    """New keys and values, and with the keys their queries if given, rotated as the scheme rotates them.

    On a CPU in one product where that gives the same numbers: a product of a single row rounds in an order of its own.

    Args:
        queries, keys, values: [B, heads, T, channels].
        rotations: which are rotated.
    """
    tokens = [queries, keys, values]
    flags = rotations.keys and queries is not None, rotations.keys, rotations.values
    chosen = [i for i in range(3) if flags[i]]
    given = [tokens[i] for i in chosen]
    together = keys.device.type == "cpu" and not device.runs_triton(keys.device) and len(given) > 1
    shapes = [(part.shape[3], part.dtype, part.numel() == part.shape[3]) for part in given] if together else []
    if together and len(set(shapes)) == 1 and not shapes[0][2]:
        rotated = hadamard_transform(torch.cat(given, 1)).split([part.shape[1] for part in given], 1)
    else:
        rotated = [hadamard_transform(part) for part in given]
    for i, part in zip(chosen, rotated, strict=True):
        tokens[i] = part
    return tokens[0], tokens[1], tokens[2]


def many_rows() -> int:
    """From how many rows on a program of the kernels takes more of them."""
    from kvconvert.kernels.rotate import triton as launch

    return 1 + launch.MANY_PROGRAMS * launch.FEW_ROWS
