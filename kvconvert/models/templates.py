"""Chat templates, rendered in a process of their own that has a limit of time and of memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kvconvert.errors import KvconvertError, UsageError
from kvconvert.models import template_process

# Bytes that a conversation's text may have beyond four times what its messages have.
FURTHER_BYTES = 2**20
_START_SECONDS = 120
# Nothing else of this process's environment, which may hold keys.
_ENVIRONMENT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ", "VIRTUAL_ENV")


class TemplateLimitError(UsageError):
    """A template that was ended because it takes too much time or memory."""


class TemplateRenderer:
    """Renders conversations by a model's chat template, one at a time, and survives whatever the template does.

    The process is started when it is first needed, and again after it was killed.

    Args:
        seconds: of a processor that a template may take, and four times as many on the clock.
        memory: bytes that it may take.
    """

    def __init__(self, seconds: int = 5, memory: int = 512 * 2**20) -> None:
        self._seconds, self._memory = seconds, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._template: str | None = None  # that the process has
        self._turn, self._closed = threading.Lock(), False

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
        asked: dict[str, Any] = {"messages": messages, "variables": variables, "further_bytes": FURTHER_BYTES}
        with self._turn:
            connection = self._started()
            try:
                if template != self._template:
                    self._template = asked["template"] = template
                connection.settimeout(4 * self._seconds)
                template_process.send(connection, asked)
                answer = template_process.receive(connection)
            except (OSError, EOFError) as error:
                self._kill()
                limits = f"{self._seconds} seconds or {self._memory >> 20} MiB of memory"
                raise TemplateLimitError(f"The model's chat template takes more than {limits}.") from error
        if "error" in answer:
            raise refused(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End the process, also while it renders for another thread."""
        self._closed = True
        self._kill()

    def _started(self) -> socket.socket:
        """The connection to a process that is ready."""
        if self._connection is not None:
            return self._connection
        here, there = socket.socketpair()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-P", template_process.__file__, str(self._seconds), str(self._memory)]
        with there:
            self._process = subprocess.Popen(
                command, stdin=there, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        self._connection = here
        here.settimeout(_START_SECONDS)
        try:
            template_process.receive(here)
        except (OSError, EOFError) as error:
            self._kill()
            raise KvconvertError("The process that renders chat templates did not start; see the log.") from error
        if self._closed:
            self._kill()
            raise KvconvertError("The server is shutting down.")
        return here

    def _kill(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = self._template = None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
            connection.close()


def refused(reason: str) -> UsageError:
    """What is said of a conversation that a template does not render."""
    return UsageError(f"The model's chat template refuses the conversation ({reason}).")
