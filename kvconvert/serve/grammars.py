"""What an answer may be where a client says so: JSON by a schema, or calls of tools, held by llguidance on the logits.

llguidance computes which tokens may follow as they are needed, and gives up, instead of going on for ever, where a
grammar takes too many steps or states. What it does before, such as compiling a number that has to be a multiple of
several others, has no such bound: a schema is compiled in a process with limits first, and that never where those who
ask for none would wait.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from kvconvert.errors import first_line
from kvconvert.models.responses import PROBE_ID, PROBE_NAME, CallFormat
from kvconvert.models.templates import TemplateLimitError, TemplateRenderer, is_quick
from kvconvert.serve.refusal import Refusal
from kvconvert.serve.replies import new_call_id

# Bytes of one schema as JSON; a thousand properties are compiled in half a second.
MOST_SCHEMA_BYTES = 2**15
MOST_GRAMMAR_BYTES = 2**17
# Different grammars of one client that may wait to be compiled, and grammars that are kept compiled.
MOST_WAITING, _MOST_KEPT = 8, 8
# Seconds for which a grammar that took too much is refused at once, and how many such are remembered.
_REFUSED_SECONDS, _MOST_REFUSED = 60.0, 1024
# Symbols of a grammar, states of its lexer (2 KB each), and what one token may cost.
_LIMITS: dict[str, Any] = {
    "max_grammar_size": 20_000,
    "max_lexer_states": 8192,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
}
# No tokens chosen ahead where one text alone may follow: each would take as long as that text, which may be a schema's.
_HEAD = '%llguidance {"no_forcing": true}'
# Between values: no endless white space, which small models tend to.
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"\n? {0,16}", "coerce_one_of": True}
# The marks of reasoning, and whether a prompt has the first of them; None for none.
Reasoning = tuple[tuple[str, str], bool] | None
ANY_OBJECT: dict[str, Any] = {"type": "object"}
# How llguidance's failures begin where no token may follow.
NOTHING_FITS = "NoExtension"


class GrammarAside(TemplateLimitError):
    """A grammar that is to be compiled where those who ask for none do not wait.

    Attributes:
        key: by which grammars are told apart.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__("A grammar is compiled aside.")
        self.key = key


