"""Threads that read what clients send, in a fair order."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
# What is larger has a thread of its own, so that small requests wait for none of it.
LARGE = 2**16
THREADS = 2
_NAMED = 4096  # clients that are remembered
# When it is due, its number, bytes, the future of its result, and the function.
Job = tuple[float, int, int, Future[Any], Callable[[], Any]]


class Readers:
    """Threads that call functions for clients, off the event loop: one for what is small, one for what is large.

    Clients share them fairly: whoever has used them less is next, counted in bytes. What its caller no longer waits for
    is dropped before it begins. The threads are daemons: what one of them does never delays the end of the process.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        lock = threading.Lock()
        # By whether jobs are large: heaps of them, and what tells their thread of new ones.
        self._waiting: tuple[list[Job], list[Job]] = ([], [])
        self._changed = (threading.Condition(lock), threading.Condition(lock))
        self._count, self._closed = 0, False
        self._used: dict[Hashable, float] = {}
        self._now = 0.0  # bytes after which the newest job was due that has begun
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
        """What a function returns that reads so many bytes for a client; cancelling this drops it from the queue."""
        future: Future[T] = Future()
        large = size > LARGE
        with self._changed[large]:
            due = max(self._now, self._used.get(client, 0.0)) + size
            if len(self._used) >= _NAMED:
                self._used = {name: used for name, used in self._used.items() if used > self._now}
            self._used[client] = due
            self._count += 1
            heapq.heappush(self._waiting[large], (due, self._count, size, future, function))
            self._changed[large].notify()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Begin nothing more."""
        for changed in self._changed:
            with changed:
                self._closed = True
                changed.notify()

    def _work(self, large: int) -> None:
        while (job := self._next(large)) is not None:
            future, function = job
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            finally:
                del future, function, job

    def _next(self, large: int) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The job that is due first and still wanted; None when the readers are closed."""
        with self._changed[large]:
            while not self._closed:
                while self._waiting[large]:
                    due, _, size, future, function = heapq.heappop(self._waiting[large])
                    if future.set_running_or_notify_cancel():
                        self._now = max(self._now, due - size)
                        return future, function
                self._changed[large].wait()
            return None
