"""The process that serves: a socket, signals, and clients that keep connections without using them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from kvconvert.errors import UsageError
from kvconvert.serve.app import Service

# Connections beside those of requests that are served or wait; uvicorn answers further ones with 503.
SPARE_CONNECTIONS = 512


def bind(host: str, port: int) -> socket.socket:
    """A socket on which nothing listens yet; a port of 0 takes a free one.

    Raises:
        UsageError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:  # labels of a name that are empty or too long are no OSError
        reason = getattr(error, "strerror", None) or "it is no name of a host"
        message = f"{host}:{port} cannot be served ({reason}); choose another `host` or `port`."
        raise UsageError(message) from error
    return bound


class Server(uvicorn.Server):
    """Serves until a signal, then refuses new requests and lets running ones finish until a deadline.

    A second signal ends them at once. Connections that are idle, or stuck although their answer is over, are closed
    after the service's `client_seconds`.

    Args:
        service: what is served.
        grace: seconds for running requests after the signal.
        ready: called when requests are accepted.

    Attributes:
        cut: requests that the deadline or the second signal ended.
    """

    def __init__(self, service: Service, *, grace: float, ready: Callable[[], None]) -> None:
        connections = service.capacity + SPARE_CONNECTIONS
        config = uvicorn.Config(
            service.app,
            http="h11",  # bounds the size of headers
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=connections,
            timeout_keep_alive=max(1, int(service.limits.client_seconds)),
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self.cut = 0
        self._service, self._grace, self._ready = service, grace, ready
        self._deadline: float | None = None
        self._unused: dict[tuple[Any, Any], float] = {}  # since when, by connection and its newest request

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down; unlike uvicorn, which would stop listening and raise the signal again."""
        now = time.monotonic()
        self._deadline = now + self._grace if self._deadline is None else now
        self._service.draining = True

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
        connection: Any  # of uvicorn's H11Protocol
        for connection in self.server_state.connections:
            cycle = connection.cycle
            if cycle is None or cycle.response_complete or connection.transport.is_closing():
                unused[connection, cycle] = self._unused.get((connection, cycle), now)
        for (connection, _), since in unused.items():
            if now - since >= self._service.limits.client_seconds:
                connection.transport.abort()  # closing would wait for what the client does not read
        self._unused = unused
