"""From text to token ids: one way for prompts, conversations, calibration, and evaluation.

Raw text gets the tokens that its tokenizer puts before a text, and none that it puts after one. A conversation gets
those that its chat template writes. What is said in it is text: a special token that is spelled in a message ends no
turn and begins none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from kvconvert.errors import KvconvertError, UsageError, first_line
from kvconvert.models.templates import TemplateLimitError, TemplateRenderer, panics_as_errors, refused, shared_renderer

# Stands within special tokens that are spelled in messages, until they were tokenized as text. Unicode reserves this
# character for what never leaves a program.
MARK = "\ufdd0"
_PROBE = "kvconvert-probe"
# An object where text is usual, and a message that calls a function with one.
_OBJECT = {_PROBE: _PROBE}
_FUNCTION = {"id": _PROBE, "type": "function", "function": {"name": _PROBE, "arguments": _OBJECT}}
_CALL = {"role": "assistant", "content": "", "tool_calls": [_FUNCTION]}
# What stands for any text, and how many conversations without their texts are kept.
_OTHER, _OUTLINES = "a", 256


def added_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text."""
    plain, whole = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    for begin in range(len(whole) - len(plain) + 1):
        if whole[begin : begin + len(plain)] == plain:
            return whole[:begin], whole[begin + len(plain) :]
    return [], []


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text and of nothing around it.

    Raises:
        UsageError: the tokenizer cannot write the text.
    """
    try:
        with panics_as_errors():
            return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except KvconvertError:
        raise
    except Exception as error:  # vocabularies may lack what a text needs, which tokenizers say by Exception itself
        raise UsageError(f"The model's tokenizer refuses the text ({first_line(error)}).") from error


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that is to go on: begun as the tokenizer begins a text, if it does not say so itself, and not
    ended.
    """
    before, _ = added_around(tokenizer)
    ids = token_ids(tokenizer, text)
    return ids if before and ids[: len(before)] == before else before + ids


class _Outline(NamedTuple):
    """A template's own part of a conversation: a hash of its special tokens in order, None where it refuses
    other texts than the conversation's, added tokens, and ids that `Conversations._normalized` gave.
    """

    special: int | None
    added: frozenset[str]
    normalized: tuple[int, ...] = ()


