"""How `kvconvert generate` chooses tokens, checked before torch is imported."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvconvert.arguments import Natural, Temperature, TopP, checked_fields
from kvconvert.errors import NOTHING_DRAWN, UsageError

if TYPE_CHECKING:
    from transformers import GenerationConfig


@checked_fields
@dataclass(frozen=True)
class Choice:
    """How tokens are chosen. What is None is as in the model's generation_config.json; that is greedy where the file
    says nothing of sampling.

    Attributes:
        temperature: divides the logits; 0 always takes the most likely token.
        top_p: only the most likely tokens whose probabilities sum up to it may be drawn.
        top_k: the number of most likely tokens to draw from; 0 allows all.
        seed: the seed of the random numbers.
        stop: texts before which an answer ends.
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Natural | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        others = (self.top_p, self.top_k, self.seed)
        if self.temperature == 0 and any(value is not None for value in others):
            raise UsageError(
                "A temperature of 0 takes the most likely token and draws none; leave `top_p`, `top_k` and "
                "`seed` out, or raise the temperature."
            )
        if "" in self.stop:
            raise UsageError("`stop` is empty text, which is found everywhere; give the text that ends an answer.")

    def config(self, own: GenerationConfig) -> GenerationConfig:
        """The model's own generation config, changed by what is given (UsageError: a seed without sampling)."""
        config = copy.deepcopy(own)
        if self.temperature == 0:
            config.update(do_sample=False, temperature=None, top_p=None, top_k=None)
        else:
            given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            given = {name: value for name, value in given.items() if value is not None}
            config.update(**given, **({"do_sample": True} if given else {}))
        if self.seed is not None and not config.do_sample:
            raise UsageError(NOTHING_DRAWN)
        return config
