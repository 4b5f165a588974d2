"""How a model writes calls of tools, and what it thinks before it answers: found by asking its chat template.

The template writes a conversation in which an assistant called a function of a known name with known arguments. What
stands around these is how the model writes calls: JSON between two marks, a name followed by JSON, or a name and tagged
values. Marks are texts, not patterns, so that an answer is read in one pass whatever the template says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvconvert.errors import UsageError
from kvconvert.models.chat import ChatPrompts
from kvconvert.models.prompts import MARK
from kvconvert.models.templates import TemplateLimitError

Call = tuple[str, Any]  # a name, and arguments: an object, or whatever else the model wrote
PROBE_NAME, _KEYS, _VALUES = "probe_function", ("probe_first", "probe_second"), ("probed one", "probed two")
_ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
# Of nine letters and digits, which is what Mistral's templates ask for.
PROBE_ID, _SECOND_ID = "probe0001", "probe0002"
_ASKED = {"role": "user", "content": "probed question"}
_THINK = ("<think>", "</think>")
# Of an answer to a probe, which is looked through from each of its brackets on.
_MOST_ANSWER = 2**13
_FENCES = ("```json", "```", "<tools>")


@dataclass(frozen=True)
class CallFormat:
    """How a template writes a call.

    Attributes:
        kind: "json" for an object with name and arguments, or a list of such; "named" for a name and then its arguments
            as JSON; "tagged" for a name and then each argument between tags.
        begin, end: what stands before and after a call, or a list of calls; either may be empty.
        before, after: the text before and after the arguments of an answer that is one call, with the probe's name and
            perhaps id in it; `after` is empty for kind "tagged".
        between: the text between name and arguments, for kind "named".
        tags: the text before a key, between key and value, and after a value, for kind "tagged".
        as_text: whether the template takes arguments of earlier calls as JSON text, not as an object.
    """

    kind: Literal["json", "named", "tagged"]
    begin: str
    end: str
    before: str
    after: str
    between: str = ""
    tags: tuple[str, str, str] = ("", "", "")
    as_text: bool = False

    def calls(self, body: str, tools: Mapping[str, Any]) -> list[Call]:
        """The calls between `begin` and `end` (ValueError: there are none).

        Args:
            body: the text.
            tools: JSON schemas of arguments, by the names of functions; tagged values are read by them.
        """
        if self.kind == "json":
            return json_calls(body)[0]
        if self.kind == "named":
            name, between, rest = body.partition(self.between)
            if not (name.strip() and between):
                raise ValueError("it has no arguments")
            return [(name.strip(), json.JSONDecoder().raw_decode(rest.strip())[0])]
        key_begin, within, after = self.tags
        name, *pieces = body.split(key_begin)
        name = name.strip().removesuffix(self.between).strip()
        if not name:
            raise ValueError("it has no name")
        arguments, schema = {}, tools.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        for piece in pieces:
            key, _, value = piece.partition(within)
            field = properties.get(key.strip()) if isinstance(properties, dict) else None
            arguments[key.strip()] = _read_value(value.rpartition(after)[0] if after in value else value, field)
        return [(name, arguments)]


@dataclass(frozen=True)
class ResponseFormat:
    """The parts of a model's answers beside text.

    Attributes:
        calls: how it calls tools; None where its template writes none.
        reasoning: the marks before and after what it thinks; None where its template knows no such thing.
    """

    calls: CallFormat | None = None
    reasoning: tuple[str, str] | None = None

    def reasons_at_once(self, prompt: str) -> bool:
        """Whether an answer to a prompt begins within reasoning, because the prompt ends with its mark."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        calls = self.calls
        own = () if calls is None else (calls.begin, calls.end, calls.between, *calls.tags)
        return tuple(mark for mark in (*own, *(self.reasoning or ())) if mark)


def response_format(chat: ChatPrompts, ends: Collection[str]) -> ResponseFormat:
    """How a model's template writes calls and reasoning.

    Args:
        chat: the chat format of the model.
        ends: texts of the tokens that end an answer.

    Raises:
        TemplateLimitError: the template takes too long.
    """
    if not chat.templated:
        return ResponseFormat()
    reasoning = _reasoning(chat)
    return ResponseFormat(_call_format(chat, ends, reasoning), reasoning)


