"""What processes of kvconvert's own do with their memory, and how they end: without taking the interpreter apart.

Python ends a thread that asks for the interpreter once this is being taken apart. Where the thread is within C++, as
those of torch and pyarrow are, that aborts the process ("terminate called without an active exception", status 134),
whatever had been its outcome. It takes seconds besides.

Anonymous memory is what the C library keeps, too, of tensors that were freed; it can be given back.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # M_... of malloc.h
_LARGE_BLOCK, _KEPT_AT_THE_END = 2**22, 2**25
# PyTorch's own setting: it asks for huge pages for tensors of 2 MiB and more, where the system gives them on request.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


def return_large_blocks() -> None:
    """Have blocks of 4 MiB and more go back to the system when they are freed; before torch is imported.

    glibc by itself keeps what was freed, up to 32 MiB each, in every thread's heap, so that the peak of a process is up
    to a fifth more than what it needs, and another one each time. The pages that large tensors then touch anew would
    cost a twentieth of the time; huge pages save more. For a whole process, hence for commands and not for functions.
    """
    for name, value in HUGE_PAGES.items():
        os.environ.setdefault(name, value)
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK)
            mallopt(_TRIM_THRESHOLD, _KEPT_AT_THE_END)


def release_free_memory() -> None:
    """Give memory that the C library has kept since it was freed back to the system.

    glibc keeps freed blocks of up to 32 MiB for later ones, and between layers of a model those rarely fit: without
    this, the peak of a later layer is larger than that of the first. Other C libraries are left alone.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def anonymous_bytes(pid: int | str = "self") -> int | None:
    """RssAnon of a process: resident bytes that are no file's, which the system cannot take back.

    None where the system does not tell (only Linux does), or the process is gone.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), None)


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
