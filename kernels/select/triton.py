"""The kernels of an eviction: scores that a `TokenScorer` predicts, and the tokens that are kept.

Both read tokens where the cache has them: each KV head of a sequence has a buffer of its own, whose address a table
gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvconvert.kernels.device import capability, upload
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.rotate.matrices import hadamard_signs
from kvconvert.kernels.rotate.triton import product_with_signs

# Tokens of a program, fewer before Hopper, whose products hold more registers; and channels of a step of its products.
TOKENS, FEW_TOKENS, STEP = 64, 32, 32
# Tokens of a program that copies.
COPIED = 32


@triton.constexpr_function
def _padded(size):
    return triton.next_power_of_2(size)


@triton.jit
def _channels(buffer, token, channel, tokens, SIZE: tl.constexpr, LAST: tl.constexpr):
    """Channels [TOKENS, STEP] of tokens, zeros beyond the last of either."""
    mask = (token < tokens)[:, None] & (channel < LAST)[None, :]
    return tl.load(buffer + token[:, None] * SIZE + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _weights(hidden_weight, column, part, features, LAST: tl.constexpr, CHANNELS: tl.constexpr):
    """Columns [STEP, CHANNELS] of the first layer, from feature `column` on."""
    channel = tl.arange(0, CHANNELS)
    return tl.load(
        hidden_weight + channel[None, :] * features + column + part[:, None], mask=(part < LAST)[:, None], other=0.0
    )


@kernel(do_not_specialize=["tokens", "sink_tokens", "newest"])
def score_kernel(
    origin,
    places,
    signs,
    normaliser,
    hidden_weight,
    hidden_bias,
    weight,
    bias,
    scores,
    tokens,
    sink_tokens,
    newest,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROTATED: tl.constexpr,
    LARGEST: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    """The scores of TOKENS tokens in all heads; see `TokenScorer.scores`."""
    HALF: tl.constexpr = KEY_SIZE // 2
    FEATURES: tl.constexpr = HEADS * (VALUE_SIZE + HALF)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    hidden = tl.zeros([TOKENS, CHANNELS], tl.float32) + tl.load(hidden_bias + channel)[None, :]
    for head in range(HEADS):
        values = origin + tl.load(places + 2 * head + 1)
        for start in range(0, VALUE_SIZE, STEP):
            part = start + tl.arange(0, STEP)
            x = _channels(values, token, part, tokens, VALUE_SIZE, VALUE_SIZE).to(tl.float32)
            w = _weights(hidden_weight, head * VALUE_SIZE, part, FEATURES, VALUE_SIZE, CHANNELS)
            hidden = tl.dot(x, w, hidden, input_precision="tf32")
        keys = origin + tl.load(places + 2 * head)
        for start in range(0, HALF, STEP):
            part = start + tl.arange(0, STEP)
            if ROTATED:
                first = tl.zeros([TOKENS, STEP], tl.float32)
                second = tl.zeros([TOKENS, STEP], tl.float32)
                for begin in range(0, KEY_SIZE, STEP):
                    inner = begin + tl.arange(0, STEP)
                    x = _channels(keys, token, inner, tokens, KEY_SIZE, KEY_SIZE)
                    at = signs + part[None, :] * KEY_SIZE + inner[:, None]
                    mask = (part < HALF)[None, :] & (inner < KEY_SIZE)[:, None]
                    first = product_with_signs(x, tl.load(at, mask=mask, other=0.0), first)
                    second = product_with_signs(x, tl.load(at + HALF * KEY_SIZE, mask=mask, other=0.0), second)
                first *= normaliser
                second *= normaliser
            else:
                first = _channels(keys, token, part, tokens, KEY_SIZE, HALF).to(tl.float32)
                second = _channels(keys + HALF, token, part, tokens, KEY_SIZE, HALF).to(tl.float32)
            norm = tl.sqrt(first * first + second * second)
            w = _weights(hidden_weight, HEADS * VALUE_SIZE + head * HALF, part, FEATURES, HALF, CHANNELS)
            hidden = tl.dot(norm, w, hidden, input_precision="tf32")
    hidden = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
    kept = (token < sink_tokens) | (token >= tokens - newest)
    for head in range(HEADS):
        own = tl.load(weight + head * CHANNELS + channel)
        score = tl.sum(hidden * own[None, :], 1) + tl.load(bias + head)
        # A comparison lets NaN through.
        score = tl.exp(tl.where(score > LARGEST, LARGEST, score))
        score = tl.where(kept & (score == score), float("inf"), score)
        tl.store(scores + head * tokens + token, score, mask=token < tokens)


@triton.jit
def _copy(source, target, at, token, present, SIZE: tl.constexpr):
    TILE: tl.constexpr = _padded(SIZE)
    channel = tl.arange(0, TILE)
    mask = present[:, None] & (channel < SIZE)[None, :]
    x = tl.load(source + at[:, None] * SIZE + channel[None, :], mask=mask)
    tl.store(target + token[:, None] * SIZE + channel[None, :], x, mask=mask)


@kernel(do_not_specialize=["width"])
def keep_kernel(
    origin,
    places,
    index,
    width,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Copy TOKENS chosen tokens of one head to its new buffers."""
    head = tl.program_id(1)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    here = places + 5 * head
    present = token < tl.load(here + 4)
    at = tl.load(index + head.to(tl.int64) * width + token, mask=present, other=0)
    _copy(origin + tl.load(here), origin + tl.load(here + 2), at, token, present, KEY_SIZE)
    _copy(origin + tl.load(here + 1), origin + tl.load(here + 3), at, token, present, VALUE_SIZE)


