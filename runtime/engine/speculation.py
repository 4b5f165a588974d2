"""Drafts of tokens to come, which one pass of the model checks together.

A draft is accepted as far as it equals the tokens that are chosen from the model's own logits, greedily or by the
request's random stream, which belongs to the token's number and not to the pass. So the tokens are those without
drafts, up to the rounding of passes of one and of several tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvconvert.errors import UsageError
from kvconvert.models import CACHE
from kvconvert.runtime.engine.sampling import Sampling, sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow.

    Attributes:
        tokens: none where nothing is known.
        chances: for each one how likely it and all before it are accepted.
    """

    tokens: list[int]
    chances: list[float]


class Drafter(Protocol):
    """Proposes tokens for one request."""

    def read(self, tokens: Sequence[int], end: int) -> None:
        """Prepare for the first tokens of a prompt, up to `end`, while the model reads them."""

    def propose(self, tokens: Sequence[int], most: int) -> Draft:
        """At most so many tokens that may follow the prompt and what was generated, `tokens`; each call has all those
        of the call before.
        """

    def learn(self, checked: int, accepted: int) -> None:
        """Note that so many tokens of the latest draft were checked, and the first ones of them accepted."""


@dataclass(frozen=True)
class Speculation:
    """How an Engine drafts, by the names that transformers' `generate` has for it.

    Attributes:
        prompt_lookup_num_tokens: tokens of a draft that is found in the prompt and the answer so far; None for no such
            drafts.
        max_matching_ngram_size: tokens before a draft that have to be those at the end of the answer, at most.
        assistant_model: drafts in the place of the prompt; a model of the same tokenizer.
        num_assistant_tokens: tokens of its drafts.

    Raises:
        UsageError: a value outside its range, or two kinds of drafts.
    """

    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int = 8
    assistant_model: PreTrainedModel | None = None
    num_assistant_tokens: int = 5

    def __post_init__(self) -> None:
        if self.prompt_lookup_num_tokens is not None and self.assistant_model is not None:
            raise UsageError("`prompt_lookup_num_tokens` and `assistant_model` exclude each other; give one of them.")
        for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST_DRAFTED:
                raise UsageError(f"`{name}` is {value}; it has to be from 1 to {MOST_DRAFTED}.")

    @property
    def drafted(self) -> int:
        """Tokens of a draft, at most; 0 without drafts."""
        if self.assistant_model is not None:
            return self.num_assistant_tokens
        return self.prompt_lookup_num_tokens or 0

    def drafter(self, sampling: Sampling, prompt_tokens: int) -> Drafter | None:
        """For a new request, whose prompt has so many tokens; None without drafts."""
        if self.assistant_model is not None:
            return DraftModel(self.assistant_model, sampling, prompt_tokens)
        return PromptLookup(self.max_matching_ngram_size) if self.prompt_lookup_num_tokens else None


# Drafts are held in full precision beside a page's tokens.
MOST_DRAFTED = 64
# What a step that checks drafts takes longer than one without, as a part of the latter, as long as it was not measured:
# the host waits for its tokens, and each draft has to be computed.
CHECK_COST, TOKEN_COST = 0.3, 0.01
# By which part more tokens have to be expected in a given time.
GAIN = 0.05
# The latest times that count, how many plain steps are measured before drafts are checked, and how often what is
# assumed counts beside what was measured.
MEASURED, LEAST_PLAIN, ASSUMED = 9, 3, 2
# Steps in which drafts were not worth it, after which the oldest times are forgotten, so that others are tried again.
RETRIED = 256


