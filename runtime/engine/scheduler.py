"""The rows of the decoding batch: which request gets one, and when, and what each goes on from.

Requests are served first come, first served, within rows and pages. A row goes on from its newest token, its position,
and how its next token is chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from kvconvert.errors import QueueFullError, UsageError
from kvconvert.kernels.device import upload
from kvconvert.kernels.sampling import HOTTEST, sample
from kvconvert.runtime.engine.request import Request
from kvconvert.runtime.engine.sampling import ProcessedRow, Sampling


class Scheduler:
    """The queue and what is handed out; knows nothing of models and caches.

    A request is admitted with a row and with pages for all tokens that it may come to, so that it never has to wait or
    fail once it runs. The oldest one waiting is always the next: while it does not fit, nothing overtakes it.

    Args:
        rows: the rows of the batch.
        pages: in all, or None where they are not limited.
        max_waiting: requests that may wait, or None for any number.
    """

    def __init__(self, rows: int, pages: int | None, max_waiting: int | None):
        self.rows, self.pages, self.max_waiting = rows, pages, max_waiting
        self.waiting: deque[Request] = deque()
        self.prompts: deque[Request] = deque()  # admitted, prompt not read completely
        self.running: dict[int, Request] = {}  # by row
        self.pages_reserved = 0  # for what requests have of their own
        self.pages_shared = 0  # of stored prefixes that requests use; others make room when it is needed
        self._free_rows = list(range(rows))  # a heap: the first ones are taken first, so that steps have few rows

    @property
    def free_rows(self) -> int:
        """Rows that no request has."""
        return len(self._free_rows)

    def enqueue(self, request: Request) -> None:
        """Admit a request, or put it at the end of the queue.

        Raises:
            UsageError: it needs more pages than there are.
            QueueFullError: too many are waiting.
        """
        if self.pages is not None and request.pages > self.pages:
            raise UsageError(
                f"A prompt of {len(request.prompt):,} tokens with up to {request.max_new_tokens:,} new ones needs "
                f"{request.pages:,} pages of the cache and there are {self.pages:,}; ask for less, or give the engine "
                "more `kv_memory`."
            )
        self.waiting.append(request)
        self.admit()
        if self.max_waiting is not None and len(self.waiting) > self.max_waiting:
            self.waiting.pop()
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, as many as `max_waiting` allows; send the request later."
            )

    def admit(self) -> None:
        """Give rows and pages to the oldest waiting requests as long as they fit."""
        while self.next_fits():
            request = self.waiting.popleft()
            request.row = heappop(self._free_rows)
            request.state = "prompt"
            self.pages_reserved += request.pages
            self.prompts.append(request)

    def next_chunks(self, chunk: int, most: int, ready: Collection[Request] | None = None) -> list[tuple[Request, int]]:
        """What the next pass reads of which prompts: the oldest ones, and later ones that fit beside them.

        A prompt is read in chunks of `chunk` tokens, of which the last may have fewer, whatever else is in a pass:
        pages are quantized between chunks, so that other chunks could give other tokens. One with images is read whole.

        Args:
            chunk: tokens of one prompt, at most `most`.
            most: tokens in all.
            ready: requests that may be read; None for all.
        """
        taken = []
        for request in self.prompts:
            if ready is not None and request not in ready:
                continue
            count = len(request.prompt) - request.prompt_read
            if request.inputs is None:
                count = min(chunk, count)
            if count <= most:
                taken.append((request, count))
                most -= count
        return taken

    def start(self, request: Request) -> None:
        """State that the prompt of an admitted request has been read."""
        self.prompts.remove(request)
        request.state = "running"
        self.running[request.row] = request

    def release(self, request: Request) -> None:
        """Take back the row and the pages of a request, or its place in the queue; once."""
        if request.row is None:
            if request.state == "waiting":
                self.withdraw(request)
            return
        if request.state == "prompt":
            self.prompts.remove(request)
        else:
            del self.running[request.row]
        heappush(self._free_rows, request.row)
        self.pages_reserved -= request.pages
        request.row = None

    def gather(self, rows: int) -> dict[int, int]:
        """Give running requests beyond the first `rows` rows free ones of these, if there are enough.

        Returns:
            the new row of each by the one that it had.
        """
        free = sorted(row for row in self._free_rows if row < rows)
        beyond = [row for row in self.running if row >= rows]
        moves = dict(zip(beyond, free, strict=False)) if len(beyond) <= len(free) else {}
        for old, new in moves.items():
            request = self.running[new] = self.running.pop(old)
            request.row = new
        self._free_rows = sorted({*self._free_rows, *moves} - {*moves.values()})
        return moves

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue, if it is there."""
        if request in self.waiting:
            self.waiting.remove(request)

    def next_fits(self) -> bool:
        """Whether there is a waiting request, and a row and pages for the oldest one."""
        if not self.waiting or not self._free_rows:
            return False
        request = self.waiting[0]
        return self.pages is None or self.pages_reserved + self.pages_shared + request.pages <= self.pages


