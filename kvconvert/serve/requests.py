"""The bodies of requests: which fields there are, what they may hold, and what they ask of an Engine."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from kvconvert.bundle.generation import LARGEST_PENALTY
from kvconvert.errors import KvconvertError, counted
from kvconvert.models.token_bytes import TokenTexts
from kvconvert.runtime import Sampling
from kvconvert.runtime.engine.request import MOST_LIKELIEST
from kvconvert.serve.forms import Form
from kvconvert.serve.refusal import Refusal, refusal_of


@dataclass(frozen=True)
class Limits:
    """What one request may come to.

    Attributes:
        body_bytes: of its body.
        prompt_tokens: of each prompt; None for as many as the model and its cache take.
        new_tokens: of each choice; also what a chat gets that states no number, where so many fit.
        choices: prompts times `n`.
        images, image_pixels: of a conversation; pixels of all of them together.
        stops, stop_characters: stop strings, and the length of each.
        client_seconds: that a client may take to send a request, or to take a piece of the answer.
    """

    body_bytes: int = 4 * 2**20
    prompt_tokens: int | None = None
    new_tokens: int = 4096
    choices: int = 16
    images: int = 8
    image_pixels: int = 2**25
    stops: int = 16
    stop_characters: int = 256
    client_seconds: float = 60.0


# More than any conversation has; each costs a thousand bytes before it is looked at.
MOST_MESSAGES = 8192
MOST_TOOLS, MOST_TOOLS_BYTES = 128, 2**18  # as JSON, which an answer of /v1/responses repeats
MOST_BIASES, MOST_VARIABLES = 1024, 256
# Values in the arguments of earlier calls, which are JSON within the JSON of a body.
MOST_ARGUMENTS = 2**16
# Probabilities in one answer, of all its tokens and of the likeliest ones beside them.
MOST_LOGPROBS = 2**17
# Of each number in a body: what 64 bits hold.
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]

# Fields of this and of other servers' interfaces that change nothing in an answer, whatever they hold.
IGNORED = {
    *("annotations", "cache_control", "cache_salt", "id", "index", "metadata", "prediction", "priority"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning", "reasoning_details"),
    *("request_id", "safety_identifier", "service_tier", "store"),
}
# Those that would change it and are not served, and what asks nothing of them; null, [] and {} never do.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "effort": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "generate_summary": ("auto",),
    "functions": (),
    "include_obfuscation": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "refusal": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "summary": ("auto",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


def _refuse_others(fields: dict[str, Any], where: str = "", known: Iterable[str] = ()) -> None:
    """Refuse every field that would have to change the answer and does not, and drop the others, which may be large and
    are not for templates either; one like a `known` field is named so.
    """
    for name, value in fields.items():
        nothing, told = [None, [], {}, *UNSERVED.get(name, ())], f"{where}{name:.100}"
        # Numbers are equal to False and True.
        idle = any(isinstance(value, bool) == isinstance(none, bool) and value == none for none in nothing)
        if idle or name in IGNORED:
            continue
        if name not in UNSERVED:
            close = difflib.get_close_matches(name[:60], known, n=1)
            advice = f"did you mean {close[0]}?" if close else "leave it out."
            raise Refusal(400, f"{told} is no field of this request; {advice}", param=told, code="unknown_parameter")
        message = f"{told} is not served by kvconvert; leave it out."
        raise Refusal(400, message, param=told, code="unsupported_parameter")
    fields.clear()


def entries(body: bytes | bytearray) -> int:
    """A count of the values in a JSON text: at least as many as there are lists, objects, and values in them."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    letters = np.frombuffer(body, np.uint8)
    outside = ~np.logical_xor.accumulate(letters == ord('"'))
    begins = (letters == ord(",")) | (letters == ord("[")) | (letters == ord("{"))
    return 1 + int(np.count_nonzero(begins & outside))


