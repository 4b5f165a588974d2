"""Requests of an Engine: how they are made from what callers give, the text that arrives, and what is reported."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, int32, int64

from kvconvert.errors import UsageError, counted
from kvconvert.runtime.engine.model_steps import ModelSteps
from kvconvert.runtime.engine.sampling import Processors, Sampling, TokenLogprobs, logits_processors

if TYPE_CHECKING:
    from transformers import LogitsProcessor, PreTrainedTokenizerBase

    from kvconvert.bundle.generation import GenerationSettings


# Tokens of the prompt that are decoded along with the first generated ones, so that spaces between words are right.
CONTEXT_TOKENS = 5
NEW_TOKENS = 256  # of a request, where nothing else is said
INCOMPLETE = "\ufffd"  # what a decoder shows for bytes of a character whose rest has not come yet
MOST_LIKELIEST = 20  # tokens whose probabilities come with each one, as in OpenAI's interface
MOST_BYTES = 4  # of a character
MOST_UNDECIDED = 16  # tokens


class TextStream:
    """Decodes tokens one at a time and ends the text before a stop string.

    Text that may be the beginning of a stop string, and bytes of an incomplete character, are held back until the next
    token decides.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt's token ids.
        stop: strings that end the text; the earliest one found counts.
        special_tokens: whether special tokens leave text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        special_tokens: bool = False,
    ):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._options = {"skip_special_tokens": not special_tokens}
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):  # which takes back letters that were shown
            self._options["clean_up_tokenization_spaces"] = False
        # Where bytes are tokens, a context that begins within a character makes all that follow it look incomplete.
        for context in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MOST_BYTES):
            self._ids = list(prompt[-context:])
            self._shown = self._decode(self._ids)  # the text of tokens that were shown
            if INCOMPLETE not in self._shown:
                break
        self._begin, self._read = 0, len(self._ids)  # decoded again for context, and already shown
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token; the text that is certain now, and whether a stop string was found."""
        self._ids.append(token)
        text = self._decode(self._ids[self._begin :])
        piece = text[len(self._shown) :]
        undecided = len(self._ids) - self._read
        if not piece and undecided > MOST_UNDECIDED:
            self._ids.pop()  # such tokens may go on without an end, and all of them are decoded with each one
        if not piece or (piece.endswith(INCOMPLETE) and undecided <= MOST_UNDECIDED):
            return "", False
        if self._read - self._begin >= CONTEXT_TOKENS:  # not with each token, for then all are decoded twice
            self._begin = self._read
            text = self._decode(self._ids[self._begin :])
        self._read, self._shown = len(self._ids), text
        return self._certain(piece)

    def finish(self) -> str:
        """What was held back, when no token follows."""
        piece, stopped = self._certain(self._decode(self._ids[self._begin :])[len(self._shown) :])
        self._begin = self._read = len(self._ids)
        self._shown = ""
        rest, self._held = self._held, ""
        return piece if stopped else piece + rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, **self._options)

    def _certain(self, piece: str) -> tuple[str, bool]:
        """Split what is held and `piece` into text to show and text that may still become a stop string."""
        text = self._held + piece
        found = min((place for stop in self._stop if (place := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self._held = ""
            return text[:found], True
        longest = max(map(len, self._stop), default=1) - 1
        hold = next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False


State = Literal["waiting", "prompt", "running", "finished"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Event:
    """What a step brought one request.

    Attributes:
        request: the one concerned.
        tokens: token ids generated since the event before.
        text: the text that became certain with them; empty without a tokenizer.
        finish_reason: with the last event, why the request ended, else None.
        logprobs: of each of the tokens, where the request asks for them.
    """

    request: Request
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(eq=False)
class Request:
    """A prompt to continue, made by `Engine.add`; its fields are for reading.

    Attributes:
        id: counts the engine's requests from 0.
        prompt: token ids.
        max_new_tokens: at most so many are generated.
        sampling: with the seed that was drawn, if none was given.
        stop_token_ids: tokens that end the request; the one met is the last of `tokens` and leaves no text.
        state: "waiting" in the queue, "prompt" while its prompt is being read, "running", or "finished".
        tokens: generated so far.
        text: the same as text, up to a stop string; "" without a tokenizer.
        cached_tokens: of the prompt, taken from stored prefixes instead of being read.
        finish_reason: "stop" (a stop token or stop string), "length" (max_new_tokens), "cancelled", "error" (the model
            failed while it was served), or None while the request goes on.
        likeliest: with each token come the logarithms of its probability and of those of so many likeliest tokens; None
            for neither.
        logprobs: these, of each of `tokens`.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: frozenset[int]
    state: State = "waiting"
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    likeliest: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)
    # The engine's bookkeeping.
    prefix_salt: bytes = field(default=b"", repr=False)
    inputs: Mapping[str, Any] | None = field(default=None, repr=False)  # of a prompt with images, until it is read
    position_shift: int = field(default=0, repr=False)
    pages: int = field(default=0, repr=False)
    row: int | None = field(default=None, repr=False)
    prompt_read: int = field(default=0, repr=False)
    prompt_cache: Any = field(default=None, repr=False)
    launched: int = field(default=0, repr=False)  # tokens chosen on the device, of which the newest may not be read yet
    text_stream: TextStream | None = field(default=None, repr=False)
    processors: Processors | None = field(default=None, repr=False)
    on_event: Callable[[Event], None] | None = field(default=None, repr=False)
    on_cancel: Callable[[Request], None] | None = field(default=None, repr=False)

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def cancel(self) -> None:
        """End the request wherever it is and free what it holds; nothing happens if it has ended. From any thread."""
        if self.on_cancel is not None:
            self.on_cancel(self)

    def take(self, token: int, logprobs: TokenLogprobs | None = None) -> Event:
        """Append a generated token: the text that became certain, and why the request ends with it, if it does."""
        self.tokens.append(token)
        told = () if logprobs is None else (logprobs,)
        self.logprobs += told
        if token in self.stop_token_ids:
            return Event(self, (token,), self._flushed(), "stop", told)
        piece, stopped = self.text_stream.push(token) if self.text_stream else ("", False)
        self.text += piece
        if stopped:
            return Event(self, (token,), piece, "stop", told)
        if len(self.tokens) == self.max_new_tokens:
            return Event(self, (token,), piece + self._flushed(), "length", told)
        return Event(self, (token,), piece, None, told)

    def _flushed(self) -> str:
        piece = self.text_stream.finish() if self.text_stream else ""
        self.text += piece
        return piece


