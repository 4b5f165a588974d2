"""Calibrations by several CPU processes, forked where the test stands, which spares each the seconds of its imports."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from calibrations import run

from kvconvert.calibration import activations
from kvconvert.convert import input_capture, layer_runner
from kvconvert.data import text
from kvconvert.errors import KvconvertError

LENGTH = 150  # one page that some query reads


def in_ranks(
    size: int,
    store: Path,
    *arguments: Any,
    own: Mapping[int, dict[str, Any]] | None = None,
    fault: tuple[int, str] | None = None,
    **options: Any,
) -> list[int]:
    """Calibrate in `size` processes that form torch.distributed's default group; one forms none.

    Sequences are six, in three batches, and samples of tokens have to leave something out. Where weights are corrected,
    the last one is of random tokens.

    Args:
        size: how many.
        store: a file that does not exist, by which they meet.
        arguments, options: of `calibrations.run`; `own` are further options of some ranks.
        fault: a rank that is to be "killed" or to "fail" in its first layer.

    Returns:
        exit codes: 1 where it raised, and wrote what to `store`.RANK; negative where a signal ended it.
    """
    context = multiprocessing.get_context("fork")
    processes = []
    for rank in range(size):
        everything = {"samples": 6, "seq_len": LENGTH} | options | (own or {}).get(rank, {})
        happens = fault[1] if fault is not None and fault[0] == rank else ""
        processes.append(context.Process(target=_rank, args=(rank, size, store, happens, arguments, everything)))
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:  # whoever has ended is waited for at once: the others see whether it is still there
        for ended in wait([*running]):
            running.pop(ended).join()
    return [process.exitcode for process in processes]


def _rank(rank: int, size: int, store: Path, fault: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    torch.set_num_threads(1)  # so that sums are alike
    layer_runner.BATCH_TOKENS = activations.LOSS_TOKENS = 2 * LENGTH
    text.RANDOM_SHARE = 6
    activations.EXPERT_TOKENS = 40
    if fault:
        input_capture.HiddenWriter.commit = _killed if fault == "killed" else _failed
    code = 1
    try:
        if size > 1:
            timeout = timedelta(seconds=240)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
        run(*arguments, **options)
        code = 0
    except BaseException as error:
        Path(f"{store}.{rank}").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)  # the others may be gone, for whom an orderly end would wait


_commit = input_capture.HiddenWriter.commit


def _killed(writer: input_capture.HiddenWriter) -> None:
    if writer._path.name.startswith("00001"):
        os.kill(os.getpid(), signal.SIGKILL)
    _commit(writer)


def _failed(writer: input_capture.HiddenWriter) -> None:
    raise KvconvertError("The disk is full")