def fields_of(body: bytes | bytearray, most: int) -> dict[str, Any]:
    """The fields of a request's body.

    Args:
        body: JSON text.
        most: values that it may hold; they are counted before any of them is made.

    Raises:
        Refusal: it is no JSON object, or has too many values.
    """
    if len(body) > most and (count := entries(body)) > most:
        message = f"The body has {count:,} values; this server takes at most {most:,}."
        raise Refusal(413, message, code="body_too_long")
    try:
        fields = _DECODER.decode(body.decode())
        if _SURROGATE.search(body):
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise Refusal(400, "Invalid JSON: the body is not UTF-8 text.", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        reasons = {RecursionError: "it is nested too deeply", json.JSONDecodeError: str(error)}
        reason = reasons.get(type(error), "a number is none, is too large, or has too many digits")
        raise Refusal(400, f"Invalid JSON: {reason}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise Refusal(400, "The body should be an object of JSON.", code="invalid_value")
    return fields


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _no_number(name: str) -> None:
    raise ValueError(name)


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):  # which no answer that tells it could be JSON with
        raise ValueError(digits)
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def _few(value: Any, most: int = 16) -> Any:
    """Refuse an object of more fields, before pydantic makes an error of each of them."""
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"give at most {most} fields, not {len(value)}")
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """One prompt, text or token ids, as a list of prompts."""

    def is_ids(ids: Any) -> bool:
        return isinstance(ids, list) and {*map(type, ids)} <= {int}

    prompts = [value] if isinstance(value, str) or (value and is_ids(value)) else value
    if not (isinstance(prompts, list) and prompts and all(isinstance(p, str) or is_ids(p) for p in prompts)):
        raise ValueError("give text, token ids, or a list of either that is not empty")
    return prompts


def _content(value: Any) -> Any:
    """The text of a message's parts, one part a line; the parts themselves where one of them is an image."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("Input should be a valid string, or a list of parts")
    parts = [_part(part) for part in value]
    return parts if any("url" in part for part in parts) else "\n".join(part["text"] for part in parts)


def _part(part: Any) -> dict[str, str]:
    if not isinstance(part, dict):
        raise ValueError(f"a part is an object with a type, not {part!r:.60}")
    kind = part.get("type")
    if kind not in ("text", "image_url"):
        raise ValueError(f"a part of the type {kind!r:.60} is not served; give text, or image_url with a data: URL")
    _refuse_others({name: part[name] for name in part if name not in ("type", kind)}, "a part's ")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise ValueError("the text of a part is no string")
        return {"type": "text", "text": part["text"]}
    image = part.get("image_url")
    if not isinstance(image, dict) or not isinstance(image.get("url"), str):
        raise ValueError("the image_url of a part is no object with a url")
    if image.get("detail") not in (None, "auto", "low", "high"):  # a wish: the model's own processor decides
        raise ValueError("the detail of an image_url may be auto, low or high")
    _refuse_others({name: image[name] for name in image if name not in ("url", "detail")}, "a part's image_url.")
    if not _DATA_URL.match(image["url"]):
        remedy = "send it as data:image/png;base64,... (or jpeg, webp)"
        if image["url"][:5].lower() == "data:":
            raise ValueError(f"an image as {image['url'].partition(',')[0]:.60} is not served; {remedy}")
        raise ValueError(f"the server fetches no image; {remedy}")
    return {"type": "image", "url": image["url"]}


_DATA_URL = re.compile(r"data:image/(?:png|jpe?g|webp);base64,", re.IGNORECASE)


def _token(name: str, vocabulary: int) -> int:
    """A token id that is the name of a field (Refusal: it is none of the model's, which are below `vocabulary`)."""
    if not (name.isascii() and name.isdigit() and len(name) < 10 and str(int(name)) == name):
        raise Refusal(400, f"logit_bias: {name!r:.60} is no token id.", param="logit_bias", code="invalid_value")
    if int(name) >= vocabulary:
        message = f"logit_bias has the token {name}; the model's ids are 0 to {vocabulary - 1}."
        raise Refusal(400, message, param="logit_bias", code="invalid_value")
    return int(name)


class StreamOptions(BaseModel, extra="allow", strict=True):
    """`include_usage`: a last piece says how many tokens there were; `continuous_usage_stats`: so does every other."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Name = Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]


class Function(BaseModel, extra="allow", strict=True):
    """What may be called: `parameters` is the JSON schema of its arguments."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel, extra="allow", strict=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class Called(BaseModel, extra="allow", strict=True):
    """A function that was called, with its arguments as JSON text, or null for none."""

    name: Annotated[str, Field(max_length=256)]
    arguments: Annotated[str, BeforeValidator(lambda given: "{}" if given is None else given)]


class ToolCall(BaseModel, extra="allow", strict=True):
    """A call that an assistant made earlier."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] | None = "function"
    function: Called


class Message(BaseModel, extra="allow", strict=True):
    """One turn of a conversation; what an assistant said may be null, as clients send it that got no text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, BeforeValidator(_content)] = None  # text, or parts where one is an image
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None

    def turn(self, arguments_as_text: bool) -> dict[str, Any]:
        """The message as chat templates take it.

        Args:
            arguments_as_text: of calls, as JSON text instead of as an object.
        """
        # "developer" is what newer clients call the system.
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        turn["content"] = self.content or ""
        if isinstance(self.content, list):
            turn["content"] = [{name: part[name] for name in part if name != "url"} for part in self.content]
        turn |= {n: value for n in ("name", "tool_call_id", "reasoning_content") if (value := getattr(self, n))}
        if self.tool_calls:
            turn["tool_calls"] = []
            for call in self.tool_calls:
                arguments: Any = call.function.arguments
                if not arguments_as_text:
                    arguments = _object(arguments)
                function = {"name": call.function.name, "arguments": arguments}
                turn["tool_calls"].append({"id": call.id or "", "type": "function", "function": function})
        return turn

    @property
    def images(self) -> list[str]:
        """The data URLs of its images."""
        parts = self.content if isinstance(self.content, list) else []
        return [part["url"] for part in parts if "url" in part]

    def check(self, where: str) -> None:
        """Refuse what is not served or does not belong to the role (Refusal)."""
        _refuse_others(self.model_extra or {}, where)
        if self.images and self.role != "user":
            raise Refusal(400, f"{where}content: images belong to a user.", param="messages", code="invalid_value")
        for place, call in enumerate(self.tool_calls or []):
            _refuse_others(call.model_extra or {}, f"{where}tool_calls.{place}.")
            _refuse_others(call.function.model_extra or {}, f"{where}tool_calls.{place}.function.")
        if self.tool_calls and self.role != "assistant":
            raise Refusal(400, f"{where}tool_calls belongs to an assistant.", param="messages", code="invalid_value")
        if self.content is None and self.role != "assistant":
            raise Refusal(400, f"{where}content: Field required.", param="messages", code="invalid_value")


