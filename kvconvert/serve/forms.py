"""Answers as the JSON of OpenAI's completions and chats, whole or as events of a stream."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kvconvert.models.token_bytes import TokenTexts
from kvconvert.runtime.engine.sampling import TokenLogprobs
from kvconvert.serve.refusal import Refusal
from kvconvert.serve.replies import Piece

# Of ids alone, which are no secrets: the system's would let all other threads go first.
_DICE = random.Random()


def new_id(kind: str) -> str:
    """An id that no other answer has."""
    return f"{kind}{_DICE.getrandbits(128):032x}"


@dataclass
class Step:
    """What came of one choice, in one step or in all.

    Attributes:
        piece: of its answer.
        reason: why it ended, if it did.
        logprobs: of its tokens, with their ids.
        offset: characters of tokens before.
    """

    piece: Piece = field(default_factory=Piece)
    reason: str | None = None
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    offset: int = 0

    def __bool__(self) -> bool:
        return bool(self.piece or self.reason or self.logprobs)

    def __iadd__(self, other: Step) -> Step:
        self.piece += other.piece
        self.reason = other.reason
        self.logprobs += other.logprobs
        return self


class Form:
    """What the answers to one request look like.

    Args:
        chat: as a message, not as text.
        model: the name under which the bundle is served.
        texts: of single tokens, for logprobs.
        likeliest: how many of the likeliest tokens are told with each one; None for no logprobs at all.
        usage: whether a stream tells it at its end.
        usage_so_far: and in every piece.
    """

    def __init__(
        self,
        chat: bool,
        model: str,
        texts: TokenTexts,
        likeliest: int | None = None,
        usage: bool = False,
        usage_so_far: bool = False,
    ) -> None:
        self.chat, self._texts, self._likeliest = chat, texts, likeliest
        self._usage, self._usage_so_far = usage, usage_so_far
        self._lengths: Counter[int] = Counter()  # characters of each choice's tokens
        self.id = new_id("chatcmpl-" if chat else "cmpl-")
        self._model, self._created = model, int(time.time())

    @property
    def tells_logprobs(self) -> bool:
        """Whether there is a number for each token."""
        return self._likeliest is not None

    def whole(self, choices: list[Step], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer from all that came of each choice."""
        made = [
            {"index": place, **self._said(step), "logprobs": self._logprobs(step), "finish_reason": step.reason}
            for place, step in enumerate(choices)
        ]
        return self._envelope("", made) | {"usage": usage}

    def _said(self, step: Step) -> dict[str, Any]:
        piece = step.piece
        if not self.chat:
            return {"text": piece.content}
        content = piece.content.rstrip() or None if piece.calls else piece.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["tool_calls"] = [{n: v for n, v in call.items() if n != "index"} for call in piece.calls]
        return {"message": message}

    def opening(self, count: int) -> list[str]:
        """The events that begin a stream of so many choices."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return [self._event(self._piece(place, said, None)) for place in range(count)] if self.chat else []

    def events(self, steps: dict[int, Step], usage: Callable[[], dict[str, Any]]) -> list[str]:
        """The events of what some choices were brought; `usage` tells it so far."""
        made = []
        for place, step in steps.items():
            step.offset = self._lengths[place]
            self._lengths[place] += sum(len(self._texts.text(id)) for id, _ in step.logprobs)
            piece = step.piece
            fields = {"reasoning_content": piece.reasoning, "content": piece.content, "tool_calls": piece.calls}
            delta = {name: value for name, value in fields.items() if value}
            said = {"delta": delta} if self.chat else {"text": piece.content}
            made.append(self._event(self._piece(place, said, step), usage() if self._usage_so_far else None))
        return made

    def closing(self, usage: dict[str, Any]) -> list[str]:
        """The events that end a stream."""
        last = [event(self._envelope(".chunk", []) | {"usage": usage})] if self._usage else []
        return [*last, "data: [DONE]\n\n"]

    def failed(self, refusal: Refusal) -> str:
        """The event that ends a stream after a failure."""
        return event(refusal.body())

    def _event(self, piece: dict[str, Any], usage: dict[str, Any] | None = None) -> str:
        # Where usage is asked for at the end alone, every other piece has an empty one.
        return event(piece | {"usage": usage} if self._usage else piece)

    def _piece(self, place: int, said: dict[str, Any], step: Step | None) -> dict[str, Any]:
        logprobs = None if step is None else self._logprobs(step)
        reason = None if step is None else step.reason
        return self._envelope(".chunk", [{"index": place, **said, "logprobs": logprobs, "finish_reason": reason}])

    def _logprobs(self, step: Step) -> dict[str, Any] | None:
        """How likely the tokens of a step were, as chats and completions have it."""
        if self._likeliest is None:
            return None
        texts = self._texts
        if self.chat:

            def entry(id: int, logprob: float) -> dict[str, Any]:
                return {"token": texts.text(id), "logprob": _finite(logprob), "bytes": list(texts.bytes(id))}

            said = [
                entry(id, told.chosen) | {"top_logprobs": [entry(*likely) for likely in told.likeliest]}
                for id, told in step.logprobs
            ]
            return {"content": said, "refusal": None}
        tokens = [texts.text(id) for id, _ in step.logprobs]
        offsets = list(accumulate(map(len, tokens), initial=step.offset))[:-1]
        likeliest = [{texts.text(id): _finite(logprob) for id, logprob in told.likeliest} for _, told in step.logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(told.chosen) for _, told in step.logprobs],
            "top_logprobs": likeliest if self._likeliest else None,
            "text_offset": offsets,
        }

    def _envelope(self, part: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = f"chat.completion{part}" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def event(piece: Mapping[str, Any], name: str | None = None) -> str:
    """A piece as a server-sent event."""
    data = f"data: {_ENCODER.encode(piece)}\n\n"
    return data if name is None else f"event: {name}\n{data}"


def _finite(logprob: float) -> float:
    """A logarithm as JSON has it: OpenAI's number for what is out of the question."""
    return max(logprob, -9999.0)
