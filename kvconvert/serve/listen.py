"""The port of a server, which is taken before anything that takes long is imported or loaded."""

from __future__ import annotations

import socket

from kvconvert.errors import MissingError


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, so that no other server takes its port; a port of 0 takes a free one.

    Raises:
        MissingError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
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
