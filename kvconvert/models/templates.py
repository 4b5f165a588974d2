"""Chat templates and tokenizers, which come with a model, and tables at work in processes that have limits of time and
memory.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvconvert.errors import CheckpointError, KvconvertError, UsageError, first_line, printable
from kvconvert.models import template_process

# Bytes that a conversation's text may have beyond four times what its messages have.
FURTHER_BYTES = 2**20
_START_SECONDS = 120
# Of a processor: for what others wait for, and for each character besides.
QUICK_SECONDS, _SECONDS_OF_CHARACTER = 0.25, 5e-6
# Seconds of a processor for all schemas of a client's grammar, and bytes of memory, which the server then has for each.
GRAMMAR_SECONDS, GRAMMAR_BYTES = 0.5, 2**25
# Characters of texts whose tokens are kept, and how many such texts.
_SHORT, _MOST_SHORT = 3, 256
_is_quick: ContextVar[bool] = ContextVar("kvconvert_is_quick", default=False)
# Nothing else of this process's environment, which may hold keys.
_ENVIRONMENT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ", "VIRTUAL_ENV")


class TemplateLimitError(UsageError):
    """A template or a tokenizer that was ended because it takes too much time or memory."""


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Give up after `QUICK_SECONDS` what is rendered or tokenized in the block."""
    token = _is_quick.set(True)
    try:
        yield
    finally:
        _is_quick.reset(token)


def is_quick() -> bool:
    """Whether the block of `quickly` is under way."""
    return _is_quick.get()


_RENDERERS: weakref.WeakSet[TemplateRenderer] = weakref.WeakSet()


def _forget_all() -> None:
    for renderer in _RENDERERS:
        renderer.forget()


# Answers on a connection that two processes have would go to either of them.
os.register_at_fork(after_in_child=_forget_all)


