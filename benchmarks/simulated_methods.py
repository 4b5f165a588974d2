"""The methods of `benchmarks/simulated_baselines.py`: what each would read back of a layer's keys and values.

Uniform grids have one clip ratio per width that is not calibrated, but for the rows of `simulated_feedback.py`. The
first tokens and what does not fill a page of 128 stay exact. Bits are nominal: codes, scales and zero points in
float16, norms, and what stays exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from simulated_feedback import Known, rounded_keys
from torch import Tensor

from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.kernels.select import column_sums, select_tokens

PAGE, SINKS = 128, 4
# Of the widths that the quantizer has; about what calibration chooses for near-Gaussian groups of 128.
CLIP_RATIOS = {1: 0.5, 2: 0.85, 4: 1.0, 8: 1.0}
FLOAT_BITS = 16


@dataclass
class Layer:
    """One layer's prompt: queries [Hq, n, D] of its last tokens, keys and values [H, n, D]; what calibration found."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    known: Known | None = None


@dataclass
class Outcome:
    """What is read back: keys and values [H, kept, D]; bits that a prompt of `numbers` numbers takes."""

    keys: Tensor
    values: Tensor
    bits: float


Method = Callable[[Layer], Outcome]
Side = Callable[[Tensor], tuple[Tensor, float]]


# One side of a page: tokens [H, n, D], n a multiple of 128, and the bits of one of its numbers.


def exact(x: Tensor) -> tuple[Tensor, float]:
    """As it is."""
    return x, FLOAT_BITS


def per_channel(x: Tensor, bits: int = 2, group: int = 128) -> tuple[Tensor, float]:
    """A scale and zero point for each channel and group of tokens."""
    return _uniform(x, bits, group, 1), bits + 2 * FLOAT_BITS / group


def per_token(x: Tensor, bits: int = 2, group: int = 128) -> tuple[Tensor, float]:
    """A scale and zero point for each token and group of channels."""
    group = min(group, x.shape[2])
    return _uniform(x, bits, group, 2), bits + 2 * FLOAT_BITS / group


def per_prompt(x: Tensor, bits: int = 2, tokens: int | None = None) -> tuple[Tensor, float]:
    """CalibQuant's: a scale and zero point for each channel of the whole prompt, or of every `tokens` tokens."""
    parts = x.split(tokens or x.shape[1], 1)
    size = parts[0].shape[1]
    return torch.cat([_uniform(part, bits, part.shape[1], 1) for part in parts], 1), bits + 2 * FLOAT_BITS / size


def _uniform(x: Tensor, bits: int, group: int, dim: int) -> Tensor:
    found = quantize(x, bits, group, dim, CLIP_RATIOS[bits])
    return dequantize(found.codes, found.scale, found.zero_point, group, dim)


def rotated(x: Tensor, side: Side) -> tuple[Tensor, float]:
    """`side` in the coordinates of a Hadamard matrix."""
    found, bits = side(hadamard_transform(x))
    return hadamard_transform(found, inverse=True), bits


def normalised(x: Tensor, side: Side) -> tuple[Tensor, float]:
    """`side` of tokens divided by their root mean square over all heads, which is stored."""
    norm = x.square().mean((0, 2), keepdim=True).sqrt().half().float().clamp(min=1e-8)
    found, bits = side(x / norm)
    return found * norm, bits + FLOAT_BITS / (x.shape[0] * x.shape[2])


def lloyd_max(x: Tensor, bits: int = 2) -> tuple[Tensor, float]:
    """TurboQuant's first stage: a random rotation, one norm per token and head, the best levels for a Gaussian."""
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(x.shape[2], x.shape[2], generator=generator))[0].to(x)
    y = x @ rotation
    norm = y.square().mean(-1, keepdim=True).sqrt().half().float().clamp(min=1e-8)
    levels = gaussian_levels(bits).to(x)
    codes = torch.bucketize((y / norm).contiguous(), (levels[1:] + levels[:-1]) / 2)
    return (levels[codes] * norm) @ rotation.T, bits + FLOAT_BITS / x.shape[2]


