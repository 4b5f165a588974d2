"""How a request's tokens are chosen, and how likely they were; `kernels/sampling` chooses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvconvert.arguments import Natural, Temperature, TopP, checked_fields
from kvconvert.bundle.generation import PROCESSED
from kvconvert.errors import UsageError, did_you_mean
from kvconvert.kernels.sampling import sample as sample  # kept importable from here


@checked_fields
@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token, whatever the other fields say.
        top_k: only the k most likely tokens may be drawn; 0 allows all.
        top_p: of these, only the most likely ones whose probabilities sum up to top_p; 1 allows all.
        seed: of the request's random stream, a 64-bit number; None draws one when the request is added.
        settings: what else changes which token is chosen, by transformers' names: `repetition_penalty`, `min_p`,
            `bad_words_ids`, and others (`kvconvert.bundle.generation.PROCESSED`).

    Raises:
        UsageError: a value outside its range, or an unknown setting.
    """

    temperature: Temperature = 0.0
    top_k: Natural = 0
    top_p: TopP = 1.0
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.settings if name not in PROCESSED]:
            name = min(unknown)
            raise UsageError(f"`settings` has {name}, which cannot be applied; {did_you_mean(name, PROCESSED)}")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def restricts(self) -> bool:
        """Whether some tokens may not be drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was by the model's logits, before any setting changed them.

    Attributes:
        chosen: natural logarithm of the token's probability.
        likeliest: ids of the likeliest tokens, the likeliest first, each with the logarithm of its probability.
    """

    chosen: float
    likeliest: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, packed: list[float], count: int) -> TokenLogprobs:
        """What `log_probabilities` packed of one row, with so many of the likeliest tokens."""
        most = len(packed) // 2
        return cls(packed[0], tuple((int(packed[1 + n]), packed[1 + most + n]) for n in range(count)))


def log_probabilities(logits: Tensor, chosen: Tensor, most: int) -> Tensor:
    """Logarithms of the probabilities of the chosen and of the likeliest tokens, in one tensor that is fetched at once.

    Args:
        logits: [B, V], of any floating-point dtype.
        chosen: int64 [B].
        most: how many of the likeliest tokens.

    Returns:
        float64 [B, 1 + 2 * most]: of the chosen token, then the ids of the likeliest ones, then theirs.
    """
    logs = logits.float().log_softmax(-1)
    values, ids = logs.topk(most, dim=-1)
    return torch.cat([logs.gather(1, chosen[:, None]).double(), ids.double(), values.double()], 1)