class TemplateRenderer:
    """Renders conversations by a model's chat template, and tokenizes text, whatever the two of them do.

    Each thread that uses it has a worker of its own, which is made when it is needed, and again after it was ended.

    Args:
        tokenizer: the model's tokenizer; None where nothing is tokenized.
        seconds: processor seconds that a conversation may take, and four times as many on the clock; a text may take
            more if it is long.
        memory: bytes that a worker may take.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, seconds: float = 5, memory: int = 512 * 2**20
    ) -> None:
        self._seconds, self._memory = seconds, memory
        self._tokenizer = "" if tokenizer is None else _json_of(tokenizer)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting, self._closed = threading.Lock(), False
        self._own = threading.local()
        # The template that all workers have compiled, None before `start`; whether its process has yet to say that it
        # is; and why one cannot be.
        self._template: str | None = None
        self._compiling = False
        self._refusals: dict[str, UsageError] = {}
        _RENDERERS.add(self)

    def forget(self) -> None:
        """Leave processes and connections to the process that this one was forked from."""
        self._process = self._control = None
        self._starting, self._own = threading.Lock(), threading.local()

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text of a conversation in which the model speaks next.

        Args:
            template: Jinja's.
            messages: in the form that the template expects.
            variables: further ones that it may use.

        Raises:
            UsageError: the template refuses the conversation, or takes more time, memory or text than it may.
            KvconvertError: there is no process to render it.
        """
        asked = {"messages": messages, "variables": variables, "further_bytes": FURTHER_BYTES}
        answer = self._ask(asked, "chat template", template=template)
        if "error" in answer:
            raise refused(answer["error"])
        return answer["text"]

    @property
    def tokenizes(self) -> bool:
        """Whether `encode` works: for tokenizers that are described by JSON."""
        return bool(self._tokenizer)

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of a text, with the special tokens that belong around one or without.

        Raises:
            UsageError: the tokenizer refuses the text, or takes more time or memory than it may.
            KvconvertError: there is no process.
        """
        answer = self._ask({"encode": text, "special": special}, "tokenizer", length=len(text))
        if "error" in answer:
            raise UsageError(f"The model's tokenizer refuses the text ({answer['error']}).")
        return answer["ids"]

    def try_tokenizer(self, path: Path) -> str:
        """Why the steps of a tokenizer.json are refused, or nothing, also where the file is none."""
        try:
            answer = self._ask({"probe": str(path)}, "tokenizer")
        except TemplateLimitError as error:
            return str(error).rstrip(".")
        return answer.get("error") or answer["text"]

    def try_grammar(self, grammar: str, limits: Mapping[str, int]) -> None:
        """Compile a client's grammar; whether it is one is for its user to find out.

        Args:
            grammar: llguidance's, without tokens of a vocabulary.
            limits: llguidance's own, which bound neither time nor memory.

        Raises:
            TemplateLimitError: it takes more time or memory than it may.
            KvconvertError: there is no process.
        """
        asked = {"grammar": grammar, "limits": dict(limits), "memory": GRAMMAR_BYTES}
        self._ask(asked, "grammar", seconds=GRAMMAR_SECONDS)

    def start(self, template: str | None = "") -> None:
        """Start what makes workers, and have it compile a template for all of them, without waiting for either; None
        where no template will be rendered.
        """
        with self._starting, contextlib.suppress(OSError, EOFError):  # it ended at once: said where a worker is wanted
            self._start()
            self._await_compiled()
            self._template = template
            self._compile()

    def _start(self) -> None:
        if self._closed or (self._process is not None and self._process.poll() is None):
            return
        self._end()
        self._control, there = socket.socketpair()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        with there, tempfile.TemporaryFile() as file:
            file.write(self._tokenizer.encode())
            file.seek(0)
            passed = [file.fileno()] if self._tokenizer else []
            command = [sys.executable, "-P", template_process.__file__, str(self._memory), str(sum(passed))]
            self._process = subprocess.Popen(
                command,
                stdin=there,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
                pass_fds=passed,
            )
        self._compiling = False
        self._compile()

    def _compile(self) -> None:
        if self._control is not None and self._template is not None:
            self._compiling = True
            self._control.sendall(template_process.TEMPLATES)
            template_process.send(self._control, {"compile": self._template, "seconds": self._seconds})

    def _await_compiled(self) -> None:
        """Wait until the process has compiled its template; where it cannot, there is another process without one."""
        if not self._compiling or self._control is None or self._template is None:
            return
        self._compiling = False
        self._control.settimeout(_START_SECONDS + 4 * self._seconds)
        template_process.receive(self._control)
        try:
            reason = template_process.receive(self._control).get("error")
        except (OSError, EOFError):
            if self._closed:
                raise
            self._refusals[self._template] = self._too_much("chat template", self._seconds)
            self._template = ""
            self._end()  # whose connection may be closed before it is over
            self._start()
            self._await_compiled()
        else:
            if reason:
                self._refusals[self._template] = refused(reason)

    def _too_much(self, what: str, seconds: float) -> TemplateLimitError:
        return TemplateLimitError(
            f"The model's {what} takes more than {seconds:.3g} seconds or {self._memory >> 20} MiB of memory."
        )

    def close(self) -> None:
        """End all processes, also while they work for other threads."""
        self._closed = True
        self._kill()  # for which a thread may wait that holds the lock
        with self._starting:
            self._end()

    def _kill(self) -> None:
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _end(self) -> None:
        self._kill()
        if self._process is not None:
            self._process.wait()
        if self._control is not None:
            self._control.close()
        self._process = self._control = None

    def _ask(
        self,
        asked: dict[str, Any],
        what: str,
        length: int = 0,
        template: str | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """The answer of this thread's worker (TemplateLimitError: there is none)."""
        if seconds is None:
            seconds = (QUICK_SECONDS if _is_quick.get() else self._seconds) + length * _SECONDS_OF_CHARACTER
        own = self._own
        connection = self._worker()
        if template is not None and (refusal := self._refusals.get(template)) is not None:
            raise type(refusal)(str(refusal))
        try:
            if template is not None and template != own.template:
                asked["template"] = template
            connection.settimeout(_START_SECONDS + 4 * seconds)  # a worker ends itself
            template_process.send(connection, asked | {"seconds": seconds})
            own.template = asked.get("template", own.template)
            return template_process.receive(connection)
        except (OSError, EOFError) as error:
            connection.close()
            own.connection = None
            raise self._too_much(what, seconds) from error

    def _worker(self) -> socket.socket:
        """The connection to a worker that is ready."""
        if getattr(self._own, "connection", None) is None:
            self._own.connection, self._own.template = self.connect(), None
        return self._own.connection

    def connect(self, ready: bytes = b"") -> socket.socket:
        """The connection to a worker of the caller's own, which ends when the connection is closed.

        Args:
            ready: what the process is to be ready for, in the words of `template_process`.

        Raises:
            KvconvertError: there is no process.
        """
        here, there = socket.socketpair()
        here.settimeout(_START_SECONDS)
        try:
            with there, self._starting:
                self._start()
                self._await_compiled()
                if self._control is None:
                    raise EOFError
                self._control.sendall(ready)
                socket.send_fds(self._control, [template_process.WORKER], [there.fileno()])
            template_process.receive(here)
        except (OSError, EOFError) as error:
            here.close()
            if self._closed:
                raise KvconvertError("The server is shutting down.") from error
            message = "The process that renders chat templates, tokenizes and reads tables did not start; see the log."
            raise KvconvertError(message) from error
        return here


