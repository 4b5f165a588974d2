"""Programs that models wrote, each run in a process of its own."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvconvert.io.progress import progress_bar

SECONDS = 10  # of processor time
WAITING = 60  # seconds until a program is stopped that computes nothing, or waits for a busy processor
BYTES = 2**31  # of memory
GUARD = Path(__file__).with_name("guard.py")


def ends_well(program: str, seconds: int = SECONDS, size: int = BYTES, waiting: float = WAITING) -> bool:
    """Whether a Python program comes to its end without an exception, within its limits; see `guard`."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as place:
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(GUARD), str(seconds), str(size), token],
                input=program.encode(errors="replace"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=place,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                timeout=waiting,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0 and done.stdout == token.encode()


def all_end_well(programs: Sequence[str], progress: bool) -> list[bool]:
    """`ends_well` of many, as many at a time as there are processors."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(ends_well, programs)
        bar = progress_bar(total=len(programs), desc="running programs", unit="program", shown=progress)
        return [result for result in found if bar.update() or True]