def _object(arguments: str) -> Any:
    """Arguments of a call as an object; as they are where they are no JSON, which small models write."""
    try:
        value = _DECODER.decode(arguments or "{}")
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except (ValueError, RecursionError):
        return arguments
    return {} if value is None else value


class _Closed(BaseModel, extra="forbid", strict=True):
    """An object of known fields alone; null stands for one that is left out."""

    @model_validator(mode="before")
    @classmethod
    def _of_few(cls, value: Any) -> Any:
        few = _few(value)
        return {n: stated for n, stated in few.items() if stated is not None} if isinstance(few, dict) else few


class NamedFunction(_Closed):
    """The name of a function."""

    name: str


class NamedTool(_Closed):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class Schema(_Closed):
    """The JSON schema of an answer."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class AnswerFormat(_Closed):
    """What an answer has to be: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


_Bias = Annotated[float, Field(ge=-100, le=100)]
_Biases = Annotated[dict[str, _Bias], BeforeValidator(partial(_few, most=MOST_BIASES))]


class _Asked(BaseModel, extra="allow", strict=True):
    """What both kinds of requests have; null stands for a field that is left out, as in OpenAI's interface."""

    model: Annotated[str, Field(max_length=256)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(allow_inf_nan=False)] | None = None
    # Other servers take -1, as generation_config.json does, for what is 0 here: any token.
    top_k: Integer | None = None
    n: Count | None = None
    seed: Integer | None = None
    stop: Annotated[list[str], Field(fail_fast=True), BeforeValidator(_listed)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1 / LARGEST_PENALTY, le=100)] | None = None
    logit_bias: _Biases | None = None
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
        extra = self.model_extra or {}
        reasoning = extra.pop("reasoning", None)
        _refuse_others(reasoning if isinstance(reasoning, dict) else {"effort": reasoning}, "reasoning.")
        _refuse_others(extra, known=type(self).model_fields)
        if self.stream_options is not None:
            _refuse_others(self.stream_options.model_extra or {}, "stream_options.")
        if self.include_usage and not self.stream:
            raise Refusal(400, "stream_options needs stream = true.", param="stream_options")
        if (choices := prompts * (self.n or 1)) > limits.choices:
            raise Refusal(400, f"n times prompts is {choices}; at most {limits.choices} are served.", param="n")
        stops = self.stop or []
        if len(stops) > limits.stops or any(not 1 <= len(text) <= limits.stop_characters for text in stops):
            message = f"stop may have {limits.stops} strings of 1 to {limits.stop_characters:,} characters."
            raise Refusal(400, message, param="stop")

    def sampling(self, defaults: Sampling, choice: int, vocabulary: int) -> Sampling:
        """How the tokens of one of the `n` choices are drawn; each has a seed of its own.

        Raises:
            UsageError, Refusal: a value outside its range, or a token that is not among the model's `vocabulary`.
        """
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: getattr(defaults, name) if value is None else value for name, value in given.items()}
        if given["top_k"] == -1:  # all tokens, as in vLLM and generation_config.json
            given["top_k"] = 0
        settings = dict(defaults.settings)
        for name, neutral in (("min_p", 0), ("repetition_penalty", 1)):
            if (value := getattr(self, name)) is not None:
                settings.pop(name, None)
                settings |= {name: value} if value != neutral else {}
        if self.logit_bias:
            biases = [[[_token(token, vocabulary)], float(bias)] for token, bias in self.logit_bias.items()]
            settings["sequence_bias"] = [*settings.get("sequence_bias", []), *biases]
        seed = None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63
        return Sampling(**given, seed=seed, settings=settings)

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens come with each one and its probability; None for neither."""
        raise NotImplementedError

    def check_logprobs(self, tokens: int, choices: int) -> None:
        """Refuse more probabilities than an answer may have (Refusal)."""
        if self.likeliest is not None and (count := tokens * choices * (1 + self.likeliest)) > MOST_LOGPROBS:
            message = (
                f"An answer may have {MOST_LOGPROBS:,} logprobs and this one could have {count:,}; lower max_tokens."
            )
            raise Refusal(400, message, param="logprobs")

    def new_tokens(self, limits: Limits, prompt_tokens: int, room: int | None) -> int:
        """Tokens that a choice may have (Refusal: too many, or too long a prompt).

        Args:
            limits: of the server.
            prompt_tokens: of the prompt.
            room: what the model and its cache have left after it; None for any number.
        """
        longest = limits.prompt_tokens
        if (longest is not None and prompt_tokens > longest) or (room is not None and room < 1):
            raise self.too_long(counted(prompt_tokens, "token"), limits)
        room = limits.new_tokens if room is None else room
        wanted, field = self.wanted()
        if wanted is None:
            return min(self.unstated(limits), room)
        if wanted > room and room <= limits.new_tokens:
            message = (
                f"{field} is {wanted:,}, but after a prompt of {counted(prompt_tokens, 'token')} there is room "
                f"for {room:,}."
            )
            raise Refusal(400, message, param=field, code="context_length_exceeded")
        if wanted > limits.new_tokens:
            message = f"{field} is {wanted:,}; this server generates at most {counted(limits.new_tokens, 'token')}."
            raise Refusal(400, message, param=field)
        return wanted

    prompt_field: ClassVar[str]

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """The request of a body's fields (ValidationError, Refusal: they are none)."""
        return cls.model_validate(fields)

    @classmethod
    def refusal(cls, error: Refusal | KvconvertError | ValidationError) -> Refusal:
        """The refusal that an error means, in the names of this interface's fields."""
        return error if isinstance(error, Refusal) else refusal_of(error)

    def form(self, model: str, texts: TokenTexts) -> Form:
        """What its answers look like.

        Args:
            model: the name under which the bundle is served.
            texts: of single tokens.
        """
        options = self.stream_options if self.include_usage else None
        every = bool(options and options.continuous_usage_stats)
        return Form(isinstance(self, Chat), model, texts, self.likeliest, self.include_usage, every)

    def too_long(self, length: str, limits: Limits) -> Refusal:
        """The refusal of a prompt of some length, which says what is served."""
        message = (
            f"The prompt has {length}, which is too long; this server takes at most {limits.prompt_tokens:,} tokens."
        )
        return Refusal(400, message, param=self.prompt_field, code="context_length_exceeded")

    def wanted(self) -> tuple[int | None, str]:
        """The number of new tokens that is stated, and in which field."""
        return self.max_tokens, "max_tokens"

    def unstated(self, limits: Limits) -> int:
        """New tokens where no number is stated."""
        raise NotImplementedError


