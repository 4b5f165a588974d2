"""Peak memory of a stretch of code: a GPU's allocator knows it, a process's resident set has to be watched."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")  # Linux alone has it
SECONDS = 0.005  # between two looks at the resident set


class PeakMemory:
    """Bytes at the worst moment within `with`: allocated on a GPU, or growth of the resident set since `baseline`.

    Args:
        device: where the model is.
        baseline: bytes of the resident set before the model was loaded, from `resident_bytes`.

    Attributes:
        bytes: the peak, after the block; None where it cannot be measured.
    """

    def __init__(self, device: torch.device, baseline: int | None):
        self.device, self.baseline = device, baseline
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.baseline is not None:
            self._over = threading.Event()
            self._highest = 0
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        elif self.baseline is not None:
            self._over.set()
            self._thread.join()
            self.bytes = max(0, max(self._highest, resident_bytes() or 0) - self.baseline)

    def _watch(self) -> None:
        while not self._over.wait(SECONDS):
            self._highest = max(self._highest, resident_bytes() or 0)


def resident_bytes() -> int | None:
    """Bytes of this process in memory, None where the system does not tell."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
