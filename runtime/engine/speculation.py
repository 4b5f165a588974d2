"""Drafts of tokens to come, which one pass of the model checks together.

A draft is accepted as far as it equals the tokens that are chosen from the model's own logits, greedily or by the
request's random stream, which belongs to the token's number and not to the pass. So the tokens are those without
drafts, up to the rounding of passes of one and of several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvconvert.errors import UsageError
from kvconvert.runtime.engine.sampling import Sampling, sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Drafter(Protocol):
    """Proposes tokens for one request."""

    def read(self, tokens: Sequence[int], end: int) -> None:
        """Prepare for the first tokens of a prompt, up to `end`, while the model reads them."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that may follow the prompt and what was generated, `tokens`; each call has more."""


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
    max_matching_ngram_size: int = 2
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


class PromptLookup:
    """Proposes what followed the last tokens the last time they occurred (prompt lookup decoding).

    Args:
        longest: tokens that have to occur again, at most; the more the better, and fewer will do.
    """

    def __init__(self, longest: int):
        self._longest, self._read = longest, 0
        # By the tokens before: where the latest continuation begins.
        self._continuations: dict[tuple[int, ...], int] = {}

    def read(self, tokens: Sequence[int], end: int) -> None:
        """See `Drafter`."""
        for place in range(max(1, self._read), end):
            for size in range(1, min(self._longest, place) + 1):
                self._continuations[tuple(tokens[place - size : place])] = place
        self._read = end

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`; nothing if the last token is new."""
        self.read(tokens, len(tokens))
        for size in range(min(self._longest, len(tokens) - 1), 0, -1):
            begin = self._continuations.get(tuple(tokens[-size:]))
            if begin is not None:
                return list(tokens[begin : begin + most])
        return []


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

    def read(self, tokens: Sequence[int], end: int) -> None:
        """See `Drafter`; the prompt is read when a draft is asked for."""

    @torch.no_grad()
    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`."""
        same = 0
        while same < min(len(self._read), len(tokens) - 1) and self._read[same] == tokens[same]:
            same += 1
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
        return drafts

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
            input_ids=read, position_ids=positions, past_key_values=self._cache, use_cache=True, logits_to_keep=1
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