GREEDY = Sampling()


class RowState:
    """Parameters of all rows, in tensors of fixed address on the device.

    The newest tokens stay on the device: a step reads what the step before chose without waiting for the host. All else
    is written on the host and copied before a step.

    Args:
        rows: their number.
        device: where tokens are chosen.

    Attributes:
        ids, positions: of the tokens that the next pass reads, int64 [rows].
    """

    def __init__(self, rows: int, device: torch.device):
        # Positions, counters, top_k, seeds; temperature, top_p. Single numbers are written faster by NumPy.
        self._host_integers = np.zeros((4, rows), np.int64)
        self._host_floats = np.ones((2, rows), np.float32)
        self._host_floats[0] = GREEDY.temperature
        self._integers = torch.from_numpy(self._host_integers).to(device, copy=True)
        self._floats = torch.from_numpy(self._host_floats).to(device, copy=True)
        # A copy from pageable memory would wait for what the device is doing. These are written again after as many
        # steps, when their copies are over: results are read one step late at most.
        pinned = device.type == "cuda"
        self._staging = [
            (
                torch.zeros(self._integers.shape, dtype=torch.int64, pin_memory=pinned),
                torch.zeros(self._floats.shape, dtype=torch.float32, pin_memory=pinned),
            )
            for _ in range(4)
        ]
        self._turn = 0
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._sampling = [GREEDY] * rows
        self._processed: dict[int, ProcessedRow] = {}  # rows whose logits are changed before a token is chosen

    @property
    def positions(self) -> Tensor:
        """Of the tokens in `ids`, int64 [rows]."""
        return self._integers[0]

    def enter(self, row: int, request: Request) -> None:
        """Let a row's next token be a request's first one."""
        sampling = request.sampling
        if request.processors is not None:
            device = self.ids.device
            self._processed[row] = ProcessedRow.of(request.processors, request.prompt, request.max_new_tokens, device)
            # They have done the rest.
            sampling = Sampling(temperature=0.0 if sampling.greedy else 1.0, seed=sampling.seed)
        self._sampling[row] = sampling
        self._host_integers[2, row] = sampling.top_k
        self._host_integers[3, row] = sampling.seed or 0
        self._host_floats[:, row] = min(sampling.temperature, HOTTEST), sampling.top_p
        self._host_integers[1, row] = 0

    def move(self, moves: Mapping[int, int]) -> None:
        """Let requests go on in free rows; `moves` has the new row by the old one."""
        old, new = [*moves], [*moves.values()]
        self._host_integers[:, new] = self._host_integers[:, old]
        self._host_floats[:, new] = self._host_floats[:, old]
        self.ids[upload(new, self.ids.device)] = self.ids[upload(old, self.ids.device)]
        for before, after in moves.items():
            self._sampling[after] = self._sampling[before]
            if before in self._processed:
                self._processed[after] = self._processed[before]
            self.leave(before)

    def leave(self, row: int) -> None:
        """Let nothing be drawn for a row that is free."""
        self._sampling[row] = GREEDY
        self._processed.pop(row, None)
        self._host_floats[0, row] = GREEDY.temperature

    def prepare(self, running: dict[int, Request]) -> None:
        """Copy to the device where each running row stands."""
        for row, request in running.items():
            self._host_integers[0, row] = len(request.prompt) + request.position_shift + request.launched - 1
            self._host_integers[1, row] = request.launched
        integers, floats = self._staging[self._turn]
        self._turn = (self._turn + 1) % len(self._staging)
        integers.numpy()[:], floats.numpy()[:] = self._host_integers, self._host_floats
        self._integers.copy_(integers, non_blocking=True)
        self._floats.copy_(floats, non_blocking=True)

    def choose(self, logits: Tensor) -> Tensor:
        """The next token of the first n rows from logits [n, V], int64 [n]; they become the first of `ids`."""
        count = len(logits)
        logits = self._process(logits)
        if all(sampling.greedy for sampling in self._sampling):
            chosen = logits.argmax(-1)
        else:
            _, counters, top_k, seeds = self._integers[:, :count]
            temperature, top_p = self._floats[:, :count]
            restrict = any(sampling.restricts for sampling in self._sampling)
            chosen = sample(logits, temperature, top_k, top_p, seeds, counters, restrict=restrict)
        self.ids[:count] = chosen
        self._append(chosen)
        return chosen

    def _process(self, logits: Tensor) -> Tensor:
        """Logits [n, V] with those rows changed whose requests ask for it."""
        rows = [row for row in self._processed if row < len(logits)]
        if rows:
            logits = logits.to(torch.float32, copy=True)
            for row in rows:
                logits[row] = self._processed[row].scores(logits[row : row + 1])[0]
        return logits

    def _append(self, chosen: Tensor) -> None:
        for row, processed in self._processed.items():
            if row < len(chosen):
                processed.append(chosen[row : row + 1])