class Constraint(LogitsProcessor):
    """A grammar that an answer follows; for one request.

    Args:
        matcher: llguidance's, at its beginning.
        vocabulary: logits of a token.

    Attributes:
        param: the field of the request that has the schemas.
        failure: why the grammar was given up; the answer then ends.
    """

    def __init__(self, matcher: Any, vocabulary: int, stops: Collection[int], param: str) -> None:
        self._matcher, self._stops = matcher, sorted(stops)
        self._length: int | None = None
        self._mask = torch.zeros(-(-vocabulary // 32), dtype=torch.int32)
        self._bits = torch.arange(32, dtype=torch.int32)
        self._vocabulary, self.param = vocabulary, param
        self.failure: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Constraint:
        return Constraint(self._matcher.deep_copy(), self._vocabulary, self._stops, self.param)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits of which only those are left that may follow."""
        count = input_ids.shape[1]
        # On a GPU this waits for the token before, which was chosen there.
        new = [] if self._length is None else input_ids[0, self._length :].tolist()
        self._length = count
        if self.failure is None and new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        if self.failure is None and not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(self._mask.data_ptr(), self._mask.numel() * 4)
            if not self._matcher.is_error():
                bits = ((self._mask[:, None] >> self._bits) & 1).flatten().bool()
                allowed[: self._vocabulary] = bits[: self._vocabulary]
        if self.failure is None and self._matcher.is_error():
            self.failure = first_line(self._matcher.get_error())
        if self.failure is not None or not allowed.any():
            allowed[:] = False
            allowed[self._stops] = True
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


class Grammars:
    """Grammars over one tokenizer.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: logits of a token.
        stops: tokens that end an answer.
        renderer: which tries schemas before they are compiled here, where nothing ends what takes too long.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        stops: Collection[int],
        renderer: TemplateRenderer,
    ) -> None:
        self._vocabulary, self._stops = vocabulary, sorted(stop for stop in stops if stop < vocabulary)
        self._renderer = renderer
        self._missing: str | None = None
        # By their keys: matchers that were compiled last, until when others are refused, and what waits, by clients.
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._refused: OrderedDict[bytes, float] = OrderedDict()
        self._waiting: dict[Hashable, Counter[bytes]] = {}
        self._lock = threading.Lock()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {token.content: id for id, token in added.items() if token.content}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        try:
            import llguidance
        except ImportError:
            self._missing = "llguidance is not installed; run pip install '.[serve]' in a clone of kvconvert"
            return
        if backend is None or not self._stops:
            self._missing = "the model's tokenizer has no form that llguidance reads, or no token that ends an answer"
            return
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
        try:
            self._tokens = llguidance.LLTokenizer(backend.to_str(), n_vocab=vocabulary, eos_token=self._stops)
        except BaseException as error:  # whatever a tokenizer holds that it does not expect, Rust's panics included
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._missing = f"llguidance does not read the model's tokenizer ({first_line(error)})"
        self._matchers, self._limits = llguidance.LLMatcher, llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)

    def check(self, param: str) -> None:
        """Refuse a field that needs a grammar where there can be none (Refusal)."""
        if self._missing is not None:
            message = f"{param} is not served: {self._missing}."
            raise Refusal(400, message, param=param, code="unsupported_parameter")

    def of(
        self,
        schema: Any,
        format: CallFormat | None,
        tools: Mapping[str, Any],
        reasoning: Reasoning,
        param: str,
        salt: bytes = b"",
    ) -> Constraint:
        """An answer that is JSON of a schema, or a call of one of some tools (Refusal: it cannot be served).

        What llguidance does not know of the tools' schemas is left to the model.

        Args:
            schema: a JSON schema; None allows calls alone.
            format: of the model's calls.
            tools: JSON schemas of arguments, by names.
            reasoning: the marks around reasoning that may come before, and whether the prompt has the first of them.
            param: the field of the request.
            salt: what is kept of compiled grammars is shared among requests of the same salt alone.
        """
        self.check(param)
        param = "tools" if schema is None else param  # where the schemas are
        schemas = [] if schema is None else ["%json " + _json(schema, param)]
        choices = list(schemas)
        rules = []
        if format is not None and tools:
            arguments = {} if format.kind == "tagged" else {n: _json(s, param, lenient=True) for n, s in tools.items()}
            rules = self._calls(format, tools, arguments)
            schemas += [f"%json {text}" for text in arguments.values()]
        choices += [rule.partition(":")[0] for rule in rules if rule.startswith("call_")]
        grammar = "\n".join([_HEAD, f"start: before ({' | '.join(choices)})", *rules, *self._before(reasoning)])
        if len(grammar) > MOST_GRAMMAR_BYTES:
            message = (
                f"{param}: all JSON schemas may have {MOST_GRAMMAR_BYTES:,} bytes at most, and have {len(grammar):,}."
            )
            raise Refusal(400, message, param=param, code="invalid_value")
        # Without the ids of calls, which are new each time.
        key = hashlib.sha256(salt + "\n".join([*schemas, param]).encode()).digest()
        matcher = self._compiled(grammar, f"start: {' | '.join(schemas) or json.dumps('')}", key, param)
        return Constraint(matcher, self._vocabulary, self._stops, param)

    def _compiled(self, grammar: str, tried: str, key: bytes, param: str) -> Any:
        """A matcher (Refusal: it takes long, or there is none; GrammarAside at once while others wait)."""
        kept = hashlib.sha256(key + grammar.encode()).digest()
        with self._lock:
            if kept in self._kept:
                self._kept.move_to_end(kept)
                return self._kept[kept].deep_copy()
            refused = self._refused.get(key, 0.0) > time.monotonic()
        takes_long = f"{param} takes too much time or memory to compile; simplify its JSON schema."
        if refused:
            raise Refusal(400, takes_long, param=param, code="invalid_value")
        if is_quick():
            raise GrammarAside(key)
        try:
            self._renderer.try_grammar(tried, _LIMITS)
        except TemplateLimitError as error:
            with self._lock:
                self._refused[key] = time.monotonic() + _REFUSED_SECONDS
                if len(self._refused) > _MOST_REFUSED:
                    self._refused.popitem(last=False)
            raise Refusal(400, takes_long, param=param, code="invalid_value") from error
        matcher = self._matchers(self._tokens, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            message = f"{param} cannot be served: {_reason(matcher.get_error())}; change its JSON schema."
            raise Refusal(400, message, param=param, code="unsupported_parameter")
        with self._lock:
            self._kept[kept] = matcher
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return matcher.deep_copy()

    @contextlib.contextmanager
    def waiting(self, client: Hashable, reason: BaseException) -> Iterator[None]:
        """While a client's request waits for what others do not wait for; by the thread of the event loop.

        Args:
            client: whose it is.
            reason: why it waits; grammars alone are counted (Refusal: too many of the client's wait).
        """
        if not isinstance(reason, GrammarAside):
            yield
            return
        keys = self._waiting.setdefault(client, Counter())
        if reason.key not in keys and len(keys) >= MOST_WAITING:
            message = f"One client may have {MOST_WAITING} new JSON schemas that wait to be compiled; try again later."
            raise Refusal(429, message, code="too_many_requests")
        keys[reason.key] += 1
        try:
            yield
        finally:
            keys[reason.key] -= 1
            if not keys[reason.key]:
                del keys[reason.key]
            if not keys:
                self._waiting.pop(client, None)

    def _calls(self, format: CallFormat, tools: Collection[str], arguments: Mapping[str, str]) -> list[str]:
        """Rules of a call of each of some tools, with the schemas of their arguments where calls have them as JSON."""
        choices = []
        for name in tools:
            before = format.before.replace(PROBE_NAME, name).replace(PROBE_ID, new_call_id())
            after = format.after.replace(PROBE_NAME, name).replace(PROBE_ID, new_call_id())
            if format.kind == "tagged":
                before = before[: before.rindex(name) + len(name)] + format.between
                choices.append(f"{self.literal(before)} rest")
            else:
                choices.append(f"{self.literal(before)} %json {arguments[name]} {self.literal(after)}".strip())
        rules = [f"call_{place}: {choice}" for place, choice in enumerate(choices)]
        if format.kind == "tagged":
            marks = {self._added[mark] for mark in self._added if mark in format.end or mark in "".join(format.tags)}
            rules.append("rest: (ANY" + "".join(f" | <[{id}]>" for id in sorted(marks)) + ")*\nANY: /(.|\\n)/")
        return rules

    def literal(self, text: str) -> str:
        """A text as a part of a grammar, in which added tokens are tokens."""
        names = sorted(self._added, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
        made = [f"<[{self._added[part]}]>" if part in self._added else json.dumps(part) for part in parts if part]
        return " ".join(made)

    def _before(self, reasoning: Reasoning) -> list[str]:
        """Rules of what may come before an answer."""
        if reasoning is None:
            return ['before: ""']
        (begin, end), begun = reasoning
        thinks = f"thinks: /(.|\\n)*/ {self.literal(end)}"
        if end not in self._added:
            thinks = f"thinks[suffix={json.dumps(end)}]: /(.|\\n)*/"
        return ["before: thinks /\\s*/" if begun else f"before: ({self.literal(begin)} thinks /\\s*/)?", thinks]


def _reason(said: str) -> str:
    """Why there is no matcher, without its place in a grammar that no client knows; of a regular expression's error,
    which shows the expression between, the first and the last line.
    """
    said = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said).partition("\n   1 | ")[0].strip()
    if "recursion limit exceeded" in said:
        return "it is nested too deeply"
    first, *rest = said.splitlines() or ["it is refused"]
    return first_line(" ".join([first, *(line.removeprefix("error: ") for line in rest[-1:])]))


def _json(schema: Any, param: str, lenient: bool = False) -> str:
    if not isinstance(schema, dict):
        raise Refusal(400, f"{param}: a JSON schema should be an object.", param=param, code="invalid_value")
    text = json.dumps(schema | {"x-guidance": _OPTIONS | {"lenient": lenient}})
    if len(text) > MOST_SCHEMA_BYTES:
        message = f"{param}: a JSON schema may have {MOST_SCHEMA_BYTES:,} bytes at most, and one has {len(text):,}."
        raise Refusal(400, message, param=param, code="invalid_value")
    return text