class Conversations:
    """Messages as a model's chat template writes them.

    Args:
        tokenizer: the tokenizer of the model.
        processor: the processor of the model, whose template is used instead of the tokenizer's.
        parse_special: take special tokens that are spelled in messages for the tokens themselves.
        renderer: applies the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None = None,
        parse_special: bool = False,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        self._tokenizer, self._parse_special, self._renderer = tokenizer, parse_special, renderer or shared_renderer()
        self._owner = tokenizer if processor is None else processor
        self._accepted: dict[str, tuple[bool, bool]] = {}
        self._python: dict[str, bool] = {}
        self._outlines: dict[bytes, _Outline] = {}
        self._controls: dict[tuple[str, frozenset[str]], re.Pattern[str]] = {}

    def takes(self, *roles: str) -> bool:
        """Whether the template writes a conversation of messages with these roles."""
        try:
            self.text([{"role": role, "content": "Yes."} for role in roles], answer=False)
        except UsageError:
            return False
        return True

    def text(
        self, messages: Sequence[Mapping[str, Any]], answer: bool, variables: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation as text, with a `MARK` in every special token that a message spells.

        Args:
            messages: in transformers' form; contents may be text or lists of parts, whatever the template takes.
            answer: add what the model's answer follows.
            variables: further ones of the template, such as `tools`; what they spell is text as well.

        Raises:
            UsageError: the template refuses the conversation, or writes no parts of a kind that it has.
        """
        fitted, variables = [self._fitted(message) for message in messages], variables or {}
        if self._parse_special:
            return self._render(fitted, answer, variables)
        outline = self._outline(fitted, answer, variables)
        control = self._control(outline.added)
        marked = [self._marked(m, self._special if m.get("role") == "assistant" else control) for m in fitted]
        rendered = self._render(marked, answer, self._marked(variables, control))
        tokens = self._special.findall(rendered)
        if hash(tuple(tokens)) == outline.special:
            return self._checked(rendered, outline)
        # The template may have made a token of texts that it joins or changes. It cannot of those whose signs are
        # apart: where it writes the same tokens around these, it wrote the others by itself.
        try:
            apart = self._render(*self._said(fitted, answer, variables, self._apart))
        except TemplateLimitError:
            raise
        except UsageError:
            if outline.special is None:  # it asks for something that only the texts themselves have
                return self._checked(rendered, outline)
            raise
        return self._checked(rendered if self._special.findall(apart) == tokens else apart, outline)

    def _checked(self, text: str, outline: _Outline) -> str:
        """A conversation's text, of which normalization makes no more special tokens than are spelled (UsageError)."""
        found = self._normalized(text)
        if found != outline.normalized:
            spelled = Counter(self._tokenizer.convert_tokens_to_ids(self._special.findall(text)))
            if more := Counter(found) - spelled:
                token = self._tokenizer.convert_ids_to_tokens(next(iter(more)))
                raise UsageError(
                    f"A message holds what this tokenizer normalizes to {token!r}, a special token; leave it out, or "
                    "have special tokens in messages read as such (`parse_special`)."
                )
        return text

    def _normalized(self, text: str) -> tuple[int, ...]:
        """Ids in a text of the special tokens that are looked for after normalization, which may change letters."""
        return tuple(id for id in token_ids(self._tokenizer, text) if id in self._after) if self._after else ()

    @cached_property
    def _after(self) -> frozenset[int]:
        """Ids of these tokens."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if getattr(backend, "normalizer", None) is None:
            return frozenset()
        added = self._tokenizer.added_tokens_decoder.items()
        unknown = self._tokenizer.unk_token_id  # which stands for text
        return frozenset(i for i, token in added if token.normalized and token.content in self._tokens and i != unknown)

    def encode(self, messages: Sequence[Mapping[str, Any]], answer: bool) -> list[int]:
        """Token ids of the conversation; see `text`."""
        return self.ids(self.text(messages, answer))

    def ids(self, rendered: str) -> list[int]:
        """Token ids of what `text` gave."""
        ids = token_ids(self._tokenizer, rendered)
        if MARK not in rendered:
            return ids
        return [id for id, kept in zip(ids, unmarked(self._tokenizer, rendered, ids), strict=True) if kept]

    @property
    def template(self) -> str:
        """The template of conversations without tools, where a model has several; empty where it has none."""
        return self._template({})

    def _template(self, variables: Mapping[str, Any]) -> str:
        """The template that transformers takes with these variables: one for tools, if there is one, has its name."""
        template = self._owner.chat_template
        if not isinstance(template, dict):
            return template or ""
        if variables.get("tools") is not None and "tool_use" in template:
            return template["tool_use"] or ""
        if "default" not in template:
            raise refused("there are several, none of which is named default")
        return template["default"] or ""

    @property
    def _sources(self) -> str:
        """All of the templates."""
        template = self._owner.chat_template
        return "\n".join(filter(None, template.values())) if isinstance(template, dict) else template or ""

    def _render(self, messages: list[dict[str, Any]], answer: bool, variables: Mapping[str, Any]) -> str:
        own = self._tokenizer.special_tokens_map | {"add_generation_prompt": answer}
        text = self._renderer.render(self._template(variables), messages, {**variables, **own})
        try:
            text.encode()
        except UnicodeError as error:  # half of a surrogate pair, which is no text
            raise refused(str(error)) from error
        return text

    def _outline(self, messages: list[dict[str, Any]], answer: bool, variables: Mapping[str, Any]) -> _Outline:
        """The template's output around texts that spell no special token."""
        plain = self._said(messages, answer, variables, lambda text: _OTHER if self._spoken(text) else text)
        key = hashlib.sha256(json.dumps([self._sources, *plain], default=str).encode()).digest()
        if key not in self._outlines:
            if len(self._outlines) >= _OUTLINES:
                self._outlines.clear()
            try:
                text = self._render(*plain)
            except TemplateLimitError:
                raise
            except UsageError:
                self._outlines[key] = _Outline(None, frozenset())
            else:
                added = frozenset(token for token in self._added if token in text)
                special = hash(tuple(self._special.findall(text)))
                self._outlines[key] = _Outline(special, added, self._normalized(text))
        return self._outlines[key]

    def _fitted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message without empty fields, its contents in the form that the template takes: text, or parts."""
        fitted: dict[str, Any] = _without_nulls(message)
        content = fitted.get("content")
        if _is_text(content):
            content = [content]
        elif isinstance(content, Mapping) and self._writes_python({"role": message.get("role"), "content": _OBJECT}):
            fitted["content"] = json.dumps(content, ensure_ascii=False)
        if any(isinstance(part, Mapping) for part in _arguments(fitted)) and self._writes_python(_CALL):
            fitted["tool_calls"] = _with_arguments_as_text(fitted["tool_calls"])
        if not isinstance(content, str | list):
            return fitted
        takes_text, takes_parts = self._accepts()
        if isinstance(content, str) and takes_parts and not takes_text:
            fitted["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            given = (part for part in content if part not in _NO_PARTS)
            parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in given]
            other = next((part for part in parts if not _is_text(part)), None)
            if takes_parts or not takes_text:
                fitted["content"] = [{"type": "text", "text": p["text"]} if _is_text(p) else p for p in parts]
            elif other is not None:
                kind = other.get("type", other) if isinstance(other, Mapping) else other
                raise UsageError(
                    f"A message has a part of the type {kind!r:.40}, and the model's chat template takes text alone; "
                    "leave the part out."
                )
            else:
                fitted["content"] = "\n".join(part["text"] for part in parts)
        return fitted

    def _accepts(self) -> tuple[bool, bool]:
        """Whether the template writes contents that are text, and contents that are lists of parts."""
        template = self.template
        if template not in self._accepted:
            forms = (_PROBE, [{"type": "text", "text": _PROBE}])
            self._accepted[template] = tuple(self._writes(form) for form in forms)  # type: ignore[assignment]
        return self._accepted[template]

    def _writes(self, content: Any) -> bool:
        try:
            text = self._render([{"role": "user", "content": content}], False, {})
        except TemplateLimitError:
            raise
        except UsageError:
            return False
        # Not as Python or JSON writes a list.
        return _PROBE in text and not re.search(rf"""["']text["']: *["']{_PROBE}""", text)

    def _writes_python(self, message: Mapping[str, Any]) -> bool:
        """Whether the template writes the object in a message as Python does, as one that takes JSON text."""
        key = json.dumps([self.template, message], default=str)
        if key not in self._python:
            before = [] if message["role"] in ("system", "user") else [{"role": "user", "content": _PROBE}]
            try:
                text = self._render([*before, dict(message)], False, {})
            except TemplateLimitError:
                raise
            except UsageError:  # it has a sentence of its own on what it was given
                text = ""
            self._python[key] = repr(_OBJECT) in text
        return self._python[key]

    @cached_property
    def _tokens(self) -> set[str]:
        """Special tokens."""
        added = self._tokenizer.added_tokens_decoder.values()
        return {*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Any special token."""
        return _any_of(self._tokens)

    @cached_property
    def _signs(self) -> re.Pattern[str]:
        """Characters that every special token contains: signs, where all have some."""
        return re.compile(r"[\W_]" if all(re.search(r"[\W_]", token) for token in self._tokens) else "(?s:.)")

    def _spoken(self, text: str) -> str:
        """A text without the space around it, unless space alone may be a special token."""
        return text if any(map(str.isspace, self._tokens)) else text.strip()

    def _apart(self, text: str) -> str:
        """A text with a mark on both sides of each sign, and of all of it but the space around it, which a template may
        cut off; it may ask whether there is any text at all, too.
        """
        if not (said := self._spoken(text)):
            return text
        apart = re.sub(rf"{MARK}+", MARK, MARK + self._signs.sub(rf"{MARK}\g<0>{MARK}", said) + MARK)
        return text.replace(said, apart)

    @cached_property
    def _added(self) -> list[str]:
        return [token.content for token in self._tokenizer.added_tokens_decoder.values()]

    def _control(self, added: frozenset[str]) -> re.Pattern[str]:
        """Any special token, or another added one that the template writes; the model's own answers may have these."""
        template = self._sources
        if (template, added) not in self._controls:
            written = {token for token in self._added if token in template}
            self._controls[template, added] = _any_of(self._tokens | written | added)
        return self._controls[template, added]

    def _marked(self, said: Any, control: re.Pattern[str]) -> Any:
        """The text, with a mark after the first character of every special token that is spelled in it."""

        def spell(text: str) -> str:
            return control.sub(lambda found: found[0][0] + MARK + found[0][1:], text.replace(MARK, ""))

        return self._changed(said, spell)

    def _kind(self, text: str) -> str:
        """A text by which the template may tell one kind of thing from another, without special tokens: as it is where
        the template names it, and where it is a word.
        """
        if f"'{text}'" in self._sources or f'"{text}"' in self._sources:
            return self._marked(text, self._special)
        return self._apart(text) if self._signs.search(text) else text

    def _said(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: bool,
        variables: Mapping[str, Any],
        change: Callable[[str], str],
    ) -> tuple[list[dict[str, Any]], bool, dict[str, Any]]:
        """A conversation with its texts changed, but for those by which a template tells one kind of thing from
        another.
        """
        texts = {name: self._kind(value) for name, value in variables.items() if isinstance(value, str)}
        others = {name: value for name, value in variables.items() if name not in texts}
        others = self._changed(others, change, self._kind)
        return [self._changed(message, change, self._kind) for message in messages], answer, texts | others

    def _changed(self, value: Any, change: Callable[[str], str], kind: Callable[[str], str] | None = None) -> Any:
        """A structure with every text in it changed, and names of fields where they are none of a message's own, which
        are words without special tokens: a template may write the arguments of a call as JSON. Texts of `_KINDS` are
        changed by `kind`, if given.
        """
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            changed = {}
            for name, field in value.items():
                if self._special.search(str(name)) or not str(name).isidentifier():
                    name = change(str(name))
                is_kind = name in _KINDS and isinstance(field, str)
                changed[name] = kind(field) if kind and is_kind else self._changed(field, change, kind)
            return changed
        return [self._changed(item, change, kind) for item in value] if isinstance(value, list) else value


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """A pattern of all tokens, the longest first, except those of one character, which cannot be told from text."""
    return re.compile(_alternatives(sorted(token for token in tokens if len(token) > 1)) or r"(?!)")


