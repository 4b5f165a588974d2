"""How a request's tokens are chosen, and how likely they were; `kernels/sampling` chooses them.

Settings that change logits before that are applied by transformers' own processors. They look at all tokens so far,
which on a GPU the host does not know yet: each such request keeps its tokens in a tensor on the device. Other requests
of a batch do without.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from kvconvert.arguments import Natural, Temperature, TopP, checked_fields
from kvconvert.bundle.generation import DRAWING, MOST_NGRAM, NGRAMS, PROCESSED
from kvconvert.errors import NumericError, UsageError, did_you_mean, first_line
from kvconvert.kernels.launches import skips_launches
from kvconvert.kernels.sampling import COLDEST, HOTTEST
from kvconvert.kernels.sampling import sample as sample  # kept importable from here

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NO_NUMBERS = (
    "The model computes NaN or infinity, so no token can be chosen; its weights are damaged, or too large for their "
    "dtype: fetch or convert it again."
)


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


Processors = Callable[[torch.device], LogitsProcessorList]


def recommended(settings: Mapping[str, Any], unstated: float = 0.0) -> Sampling:
    """How tokens are chosen according to a model's generation settings.

    Args:
        settings: see `kvconvert.bundle.generation`; without `do_sample` its temperature, top_k, and top_p mean nothing.
        unstated: the temperature where nothing is said of sampling.

    Raises:
        UsageError: a value out of range.
    """
    draws = settings.get("do_sample")
    drawn: dict[str, Any] = {"temperature": unstated if draws is None else 1.0 if draws else 0.0}
    drawn |= {name: settings[name] for name in DRAWING[:3] if draws and name in settings}
    processed = {name: settings[name] for name in PROCESSED if name in settings}
    return Sampling(**drawn, settings=processed)


def check_settings(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Refuse a model's generation settings that transformers would refuse while it generates (UsageError)."""
    sampling = recommended(settings)
    stops = settings.get("eos_token_id", [])
    logits_processors(model, sampling, [0], 1, stops if isinstance(stops, list) else [stops])


def logits_processors(
    model: PreTrainedModel,
    sampling: Sampling,
    prompt: Sequence[int],
    max_new_tokens: int,
    stops: Collection[int],
    constraint: LogitsProcessor | None = None,
) -> Processors | None:
    """What makes the processors of a request on a device, those of temperature, top_k, and top_p included; None for a
    request without `settings` and without a constraint.

    Args:
        model: as transformers' `generate` has it.
        sampling: the request's sampling.
        prompt: its token ids.
        max_new_tokens: the number of tokens that the request may generate.
        stops: tokens that end it.
        constraint: applied before all others.

    Raises:
        UsageError: a setting that transformers does not accept.
    """
    settings = {n: v for n, v in sampling.settings.items() if not (sampling.greedy and n in DRAWING)}
    for name in NGRAMS:
        if isinstance(size := settings.get(name), int) and size > MOST_NGRAM:
            raise UsageError(f"`settings` has {name} = {size:,}; an n-gram has {MOST_NGRAM:,} tokens at most.")
    if not stops:
        settings.pop("exponential_decay_length_penalty", None)  # there is nothing that it could make likelier
    if not settings and constraint is None:
        return None
    drawn: dict[str, Any] = {} if sampling.greedy else {name: getattr(sampling, name) for name in DRAWING[:3]}
    if drawn:  # transformers takes no integer
        drawn["temperature"] = float(sampling.temperature)

    def make(
        device: torch.device, constrained: bool = True, prompt: Sequence[int] = prompt, new: int = max_new_tokens
    ) -> LogitsProcessorList:
        config = GenerationConfig(**settings, **drawn, do_sample=not sampling.greedy)
        config.max_length = len(prompt) + new
        config._eos_token_tensor = torch.tensor(sorted(stops), device=device) if stops else None
        ids = torch.tensor([prompt], device=device)
        made = model._get_logits_processor(config, len(prompt), ids, None, LogitsProcessorList(), str(device), {})
        # The engine looks for NaN without waiting for the device.
        made = [p for p in made if not isinstance(p, RefuseNoNumbers)]
        made = [_Temperature(p) if isinstance(p, TemperatureLogitsWarper) else p for p in made]
        for n, (first, second) in enumerate(pairwise(made)):
            if isinstance(first, _Temperature) and isinstance(second, TopKLogitsWarper):
                # The likeliest are chosen before logits are divided, which may make different ones equal.
                made[n : n + 2] = second, first
        return LogitsProcessorList(made if constraint is None or not constrained else [constraint, *made])

    # Some values are looked at only when the processors are called, or many tokens later.
    try:
        start, factor = settings.get("exponential_decay_length_penalty", (0, 1.0))
        pow(factor + 0.0, max(max_new_tokens - operator.index(start), 0))
        for ids, new in ((prompt, max_new_tokens), (prompt[:1], 1)):  # some apply to the first or last token alone
            made = make(torch.device("cpu"), False, ids, new)
            made(torch.tensor([ids]), torch.zeros(1, model.config.get_text_config(decoder=True).vocab_size))
    except Exception as error:  # processors do many things with their values
        raise UsageError(
            f"The generation settings {', '.join(settings)} cannot be applied ({first_line(error)}); correct them in "
            "`sampling`, or in the model's generation_config.json."
        ) from error
    return make


class RefuseNoNumbers(LogitsProcessor):
    """Raises a NumericError where no token can be chosen: transformers takes the first of the vocabulary, which may
    well end the text.

    A GPU is waited for after the prompt and by `check`, which belongs to the end of the text.
    """

    def __init__(self) -> None:
        self._sound: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [B, V] as they are."""
        if not skips_launches():
            sound = has_numbers(scores).all()
            if self._sound is None or scores.device.type == "cpu":
                self._sound = sound
                self.check()
            else:
                self._sound &= sound
        return scores

    def check(self) -> None:
        """Raise for any of the scores so far."""
        if self._sound is not None and not bool(self._sound):
            raise NumericError(NO_NUMBERS)


def has_numbers(logits: Tensor) -> Tensor:
    """Whether the largest of each row [..., V] is a finite number."""
    return logits.amax(-1) * 0 == 0  # fewer launches than isfinite


class _Temperature(LogitsProcessor):
    """A temperature as `sampling` divides by it, where transformers' own goes to infinity or to no number at all."""

    def __init__(self, warper: TemperatureLogitsWarper) -> None:
        self._temperature = warper.temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return (scores - scores.amax(-1, keepdim=True)) / min(max(self._temperature, COLDEST), HOTTEST)


@dataclass
class ProcessedRow:
    """The logits processors of one row, and its tokens so far.

    Attributes:
        processors: the request's processors.
        ids: int64 [1, tokens that it may come to].
        length: tokens so far.
    """

    processors: LogitsProcessorList
    ids: Tensor
    length: int

    @classmethod
    def of(cls, make: Processors, prompt: Sequence[int], max_new_tokens: int, device: torch.device) -> ProcessedRow:
        """The row of a request whose prompt has been read."""
        ids = torch.tensor([[*prompt, *[0] * max_new_tokens]], device=device)
        return cls(make(device), ids, len(prompt))

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [1, V] in float32, from which a token is chosen at temperature 1, or the most likely one."""
        return self.processors(self.ids[:, : self.length], logits.to(torch.float32, copy=True))

    def append(self, token: Tensor) -> None:
        """Add the token that was chosen, int64 [1]; one beyond the request's last is not needed."""
        if self.length < self.ids.shape[1]:
            self.ids[0, self.length : self.length + 1] = token
            self.length += 1
