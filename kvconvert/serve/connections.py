"""Connections: what uvicorn's HTTP/1.1 does, and who makes room when there are too many, or said all it has to say."""

from __future__ import annotations

import asyncio
import re
import select
import time
from collections import Counter
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvconvert.serve.places import network

# Bytes that are read at once, and so how much of one client's is parsed before another's turn.
READ_BYTES = 2**14
# The same at first, where nothing took less time, and what is long: a chunk of one byte takes as long as thousands
# without chunks.
_FEW_BYTES, _FEWEST_BYTES, _LONG = 2**11, 2**7, 0.0005
# Headers of a request, each of which takes a while as well.
MOST_HEADERS = 100
# Seconds for which what a refused client still sends is dropped: closed at once, it might never see the answer.
_LINGERS = 2.0
_HEADERS_END = re.compile(rb"\n\r?\n")
# Seconds between looks at a client whose end may go unseen, and between bytes sent to learn whether it is still there.
_LOOKS, _ASKS = 0.25, 1.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b":\n\n"  # in a stream of events


class Connection(H11Protocol):
    """A client's connection.

    When there are as many as are served, one gives way to a new one of an address that has no more: of those whose
    address has most, the oldest that waits for its client, or the oldest at all where that address has more than the
    new one's. A client that ends its side after its request still gets the answer.

    Attributes:
        idle_since: when it last began to wait for its client, by `time.monotonic`.
        address: the client's, as far as it tells clients apart.
    """

    idle_since, address = 0.0, ""
    _half_closed = _looks = _refused = False

    @property
    def waits_for_client(self) -> bool:
        """Whether no request is complete that has no answer."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, in the place of another connection if need be."""
        super().connection_made(transport)
        transport.max_size = _FEW_BYTES  # type: ignore[attr-defined]
        self.idle_since, self.address = time.monotonic(), network(self.client[0]) if self.client else ""
        # uvicorn answers with 503 where there are as many as `limit_concurrency`: only those that found no place.
        full = self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency
        self.limit_concurrency = 0 if full and not self._take_a_place() else None

    def _take_a_place(self) -> bool:
        """Whether another one gave way."""
        others: list[Connection] = [other for other in self.connections if isinstance(other, Connection)]
        count = Counter(other.address for other in others)
        own = count[self.address]
        given = [
            other
            for other in others
            if other is not self
            and (count[other.address] > own or (count[other.address] == own and other.waits_for_client))
        ]
        if not given:
            return False
        oldest = max(given, key=lambda other: (count[other.address], other.waits_for_client, -other.idle_since))
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def data_received(self, data: bytes) -> None:
        """Parse what came; less at once the next time where it took long, so that others' turns come."""
        if self._refused:
            return
        begun, transport = time.thread_time(), self.transport
        super().data_received(data)
        size: int = transport.max_size  # type: ignore[attr-defined]
        long = time.thread_time() - begun > _LONG
        size = max(size // 4, _FEWEST_BYTES) if long else min(2 * size, READ_BYTES)
        transport.max_size = size  # type: ignore[attr-defined]

    def handle_events(self) -> None:
        """Go on with what came, unless it begins a request with too many headers, or too long ones."""
        if self.conn.their_state is h11.IDLE:
            head = self.conn.trailing_data[0]
            end, most = _HEADERS_END.search(head), self.config.h11_max_incomplete_event_size
            if head.count(b"\n", 0, end.start() if end else len(head)) > MOST_HEADERS:
                return self._refuse(431, f"A request has {MOST_HEADERS} headers at most.")
            if end is None and most is not None and len(head) > most:
                return self._refuse(431, f"A request's line and headers have {most:,} bytes at most.")
        super().handle_events()
        if self.flow.read_paused:  # a closed connection only shows once everything before it has been read
            self._look_later(time.monotonic() + _ASKS)

    def on_response_complete(self) -> None:
        """Go on with the next request, if one may come."""
        self.idle_since = time.monotonic()
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Say that this is not HTTP, where nothing else was said."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer, where nothing else was said, and take nothing more from this client."""
        self._refused = True
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
        said = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
        try:
            for event in (said, h11.Data(message.encode("ascii")), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.write_eof()
            self.loop.call_later(_LINGERS, self.transport.abort)
        except h11.LocalProtocolError:
            self.transport.abort()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what answers the request would write after this
            self.cycle.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answer to a whole request; whether this is so."""
        if self.waits_for_client or self._refused:
            return False
        self._half_closed = True
        self._look_later(time.monotonic() + _ASKS)
        return True

    def _look_later(self, asks: float) -> None:
        if not self._looks:
            self._looks = True
            self.loop.call_later(_LOOKS, self._look, asks)

    def _look(self, asks: float) -> None:
        """Give up a client that is gone: it has ended its side as well, but what is sent to it comes back."""
        self._looks = False
        if self.transport.is_closing() or not (self._half_closed or self.flow.read_paused):
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):  # an error, or both sides have ended
            self.transport.abort()
            return
        now = time.monotonic()
        asked = self.waits_for_client or self.transport.get_write_buffer_size() > 0  # by what it has yet to take
        if now >= asks and self.scope["http_version"] != "1.0" and not asked:
            asks = now + _ASKS
            if not self.cycle.response_started:
                self.transport.write(_CONTINUE)
            elif self.conn.our_state is h11.SEND_BODY:
                self.transport.write(self.conn.send(h11.Data(_COMMENT)) or b"")
        self._look_later(asks)
