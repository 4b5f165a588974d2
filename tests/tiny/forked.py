"""A process that begins where the test stands: it spares the seconds in which a new one imports torch."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable


def start(function: Callable[[], object]) -> int:
    """Call a function in a forked process, which ends with 0, or with 1 and a traceback; Ctrl-C interrupts it.

    Returns:
        The number of the process, which the caller waits for.
    """
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if templates := sys.modules.get("kvconvert.models.templates"):
            templates.shared_renderer.cache_clear()  # whose worker answers the process that started it
        function()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(process: int) -> int:
    """The exit code of a process that was started; of one that a signal ended, the negative number of the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
