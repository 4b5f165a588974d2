"""The port of a server, which is taken before anything that takes long is imported or loaded."""

from __future__ import annotations

import select
import socket
from collections import deque
from typing import Any

from kvconvert.errors import MissingError

# Connections that are accepted before the event loop does something else: of clients that are there, and of those that
# have ended their side.
_TOGETHER, _ENDED = 64, 32
# That are looked at for these, as many as wait in the kernel.
_LOOKED_AT = 2048
_RDHUP = getattr(select, "POLLRDHUP", 0)  # Linux alone tells that one side has ended


class Listening(socket.socket):
    """A socket that listens, whose queue honest clients need not share with those that only come and go.

    Connections whose client has left are closed without a word. Those whose client has ended its side, as it may after
    its request, come after all others; where there are many, the oldest are taken for clients that have left.
    """

    def __init__(self, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self._accepted: deque[tuple[socket.socket, Any] | None] = deque()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection (BlockingIOError: none waits, or the event loop has other things to do first)."""
        if not self._accepted:
            self._accepted = self._look()
        if (connection := self._accepted.popleft()) is None:
            raise BlockingIOError
        return connection

    def _look(self) -> deque[tuple[socket.socket, Any] | None]:
        """What is accepted together, and None."""
        there: deque[tuple[socket.socket, Any] | None] = deque()
        ended: deque[tuple[socket.socket, Any]] = deque()
        for _ in range(_LOOKED_AT):
            if len(there) == _TOGETHER:
                break
            try:
                connection, address = super().accept()
            except ConnectionAbortedError:
                continue
            except OSError as error:  # none waits, or there is no descriptor for another one
                if not (there or ended or isinstance(error, BlockingIOError)):
                    raise
                break
            poll = select.poll()
            poll.register(connection, _RDHUP)
            if not poll.poll(0):
                there.append((connection, address))
            elif _says_something(connection):
                ended.append((connection, address))
            else:
                connection.close()
            if len(ended) > _ENDED:
                ended.popleft()[0].close()
        return deque([*there, *ended, None])


def _says_something(connection: socket.socket) -> bool:
    """Whether a client that has ended its side has sent something before."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:  # it has left
        return False


def bind(host: str, port: int) -> Listening:
    """A socket that listens, so that no other server takes its port; a port of 0 takes a free one.

    Raises:
        MissingError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = Listening(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen()
        except BaseException:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "this is no name of a host"
        message = f"{host:.80}:{port} cannot be served ({reason}); choose another `host` or `port`."
        raise MissingError(message) from error
    return bound
