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

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvconvert.kernels.rotate import hadamard_transform

# Pages whose constant parts are computed at a time: bounds the float32 copies that a long prompt's pages need.
PAGES_AT_ONCE = 32


@dataclass(frozen=True, eq=False)
class KeyCenter:
    """The constant part of one layer's keys, in the coordinates of stored keys.

    Attributes:
        matrix: M, float16 [H, D, 2F], contiguous.
        frequencies: w, float32 [F], in radians per token.
    """

    matrix: Tensor
    frequencies: Tensor
    _steps: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict, init=False, repr=False)

    def steps(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """phi of 0 ... count - 1: [count, 2F]; the same tensor at every call, whose address kernels may keep."""
        if (count, dtype) not in self._steps:
            with torch.inference_mode(False):
                steps = page_features(self.frequencies.new_zeros(1), count, self.frequencies)
                self._steps[count, dtype] = steps[0].to(dtype)
        return self._steps[count, dtype]


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


def key_center(mean: Tensor, frequencies: Tensor, pairs: Tensor, rotated: bool) -> KeyCenter:
    """The constant part of a layer's keys in the coordinates in which they are stored.

    Args:
        mean, frequencies, pairs: see `rope_matrix`.
        rotated: whether keys are stored after their Hadamard rotation.
    """
    frequencies = frequencies.to(mean.device, torch.float32).contiguous()
    matrix = rope_matrix(mean, frequencies, pairs.to(mean.device))
    if rotated:
        matrix = hadamard_transform(matrix.transpose(1, 2)).transpose(1, 2)
    return KeyCenter(matrix.half().contiguous(), frequencies)


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


def projected_scores(projected: Tensor, starts: Tensor, count: int, center: KeyCenter) -> Tensor:
    """q . c(t), to be added to the dot products of queries with N pages' stored keys: float32 [N, H, R, count].

    Queries are turned back by each page's first position, which is less work than turning `count` tokens' features on,
    then multiplied with features that all pages share.

    Args:
        projected: q M, float32 [N or 1, H, R, 2F].
        starts: [N], the position of each page's first token.
        count: tokens of a page.
        center: the layer's key center.
    """
    angle = (starts.float().unsqueeze(1) * center.frequencies)[:, None, None]
    cos, sin = angle.cos(), angle.sin()
    first, second = projected.chunk(2, -1)
    turned = torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
    return turned @ center.steps(count).T


def add_centers_reference(tokens: Tensor, position: int, page_size: int, center: KeyCenter, sign: int) -> None:
    """Add sign * c(t) in place to tokens [H, n, D] of consecutive pages, the first of which begins at `position`."""
    for first in range(0, tokens.shape[1], PAGES_AT_ONCE * page_size):
        some = tokens[:, first : first + PAGES_AT_ONCE * page_size]
        starts = torch.arange(0, some.shape[1], page_size, device=tokens.device) + (position + first)
        centers = page_centers(starts, page_size, center).transpose(0, 1).flatten(1, 2)
        some.copy_(some.float().add_(centers[:, : some.shape[1]], alpha=sign))
