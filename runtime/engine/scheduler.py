"""Which request gets a row of the batch, and when: first come, first served, within rows and pages."""

from __future__ import annotations

from collections import deque

from kvconvert.errors import QueueFullError, UsageError
from kvconvert.runtime.engine.request import Request


class Scheduler:
    """The queue and what is handed out; knows nothing of models and caches.

    A request is admitted with a row and with pages for all tokens that it may come to, so that it never has to wait or
    fail once it runs. The oldest one waiting is always the next: while it does not fit, nothing overtakes it.

    Args:
        rows: of the batch.
        pages: in all, or None where they are not limited.
        max_waiting: requests that may wait, or None for any number.
    """

    def __init__(self, rows: int, pages: int | None, max_waiting: int | None):
        self.rows, self.pages, self.max_waiting = rows, pages, max_waiting
        self.waiting: deque[Request] = deque()
        self.prompts: deque[Request] = deque()  # admitted, prompt not read completely
        self.running: dict[int, Request] = {}  # by row
        self.pages_reserved = 0
        self._free_rows = list(reversed(range(rows)))

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
                f"A prompt of {len(request.prompt)} tokens with up to {request.max_new_tokens} new ones needs "
                f"{request.pages} pages of the cache and there are {self.pages}; ask for less, or give the engine more "
                "`kv_memory`."
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
        while self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            request.row = self._free_rows.pop()
            request.state = "prompt"
            self.pages_reserved += request.pages
            self.prompts.append(request)

    def start(self, request: Request) -> None:
        """State that the prompt of the oldest admitted request has been read."""
        self.prompts.remove(request)
        request.state = "running"
        self.running[request.row] = request

    def release(self, request: Request) -> None:
        """Take back the row and the pages of a request, or its place in the queue; once."""
        if request.row is None:
            if request.state == "waiting":
                self.waiting.remove(request)
            return
        if request.state == "prompt":
            self.prompts.remove(request)
        else:
            del self.running[request.row]
        self._free_rows.append(request.row)
        self.pages_reserved -= request.pages
        request.row = None

    def _fits(self, request: Request) -> bool:
        enough = self.pages is None or self.pages_reserved + request.pages <= self.pages
        return bool(self._free_rows) and enough
