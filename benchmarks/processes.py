"""Measure a command in a process of its own: wall and processor time, and its peak of anonymous memory."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence

from kvconvert.io.process import anonymous_bytes

LOOK_S = 0.01  # between two looks at the memory


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = float("inf")
) -> tuple[dict[str, float], str]:
    """Run a command to its end: what it took, and what it printed (SystemExit if it fails, or takes too long).

    Args:
        command: program and arguments.
        environment: variables beside this process's own.
        timeout: in seconds.
    """
    before, begun, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(command, stdout=said, stderr=messages, env=os.environ | (environment or {}))
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid) or 0)
            if time.perf_counter() - begun > timeout:
                process.kill()
                process.wait()
                raise SystemExit(f"{' '.join(command[:4])} took longer than {timeout:.0f} s")
            time.sleep(LOOK_S)
        said.seek(0)
        messages.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command[:4])} failed:\n{messages.read()[-2000:]}")
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begun
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"wall_s": round(wall, 1), "processor_s": round(used, 1), "peak_anonymous_bytes": peak}, said.read()
