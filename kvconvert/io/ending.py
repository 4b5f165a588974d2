"""How a process of kvconvert's own ends: without taking the interpreter apart.

Python ends a thread that asks for the interpreter once this is being taken apart. Where the thread is within C++, as
those of torch and pyarrow are, that aborts the process ("terminate called without an active exception", status 134),
whatever had been its outcome. It takes seconds besides.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End this process now; what was printed is written."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Around all of a program: once it has ended, and what others registered with `atexit` is done, so has the process.

    Its status is that of SystemExit; 1 after any other exception, whose traceback Python prints.
    """
    code = 1
    atexit.register(lambda: end_process(code))  # the first one registered is called last
    try:
        yield
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
        raise
