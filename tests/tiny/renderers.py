"""Processes of chat templates, forked from one that has imported what each of them would import anew."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Reads its standard input to its end, which comes with the end of the tests.
SERVER = """
import os, select, signal, socket, sys
from importlib import util
from tokenizers import Tokenizer
from transformers.utils import chat_template_utils
spec = util.spec_from_file_location("template_process", sys.argv[1])
module = util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[2])
listening.listen(64)
print(flush=True)
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, reap)
while sys.stdin not in (found := select.select([sys.stdin, listening], [], [])[0]):
    connection, _ = listening.accept()
    memory, (control, *tokenizer), _, _ = socket.recv_fds(connection, 32, 2)
    if process := os.fork():
        connection.sendall(str(process).encode())
        connection.close()
        for descriptor in (control, *tokenizer):
            os.close(descriptor)
        continue
    try:
        os.setsid()
        os.dup2(control, 0)
        os.close(control)
        connection.close()
        listening.close()
        module.main(int(memory), sum(tokenizer))
    finally:
        os._exit(0)
"""


class Forked:
    """What `templates` needs of a `subprocess.Popen`."""

    def __init__(
        self, place: str, command: list[str], stdin: socket.socket, pass_fds: list[int], **others: Any
    ) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(place)
            socket.send_fds(connection, [command[-2].encode()], [stdin.fileno(), *pass_fds])
            self.pid = int(connection.recv(32))

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.002)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def forking_server() -> Iterator[str]:
    """The address of a process that forks others."""
    from kvconvert.models import template_process

    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "socket")
        command = [sys.executable, "-P", "-c", SERVER, template_process.__file__, place]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"}, **pipes) as server:
            server.stdout.readline()
            yield place
            server.stdin.close()


@contextlib.contextmanager
def forked_renderers(place: str) -> Iterator[None]:
    """Renderers that are started within have such processes."""
    from kvconvert.models import templates

    def forked(command: list[str], **options: Any) -> Forked:
        return Forked(place, command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "subprocess", SimpleNamespace(Popen=forked, DEVNULL=subprocess.DEVNULL))
        yield
