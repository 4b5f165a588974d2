"""Runs one program, which stdin holds, in a process that can neither reach a network, start processes, nor write files.

Started as `python -I guard.py SECONDS BYTES TOKEN`; prints TOKEN when the program has come to its end. Limits of the
kernel bound processor time and memory; everything else is refused by an audit hook, which Python programs cannot take
off. That keeps a program that a model wrote from doing harm by accident; it is no wall against one written to break it.
"""

import io
import os
import resource
import sys
from typing import Any

REFUSED = (
    "socket.",
    "subprocess.",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.kill",
    "os.link",
    "os.symlink",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "pty.",
    "ctypes.dlsym",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: a PermissionError for what a program may not do."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
    if writes or event.startswith(REFUSED):
        raise PermissionError(f"programs of an evaluation may not call {event}")


def main() -> None:
    """Run the program."""
    seconds, size, token = int(sys.argv[1]), int(sys.argv[2]), sys.argv.pop()
    program = compile(sys.stdin.read(), "program", "exec")
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout = sys.stderr = io.StringIO()
    sys.addaudithook(refuse)
    exec(program, {"__name__": "program"})
    os.write(1, token.encode())


if __name__ == "__main__":
    main()