def _distances(base: torch.Tensor, *columns: Sequence[torch.Tensor]) -> np.ndarray:
    """How far tensors lie from `base`, in elements: int64 [n, columns]."""
    addresses = np.array([[tensor.data_ptr() for tensor in row] for row in zip(*columns, strict=True)], np.int64)
    return (addresses - base.data_ptr()) // base.element_size()


def scores(
    scorer: tuple[torch.Tensor, ...],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    rotated: bool,
    sink_tokens: int,
    newest: int,
    largest: float,
) -> torch.Tensor:
    """`predicted_scores` of kernels/select/__init__.py, of what `unsupported` accepts."""
    base, (tokens, dim) = keys[0], keys[0].shape
    hidden_weight, hidden_bias, weight, bias = scorer
    found = torch.zeros(len(keys), tokens, dtype=torch.float32, device=base.device)
    signs, normaliser = hadamard_signs(dim, base.dtype, base.device) if rotated else (base, 1.0)
    places = upload(_distances(base, keys, values), base.device)
    # Pipelined in two stages, Triton 3.6 computes other numbers on Hopper where heads have 128 rotated channels.
    block = TOKENS if capability(base.device) >= (9, 0) else FEW_TOKENS
    score_kernel[(triton.cdiv(tokens, block),)](
        base, places, signs, normaliser, hidden_weight, hidden_bias, weight, bias, found, tokens, sink_tokens, newest,
        HEADS=len(keys), KEY_SIZE=dim, VALUE_SIZE=values[0].shape[1], CHANNELS=len(hidden_bias), ROTATED=rotated,
        LARGEST=largest, TOKENS=block, STEP=STEP, num_warps=8, num_stages=1,
    )  # fmt: skip
    return found


def keep(
    sources: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    targets: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    index: torch.Tensor,
) -> None:
    """`keep_tokens` of kernels/select/__init__.py, of what `unsupported` accepts."""
    base, (keys, values) = sources[0][0], targets
    counts = np.array([[len(target)] for target in keys], np.int64)
    places = np.concatenate([_distances(base, *sources, *targets), counts], 1)
    keep_kernel[(triton.cdiv(index.shape[1], COPIED), len(keys))](
        base, upload(places, base.device), index, index.shape[1], KEY_SIZE=base.shape[1], VALUE_SIZE=values[0].shape[1],
        TOKENS=COPIED, num_warps=4,
    )  # fmt: skip
