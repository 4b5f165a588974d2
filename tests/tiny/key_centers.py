"""Key centers for caches without a calibrated model: their plan tensors, and what they mean, written independently."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000.0


def frequencies(dim: int) -> Tensor:
    """RoPE's, in radians per token."""
    return BASE ** (-torch.arange(0, dim, 2).double() / dim)


def center_plan(layers: int, heads: int, dim: int, size: float = 3.0, seed: int = 7) -> dict[str, Tensor]:
    """Plan tensors of layers whose constant parts are random and of this size."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.arange(dim // 2, dtype=torch.int32)
    plan = {}
    for index in range(layers):
        plan[f"layers.{index}.key_mean"] = size * torch.randn(heads, dim, generator=generator)
        plan[f"layers.{index}.rope_frequencies"] = frequencies(dim).float()
        plan[f"layers.{index}.rope_pairs"] = torch.stack([half, half + dim // 2], 1)
    return plan


def constant_part(mean: Tensor, positions: Tensor) -> Tensor:
    """RoPE at `positions` [n] of vectors [H, D] whose pairs are half a head apart: float64 [H, n, D]."""
    # The mean as the cache has it.
    first, second = mean.half().double().unsqueeze(1).chunk(2, -1)
    angle = positions.double().unsqueeze(1) * frequencies(mean.shape[1]).float().double()
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
