"""A scheme of which heads keep parts of a prompt, and networks that predict which."""

import torch

from kvconvert.methods import KVScheme
from kvconvert.methods.kvzip import SCORE_QUANTILES, scorer_shapes


def predicting(**changes) -> KVScheme:
    """Keys and values of 3 and 2 bits, of two fifths of a prompt."""
    fields = {
        "key_bits": 3,
        "value_bits": 2,
        "key_group_size": 16,
        "value_group_size": 16,
        "sink_tokens": 4,
        "rotate_keys": "hadamard",
        "token_norm": "per_head",
        "heavy_ratio": 0.4,
        "recent_ratio": 0.02,
        "selection": "predicted",
    }
    return KVScheme(**fields | changes)


def scorer_plan(layers: int, heads: int, dim: int) -> dict[str, torch.Tensor]:
    """Random networks whose scores spread more in later heads, which keep more of a prompt."""
    generator, plan = torch.Generator().manual_seed(0), {}
    for layer in range(layers):
        for name, shape in scorer_shapes(heads, dim, dim).items():
            plan[f"layers.{layer}.{name}"] = 0.1 * torch.randn(shape, generator=generator)
        spread = torch.linspace(2, -2, SCORE_QUANTILES) * (1.0 + torch.arange(heads)[:, None])
        plan[f"layers.{layer}.scorer_quantiles"] = spread
    return plan