@dataclass(frozen=True)
class UnreadStep:
    """A step whose tokens were not read yet.

    Attributes:
        read: waits for their copy to the host.
        rows: whose they are, by row.
        joined: of requests whose prompts ended, what raises an error if these are lost.
        logprobs: waits for what `log_probabilities` gave of rows that ask for it, by row; None where none does.
    """

    read: Callable[[], list[int]]
    rows: dict[int, Request]
    joined: dict[Request, Callable[[], None]]
    logprobs: Callable[[], dict[int, list[float]]] | None = None

    def logprobs_of(self) -> dict[Request, TokenLogprobs]:
        """Of the step's tokens, those of the requests that ask for them."""
        packed = {} if self.logprobs is None else self.logprobs()
        return {self.rows[row]: TokenLogprobs.of(p, self.rows[row].likeliest or 0) for row, p in packed.items()}


@dataclass(frozen=True)
class EngineStats:
    """What an engine is doing and has done.

    Attributes:
        waiting: requests in the queue.
        running: requests that have a row, those whose prompt is being read included.
        finished, cancelled, failed, refused: requests so far that ended by themselves, were cancelled, were lost when
            the model failed, and were refused by `add`.
        pages_reserved: pages of a layer set aside for the requests that have a row.
        pages_free: pages of a layer that hold nothing; None where the cache grows as needed.
        state_bytes: bytes of the recurrent states of `max_batch` sequences.
        prefix_pages: pages of a layer that stored prefixes hold; those that no request uses make room when needed.
        prefixes_evicted: stored prefixes dropped so far to make room.
        prompt_tokens, generated_tokens: read and generated so far.
        cached_tokens: of prompts, taken from stored prefixes so far, and not counted as read.
        steps: so far.
        seconds: spent in them.
    """

    waiting: int
    running: int
    finished: int
    cancelled: int
    failed: int
    refused: int
    pages_reserved: int
    pages_free: int | None
    state_bytes: int
    prefix_pages: int
    prefixes_evicted: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    steps: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of stepping, reading prompts included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