class BoundedTokenizer:
    """A tokenizer whose work with texts is done by a `TemplateRenderer`; in all else it is the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: TemplateRenderer) -> None:
        self._tokenizer, self._renderer = tokenizer, renderer
        self._short: dict[tuple[str, bool], list[int]] = {}  # what is asked for each text: what belongs around it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, list[int]]:
        """`input_ids` of a text."""
        if len(text) > _SHORT:
            return {"input_ids": self._renderer.encode(text, add_special_tokens)}
        key = (text, add_special_tokens)
        if key not in self._short:
            if len(self._short) >= _MOST_SHORT:
                self._short.clear()
            self._short[key] = self._renderer.encode(text, add_special_tokens)
        return {"input_ids": list(self._short[key])}


def bounded(tokenizer: PreTrainedTokenizerBase, renderer: TemplateRenderer) -> Any:
    """A tokenizer that works within limits, where a renderer has it."""
    return BoundedTokenizer(tokenizer, renderer) if renderer.tokenizes else tokenizer


@cache
def shared_renderer() -> TemplateRenderer:
    """The templates of commands that do not serve requests."""
    renderer = TemplateRenderer()
    atexit.register(renderer.close)
    return renderer


def _json_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The files a worker makes a tokenizer of; nothing for one whose class does more than to apply its JSON.

    Raises:
        CheckpointError: nobody can make one of it; where two tokens have one id, merges lack the one that is forgotten.
    """
    own, plain = type(tokenizer), PreTrainedTokenizerFast
    applies = issubclass(own, plain) and own.__call__ is plain.__call__ and own._encode_plus is plain._encode_plus
    if not applies or tokenizer.split_special_tokens:
        return ""
    text = tokenizer.backend_tokenizer.to_str()
    try:
        with panics_as_errors():
            Tokenizer.from_str(text)
    except Exception as error:  # the class that Rust's errors have
        raise CheckpointError(
            f"The model's tokenizer contradicts itself ({first_line(error)}); fetch it again."
        ) from error
    return text


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Make a RuntimeError of a panic of Rust's, which is no Exception, within the block."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which no module has
            raise
        raise RuntimeError(first_line(error)) from error


def refused(reason: str) -> UsageError:
    """The message for a conversation that a template does not render."""
    return UsageError(f"The model's chat template refuses the conversation ({printable(reason)}).")
