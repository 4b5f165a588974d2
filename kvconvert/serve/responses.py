"""POST /v1/responses: OpenAI's newer interface, as a chat whose answer is told in other words. Nothing is kept."""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Callable
from typing import Any, ClassVar, Self

from pydantic import ValidationError

from kvconvert.errors import KvconvertError
from kvconvert.models.token_bytes import TokenTexts
from kvconvert.serve.forms import Form, Step, event, new_id
from kvconvert.serve.refusal import Refusal
from kvconvert.serve.replies import Piece
from kvconvert.serve.requests import IGNORED, MOST_MESSAGES, UNSERVED, Chat

# Fields that mean the same in a chat.
_SAME = (
    *("model", "temperature", "top_p", "top_k", "seed", "stream", "user", "parallel_tool_calls", "stop", "min_p"),
    *("repetition_penalty", "chat_template_kwargs", "stream_options", "store", "metadata", "service_tier", "reasoning"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
)
_OF_KEPT = ("background", "conversation", "previous_response_id", "prompt")
# What asks nothing of other fields.
_IDLE: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": (["reasoning.encrypted_content"],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# What a chat's fields are called here; outside of quotes, where a client's own words stand. Items of the input become
# other numbers of messages, so that those of messages would mislead.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
_NAMED = re.compile(rf"(?<![\w'\".])({'|'.join(map(re.escape, _NAMES))})(?:(?<=messages)\.\d+)?(?![\w'\"])")
_IN_FUNCTION = re.compile(r"(?<![\w'\".])(tools\.\d+)\.function(?![\w'\"])")
_TEXTS = ("input_text", "output_text", "text")


class _OwnRefusal(Refusal):
    """A refusal in the names of this interface, not of a chat's fields."""


def _refused(where: str, said: str) -> Refusal:
    return _OwnRefusal(400, f"{where}: {said}.", param=where.partition(".")[0], code="invalid_value")


def _own_names(said: str) -> str:
    return _IN_FUNCTION.sub(r"\1", _NAMED.sub(lambda found: _NAMES[found[1]], said))


def _content(value: Any, where: str) -> Any:
    if not isinstance(value, list):
        return value
    parts = []
    for part in value:
        if isinstance(part, dict) and part.get("type") in _TEXTS:
            part = {"type": "text", "text": part.get("text")}
        elif isinstance(part, dict) and part.get("type") == "input_image":
            image = {"url": part.get("image_url"), "detail": part.get("detail")}
            others = {name: part[name] for name in part if name != "detail"}
            part = others | {"type": "image_url", "image_url": image}
        parts.append(part)
    return parts


def _messages(given: Any) -> list[Any]:
    """The items of an input as messages (Refusal: one is of a kind that is not served)."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise _refused("input", "give text, or a list of items")
    if len(given) > MOST_MESSAGES:
        raise _refused("input", f"a conversation has {MOST_MESSAGES:,} items at most, and this one has {len(given):,}")
    messages: list[Any] = []
    for place, item in enumerate(given):
        where = f"input.{place}"
        if not isinstance(item, dict):
            raise _refused(where, "give an object")
        kind = item.get("type") or "message"
        if kind == "message":
            kept = {name: value for name, value in item.items() if name not in ("type", "id", "status", "phase")}
            messages.append(kept | {"content": _content(item.get("content"), where)})
        elif kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant":
                messages.append(last := {"role": "assistant", "content": None})
            calls = last.get("tool_calls") or []
            if not isinstance(calls, list):
                raise _refused(f"input.{place - 1}.tool_calls", "give a list")
            last["tool_calls"] = [*calls, {"id": item.get("call_id"), "type": "function", "function": call}]
        elif kind == "function_call_output":
            output = _content(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":  # which a model need not see again
            raise _refused(
                f"{where}.type", f"{kind!r:.60} is not served; give messages, calls of functions, and outputs"
            )
    return messages


def _tools(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    made = []
    for place, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise _refused(f"tools.{place}.type", f"{kind!r:.60} is not served; give functions")
        made.append({"type": "function", "function": {name: tool[name] for name in tool if name != "type"}})
    return made


class ResponsesChat(Chat):
    """The chat that a request of this interface asks for."""

    prompt_field: ClassVar[str] = "input"
    named_tool: ClassVar[str] = '{"type": "function", "name": NAME}'

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """The request of a body's fields (ValidationError, Refusal: they are none)."""
        chat = {name: fields.pop(name) for name in _SAME if name in fields}
        options = chat.get("stream_options")
        if isinstance(options, dict) and options.get("continuous_usage_stats") not in (None, False):
            raise _refused("stream_options", "continuous_usage_stats is not served here; the last event has the usage")
        messages = _messages(fields.pop("input", None))
        if (instructions := fields.pop("instructions", None)) is not None:
            if not isinstance(instructions, str):
                raise _refused("instructions", "give text")
            messages.insert(0, {"role": "system", "content": instructions})
        chat |= {"messages": messages, "max_completion_tokens": fields.pop("max_output_tokens", None)}
        chat["tools"] = _tools(fields.pop("tools", None))
        choice = fields.pop("tool_choice", None)
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {name: choice[name] for name in choice if name != "type"}}
        chat["tool_choice"] = choice
        text = fields.pop("text", None)
        if text is not None and not isinstance(text, dict):
            raise _refused("text", "give an object")
        text = dict(text or {})
        form = text.pop("format", None)
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
        chat["response_format"] = form
        fields |= {f"text.{name}": value for name, value in text.items()}
        for name, value in fields.items():
            if name not in IGNORED and value not in (None, {}, [], *_IDLE.get(name, ())):
                why = ", which keeps no responses" if name in _OF_KEPT else ""
                meant = [_NAMES.get(name), *difflib.get_close_matches(name[:60], [*_SAME, *_NAMES.values()], n=1)]
                own = None if why or name in UNSERVED else next(filter(None, meant), None)
                advice = "leave it out." if own is None else f"did you mean {own}?"
                message = f"{name} is not served by kvconvert{why}; {advice}"
                raise _OwnRefusal(400, message, param=name, code="unsupported_parameter")
        return cls.model_validate(chat)

    @classmethod
    def refusal(cls, error: Refusal | KvconvertError | ValidationError) -> Refusal:
        """The refusal that an error means, in the names of this interface's fields."""
        told = super().refusal(error)
        if isinstance(told, _OwnRefusal):
            return told
        param = told.param and _own_names(told.param)
        return Refusal(told.status, _own_names(told.message), param=param, code=told.code)

    def form(self, model: str, texts: TokenTexts) -> Form:
        """What its answers look like."""
        return ResponsesForm(self, model, texts)