def new_request(
    steps: ModelSteps,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Sequence[int] | Tensor,
    max_new_tokens: int | None,
    generation: GenerationSettings,
    sampling: Sampling,
    stop_token_ids: Collection[int],
    stop: Sequence[str],
    *,
    constraint: LogitsProcessor | None = None,
    likeliest: int | None = None,
    special_tokens: bool = False,
    extras: Mapping[str, Tensor] | None = None,
    most_tokens: int,
) -> Request:
    """A request after every check of `Engine.add`'s arguments; its id is given later.

    `generation` says how many new tokens there are where `max_new_tokens` does not; `most_tokens` are those of a pass,
    which a prompt with images has to fit in.

    Raises:
        UsageError: it can never be served.
    """
    if isinstance(prompt, Tensor):
        if prompt.ndim not in (1, 2) or (prompt.ndim == 2 and prompt.shape[0] != 1):
            raise UsageError(f"`prompt` has the shape {list(prompt.shape)}; give one sequence, [n] or [1, n].")
        if prompt.dtype not in (int64, int32):
            raise UsageError(f"`prompt` has the dtype {prompt.dtype}; give ids of tokens, int64.")
        prompt = prompt.flatten().tolist()
    # No list: Python's garbage collector looks into these at every full collection, as long as a request is kept.
    ids = tuple(prompt)
    if not ids:
        raise UsageError("`prompt` has no tokens; give at least one.")
    for id in (min(ids), max(ids)):
        if not 0 <= id < steps.vocabulary:
            raise UsageError(f"`prompt` has the token {id}; the model's ids are 0 to {steps.vocabulary - 1}.")
    if max_new_tokens is None:
        room, usual = steps.room(len(ids)), generation.new_tokens(len(ids))
        if usual is None:
            usual = NEW_TOKENS
        elif usual < 1:
            raise UsageError(
                f"The model's generation_config.json allows no new token after a prompt of {len(ids):,} tokens "
                "(max_new_tokens or max_length); give `max_new_tokens`."
            )
        max_new_tokens = usual if room is None else max(1, min(usual, room))
    if steps.max_positions is not None and len(ids) + max_new_tokens > steps.max_positions:
        raise UsageError(
            f"A prompt of {counted(len(ids), 'token')} and {counted(max_new_tokens, 'new one')} at most do not fit the "
            f"{steps.max_positions:,} positions that an Engine serves of this model; shorten the prompt or lower "
            "`max_new_tokens`."
        )
    if stop and tokenizer is None:
        raise UsageError("`stop` needs text; give the engine a `tokenizer`, or use `stop_token_ids`.")
    if not all(stop):
        raise UsageError("`stop` has an empty string, which would end every text; leave it out.")
    if sampling.seed is None:
        sampling = replace(sampling, seed=random.getrandbits(63))
    request = Request(-1, ids, max_new_tokens, sampling, frozenset(stop_token_ids))
    if likeliest is not None and likeliest > min(MOST_LIKELIEST, steps.vocabulary):
        raise UsageError(f"`likeliest` is {likeliest}; it has to be 0 to {min(MOST_LIKELIEST, steps.vocabulary)}.")
    request.likeliest = likeliest
    if sampling.settings or constraint is not None:
        request.processors = logits_processors(
            steps.model, sampling, ids, max_new_tokens, request.stop_token_ids, constraint
        )
    if extras is not None:
        if len(ids) > most_tokens:
            raise UsageError(
                f"A prompt with images is read in one pass, of at most {most_tokens:,} tokens, and this one has "
                f"{len(ids):,}; give fewer or smaller images, or less text."
            )
        request.inputs, request.position_shift = steps.inputs(ids, extras)
    request.pages = steps.pages_needed(len(ids), max_new_tokens)
    request.text_stream = TextStream(tokenizer, ids, stop, special_tokens) if tokenizer is not None else None
    return request