class StepTimes:
    """What steps that check drafts take, over what steps without take; learned while an Engine serves."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=MEASURED)
        self._costs: dict[int, deque[float]] = {}
        self._declined = 0

    @property
    def known(self) -> bool:
        """Whether it is known what steps without drafts take."""
        return len(self._plain) >= LEAST_PLAIN

    def plain(self, seconds: float) -> None:
        """Note a step without drafts that followed another one."""
        self._plain.append(seconds)

    def checked(self, length: int, rows: int, seconds: float) -> None:
        """Note a step that checked so many drafts in each row, of which so many decoded."""
        if self.known:
            cost = seconds / median(self._plain) / self._assumed(length, rows)
            self._costs.setdefault(length, deque(maxlen=MEASURED)).append(cost)

    def declined(self) -> None:
        """Note that there were drafts, and none worth checking."""
        self._declined += 1
        if self._declined % RETRIED == 0:
            self._costs = {
                length: deque([*costs][1:], MEASURED) for length, costs in self._costs.items() if len(costs) > 1
            }

    def cost(self, length: int, rows: int) -> float:
        """What a step takes that checks so many drafts in each row, over one without."""
        costs = self._costs.get(length)
        if costs is None:
            costs = [cost for known in self._costs.values() for cost in known]
        return self._assumed(length, rows) * median_low([1.0] * ASSUMED + [*costs])

    @staticmethod
    def _assumed(length: int, rows: int) -> float:
        return 1 + CHECK_COST + TOKEN_COST * rows * length


def worthwhile(drafts: Sequence[Draft], lengths: Sequence[int], times: StepTimes) -> int:
    """How many tokens of each row's draft to check so that the most tokens are generated in a given time.

    Args:
        drafts: of all rows that decode.
        lengths: that there are to choose from.
        times: of steps.

    Returns:
        one of the lengths, or 0 where a step without drafts is about as fast.
    """
    rows = len(drafts)

    def speed(length: int) -> float:
        accepted = sum(sum(draft.chances[:length]) for draft in drafts)
        return (rows + accepted) / times.cost(length, rows)

    best = max(lengths, key=speed)
    return best if speed(best) > (1 + GAIN) * rows else 0


# Tokens of which all occurrences are found by an index, and of how many of them the latest are compared further.
INDEXED, MOST_PLACES = 3, 16
# Of a token's number in the keys of the index; places are compared token by token.
BITS = 21
# How likely a token after a match of 1, 2, ... tokens is accepted. This is known beforehand as if from so many checks;
# what is learned counts less and less, after checks and while there are none.
CHANCES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.7, 0.85)
WEIGHT = 8.0
FORGETTING, RECOVERY = 0.99, 0.995


class PromptLookup:
    """Proposes what followed the last tokens when they occurred before (prompt lookup decoding).

    The continuation is taken from where the most of the last tokens occurred, and of several such places from the
    latest. The longer the match, the more likely the next token is accepted; how likely, is learned from this text for
    matches of each length.

    Args:
        longest: tokens that are compared, at most.
    """

    def __init__(self, longest: int):
        self._longest, self._read = longest, 0
        # Of the last one, two, three tokens: by them, where their latest continuation begins.
        self._latest: list[dict[int, int]] = [{} for _ in range(min(longest, INDEXED))]
        # For each place the one before it with the same `INDEXED` tokens in front of it; -1 for none.
        self._earlier: list[int] = []
        self._accepted, self._checked = [WEIGHT * chance for chance in CHANCES], [WEIGHT] * len(CHANCES)
        self._length = 0

    def read(self, tokens: Sequence[int], end: int) -> None:
        """See `Drafter`."""
        for place in range(self._read, end):
            key, earlier = 0, -1
            for size, latest in enumerate(self._latest[:place], start=1):
                key |= tokens[place - size] << (BITS * (size - 1))
                if size == INDEXED:
                    earlier = latest.get(key, -1)
                latest[key] = place
            self._earlier.append(earlier)
        self._read = max(self._read, end)

    def _match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the continuation begins, and how many tokens before it are the last ones; 0 for none."""
        self.read(tokens, len(tokens))
        key, best, length = 0, -1, 0
        for size, latest in enumerate(self._latest, start=1):
            key |= tokens[-size] << (BITS * (size - 1))
            place = latest.get(key, -1)
            if place < 0:
                return best, length
            best, length = place, size
        for _ in range(MOST_PLACES):
            count, most = len(self._latest), min(self._longest, place)
            while count < most and tokens[place - 1 - count] == tokens[-1 - count]:
                count += 1
            if count > length:
                best, length = place, count
            place = self._earlier[place]
            if place < 0 or length == self._longest:
                break
        return best, length

    def propose(self, tokens: Sequence[int], most: int) -> Draft:
        """See `Drafter`; nothing if the last token is new."""
        begin, self._length = self._match(tokens)
        if not self._length:
            return Draft([], [])
        found, chances, chance = list(tokens[begin : begin + most]), [], 1.0
        for number in range(len(found)):
            level = self._level(number)
            accepted, checked = self._accepted[level], self._checked[level]
            chance *= accepted / checked
            chances.append(chance)
            self._accepted[level] += (1 - RECOVERY) * (WEIGHT * CHANCES[level] - accepted)
            self._checked[level] += (1 - RECOVERY) * (WEIGHT - checked)
        return Draft(found, chances)

    def learn(self, checked: int, accepted: int) -> None:
        """See `Drafter`."""
        for number in range(min(checked, accepted + 1)):
            level = self._level(number)
            self._accepted[level] = FORGETTING * self._accepted[level] + (number < accepted)
            self._checked[level] = FORGETTING * self._checked[level] + 1

    def _level(self, number: int) -> int:
        """Of `CHANCES`, that of a draft's token after the first `number` ones. The longest match may be any longer."""
        known = len(CHANCES) if self._length == self._longest else self._length + number
        return min(known, len(CHANCES)) - 1


