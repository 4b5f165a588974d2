"""Threads that read what clients send, in a fair order."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
# What is larger takes one thread at most, so that another one is free for what is small.
LARGE = 2**16
THREADS = 2
_NAMED = 4096  # clients that are remembered


class Readers:
    """Threads that call functions for clients, off the event loop.

    Clients share them fairly: whoever has used them less is next, counted in bytes, so that a short request waits for
    no queue of large ones. What its caller no longer waits for is dropped before it begins. The threads are daemons:
    what one of them does never delays the end of the process.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, int, Future[Any], Callable[[], Any]]] = []  # a heap
        self._count, self._large_running, self._closed = 0, False, False
        self._used: dict[Hashable, float] = {}
        self._now = 0.0  # bytes after which the newest job was due that has begun
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether, closed, one of the threads is still in a function."""
        return any(thread.is_alive() for thread in self._threads)

    async def run(self, client: Hashable, size: int, function: Callable[[], T]) -> T:
        """What a function returns that reads so many bytes for a client; cancelling this drops it from the queue."""
        future: Future[T] = Future()
        with self._changed:
            due = max(self._now, self._used.get(client, 0.0)) + size
            if len(self._used) >= _NAMED:
                self._used = {name: used for name, used in self._used.items() if used > self._now}
            self._used[client] = due
            self._count += 1
            heapq.heappush(self._waiting, (due, self._count, size, future, function))
            self._changed.notify_all()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            size, future, function = job
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            finally:
                del future, function, job
            if size > LARGE:
                with self._changed:
                    self._large_running = False
                    self._changed.notify_all()

    def _next(self) -> tuple[int, Future[Any], Callable[[], Any]] | None:
        """The job that is due first and may begin; None when the readers are closed."""
        with self._changed:
            while not self._closed:
                kept = []
                found = None
                while self._waiting and found is None:
                    due, _, size, future, function = job = heapq.heappop(self._waiting)
                    if size > LARGE and self._large_running:
                        kept.append(job)
                    elif future.set_running_or_notify_cancel():
                        found = size, future, function
                        self._now = max(self._now, due - size)
                        self._large_running |= size > LARGE
                for job in kept:
                    heapq.heappush(self._waiting, job)
                if found is not None:
                    return found
                self._changed.wait()
            return None
