"""Processors are tried with pictures before they are used, in a process that may take little.

Settings of a processor say how large pictures become, in how many parts, and of how many tokens, by many names and in
combinations that only its code knows. One that makes gigabytes of a small picture is refused.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

MEMORY = 2**31  # bytes more than this process has
SECONDS = 20  # of a processor
# Small, as large as photographs are sent, and as long as servers take.
PICTURES = ((64, 48), (1200, 1000), (1500, 30))
_FINE, _MUCH = 0, 3


def why_refused(encoders: list[Callable[[Any], Any]]) -> str | None:
    """Why pictures take too much, in words, or None.

    The trial is a fork of this process: it has the processor, and starts at once. Errors of the processor itself are no
    reason: where it is used they are said, and some processors take no picture of these sizes.

    Args:
        encoders: make a model's inputs of a picture in RGB.
    """
    from PIL import Image

    pictures = [Image.new("RGB", size, (200, 60, 20)) for size in PICTURES]
    with warnings.catch_warnings():
        # There may be threads, of which the fork has none and needs none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        status = _MUCH
        try:
            status = _try(encoders, pictures)
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        late = os.WTERMSIG(ended) in (signal.SIGPROF, signal.SIGALRM)
        return f"it takes more than {SECONDS} seconds for a picture" if late else "it ends the process on a picture"
    return None if os.WEXITSTATUS(ended) == _FINE else f"it takes more than {MEMORY >> 30} GiB for a picture"


def _try(encoders: list[Callable[[Any], Any]], pictures: list[Any]) -> int:
    import torch

    torch.set_num_threads(1)  # threads of the other process are none of this one's
    with open(os.devnull, "w", encoding="ascii") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    for kind in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(kind, signal.SIG_DFL)
    if sys.platform == "linux":  # elsewhere there is no such limit
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)
    for encode, picture in itertools.product(encoders, pictures):
        try:
            encode(picture)
        except Exception as error:  # of whatever kind, and raised from others
            if _is_memory(error):
                return _MUCH
    return _FINE


def _is_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
