"""Runs one program, which stdin holds, in a process that can neither reach a network, start processes, nor write files.

Started as `python -I guard.py SECONDS BYTES TOKEN`; prints TOKEN when the program has come to its end. Limits of the
kernel bound processor time, memory, and the length of files, stdout included; everything else is refused by an audit
hook, which Python programs cannot take off, or replaced where a call tells no hook. That keeps a program that a model
wrote from doing harm by accident; it is no wall against one written to break it.
"""

import contextlib
import importlib
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
    "os.utime",
    "os.setxattr",
    "os.removexattr",
    "pty.",
    "ctypes.dlsym",
    "resource.setrlimit",
    "resource.prlimit",
    "sqlite3.",
    "syslog.",
)
# What may be imported: many other packages have code of their own that writes files or reaches a network and tells no
# hook. So do a few modules of the standard library, and in another interpreter there is no hook.
SILENT = {"readline", "_gdbm", "_dbm", "nis", "_interpreters"}
PACKAGES = {"numpy", "sympy", "mpmath", *sys.stdlib_module_names} - SILENT
# Of the modules below, what does the same and tells no hook.
UNTOLD = {"posix": ("mkfifo", "mknod", "pidfd_open"), "_posixsubprocess": ("fork_exec",), "_posixshmem": ("shm_open",)}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: a PermissionError for what a program may not do, an ImportError for what it may not import."""
    package = str(arguments[0]).partition(".")[0] if event == "import" else ""
    if package and package not in PACKAGES and not package.startswith("_sysconfigdata"):
        raise ImportError(f"programs of an evaluation may not import {package}")
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
    if writes or event.startswith(REFUSED):
        raise PermissionError(f"programs of an evaluation may not call {event}")


def refused(*_: Any, **__: Any) -> None:
    """The replacement of functions that call no audit hook."""
    raise PermissionError("programs of an evaluation may not call this")


def replace_untold() -> None:
    """Put `refused` in place of all `UNTOLD`."""
    for name, calls in UNTOLD.items():
        with contextlib.suppress(ImportError):  # of another system
            for module in (importlib.import_module(name), os):
                for call in calls:
                    if hasattr(module, call):
                        setattr(module, call, refused)


def main() -> None:
    """Run the program."""
    seconds, size, token = int(sys.argv[1]), int(sys.argv[2]), sys.argv.pop()
    program = sys.stdin.read()
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(token), len(token)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout = sys.stderr = io.StringIO()
    replace_untold()
    sys.addaudithook(refuse)
    exec(compile(program, "program", "exec"), {"__name__": "program"})
    os.write(1, token.encode())


if __name__ == "__main__":
    main()
