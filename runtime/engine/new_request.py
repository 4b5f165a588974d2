"""Making requests from what callers give."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvconvert.errors import UsageError
from kvconvert.runtime.engine.model_steps import ModelSteps
from kvconvert.runtime.engine.request import Request
from kvconvert.runtime.engine.sampling import Sampling
from kvconvert.runtime.engine.text_stream import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def new_request(
    steps: ModelSteps,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Sequence[int] | Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    stop_token_ids: Sequence[int] | None,
    stop: Sequence[str],
) -> Request:
    """A request after every check of `Engine.add`'s arguments; its id is given later.

    Raises:
        UsageError: it can never be served.
    """
    if isinstance(prompt, Tensor):
        if prompt.ndim not in (1, 2) or (prompt.ndim == 2 and prompt.shape[0] != 1):
            raise UsageError(f"`prompt` has the shape {list(prompt.shape)}; give one sequence, [n] or [1, n].")
        prompt = prompt.flatten().tolist()
    ids = list(prompt)
    if not ids:
        raise UsageError("`prompt` has no tokens; give at least one.")
    wrong = next((id for id in ids if not isinstance(id, int) or not 0 <= id < steps.vocabulary), None)
    if wrong is not None:
        raise UsageError(f"`prompt` has the token {wrong!r}; the model's ids are 0 to {steps.vocabulary - 1}.")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise UsageError(f"`max_new_tokens` is {max_new_tokens}; it has to be an integer, at least 1.")
    if steps.max_positions is not None and len(ids) + max_new_tokens > steps.max_positions:
        raise UsageError(
            f"A prompt of {len(ids)} tokens with up to {max_new_tokens} new ones does not fit the "
            f"{steps.max_positions} positions that an Engine serves of this model; shorten the prompt or lower "
            "`max_new_tokens`."
        )
    if stop and tokenizer is None:
        raise UsageError("`stop` needs text; give the engine a `tokenizer`, or use `stop_token_ids`.")
    if isinstance(stop, str) or not all(stop):
        raise UsageError(f"`stop` is {stop!r}; give a list of strings that are not empty.")
    if sampling.seed is None:
        sampling = replace(sampling, seed=random.getrandbits(63))
    stops = steps.stop_token_ids() if stop_token_ids is None else frozenset(stop_token_ids)
    request = Request(-1, ids, max_new_tokens, sampling, stops)
    request.pages = steps.pages_needed(len(ids), max_new_tokens)
    request.text_stream = TextStream(tokenizer, ids, stop) if tokenizer is not None else None
    return request
