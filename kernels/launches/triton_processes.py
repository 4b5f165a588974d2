"""Compiling recorded launches in several processes, into Triton's cache, where any later process finds them.

Triton's cache tells sources, versions, architectures and options apart by itself; all that is added to it are empty
files which say that a launch is there, so that a process need not look into every kernel to know that none is missing.

    python -m kvconvert.kernels.launches.triton_processes

is one such process group: it reads a pickled `Order` from stdin and writes a line for each launch that is ready.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from kvconvert.errors import KvconvertError
from kvconvert.kernels.launches.notes import Launch
from kvconvert.kernels.launches.triton import compiled, kernel_of

THREADS_PER_WARP = 32
READY = "ready"


@dataclass(frozen=True)
class Order:
    """What is to be compiled.

    Attributes:
        launches: see `Launch`.
        capability: of the GPU that they are for, 90 for sm_90.
        jobs: processes.
    """

    launches: tuple[Launch, ...]
    capability: int
    jobs: int


def unready(launches: Iterable[Launch], capability: int) -> list[Launch]:
    """Those of the launches that Triton's cache is not known to hold; arguments as in `Order`."""
    return [launch for launch in launches if not os.path.exists(_marker(launch, capability))]


def compile_in_processes(launches: Sequence[Launch], capability: int, jobs: int, on_ready: Callable[[], Any]) -> None:
    """Compile launches, calling `on_ready` after each; other arguments as in `Order`.

    Raises:
        KvconvertError: a kernel cannot be compiled.
    """
    # The process that asks may have a GPU, threads, and a __main__ that must not run again: nothing is forked from it.
    path = os.pathsep.join([entry or os.getcwd() for entry in sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environment.pop("TRITON_INTERPRET", None)
    environment["TRITON_CACHE_DIR"] = str(directory())
    # In a session of its own, an interrupt reaches this process alone, which then ends the others.
    command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            with suppress(BrokenPipeError), worker.stdin as order:  # its exit code says more
                pickle.dump(Order(tuple(launches), capability, jobs), order)
            failed = None
            for line in worker.stdout:
                if line.decode().strip() == READY:
                    on_ready()
                else:
                    failed = line.decode().strip()
        except BaseException:
            os.killpg(worker.pid, signal.SIGTERM)
            raise
    if failed or worker.returncode:
        raise KvconvertError(
            f"Kernels could not be compiled for sm_{capability}: "
            f"{failed or f'the process that compiles ended with {worker.returncode}'}; "
            "see whether Triton works here with `kvconvert doctor`."
        )


def directory() -> Path:
    """Of Triton's cache."""
    return Path(triton.knobs.cache.dir)


def load(launches: Iterable[Launch]) -> None:
    """Bring compiled launches to this process's GPU, so that the first of each takes no longer than others."""
    for launch in launches:
        compiled(launch).run  # noqa: B018, loads what it gives


def _marker(launch: Launch, capability: int) -> Path:
    # Triton finds a kernel by its absolute path: in a cache that was moved it finds none.
    known = (str(directory().absolute()), triton.__version__, kernel_of(launch).key, launch, capability)
    text = repr((*known, sys.implementation.cache_tag))
    return directory() / "kvconvert" / hashlib.sha256(text.encode()).hexdigest()


class _Target:
    """What Triton asks of a driver in order to compile; processes that only compile need none of the GPU's memory."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, THREADS_PER_WARP)


_order: Order


def _compile(index: int) -> str:
    """Compile one launch of `_order`: READY, or what went wrong in one line."""
    launch, driver = _order.launches[index], triton.runtime.driver
    try:
        driver.set_active(_Target(_order.capability))
        kernel = compiled(launch)
        if torch.cuda.is_available():
            # Some versions compile C code for every signature.
            driver.set_active(driver.default)
            driver.default.launcher_cls(kernel.src, kernel.metadata)
        marker = _marker(launch, _order.capability)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except Exception as error:  # compilers fail in many ways; the process that asked says which it was
        return f"{launch.name}: {' '.join(str(error).split())[-300:] or type(error).__name__}"
    return READY


def main() -> None:
    """Compile what stdin orders; the processes are forks, which share what was imported."""
    global _order
    _order = pickle.load(sys.stdin.buffer)
    for launch in _order.launches:
        kernel_of(launch)
    with multiprocessing.get_context("fork").Pool(min(_order.jobs, len(_order.launches))) as pool:
        for said in pool.imap_unordered(_compile, range(len(_order.launches))):
            print(said, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
