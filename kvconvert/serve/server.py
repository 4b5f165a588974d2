"""The process that serves: signals, and clients that keep connections without using them."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from kvconvert.serve.app import Service
from kvconvert.serve.connections import Connection

# Connections beside those of requests that are served or wait.
SPARE_CONNECTIONS = 512
# Of a request's line and headers.
MOST_HEAD_BYTES = 2**14
# That ending takes at most, once requests were ended: what a client does not read, and a step under way, are left.
END_SECONDS = 5.0
# Descriptors that are not for connections.
_OTHER_DESCRIPTORS = 128


class Server(uvicorn.Server):
    """Serves until a signal, then refuses new requests and lets running ones finish until a deadline.

    A second signal ends them at once. Connections that are idle, stuck although their answer is over, or of a client
    that takes nothing of an answer are closed after the service's `client_seconds`.

    Args:
        service: what is served.
        grace: seconds for running requests after the signal.
        ready: called when requests are accepted.
        ending: called with the seconds until all has to be over, at each signal.

    Attributes:
        cut: requests that the deadline or the second signal ended.
    """

    def __init__(
        self,
        service: Service,
        *,
        grace: float,
        ready: Callable[[], None],
        ending: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        connections = service.places.capacity + SPARE_CONNECTIONS
        if descriptors != resource.RLIM_INFINITY:
            connections = min(connections, max(descriptors - _OTHER_DESCRIPTORS, 1))
        config = uvicorn.Config(
            service.app,
            http=Connection,
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # not a line for whatever is no HTTP
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=connections,
            timeout_keep_alive=max(1, int(service.limits.client_seconds)),
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        )
        super().__init__(config)
        self.cut = 0
        self._service, self._grace, self._ready, self._ending = service, grace, ready, ending
        self._deadline: float | None = None
        # Since when, by connection, its newest request, and what of an answer the client has yet to take.
        self._unused: dict[tuple[Any, Any, int], float] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down; unlike uvicorn, which would stop listening and raise the signal again."""
        now = time.monotonic()
        self._deadline = now + self._grace if self._deadline is None else now
        self._service.draining = True
        self._ending(self._deadline - now + END_SECONDS)

    async def on_tick(self, counter: int) -> bool:
        """What has to be done ten times a second; whether the server is to end."""
        if counter % 10 == 0:
            self._close_unused()
        if self._deadline is not None and (not self._service.active or time.monotonic() >= self._deadline):
            self.cut = self._service.cut()
            self.should_exit = True
        return await super().on_tick(counter)

    def _close_unused(self) -> None:
        now, unused = time.monotonic(), {}
        connection: Any  # Connection
        for connection in self.server_state.connections:
            cycle = connection.cycle
            over = cycle is None or cycle.response_complete or connection.transport.is_closing()
            if over or connection.flow.write_paused:
                key = connection, cycle, 0 if over else connection.transport.get_write_buffer_size()
                unused[key] = self._unused.get(key, now)
        for (connection, _, _), since in unused.items():
            if now - since >= self._service.limits.client_seconds:
                connection.transport.abort()  # closing would wait for what the client does not read
        self._unused = unused