def json_calls(text: str, exact: bool = False) -> tuple[list[Call], str]:
    """Calls written as JSON at the beginning of a text, and what follows them (ValueError: there are none).

    Args:
        text: what may be calls.
        exact: whether a call has to have a name, arguments, and nothing else.
    """
    decoder, calls, rest = json.JSONDecoder(), [], text.strip()
    while rest[:1] in ("{", "["):
        doubled = rest.startswith("{{")  # as Qwen 2.5 Coder's template shows it
        value, end = decoder.raw_decode(rest, int(doubled))
        calls += [_json_call(item, exact) for item in (value if isinstance(value, list) else [value])]
        rest = rest[end:].removeprefix("}" if doubled else "").lstrip(" \t\r\n;,")
    if not calls:
        raise ValueError("it is no JSON")
    return calls, rest


def bare_calls(text: str, exact: bool = False) -> tuple[list[Call], str]:
    """`json_calls` of a text that may be fenced as code."""
    text = text.strip()
    fence = next((fence for fence in _FENCES if text.startswith(fence)), "")
    calls, rest = json_calls(text.removeprefix(fence), exact)
    return calls, rest.removeprefix("```" if fence.startswith("`") else "</tools>") if fence else rest


def may_be_bare_call(text: str, names: Collection[str]) -> bool:
    """Whether a text begins, or may go on to begin, as a call of one of some functions without any marks."""
    text = text.lstrip()
    fence = next((fence for fence in _FENCES if text.startswith(fence)), "")
    if text and any(fence.startswith(text) for fence in _FENCES):
        return True
    longest = max(map(len, names), default=0)
    text = "".join(text[len(fence) : len(fence) + longest + 64].split()).removeprefix("[")
    text = text[1:] if text.startswith("{{") else text
    begins = [
        begin + name + '"' for name in names for begin in ('{"name":"', '{"type":"function","function":{"name":"')
    ]
    return any(begin.startswith(text) or text.startswith(begin) for begin in begins)


def _json_call(value: Any, exact: bool) -> Call:
    value = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("it names no function")
    given = [name for name in ("arguments", "parameters") if name in value]
    if exact and (not given or len(value) > 2):
        raise ValueError("it is no call alone")
    arguments = value[given[0]] if given else {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return value["name"], arguments


def _read_value(text: str, schema: Any) -> Any:
    """A tagged value: text where its schema says so or nothing, and JSON elsewhere, if it is any."""
    text = text.removeprefix("\n").removesuffix("\n")
    if not isinstance(schema, dict) or schema.get("type", "string") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _call_format(chat: ChatPrompts, ends: Collection[str], reasoning: tuple[str, str] | None) -> CallFormat | None:
    for as_text in (False, True):
        one = _written(chat, [PROBE_ID], as_text, reasoning)
        if one is None or PROBE_NAME not in one:
            continue
        two = _written(chat, [PROBE_ID, _SECOND_ID], as_text, reasoning)
        found = _json_format(one, two, ends, as_text) or _tagged_format(one, two, ends)
        if found is not None:
            return found
    return None


def _written(chat: ChatPrompts, ids: Sequence[str], as_text: bool, reasoning: tuple[str, str] | None) -> str | None:
    """An answer of calls as the template writes it, after what it writes before any answer and after empty reasoning;
    None if it refuses it, or writes far more than a call.
    """
    arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
    function = {"name": PROBE_NAME, "arguments": arguments}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in _KEYS}, "required": [*_KEYS]}
    tool = {"type": "function", "function": {"name": PROBE_NAME, "description": "probed", "parameters": parameters}}
    written = _answer(chat, {"role": "assistant", "content": "", "tool_calls": calls}, {"tools": [tool]})
    if written is None or reasoning is None:
        return written
    # Templates such as Qwen 3's write the marks even around nothing; a model that reasons has written its own.
    begin, end = reasoning
    thought, found, rest = written.partition(end)
    return rest.lstrip() if found and thought.strip().startswith(begin) and PROBE_NAME not in thought else written


def _answer(chat: ChatPrompts, message: dict[str, Any], variables: dict[str, Any] | None = None) -> str | None:
    try:
        head = chat.text([_ASKED], variables=variables).replace(MARK, "")
        whole = chat.text([_ASKED, message], False, variables).replace(MARK, "")
    except TemplateLimitError:
        raise
    except UsageError:
        return None
    # What begins reasoning for the model may be missing where a template writes an answer that is known.
    if head.rstrip().endswith(_THINK[0]):
        head = head.rstrip().removesuffix(_THINK[0])
    answer = whole[len(_common_prefix(head, whole)) :]
    return answer if len(answer) <= _MOST_ANSWER else None


