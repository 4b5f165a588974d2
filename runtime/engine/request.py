"""One request of an Engine and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from kvconvert.runtime.engine.sampling import Sampling
from kvconvert.runtime.engine.text_stream import TextStream

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
    """

    request: Request
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None


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
        finish_reason: "stop" (a stop token or stop string), "length" (max_new_tokens), "cancelled", "error" (the model
            failed while it was served), or None while the request goes on.
    """

    id: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: frozenset[int]
    state: State = "waiting"
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    # The engine's bookkeeping.
    pages: int = field(default=0, repr=False)
    row: int | None = field(default=None, repr=False)
    prompt_read: int = field(default=0, repr=False)
    prompt_cache: Any = field(default=None, repr=False)
    launched: int = field(default=0, repr=False)  # tokens chosen on the device, of which the newest may not be read yet
    text_stream: TextStream | None = field(default=None, repr=False)
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

    def accept(self, token: int) -> tuple[str, FinishReason | None]:
        """Append a generated token; the text that became certain, and why the request ends with it, if it does."""
        self.tokens.append(token)
        if token in self.stop_token_ids:
            return self._flushed(), "stop"
        piece, stopped = self.text_stream.push(token) if self.text_stream else ("", False)
        self.text += piece
        if stopped:
            return piece, "stop"
        if len(self.tokens) == self.max_new_tokens:
            return piece + self._flushed(), "length"
        return piece, None

    def _flushed(self) -> str:
        piece = self.text_stream.finish() if self.text_stream else ""
        self.text += piece
        return piece


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
        prompt_tokens, generated_tokens: read and generated so far.
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
    prompt_tokens: int
    generated_tokens: int
    steps: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of stepping, reading prompts included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0
