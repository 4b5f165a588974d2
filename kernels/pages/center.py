"""Keys with a constant part: what a page of keys has at its positions, kept apart from what is quantized.

Before RoPE most of a head's key is one vector, the mean mu of its keys (where the projection has a bias, mostly that).
RoPE turns it with the position, so that it fills the range of channels that turn fast. It need not be stored: with

    phi(t) = [cos(t w_1) ... cos(t w_F), sin(t w_1) ... sin(t w_F)]          for the F frequencies w of RoPE,
    c(t)   = RoPE(t) mu = phi(t) M^T                                         M [D, 2F], of one KV head

pages hold k(t) - c(t) alone, and attention adds q . c(t) = (q M) . phi(t) to the scores of their tokens. Rotations of
keys are in M; so is the arrangement of RoPE's pairs of channels, and channels without RoPE have rows of zeros.

Positions are those of a sequence's tokens in the order in which they came, 0 for the first. What flush subtracts is
what attention adds, whatever positions the model meant: where they differ (images, positions of the caller's own), what
is left to quantize is larger, and nothing else changes.

phi of a page's token j is phi of the page's first position turned on by j, in float32:

    cos((t + j) w) = cos(t w) cos(j w) - sin(t w) sin(j w),    sin((t + j) w) = sin(t w) cos(j w) + cos(t w) sin(j w)

with t w rounded to float32 once, so that every path that has to agree rounds alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class KeyCenter:
    """The constant part of one layer's keys, in the coordinates of stored keys.

    Attributes:
        matrix: M, float16 [H, D, 2F], contiguous.
        frequencies: w, float32 [F], in radians per token.
    """

    matrix: Tensor
    frequencies: Tensor


def rope_matrix(mean: Tensor, frequencies: Tensor, pairs: Tensor) -> Tensor:
    """M of keys that are not rotated, float32 [H, D, 2F].

    Args:
        mean: mu before RoPE, [H, D], times the factor by which RoPE scales (YaRN's attention factor).
        frequencies: [F].
        pairs: int [F, 2], the channels (a, b) that each frequency turns: a becomes a cos - b sin, b b cos + a sin.
    """
    heads, dim, count = *mean.shape, len(frequencies)
    first, second = pairs.long().unbind(1)
    each = torch.arange(count, device=mean.device)
    matrix = mean.new_zeros(heads, dim, 2 * count, dtype=torch.float32)
    a, b = mean[:, first].float(), mean[:, second].float()
    matrix[:, first, each], matrix[:, first, count + each] = a, -b
    matrix[:, second, each], matrix[:, second, count + each] = b, a
    return matrix


def page_features(starts: Tensor, count: int, frequencies: Tensor) -> Tensor:
    """phi of `count` consecutive positions from each of `starts` [N] on: float32 [N, count, 2F]."""
    start = starts.float().unsqueeze(1) * frequencies
    step = torch.arange(count, device=frequencies.device).float().unsqueeze(1) * frequencies
    cos_start, sin_start = start.cos().unsqueeze(1), start.sin().unsqueeze(1)
    cos_step, sin_step = step.cos(), step.sin()
    return torch.cat([cos_start * cos_step - sin_start * sin_step, sin_start * cos_step + cos_start * sin_step], dim=2)


def page_centers(starts: Tensor, count: int, center: KeyCenter) -> Tensor:
    """c(t) at `count` consecutive positions from each of `starts` [N] on: float32 [N, H, count, D]."""
    features = page_features(starts, count, center.frequencies)
    return features.unsqueeze(1) @ center.matrix.float().transpose(1, 2)


def center_scores(queries: Tensor, starts: Tensor, count: int, center: KeyCenter) -> Tensor:
    """q . c(t), to be added to the dot products of queries with N pages' stored keys.

    Args:
        queries: float32 [N or 1, H, R, D], in the coordinates of stored keys.
        starts: [N], the position of each page's first token.
        count: tokens of a page.
        center: of the layer.

    Returns:
        float32 [N, H, R, count].
    """
    features = page_features(starts, count, center.frequencies)
    return (queries @ center.matrix.float()) @ features.unsqueeze(1).transpose(2, 3)
