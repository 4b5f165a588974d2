"""The bodies of requests: which fields there are, what they may hold, and what they ask of an Engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from kvconvert.runtime import Sampling
from kvconvert.serve.refusal import Refusal


@dataclass(frozen=True)
class Limits:
    """What one request may come to.

    Attributes:
        body_bytes: of its body.
        prompt_tokens: of each prompt; None for as many as the model and its cache take.
        new_tokens: of each choice; also what a chat gets that states no number, where so many fit.
        choices: prompts times `n`.
        stops, stop_characters: stop strings, and the length of each.
        client_seconds: that a client may take to send a request, or to take a piece of the answer.
    """

    body_bytes: int = 4 * 2**20
    prompt_tokens: int | None = None
    new_tokens: int = 4096
    choices: int = 16
    stops: int = 16
    stop_characters: int = 256
    client_seconds: float = 60.0


# Fields of OpenAI's interface that are not served, and what asks nothing of them; null, [] and {} never do.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": (),
    "logit_bias": (),
    "logprobs": (False,),
    "metadata": (),
    "modalities": (["text"],),
    "moderation": (),
    "name": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "refusal": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "annotations": (),
    "tool_call_id": (),
    "tool_calls": (),
    "tool_choice": ("none",),
    "tools": (),
    "top_logprobs": (),
    "verbosity": (),
    "web_search_options": (),
}


def _refuse_others(fields: dict[str, Any], where: str = "") -> None:
    """Refuse every field that would have to change the answer and does not."""
    for name, value in fields.items():
        if name not in UNSERVED:
            message = f"{where}{name} is no field of this request; leave it out."
            raise Refusal(400, message, param=where + name, code="unknown_parameter")
        # By type as well: as numbers, False and 0 are equal.
        nothing = [None, [], {}, *UNSERVED[name]]
        if not any(type(value) is type(idle) and value == idle for idle in nothing):
            message = f"{where}{name} is not served by kvconvert; leave it out."
            raise Refusal(400, message, param=where + name, code="unsupported_parameter")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """One prompt, text or token ids, as a list of prompts."""

    def is_ids(ids: Any) -> bool:
        return isinstance(ids, list) and all(type(id) is int for id in ids)

    prompts = [value] if isinstance(value, str) or (value and is_ids(value)) else value
    if not (isinstance(prompts, list) and prompts and all(isinstance(p, str) or is_ids(p) for p in prompts)):
        raise ValueError("give text, token ids, or a list of either that is not empty")
    return prompts


def _content(value: Any) -> Any:
    """The text of a message's parts, one part a line."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a part of the type {kind!r} is not served; give parts of text")
        if not isinstance(part["text"], str):
            raise ValueError("the text of a part is no string")
    return "\n".join(part["text"] for part in value)


class StreamOptions(BaseModel, extra="forbid", strict=True):
    """`include_usage`: a last piece says how many tokens there were."""

    include_usage: bool | None = None


class Message(BaseModel, extra="allow", strict=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]


class _Asked(BaseModel, extra="allow", strict=True):
    """What both kinds of requests have; null stands for a field that is left out, as in OpenAI's interface."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_listed)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the last piece of a stream is to say how many tokens there were."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self, limits: Limits, prompts: int) -> None:
        """Refuse what is not served and what is beyond the limits (Refusal)."""
        _refuse_others(self.model_extra or {})
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options needs stream = true.", param="stream_options")
        if (choices := prompts * (self.n or 1)) > limits.choices:
            raise Refusal(400, f"n times prompts is {choices}; at most {limits.choices} are served.", param="n")
        stops = self.stop or []
        if len(stops) > limits.stops or any(not 1 <= len(text) <= limits.stop_characters for text in stops):
            message = f"stop may have {limits.stops} strings of 1 to {limits.stop_characters} characters."
            raise Refusal(400, message, param="stop")

    def sampling(self, defaults: Sampling, choice: int) -> Sampling:
        """How the tokens of one of the `n` choices are drawn; each has a seed of its own.

        Raises:
            UsageError: a value outside its range.
        """
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: getattr(defaults, name) if value is None else value for name, value in given.items()}
        return replace(defaults, **given, seed=None if self.seed is None else self.seed + choice)

    def new_tokens(self, limits: Limits, prompt_tokens: int, room: int | None) -> int:
        """Tokens that a choice may have (Refusal: too many, or too long a prompt).

        Args:
            limits: of the server.
            prompt_tokens: of the prompt.
            room: what the model and its cache have left after it; None for any number.
        """
        longest = limits.prompt_tokens
        room = limits.new_tokens if room is None else room
        wanted, field = self.wanted()
        if (longest is not None and prompt_tokens > longest) or room < 1:
            fits = "" if longest is None else f"; this server takes at most {longest}"
            message = f"The prompt has {prompt_tokens} tokens, which is too long{fits}."
            raise Refusal(400, message, param=self.prompt_field, code="context_length_exceeded")
        if wanted is None:
            return min(self.unstated(limits), room)
        if wanted > limits.new_tokens:
            message = f"{field} is {wanted}; this server generates at most {limits.new_tokens} tokens."
            raise Refusal(400, message, param=field)
        if wanted > room:
            message = f"{field} is {wanted}, but after a prompt of {prompt_tokens} tokens there is room for {room}."
            raise Refusal(400, message, param=field, code="context_length_exceeded")
        return wanted

    prompt_field: ClassVar[str]

    def wanted(self) -> tuple[int | None, str]:
        """The number of new tokens that is stated, and in which field."""
        return self.max_tokens, "max_tokens"

    def unstated(self, limits: Limits) -> int:
        """New tokens where no number is stated."""
        raise NotImplementedError


class Completion(_Asked):
    """POST /v1/completions: text or token ids to continue."""

    prompt_field: ClassVar[str] = "prompt"
    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]

    def unstated(self, limits: Limits) -> int:
        """16, OpenAI's number."""
        return min(16, limits.new_tokens)


class Chat(_Asked):
    """POST /v1/chat/completions: a conversation in which the model speaks next."""

    prompt_field: ClassVar[str] = "messages"
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    def check(self, limits: Limits, prompts: int) -> None:
        """Refuse what is not served and what is beyond the limits (Refusal)."""
        super().check(limits, prompts)
        for place, turn in enumerate(self.messages):
            _refuse_others(turn.model_extra or {}, f"messages.{place}.")
        if None not in (self.max_tokens, self.max_completion_tokens):
            message = "max_tokens is the older name of max_completion_tokens; give one of them."
            raise Refusal(400, message, param="max_tokens")

    def wanted(self) -> tuple[int | None, str]:
        """The number of new tokens that is stated, and in which field."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return super().wanted()

    def unstated(self, limits: Limits) -> int:
        """As many as the server generates at most."""
        return limits.new_tokens
