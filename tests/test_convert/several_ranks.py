"""Calibrations by several CPU processes, forked from this one: they inherit its imports, and its patches."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def in_ranks(size: int, store: Path, function: Callable[[int], Any]) -> list[int]:
    """Run `function(rank)` in `size` processes that form torch.distributed's default group; one forms none.

    Args:
        size: how many.
        store: a file that does not exist, by which they meet.
        function: what each does; one thread each, so that sums are alike.

    Returns:
        exit codes: 1 where it raised, and wrote what to `store`.RANK; negative where a signal ended it.
    """
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            code = 1
            try:
                torch.set_num_threads(1)
                if size > 1:
                    dist.init_process_group(
                        "gloo",
                        init_method=f"file://{store}",
                        rank=rank,
                        world_size=size,
                        timeout=timedelta(seconds=120),
                    )
                function(rank)
                code = 0
            except BaseException as error:
                Path(f"{store}.{rank}").write_text(f"{type(error).__name__}: {error}")
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes: dict[int, int] = {}
    while len(codes) < size:  # whichever ends first, as a launcher does
        for child in [child for child in children if child not in codes]:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[child] for child in children]
