"""The process in which chat templates are rendered: run as a script, with a socket as its standard input.

A template comes with the model, is a program, and may run for ever or fill the memory; this process may be killed.
Each message on the socket is JSON after its length in eight bytes. The first one sent is empty and says that the
process is ready; each one received asks for a text, and is answered with `text` or `error`.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
from typing import Any

LENGTH = 8


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    content = json.dumps(message, default=str).encode()
    connection.sendall(len(content).to_bytes(LENGTH, "big") + content)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Wait for one message, and say how many bytes it had; EOFError if the other side is gone."""
    size = int.from_bytes(_read(connection, LENGTH), "big")
    return {"bytes": size} | json.loads(_read(connection, size))


def _read(connection: socket.socket, size: int) -> bytearray:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), 2**20))
        if not part:
            raise EOFError
        content += part
    return content


def answer(asked: dict[str, Any], template: str) -> dict[str, Any]:
    """The text of a conversation as the template writes it, or why there is none."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), _ = render_jinja_template(
            [asked["messages"]],
            chat_template=template,
            **{"add_generation_prompt": True} | asked["variables"],
        )
        most = asked["further_bytes"] + 4 * asked["bytes"]
        if len(text) > most:
            return {"error": f"its text has more than {most} characters"}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # templates raise errors of their own making
        return {"error": " ".join(str(error).split()).rstrip(".")[:500] or type(error).__name__}
    return {"text": text}


def main(seconds: int, memory: int) -> None:
    """Answer until the other side is gone, with so many seconds of a processor for each text, and bytes of memory."""
    from transformers.utils import chat_template_utils  # noqa: F401, before memory is limited

    connection = socket.socket(fileno=0)
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # elsewhere there is no such limit
        with open("/proc/self/statm", encoding="ascii") as file:
            _limit(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + memory)
    send(connection, {})
    template = ""
    while True:
        try:
            asked = receive(connection)
        except EOFError:
            return
        template = asked.get("template", template)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
        send(connection, answer(asked, template))


def _limit(which: int, value: int) -> None:
    """Set a limit; the hard one stays, so that it can be raised again."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