def _json_format(one: str, two: str | None, ends: Collection[str], as_text: bool) -> CallFormat | None:
    arguments = _find_json(one, lambda value: value == _ARGUMENTS)
    if arguments is None:
        return None
    before, after = one[: arguments[0]], _cut(one[arguments[1] :], ends)
    whole = _find_json(one, lambda value: PROBE_NAME in str(value))
    name = before.rfind(PROBE_NAME)
    if whole is None and name < 0:
        return None
    kind: Literal["json", "named"] = "named" if whole is None else "json"
    begin, end = (name, arguments[1]) if whole is None else whole
    between = "" if whole is not None else one[name + len(PROBE_NAME) : arguments[0]].strip()
    if kind == "named" and not between:
        return None
    lead, tail = one[:begin], one[end:]
    gap = None
    if two is not None and one[begin] != "[":
        # From the end of the first of two calls to the beginning of the second.
        next_call = two.find(two[begin : begin + 8], end)
        gap = two[end:next_call] if next_call > 0 and two[:end] == one[:end] else None
    if gap is None or not gap.strip():
        first, last = lead.strip(), _cut(tail, ends).strip()
    else:
        last, first = _split(gap, len(_common_prefix(gap, tail)), len(_common_suffix(lead, gap)))
    return CallFormat(kind, first, last, before, after, between, as_text=as_text)


def _tagged_format(one: str, two: str | None, ends: Collection[str]) -> CallFormat | None:
    places = [one.find(text) for text in (PROBE_NAME, _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])]
    if -1 in places or places != sorted(places):
        return None
    name, key, value, next_key, last = places
    first = one[name + len(PROBE_NAME) : key]
    within = one[key + len(_KEYS[0]) : value].strip()
    gap, rest = one[value + len(_VALUES[0]) : next_key], one[last + len(_VALUES[1]) :]
    after, key_begin = _split(gap, len(_common_prefix(gap, rest)), len(_common_suffix(first, gap)))
    if not (key_begin and within and after):
        return None
    lead, end = one[:name], _cut(rest, ends).strip().removeprefix(after).strip()
    if two is not None and (again := two.find(PROBE_NAME, places[-1])) > 0:
        lead = _common_suffix(lead, two[:again])
    between = first.strip().removesuffix(key_begin).strip()
    return CallFormat("tagged", lead.strip(), end, one[:key], "", between, (key_begin, within, after))


def _find_json(text: str, wanted: Callable[[Any], bool]) -> tuple[int, int] | None:
    """Where the first JSON value of some kind begins and ends."""
    decoder = json.JSONDecoder()
    for place, letter in enumerate(text):
        if letter in "{[":
            try:
                value, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                continue
            if wanted(value):
                return place, end
    return None


def _cut(text: str, ends: Collection[str]) -> str:
    """A text up to the first of some others."""
    places = [place for end in ends if end and (place := text.find(end)) >= 0]
    return text[: min(places)] if places else text.rstrip()


def _split(gap: str, most_before: int, most_after: int) -> tuple[str, str]:
    """Split the text between two things into what ends one and what begins the next.

    Args:
        gap: the text.
        most_before, most_after: letters at its beginning and at its end that also stand around a single thing.
    """
    least = len(gap) - most_after
    if least > most_before:
        return gap[:most_before].strip(), gap[least:].strip()
    places = range(least, most_before + 1)
    begins = [*(n for n in places if gap[n : n + 1].isspace()), *(n for n in places if gap[n : n + 1] in ("<", "["))]
    place = begins[0] if begins else most_before
    return gap[:place].strip(), gap[place:].strip()


def _common_prefix(first: str, second: str) -> str:
    differs = (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(differs, min(len(first), len(second)))]


def _common_suffix(first: str, second: str) -> str:
    return _common_prefix(first[::-1], second[::-1])[::-1]


def _reasoning(chat: ChatPrompts) -> tuple[str, str] | None:
    if _THINK[1] in chat.template:
        return _THINK
    thought, said = _VALUES
    message = {"role": "assistant", "content": said, "reasoning_content": thought, "thinking": thought}
    written = _answer(chat, message)
    if written is None or not 0 < written.find(thought) < written.find(said):
        return None
    begin, _, rest = written.partition(thought)
    begin, end = begin.strip(), rest.partition(said)[0].strip()
    return (begin, end) if begin and end else None
