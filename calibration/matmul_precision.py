"""Precision of float32 matrix products on a GPU: TF32 where a search compares large errors, float32 where it adds up.

TF32 rounds the factors to 11 significant bits and adds in float32, several times as fast. That changes the error that
rounding weights to 8 bits or less makes by far less than the error. A Hessian, whose inverse depends on its smallest
eigenvalues, is added up in float32. On a CPU nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """Within the block products of float32 matrices on this device may use TF32."""
    with _precision("high", device):
        yield


@contextmanager
def float32_products(device: torch.device) -> Iterator[None]:
    """Within the block, which may be inside one of `tf32_products`, they do not."""
    with _precision("highest", device):
        yield


@contextmanager
def _precision(precision: str, device: torch.device) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and before != precision:
        torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        if before != torch.get_float32_matmul_precision():
            torch.set_float32_matmul_precision(before)