class Completion(_Asked):
    """POST /v1/completions: text or token ids to continue."""

    prompt_field: ClassVar[str] = "prompt"
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens come with each one and its probability; None for neither."""
        return self.logprobs

    def unstated(self, limits: Limits) -> int:
        """16, OpenAI's number."""
        return min(16, limits.new_tokens)


# What the server, the tokenizer, or transformers itself gives a chat template.
_NO_VARIABLES = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversations", "documents", "messages"),
    *("return_assistant_tokens_mask", "self", "tools", "bos_token", "eos_token", "pad_token", "unk_token"),
}


def _variable(value: Any) -> str | int | float | bool:
    if not isinstance(value, str | int | float | bool):
        raise ValueError("give text, a number, true or false")
    return value


_Variables = Annotated[
    dict[str, Annotated[Any, PlainValidator(_variable)]], BeforeValidator(partial(_few, most=MOST_VARIABLES))
]


class Chat(_Asked):
    """POST /v1/chat/completions: a conversation in which the model speaks next."""

    prompt_field: ClassVar[str] = "messages"
    named_tool: ClassVar[str] = '{"type": "function", "function": {"name": NAME}}'
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: AnswerFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None
    chat_template_kwargs: _Variables | None = None

    @field_validator("tool_choice", mode="wrap")
    @classmethod
    def _any_choice(cls, value: Any, read: Callable[[Any], Any]) -> Any:
        """Of several forms, pydantic names the first alone."""
        try:
            return read(value)
        except ValidationError:
            raise ValueError(f"give none, auto, required, or {cls.named_tool}") from None

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens come with each one and its probability; None for neither."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def images(self) -> list[str]:
        """The data URLs of all images, in the order of the conversation."""
        return [url for message in self.messages for url in message.images]

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schemas of arguments, by the names of functions that may be called."""
        if self.tool_choice == "none":
            return {}
        return {t.function.name: t.function.parameters or {"type": "object"} for t in self.tools or []}

    @property
    def forced(self) -> Mapping[str, Any] | None:
        """Of `schemas`, those of which one has to be called; None where none has to be."""
        if isinstance(self.tool_choice, NamedTool):
            return {self.tool_choice.function.name: self.schemas[self.tool_choice.function.name]}
        return self.schemas if self.tool_choice == "required" else None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer follows, if any."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        asked = self.response_format.json_schema
        return {"type": "object"} if asked is None else asked.schema_

    def check(self, limits: Limits, prompts: int) -> None:
        """Refuse what is not served and what is beyond the limits (Refusal)."""
        super().check(limits, prompts)
        for place, turn in enumerate(self.messages):
            turn.check(f"messages.{place}.")
        if (count := len(self.images)) > limits.images:
            message = f"The conversation has {count} images; this server takes at most {limits.images}."
            raise Refusal(400, message, param=self.prompt_field, code="invalid_value")
        arguments = [call.function.arguments for turn in self.messages for call in turn.tool_calls or []]
        if sum(map(len, arguments)) > MOST_ARGUMENTS:
            values = sum(entries(text.encode()) for text in arguments)
            if values > MOST_ARGUMENTS:
                message = (
                    f"The arguments of calls have {values:,} values; this server takes at most {MOST_ARGUMENTS:,}."
                )
                raise Refusal(413, message, param=self.prompt_field, code="body_too_long")
        variables = self.chat_template_kwargs or {}
        _refuse_others({name: variables[name] for name in variables if name in _NO_VARIABLES}, "chat_template_kwargs.")
        self._check_tools()
        asked = self.response_format
        if asked is not None and (asked.type == "json_schema") != (asked.json_schema is not None):
            message = "response_format: json_schema belongs to the type json_schema, which needs it."
            raise Refusal(400, message, param="response_format", code="invalid_value")
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs = true.", param="top_logprobs", code="invalid_value")
        if self.ignore_eos and (self.forced or self.answer_schema):
            raise Refusal(
                400, "An answer in a form of its own ends by itself; leave ignore_eos out.", param="ignore_eos"
            )
        if None not in (self.max_tokens, self.max_completion_tokens):
            message = "max_tokens is the older name of max_completion_tokens; give one of them."
            raise Refusal(400, message, param="max_tokens")

    def _check_tools(self) -> None:
        for place, tool in enumerate(self.tools or []):
            _refuse_others(tool.model_extra or {}, f"tools.{place}.")
            _refuse_others(tool.function.model_extra or {}, f"tools.{place}.function.")
        if (size := len(json.dumps([tool.model_dump() for tool in self.tools or []]))) > MOST_TOOLS_BYTES:
            message = f"All tools may have {MOST_TOOLS_BYTES:,} bytes at most as JSON, and have {size:,}."
            raise Refusal(400, message, param="tools", code="invalid_value")
        names = [tool.function.name for tool in self.tools or []]
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        said = None
        if len(set(names)) < len(names):
            said = "tools: two functions have one name."
        elif wanted is not None and wanted not in names:
            said = f"tool_choice: there is no tool {wanted!r:.150}; name one of tools."
        elif self.tool_choice == "required" and not names:
            said = "tool_choice: there are no tools; give some in tools."
        elif self.forced and self.answer_schema:
            said = "tool_choice asks for a call and response_format for another answer; leave one of them out."
        if said is not None:
            raise Refusal(400, said, param=said.partition(":")[0].split()[0], code="invalid_value")

    def wanted(self) -> tuple[int | None, str]:
        """The number of new tokens that is stated, and in which field."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return super().wanted()

    def unstated(self, limits: Limits) -> int:
        """As many as the server generates at most."""
        return limits.new_tokens
