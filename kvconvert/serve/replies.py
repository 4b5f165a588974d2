"""From the text that a model generates to what a client gets: content, reasoning, and calls of tools."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconvert.models.responses import Call, ResponseFormat, bare_calls, may_be_bare_call

_LETTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """An id of nine letters and digits, which is what Mistral's templates ask for."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass
class Piece:
    """What a step brought an answer.

    Attributes:
        content, reasoning: text.
        calls: of tools, as OpenAI's interface has them.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __iadd__(self, other: Piece) -> Piece:
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls
        return self


class Reply:
    """Divides the text of one answer.

    Args:
        format: how the model writes calls and reasoning; None takes all text as content.
        tools: JSON schemas of arguments, by the names of functions that may be called.
        prompt: the text that the answer follows.
        parallel: whether there may be several calls; all but the first are left out else.
        special: texts of special tokens, which are no content.
        schema: whether the answer may be JSON of a schema, which a field called name makes no call.

    Attributes:
        reasoning_tokens: tokens with reasoning so far, its marks included.
    """

    def __init__(
        self,
        format: ResponseFormat | None = None,
        tools: Mapping[str, Any] | None = None,
        prompt: str = "",
        parallel: bool = True,
        special: Collection[str] = (),
        schema: bool = False,
    ) -> None:
        format = format or ResponseFormat()
        self._calls = format.calls if tools else None
        self._reasoning, self._tools, self._parallel = format.reasoning, tools or {}, parallel
        self._special, self._schema = tuple(special), schema
        self._reasons, self._in_call = format.reasons_at_once(prompt), False
        self._text = ""  # not decided yet
        self._silent = True  # whether there was neither content nor a call
        self._trims = self._reasons  # spaces around reasoning, which templates write
        self._called = 0
        self.reasoning_tokens = 0

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self._called > 0

    def feed(self, text: str, last: bool = False, tokens: int = 0) -> Piece:
        """Add text and return what can already be told apart; with `last`, everything that was held back.

        Args:
            text: the next part of the answer.
            last: whether no more text follows.
            tokens: the number of tokens that the text was decoded from.
        """
        if self._calls is None and self._reasoning is None:
            return Piece(self._visible(text))
        self._text += text
        piece, reasoned = Piece(), self._reasons
        for part in self._parts(last):
            piece += part
        if reasoned or self._reasons:
            self.reasoning_tokens += tokens
        return piece

    def _parts(self, last: bool) -> Iterator[Piece]:
        while self._text or (last and self._in_call):
            before = len(self._text), self._reasons, self._in_call
            read = self._in_call_part if self._in_call else self._reason if self._reasons else self._say
            if part := read(last):
                yield part
            if before == (len(self._text), self._reasons, self._in_call):
                return

    def _reason(self, last: bool) -> Piece:
        assert self._reasoning is not None
        if self._trims:
            self._text = self._text.lstrip()
        text, found = self._until([self._reasoning[1]], last, spaces=True)
        self._trims = self._trims and not text
        if found is not None:
            self._reasons, self._trims, text = False, True, text.rstrip()
        return Piece(reasoning=self._visible(text))

    def _say(self, last: bool) -> Piece:
        if self._trims and self._silent:
            self._text = self._text.lstrip()
            if not self._text:
                return Piece()
        if self._silent and self._calls is not None and self._calls.kind == "json":
            held = self._text.lstrip()
            if not held or may_be_bare_call(held, self._tools):
                return self._bare(held) if last and held else Piece()
        marks = [self._calls.begin] if self._calls is not None and self._calls.begin else []
        thinks = [self._reasoning[0]] if self._reasoning is not None and self._silent else []
        text, found = self._until([*marks, *thinks], last, spaces=bool(marks))
        if found in thinks and not text.strip():
            self._reasons = self._trims = True
            return Piece()
        if found in thinks:  # in the middle of an answer it is text
            text += found or ""
        elif found is not None:
            self._in_call = True
            text = text.rstrip()
        return self._content(text)

    def _content(self, text: str) -> Piece:
        text = self._visible(text)
        self._silent = self._silent and not text.strip()
        return Piece(content=text)

    def _bare(self, text: str) -> Piece:
        """A whole answer that looks like a call without marks, as small models write them."""
        self._text, self._silent = "", False
        try:
            calls, rest = bare_calls(text, self._schema)
            if not {name for name, _ in calls} <= set(self._tools):
                raise ValueError("it calls what is no tool")
            piece = self._call(calls)
        except (ValueError, RecursionError):
            return self._content(text)
        piece += self._content(rest.strip())
        return piece

    def _in_call_part(self, last: bool) -> Piece:
        calls = self._calls
        assert calls is not None
        end = calls.end or calls.begin  # a call without an end lasts until the next one
        body, separator, rest = self._text.partition(end)
        if not separator and not last:
            return Piece()
        self._text = rest.lstrip() if separator else ""
        self._in_call = bool(separator) and not calls.end
        self._silent = False
        try:
            return self._call(calls.calls(body, self._tools))
        except (ValueError, RecursionError):  # then it is what the model says
            return self._content(calls.begin + body + (separator if calls.end else ""))

    def _call(self, calls: list[Call]) -> Piece:
        """Calls as clients get them (ValueError: no text in JSON can hold one, such as half of a surrogate pair)."""
        self._silent = False
        if not self._parallel:
            calls = calls[: 1 - self._called]
        made: list[dict[str, Any]] = []
        for index, (name, arguments) in enumerate(calls, self._called):
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
            "".join(function.values()).encode()
            made.append({"index": index, "id": new_call_id(), "type": "function", "function": function})
        self._called += len(made)
        return Piece(calls=made)

    def _until(self, marks: list[str], last: bool, spaces: bool = False) -> tuple[str, str | None]:
        """Take text up to the first mark, and say which; without one, up to where one may begin.

        Args:
            marks: that are looked for.
            last: whether no more text comes.
            spaces: hold spaces at the end, too, which are left out before a mark.
        """
        text = self._text
        found = min(((place, mark) for mark in marks if (place := text.find(mark)) >= 0), default=None)
        if found is not None:
            place, mark = found
            self._text = text[place + len(mark) :]
            return text[:place], mark
        longest = 0 if last else max(map(len, marks), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        held = next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in marks)), 0)
        end = len(text) - held
        if spaces and not last:
            end = len(text[:end].rstrip())
        self._text = text[end:]
        return text[:end], None

    def _visible(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        return text
