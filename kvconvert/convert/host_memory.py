"""Anonymous memory of processes: what it is, and giving back what the C library keeps of freed tensors."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


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
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), None)
