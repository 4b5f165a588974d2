"""Anonymous memory of processes: what it is, and giving back what the C library keeps of freed tensors."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

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
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), None)
