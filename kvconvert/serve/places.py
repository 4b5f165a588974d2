"""What one client may take of a server: places of requests, and memory for bodies that arrive."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kvconvert.serve.refusal import Refusal

# A body is not counted up to this size; connections bound how many there are.
SMALL_BODY = 2**16
# Seconds after which a body that has not arrived gives way to others that need its room.
_GIVES_WAY = 1.0


@lru_cache(4096)
def network(address: str) -> str:
    """By what clients without keys are told apart: their address, and of IPv6 the half that a network has."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped or ipaddress.ip_network((parsed, 64), strict=False))
    return address


class Places:
    """Choices of requests that are served or wait.

    Args:
        capacity: in all.
        of_one: of one client.
    """

    def __init__(self, capacity: int, of_one: int) -> None:
        self.capacity, self.of_one = capacity, of_one
        self._taken: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def check(self, client: Hashable, count: int = 1) -> None:
        """Refuse a client for whom there is no place now (Refusal)."""
        taken = self._taken.total()
        if taken + count > self.capacity:
            raise Refusal(429, f"{taken} choices are being served or wait; try again later.", code="queue_full")
        if self._taken[client] + count > self.of_one:
            message = f"One client may have {self.of_one} choices that are served or wait; try again later."
            raise Refusal(429, message, code="too_many_requests")

    @contextlib.contextmanager
    def take(self, client: Hashable) -> Iterator[Callable[[int], None]]:
        """A place for a request (Refusal: there is none); what is given takes more, from any thread, until the end."""
        held, over = 0, False

        def more(count: int) -> None:
            nonlocal held
            with self._lock:
                if over:
                    return
                self.check(client, count)
                held += count
                self._taken[client] += count

        more(1)
        try:
            yield more
        finally:
            with self._lock:
                over = True
                self._taken[client] -= held
                if not self._taken[client]:
                    del self._taken[client]


@dataclass(eq=False)
class Body:
    """The memory of a body that arrives or waits to be parsed.

    Attributes:
        client: whose it is.
        content: what has arrived.
        asked: what it says, once it was parsed.
        size: bytes that are counted.
        begun: when it was asked for, by `time.monotonic`.
        arriving: the time limit of what has not arrived, which may be moved.
        gave_way: whether it was ended to make room.
    """

    client: bytes
    content: bytearray = field(default_factory=bytearray)
    asked: Any = None
    size: int = 0
    begun: float = field(default_factory=time.monotonic)
    arriving: asyncio.Timeout | None = None
    gave_way: bool = False


class Bodies:
    """Bodies of all requests that were not parsed yet, or what was made of the images in them; from any thread.

    Where there is no room for another one, those that have been arriving for longest are ended; one client's have half
    of the room at most.

    Args:
        most: bytes that they may have, but for small ones.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: set[Body] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hold(self, client: bytes) -> Iterator[Body]:
        """Memory for a body; `grow` says how much."""
        body = Body(client)
        with self._lock:
            self._held.add(body)
        try:
            yield body
        finally:
            self.release(body)

    def release(self, body: Body) -> None:
        """Drop a body."""
        body.content, body.asked = bytearray(), None
        with self._lock:
            self._held.discard(body)

    def grow(self, body: Body, size: int) -> None:
        """Make room for a body of a size (Refusal: there is none)."""
        if size > max(SMALL_BODY, body.size):
            with self._lock:
                self._grow(body, size)

    def _grow(self, body: Body, size: int) -> None:
        now = time.monotonic()
        while True:
            others = [other for other in self._held if other is not body and other.size]
            own = [other for other in others if other.client == body.client]
            full = sum(other.size for other in others) + size > self._most
            if not full and sum(other.size for other in own) + size <= self._most // 2:
                body.size = size
                return
            late = [o for o in (others if full else own) if o.arriving and now - o.begun > _GIVES_WAY]
            if not late:
                message = "Other large requests are arriving; try again later."
                raise Refusal(429, message, code="too_many_requests")
            oldest = min(late, key=lambda other: other.begun)
            oldest.size, oldest.gave_way = 0, True
            assert oldest.arriving is not None
            oldest.arriving.reschedule(0)
            oldest.arriving = None
