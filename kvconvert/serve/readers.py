"""Threads that read what clients send, in a fair order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
# What is larger has a thread of its own, so that small requests wait for none of it.
LARGE = 2**16
THREADS = 2
_NAMED = 4096  # clients that are remembered
Job = tuple[Future[Any], Callable[[], Any]]


class Readers:
    """Threads that call functions for clients, off the event loop: one for what is small, one for what is large.

    Clients share them fairly: whoever has used them less is next, in seconds, which a hundred bytes may take as many of
    as megabytes. What its caller no longer waits for is dropped before it begins. The threads are daemons: what one of
    them does never delays the end of the process.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        # By whether jobs are large: those of each client in order, and what their thread waits for, once for each.
        self._waiting: tuple[dict[Hashable, deque[Job]], dict[Hashable, deque[Job]]] = ({}, {})
        self._calls: tuple[SimpleQueue[None], SimpleQueue[None]] = (SimpleQueue(), SimpleQueue())
        self._closed = False
        self._used: dict[Hashable, float] = {}
        self._now = 0.0  # what the client had used whose job began last: those that come later have used no less
        self._threads = [
            threading.Thread(target=self._work, args=[large], name=f"{name}-{large}", daemon=True)
            for large in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether, closed, one of the threads is still in a function."""
        return any(thread.is_alive() for thread in self._threads)

    async def run(self, client: Hashable, size: int, function: Callable[[], T]) -> T:
        """Call a function that reads `size` bytes for a client and return its result; cancelling drops the call."""
        future: Future[T] = Future()
        large = size > LARGE
        with self._lock:
            if len(self._used) >= _NAMED:
                self._used = {name: used for name, used in self._used.items() if used > self._now}
            self._used[client] = max(self._now, self._used.get(client, 0.0))
            self._waiting[large].setdefault(client, deque()).append((future, function))
        self._calls[large].put(None)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Begin nothing more."""
        self._closed = True
        for calls in self._calls:
            calls.put(None)

    def _work(self, large: int) -> None:
        while (job := self._next(large)) is not None:
            client, (future, function) = job
            begun = time.monotonic()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            finally:
                del future, function, job
            with self._lock:
                self._used[client] = self._used.get(client, self._now) + time.monotonic() - begun

    def _next(self, large: int) -> tuple[Hashable, Job] | None:
        """The client that has used least, and its first job that is still wanted; None when the readers are closed."""
        waiting = self._waiting[large]
        while True:
            self._calls[large].get()
            if self._closed:
                return None
            with self._lock:
                client = min(waiting, key=lambda client: self._used.get(client, self._now))
                job = waiting[client].popleft()
                if not waiting[client]:
                    del waiting[client]
                if job[0].set_running_or_notify_cancel():
                    self._now = max(self._now, self._used.get(client, 0.0))
                    return client, job