class DraftModel:
    """Proposes what another model would generate, with the request's own sampling and random stream.

    Args:
        model: of a bundle, or any model of transformers whose cache can be cropped.
        sampling: of the request; equal logits give equal tokens.
        prompt_tokens: of the request.
    """

    def __init__(self, model: PreTrainedModel, sampling: Sampling, prompt_tokens: int):
        self._model, self._sampling, self._prompt_tokens = model, sampling, prompt_tokens
        self._cache: Any = None
        self._read: list[int] = []
        self._certain = 0  # of the tokens read, those known not to be drafts

    def read(self, tokens: Sequence[int], end: int) -> None:
        """See `Drafter`; the prompt is read when a draft is asked for."""

    def learn(self, checked: int, accepted: int) -> None:
        """See `Drafter`; all its drafts are checked."""

    @torch.no_grad()
    def propose(self, tokens: Sequence[int], most: int) -> Draft:
        """See `Drafter`."""
        same = self._certain
        while same < min(len(self._read), len(tokens) - 1) and self._read[same] == tokens[same]:
            same += 1
        self._certain = same
        if self._cache is None:
            self._cache = self._new_cache()
        elif same < len(self._read):
            self._cache.crop(same - len(self._read))
        drafts: list[int] = []
        known = list(tokens)
        if len(known) - same == 2 and self._model.device.type == "cuda":
            # After drafts that were all accepted; single tokens are recorded.
            self._step(known[same : same + 1], same)
            same += 1
        for _ in range(most):
            self._step(known[same:], same)
            same = len(known)
            token = self._choose(len(known) - self._prompt_tokens)
            drafts.append(token)
            known.append(token)
        self._read = known[:-1]
        return Draft(drafts, [1.0] * most)

    def _new_cache(self) -> Any:
        if hasattr(self._model, "new_kv_cache"):
            cache = self._model.new_kv_cache()
            cache.activate_past_recording()
            return cache
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        cache.activate_past_recording()
        return cache

    def _step(self, ids: Sequence[int], begin: int) -> None:
        device = self._model.device
        read = torch.tensor([ids], device=device)
        positions = torch.arange(begin, begin + len(ids), device=device)[None]
        output = self._model(
            input_ids=read, position_ids=positions, use_cache=True, logits_to_keep=1, **{CACHE: self._cache}
        )
        self._logits = output.logits[:, -1]

    def _choose(self, number: int) -> int:
        if self._sampling.greedy:
            return int(self._logits.argmax(-1))
        like = {"device": self._logits.device}
        values = self._sampling
        return int(
            sample(
                self._logits,
                torch.tensor([values.temperature], **like),
                torch.tensor([values.top_k], **like),
                torch.tensor([values.top_p], **like),
                torch.tensor([values.seed or 0], **like),
                torch.tensor([number], **like),
                restrict=values.restricts,
            )
        )


def accepted(chosen: Sequence[int], drafts: Sequence[int]) -> int:
    """How many drafts are the tokens that were chosen, `chosen` having one more."""
    for number, (token, draft) in enumerate(zip(chosen, drafts, strict=False)):
        if token != draft:
            return number
    return len(drafts)
