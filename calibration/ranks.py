"""Several processes that calibrate one layer together: `torchrun --nproc-per-node N -m kvconvert calibrate ...`.

Each rank runs its own calibration sequences through the layer, whole batches of the runner in order, so that a batch's
arithmetic is that of a single process. What passes observe is combined in one of three ways, each of which gives
every rank the numbers that a single process has:

    gather, gather_list, sum_in_order   rows or partial sums of batches, put together in the order of the samples:
                                        equal bit for bit
    sum_                                float64 sums of batches' float32 sums: exact in any order as long as a number's
                                        addends span fewer than 29 - log2(batches) binary orders of magnitude, and
                                        then rounded to float32; beyond that, equal to 1e-16
    mine, share                         each rank evaluates some of the candidates of a search on the same sample; the
                                        losses are exchanged: equal bit for bit

A single process is `ALONE`, whose methods give back what they get.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kvconvert.errors import FROM_THE_LAST_LAYER, KvconvertError, UsageError

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT = timedelta(minutes=30)  # the others wait while rank 0 verifies and writes files
_NOTICED = 2.0  # seconds until a process that ended is gone for all others


class Ranks:
    """One process alone.

    Attributes:
        rank, size: the number of this process, and how many there are.
        device: where this rank computes.
    """

    rank, size = 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and shows messages."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place; for float64, and for integers."""
        return tensor

    def gather(self, rows: Tensor) -> Tensor:
        """All ranks' rows in order; shapes and dtypes agree but for the number of rows."""
        return rows

    def gather_list(self, items: list[T]) -> list[T]:
        """All ranks' lists one after another; tensors in them arrive on this rank's device."""
        return items

    def broadcast_(self, tensor: Tensor, source: int) -> Tensor:
        """Copy the tensor of rank `source`, in place."""
        return tensor

    def of_first(self, value: T) -> T:
        """The value of rank 0."""
        return value

    def wait(self) -> None:
        """Return when every rank is here."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that uses no other method: where some ranks raise a KvconvertError in it, one says so, all end."""
        yield

    def shares(self, samples: int, batch: int) -> list[tuple[int, int]]:
        """Each rank's first sample and the one after its last; whole batches of `batch` samples.

        Raises:
            UsageError: fewer batches than ranks.
        """
        batches = -(-samples // batch)
        if batches < self.size:
            raise UsageError(
                f"{self.size} processes were started, and {samples} calibration sequences run in batches of "
                f"up to {batch}; start {batches} at most, or give more `samples`."
            )
        ends = [min(rank * batches // self.size * batch, samples) for rank in range(self.size + 1)]
        return list(pairwise(ends))

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """Those of some items that this rank evaluates."""
        return items[self.rank :: self.size]

    def owner(self, index: int) -> int:
        """The rank that evaluates item `index`, see `mine`."""
        return index % self.size

    def share(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`function` of every item, each computed by one rank; tensors arrive on this rank's device."""
        found = dict(self.gather_list([(i, function(items[i])) for i in self.mine(range(len(items)))]))
        return [found[i] for i in range(len(items))]

    def sum_in_order(self, partial: Sequence[Tensor]) -> Tensor:
        """Sum of all ranks' tensors of one shape, added one after another in order."""
        first, *rest = self.gather(torch.stack(tuple(partial)))
        for tensor in rest:
            first = first + tensor
        return first


ALONE = Ranks()


class ProcessRanks(Ranks):
    """The processes of torch.distributed's default group, which has to be there.

    Args:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self._agreed = False
        self._processes: list[tuple[str, int]] = [("", 0)] * self.size
        dist.all_gather_object(self._processes, (socket.gethostname(), os.getpid()))

    def __str__(self) -> str:
        return f"Rank {self.rank} of {self.size}"

    def sum_(self, tensor: Tensor) -> Tensor:
        """See `Ranks`."""
        dist.all_reduce(tensor)
        return tensor

    def gather(self, rows: Tensor) -> Tensor:
        """See `Ranks`."""
        counts: list[int] = self.gather_list([len(rows)])
        found = [
            rows.contiguous() if rank == self.rank else rows.new_empty(count, *rows.shape[1:])
            for rank, count in enumerate(counts)
        ]
        for rank, part in enumerate(found):
            if len(part):
                dist.broadcast(part.view(torch.uint8) if part.dtype == torch.bool else part, rank)
        return torch.cat(found)

    def gather_list(self, items: list[T]) -> list[T]:
        """See `Ranks`."""
        found: list[list[T]] = [[] for _ in range(self.size)]
        dist.all_gather_object(found, _moved(items, torch.device("cpu")))
        return [_moved(item, self.device) for part in found for item in part]

    def broadcast_(self, tensor: Tensor, source: int) -> Tensor:
        """See `Ranks`."""
        sent = tensor.contiguous()
        dist.broadcast(sent, source)
        return tensor if sent is tensor else tensor.copy_(sent)

    def of_first(self, value: T) -> T:
        """See `Ranks`."""
        return self.gather_list([value] if self.is_first else [])[0]

    def wait(self) -> None:
        """See `Ranks`."""
        self.gather_list([None])

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Ranks`."""
        error: KvconvertError | None = None
        try:
            yield
        except KvconvertError as raised:
            error = raised
        found = self.gather_list([None if error is None else (str(error), error.exit_code)])
        failed = [rank for rank, outcome in enumerate(found) if outcome is not None]
        if not failed:
            return
        self._agreed = True
        if self.rank != failed[0]:
            raise SystemExit(found[failed[0]][1])
        raise error if len(failed) == self.size else self._named(error)

    def _named(self, error: KvconvertError) -> KvconvertError:
        return type(error)(f"{self}: {error}")

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """A block whose errors name their rank, and that ends with a sentence when another rank has ended.

        Raises:
            KvconvertError: of this rank, with its name; or another rank's process ended or did not answer in time.
        """
        try:
            yield
        except KvconvertError as error:
            raise error if self._agreed else self._named(error) from error
        except SystemExit as error:  # torchrun terminates the others of a rank that ended
            ended = [] if self._agreed else self._ended()
            if not ended:
                raise
            raise KvconvertError(self._stopped_by(ended)) from error
        except (dist.DistError, RuntimeError) as error:
            if not _is_communication(error):
                raise
            raise KvconvertError(self._stopped_by(self._wait_for_ended())) from error

    def _stopped_by(self, ended: list[int]) -> str:
        if not ended:
            return (
                f"{self} stops: another rank ended on another machine or did not answer for "
                f"{TIMEOUT.total_seconds() / 60:g} minutes; start the same command again to go on "
                f"{FROM_THE_LAST_LAYER}."
            )
        which = f"rank {ended[0]}" if len(ended) == 1 else f"ranks {', '.join(map(str, ended))}"
        return (
            f"{self} stops: the process of {which} has ended, for the reason that it or torchrun's report gives; start "
            f"the same command again to go on {FROM_THE_LAST_LAYER}."
        )

    def _wait_for_ended(self) -> list[int]:
        deadline = time.monotonic() + _NOTICED
        try:
            while time.monotonic() < deadline and not self._ended():
                time.sleep(0.05)
        except SystemExit:  # torchrun has noticed too
            pass
        return self._ended()

    def _ended(self) -> list[int]:
        """Ranks of this machine whose processes are gone."""
        host, _ = self._processes[self.rank]
        return [rank for rank, (place, pid) in enumerate(self._processes) if place == host and not _runs(pid)]


def local_device(device: torch.device) -> torch.device:
    """The GPU of this process among those of its machine, where a launcher says which process it is.

    Raises:
        UsageError: there are fewer GPUs than processes.
    """
    if device.type != "cuda" or device.index is not None or not launched():
        return device
    number, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= count:
        raise UsageError(
            f"Process {number} of this machine has no GPU of its own: torch finds {count}; start with "
            f"--nproc-per-node {count} or fewer."
        )
    return torch.device("cuda", number)


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return dist.is_available() and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_process() -> bool:
    """Whether this process is the one that talks to the user."""
    return not launched() or os.environ["RANK"] == "0"


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """The ranks that this process belongs to: torchrun's, or those of an initialized default group, or `ALONE`."""
    initialized = dist.is_available() and dist.is_initialized()
    if not initialized and not launched():
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not initialized:
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    elif dist.get_world_size() == 1:
        yield ALONE
        return
    ranks = ProcessRanks(device)
    with ranks.reporting():
        yield ranks
    if not initialized:  # after an error the others may be gone, and destroying the group would wait for them
        dist.destroy_process_group()


def _is_communication(error: Exception) -> bool:
    """Whether a collective failed; gloo raises plain RuntimeErrors."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return any(word in text for word in ("gloo", "Connection closed", "Connection reset", "NCCL", "Timed out"))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors in nested lists, tuples and dicts on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