class ResponsesForm(Form):
    """Answers as responses: a list of items, of reasoning, messages, and calls.

    Args:
        asked: the request, of whose fields a response tells some.
        model: the name under which the bundle is served.
        texts: of single tokens.
    """

    def __init__(self, asked: ResponsesChat, model: str, texts: TokenTexts) -> None:
        super().__init__(True, model, texts)
        self.id = new_id("resp_")
        self._began = int(time.time())
        choice = asked.tool_choice or "auto"
        self._told = {
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice.function.name},
        }
        tools = [{"type": "function", **tool.function.model_dump()} for tool in asked.tools or []]
        self._tools = json.dumps(tools)  # which takes a twentieth of the memory
        self._output: list[dict[str, Any]] = []
        self._open: str | None = None  # the kind of the last item, while it goes on
        self._spaces = ""  # which begin a message if more than spaces follows
        self._sequence = 0
        self._status = "completed"

    def whole(self, choices: list[Step], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer from all that came of its one choice."""
        self.events(dict(enumerate(choices)))
        self._close()
        return self._response(self._status, usage)

    def opening(self, count: int) -> list[str]:
        """The events that begin a stream."""
        response = self._response("in_progress")
        return [
            self._tell("response.created", response=response),
            self._tell("response.in_progress", response=response),
        ]

    def events(self, steps: dict[int, Step], usage: Callable[[], dict[str, Any]] | None = None) -> list[str]:
        """The events of what the choice was brought."""
        made = []
        for step in steps.values():
            piece: Piece = step.piece
            if piece.reasoning:
                made += self._text("reasoning", piece.reasoning)
            content, self._spaces = self._spaces + piece.content, ""
            if content.strip() or (content and self._open == "message"):
                made += self._text("message", content)
            else:
                self._spaces = content
            for call in piece.calls:
                made += self._call(call["id"], call["function"])
            if step.reason == "length":
                self._status = "incomplete"
        return made

    def closing(self, usage: dict[str, Any]) -> list[str]:
        """The events that end a stream."""
        made = self._close()
        return [*made, self._tell(f"response.{self._status}", response=self._response(self._status, usage))]

    def failed(self, refusal: Refusal) -> str:
        """The event that ends a stream after a failure."""
        return self._tell("error", **{name: refusal.body()["error"][name] for name in ("message", "code", "param")})

    def _tell(self, name: str, /, **fields: Any) -> str:
        self._sequence += 1
        return event({"type": name, "sequence_number": self._sequence - 1, **fields}, name)

    def _add(self, item: dict[str, Any]) -> list[str]:
        made = self._close()
        self._output.append(item)
        return [*made, self._tell("response.output_item.added", output_index=len(self._output) - 1, item=item)]

    def _text(self, kind: str, text: str) -> list[str]:
        """Add text to a message, or to reasoning, which goes on or begins."""
        name = "output_text" if kind == "message" else "reasoning_text"
        made = []
        if self._open != kind:
            item: dict[str, Any] = {"type": kind, "id": new_id(f"{kind[:3]}_"), "status": "in_progress"}
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
            made += self._add(item)
            self._open = kind
            part: dict[str, Any] = {"type": name, "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            made.append(self._tell("response.content_part.added", **self._place(), part=dict(part)))
            self._output[-1]["content"].append(part)
        self._output[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [*made, self._tell(f"response.{name}.delta", **self._place(), delta=text, **more)]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _call(self, id: str, function: dict[str, str]) -> list[str]:
        item = {"type": "function_call", "id": new_id("fc_"), "call_id": id, "name": function["name"]}
        made = self._add(item | {"arguments": "", "status": "in_progress"})
        self._output[-1] = item | {"arguments": function["arguments"], "status": "completed"}
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        arguments = function["arguments"]
        return [
            *made,
            self._tell("response.function_call_arguments.delta", **place, delta=arguments),
            self._tell("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments),
            self._tell("response.output_item.done", output_index=place["output_index"], item=self._output[-1]),
        ]

    def _close(self) -> list[str]:
        """End the item that goes on, if one does."""
        if self._open is None:
            return []
        kind, self._open, item = self._open, None, self._output[-1]
        item["status"] = "completed"
        part = item["content"][0]
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        name = "output_text" if kind == "message" else "reasoning_text"
        return [
            self._tell(f"response.{name}.done", **self._place(), text=part["text"], **more),
            self._tell("response.content_part.done", **self._place(), part=part),
            self._tell("response.output_item.done", output_index=len(self._output) - 1, item=item),
        ]

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        told = None
        if usage is not None:
            told = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._began,
            "model": self._model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": {},
            "output": list(self._output),
            **self._told,
            "tools": json.loads(self._tools),
            "usage": told,
        }