def _alternatives(tokens: Sequence[str], depth: int = 0) -> str:
    """A regular expression of sorted texts that looks at each character of what it reads once, where one after another
    would compare all of thousands at every place of a long text that resembles them.
    """
    if len(tokens) < 2 or depth > _NESTED:
        return "|".join(map(re.escape, reversed(tokens)))
    branches = []
    for _, group in groupby(tokens, key=lambda token: token[:1]):
        same = list(group)
        first, last = same[0], same[-1]
        length = next((n for n in range(len(first)) if first[n] != last[n]), len(first))
        begin = first[:length]
        rest = _alternatives([token[length:] for token in same], depth + 1) if len(same) > 1 else ""
        branches.append(re.escape(begin) + (f"(?:{rest})" if rest else ""))
    return "|".join(reversed(branches))  # the empty rest, which is the shortest, last


_NESTED = 50  # groups in one another, of which Python takes no more than some hundreds


def unmarked(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[bool]:
    """Which token ids of a text are none of its marks.

    Raises:
        UsageError: the marks are not tokens of their own here.
    """
    shorter, longer = (tokenizer(MARK * count, add_special_tokens=False)["input_ids"] for count in (2, 3))
    mark = longer[len(shorter) :]
    kept, found, place = [True] * len(ids), 0, 0
    while mark and place <= len(ids) - len(mark):
        if list(ids[place : place + len(mark)]) == mark:
            kept[place : place + len(mark)] = [False] * len(mark)
            found, place = found + 1, place + len(mark)
        else:
            place += 1
    if found != text.count(MARK):
        rest = text[text.index(MARK) - 1 :].replace(MARK, "")
        spelled = next((token for token in tokenizer.all_special_tokens if rest.startswith(token)), rest[:20])
        raise UsageError(
            f"A message holds {spelled!r}, a special token that this tokenizer cannot write as text; leave it out, or "
            "have special tokens in messages read as such (`parse_special`)."
        )
    return kept


def without_marks(tokenizer: PreTrainedTokenizerBase, text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A processor's inputs of a text without the tokens of its marks; `input_ids` and what is like it are [1, n]."""
    ids = inputs["input_ids"]
    kept = torch.tensor(unmarked(tokenizer, text, ids[0].tolist()))
    return {name: value[:, kept] if value.shape == ids.shape else value for name, value in inputs.items()}


def _arguments(message: Mapping[str, Any]) -> list[Any]:
    """The arguments of a message's calls."""
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    return [function.get("arguments") for function in functions if isinstance(function, Mapping)]


def _with_arguments_as_text(calls: Sequence[Any]) -> list[Any]:
    """Calls whose arguments are JSON text."""
    made = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": text}}
        made.append(call)
    return made


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") in _TEXT_PARTS


_TEXT_PARTS = ("text", "input_text", "output_text")
_NO_PARTS = (None, *({"type": kind} for kind in _TEXT_PARTS))  # of which a null was left out


def _without_nulls(value: Any) -> Any:
    """Without the fields that a table fills with null where a row does not have them."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


# Fields by whose texts a template tells one kind of thing from another.
_KINDS = ("role", "type", "id", "tool_call_id")
