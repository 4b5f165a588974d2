"""RoPE read off its tables of cosines and sines, as the model hands them to its layers.

A layer gets cos and sin [T, R] of positions 0, 1, ..., whatever made them: every scaling that leaves frequencies
as they are for all lengths is in the angles (linear, llama3, YaRN), a factor on both (YaRN's attention factor) in their
size, partial RoPE in R. How channels are paired does not always show in the tables: halves (i, i + R / 2) or neighbours
(2 i, 2 i + 1). The wrong pairing makes no constant of keys that have one, so that keys themselves decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 0.02  # of a table's entries: bfloat16 rounds those near 1 by 0.004


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embeddings of a head.

    Attributes:
        frequencies: float32 [D / 2], radians per token; 0 for channels that are not turned.
        pairs: int64 [D / 2, 2], the channels (a, b) of each: a becomes a cos - b sin, b b cos + a sin.
        scale: by which turned channels are multiplied.
    """

    frequencies: Tensor
    pairs: Tensor
    scale: float

    def undone(self, keys: Tensor) -> Tensor:
        """Keys [..., T, D] of positions 0 to T - 1 as they were before RoPE, but scaled: float32."""
        position = torch.arange(keys.shape[-2], device=keys.device, dtype=torch.float64)
        angle = position.unsqueeze(1) * self.frequencies.to(keys.device, torch.float64)
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = self.pairs.to(keys.device).unbind(1)
        a, b = keys[..., first].float(), keys[..., second].float()
        result = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
        result[..., first], result[..., second] = a * cos + b * sin, b * cos - a * sin
        return result


def ropes_of(embeddings: object, dim: int) -> list[Rope] | str:
    """What a layer's tables of cosines and sines may mean, or why they mean nothing that a constant can be kept for.

    Args:
        embeddings: (cos, sin), each [1, T, R] of positions 0 to T - 1, as layers get them; anything else is refused.
        dim: D, channels of a head.

    Returns:
        one or two readings, which differ in how channels are paired; or the end of a sentence.
    """
    tables = embeddings if isinstance(embeddings, (tuple, list)) else ()
    if len(tables) != 2 or not all(torch.is_tensor(t) and t.is_floating_point() and t.dim() == 3 for t in tables):
        return "the layer gets no table of cosines and sines of its RoPE"
    cos, sin = (table[0].double().cpu() for table in tables)
    if len(tables[0]) != 1 or len(cos) < 2 or dim % 2:
        return "its RoPE's tables are not those of one sequence of tokens"
    count = cos.shape[1]
    half = count // 2
    if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
        cos, sin, arrangements = cos[:, :half], sin[:, :half], ("halves", "neighbours")
    elif torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):
        cos, sin, arrangements = cos[:, ::2], sin[:, ::2], ("neighbours",)
    else:
        count, arrangements = 2 * count, ("halves", "neighbours")
    if count > dim:
        return f"its RoPE turns {count} channels of heads of {dim}"
    scale = float(torch.hypot(cos[0], sin[0]).mean())
    frequencies = _frequencies(cos, sin)
    angle = torch.arange(len(cos), dtype=torch.float64).unsqueeze(1) * frequencies
    if not scale or max((scale * angle.cos() - cos).abs().max(), (scale * angle.sin() - sin).abs().max()) > (
        TOLERANCE * scale
    ):
        return "its RoPE does not turn by equal angles from token to token"
    rest = torch.arange(count, dim).view(-1, 2)
    turned = torch.arange(count)
    frequencies = torch.cat([frequencies, frequencies.new_zeros(len(rest))]).float()
    pairings = {"halves": turned.view(2, -1).T, "neighbours": turned.view(-1, 2)}
    return [Rope(frequencies, torch.cat([pairings[name], rest]), scale) for name in arrangements]


def _frequencies(cos: Tensor, sin: Tensor) -> Tensor:
    """Radians per token, float64 [F]: from the first step, refined by ever longer ones, which rounding moves less."""
    frequencies = torch.atan2(sin[1], cos[1])
    step = 2
    while step < len(cos):
        beyond = torch.atan2(sin[step], cos[step]) - step * frequencies
        frequencies += (torch.remainder(beyond + math.pi, 2 * math.pi) - math.pi) / step
        step *= 2
    return frequencies


def constant_part(keys: Tensor, ropes: Sequence[Rope], first: int) -> tuple[Rope, Tensor, Tensor]:
    """The mean of keys before RoPE.

    Args:
        keys: [n, H, T, D] after RoPE, of positions 0 to T - 1, not rotated otherwise.
        ropes: readings of the layer's RoPE; the one that makes most of the keys constant is taken.
        first: the first token that is quantized; those before it are left out.

    Returns:
        the RoPE, the mean float32 [H, D], and float64 [H]: its share of the energy of each head's keys.
    """
    energy = keys[:, :, first:].double().square().sum(3).mean((0, 2)).clamp_min(torch.finfo(torch.float64).tiny)
    best: tuple[Rope, Tensor, Tensor] | None = None
    for rope in ropes:
        mean = rope.undone(keys)[:, :, first:].mean((0, 2), dtype=torch.float64)
        share = mean.square().sum(1) / energy
        if best is None or share.mean() > best[2].mean():
            best = rope, mean.float(), share
    return best