def gaussian_levels(bits: int) -> Tensor:
    """The 2^bits levels with the smallest mean squared error for a standard normal distribution (Lloyd, Max)."""
    normal = torch.distributions.Normal(0.0, 1.0)
    samples = normal.icdf((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)
    levels = normal.icdf((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    for _ in range(200):
        nearest = torch.bucketize(samples, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros_like(levels).index_add_(0, nearest, samples)
        levels = sums / nearest.bincount(minlength=len(levels))
    return levels.float()


def pages(layer: Layer, keys: Side, values: Side) -> Outcome:
    """Complete pages after the sink tokens; what remains is exact."""
    return _stored(layer, keys, values, layer.keys.shape[1])


def _stored(layer: Layer, keys: Side, values: Side, prompt: int) -> Outcome:
    kept = layer.keys.shape[1]
    stop = SINKS + (kept - SINKS) // PAGE * PAGE
    found, bits = [], 0.0
    for x, side in ((layer.keys, keys), (layer.values, values)):
        read, width = side(x[:, SINKS:stop])
        found.append(torch.cat([x[:, :SINKS], read, x[:, stop:]], 1))
        bits += (width * (stop - SINKS) + FLOAT_BITS * (kept - stop + SINKS)) / prompt / 2
    return Outcome(*found, bits)


def boosted(layer: Layer, values: Side, fraction: float, block: str) -> Outcome:
    """Some key channels at 4 bits, the others at 2: chosen by `E|q| E[range]` on calibration text.

    Args:
        layer: with what calibration text says of it.
        values: how values are stored.
        fraction: of the channels.
        block: what is chosen together: "channel", "pair" (the two channels that RoPE turns into each other), or "band"
            (neighbouring pairs, four at a time).
    """
    sensitivity = layer.known.sensitivity
    size = sensitivity.shape[1]
    blocks = sensitivity.unflatten(1, {"channel": (1, size, 1), "pair": (2, size // 2, 1)}.get(block, (2, -1, 4)))
    score = blocks.sum((1, 3))
    count = round(fraction * score.shape[1])
    best = torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.topk(count, dim=1).indices, True)
    chosen = best[:, None, :, None].expand(blocks.shape).flatten(1)

    def keys(x: Tensor) -> tuple[Tensor, float]:
        low, high = per_channel(x, 2), per_channel(x, 4)
        return torch.where(chosen[:, None], high[0], low[0]), low[1] + 2 * fraction

    return pages(layer, keys, values)


def fed_back(layer: Layer, bits: int, calibrated: bool, feedback: bool) -> Outcome:
    """OScaR's pages with calibrated clip ratios; see `simulated_feedback.py`."""
    size = layer.keys.shape[0] * layer.keys.shape[2]
    width = bits + 2 * FLOAT_BITS / PAGE + FLOAT_BITS / size

    def keys(x: Tensor) -> tuple[Tensor, float]:
        return rounded_keys(x, layer.known, bits, calibrated, feedback), width

    return pages(layer, keys, TWO_BIT_VALUES)


def evicted(layer: Layer, share: float, queries: int | None, keys: Side = exact, values: Side = exact) -> Outcome:
    """Half of the kept tokens are the newest, half those that received most attention.

    Args:
        layer: its prompt.
        share: of the prompt that is kept.
        queries: whose attention counts: all (H2O), or the newest ones alone (SnapKV, without its pooling).
        keys, values: how the kept tokens are stored.
    """
    n = layer.keys.shape[1]
    counted = layer.queries if queries is None else layer.queries[:, -queries:]
    mass = column_sums(counted, layer.keys, None, counted.shape[2] ** -0.5)
    index = select_tokens(mass, round(share * n / 2), round(share * n / 2), SINKS)
    index = index.unsqueeze(2).expand(-1, -1, layer.keys.shape[2])
    return _stored(Layer(counted, layer.keys.gather(1, index), layer.values.gather(1, index)), keys, values, n)


def _of(side: Callable[..., tuple[Tensor, float]], **options: int) -> Side:
    return partial(side, **options)


TWO_BIT_VALUES = partial(rotated, side=per_token)
OSCAR = partial(rotated, side=partial(normalised, side=per_channel))
ROTATIONS = {False: "Hadamard", True: "calibrated"}
METHODS: dict[str, Method] = {
    "keys per channel (KIVI)": partial(pages, keys=per_channel, values=per_token),
    "keys per token": partial(pages, keys=per_token, values=per_token),
    "rotation, keys per token (QuaRot-like)": partial(pages, keys=TWO_BIT_VALUES, values=TWO_BIT_VALUES),
    "rotation, keys per channel": partial(pages, keys=partial(rotated, side=per_channel), values=TWO_BIT_VALUES),
    "rotation and norm (OScaR)": partial(pages, keys=OSCAR, values=TWO_BIT_VALUES),
    "random rotation, Lloyd-Max levels (TurboQuant-like)": partial(pages, keys=lloyd_max, values=lloyd_max),
    **{
        f"{name} rotation, keys of {bits} bits, {'error feedback' if feedback else 'to nearest'}": partial(
            fed_back, bits=bits, calibrated=calibrated, feedback=feedback
        )
        for bits in (2, 1)
        for feedback in (False, True)
        for calibrated, name in ROTATIONS.items()
    },
    **{
        f"{block}s boosted, {fraction:.1%}": partial(boosted, values=TWO_BIT_VALUES, fraction=fraction, block=block)
        for fraction in (0.125, 0.25)
        for block in ("channel", "pair", "band")
    },
    **{
        f"spans of {length}, {bits} bit (CalibQuant)": partial(
            pages, keys=_of(per_prompt, bits=bits, tokens=tokens), values=_of(per_prompt, bits=bits, tokens=tokens)
        )
        for bits in (1, 2)
        for length, tokens in (("the prompt", None), ("512", 512), ("256", 256))
    },
    "keys as the prompt's span, 2 bit": partial(pages, keys=per_prompt, values=exact),
    "values as the prompt's span, 2 bit": partial(pages, keys=exact, values=per_prompt),
    **{
        f"{share:.0%} kept by {name}": partial(evicted, share=share, queries=queries)
        for share in (0.5, 0.25)
        for name, queries in (("all queries (H2O-like)", None), ("the last 32 queries (SnapKV-like)", 32))
    },
    **{
        f"50% kept by {name}, OScaR": partial(evicted, share=0.5, queries=queries, keys=OSCAR, values=TWO_BIT_VALUES)
        for name, queries in (("all queries", None), ("the last 32 queries", 32))
    },
}
