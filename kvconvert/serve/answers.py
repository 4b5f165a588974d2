"""Answers: the engine's requests behind an HTTP request, and how what comes of them is sent, whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kvconvert.errors import printable
from kvconvert.runtime import Engine
from kvconvert.runtime.engine import Event, Request
from kvconvert.serve.forms import Form, Step
from kvconvert.serve.grammars import NOTHING_FITS, Constraint
from kvconvert.serve.metrics import Metrics
from kvconvert.serve.refusal import Refusal
from kvconvert.serve.replies import Piece, Reply

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Events of an answer that is sent whole, after which they are taken before its end.
_MANY_EVENTS = 64


class Bell:
    """Wakes those who wait in an event loop for what a step of the engine brought, all of them at once."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None]] = deque()

    def add(self, wake: Callable[[], None]) -> None:
        """Let something be called when the bell rings next; from any thread."""
        self._due.append(wake)

    def ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call what is due in the event loop; from any thread."""
        if self._due:
            with contextlib.suppress(RuntimeError):  # a pass may end after the event loop
                loop.call_soon_threadsafe(self._call)

    def _call(self) -> None:
        while self._due:
            self._due.popleft()()


class Generation:
    """The choices of one HTTP request, each a request of the engine.

    `add` is called by one thread at a time; the rest is for the event loop in which the object was made.

    Args:
        engine: which steps.
        bell: which rings after each step.

    Attributes:
        requests: in the order of the choices.
        replies: what divides their texts.
        whole: whether their events are wanted at their end alone, for which the event loop is woken seldom.
        cancelled: whether the choices that have not finished were cancelled.
    """

    def __init__(self, engine: Engine, bell: Bell) -> None:
        self.requests: list[Request] = []
        self.replies: list[Reply] = []
        self.whole = self.cancelled = False
        self._constraints: list[Constraint | None] = []
        self._engine, self._bell, self._loop = engine, bell, asyncio.get_running_loop()
        self._events: deque[tuple[int, Event, float]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._told = False  # whether the event loop knows, or will, of all in `_events`
        self._end_work: Callable[[], None] | None = None

    async def unless_over(self, work: Coroutine[Any, Any, T], gone: asyncio.Task[None] | None = None) -> T:
        """The result of some work, which is cancelled if these choices are, or if the client is gone.

        Raises:
            ClientDisconnect: the client is gone.
            Refusal: the choices were cancelled.
        """
        task, working, ended = asyncio.current_task(), True, False
        assert task is not None
        others = task.cancelling()  # by whom it was cancelled before

        def end(gone: asyncio.Task[None] | None = None) -> None:
            nonlocal ended
            if working and not ended:
                ended = task.cancel()

        if gone is not None:
            gone.add_done_callback(end)
        self._end_work = end
        try:
            if not self.cancelled and not (gone and gone.done()):
                result = await work
        except asyncio.CancelledError:
            if not ended or task.uncancel() > others:
                raise
        finally:
            working = False
            work.close()
            self._end_work = None
            if gone is not None:
                gone.remove_done_callback(end)
        if gone is not None and gone.done():
            raise ClientDisconnect
        if self.cancelled:
            raise _ending()
        return result

    def add(self, prompt: list[int], reply: Reply, constraint: Constraint | None = None, **options: Any) -> None:
        """Queue one more choice, whose text `reply` divides; other arguments and errors are those of `Engine.add`."""
        report = partial(self._report, len(self.requests))
        self.replies.append(reply)
        self._constraints.append(constraint)
        self.requests.append(self._engine.add(prompt, on_event=report, constraint=constraint, **options))
        if self.cancelled:  # while it was being added
            self.requests[-1].cancel()

    def cancel(self) -> None:
        """End what has not ended."""
        self.cancelled = True
        self._wake()
        if self._end_work is not None:
            self._end_work()
        for request in list(self.requests):
            request.cancel()

    async def events(self) -> list[tuple[int, Event, float]]:
        """Events of all choices since the last ones, each with its choice's place and when it came, by
        `time.perf_counter` (Refusal: they were cancelled).
        """
        self._told = False
        while not (self._events or self.cancelled):
            self._waiter = self._loop.create_future()
            await self._waiter
            self._told = False
        if self.cancelled:  # the engine says so when its pass is over, which is not waited for
            raise _ending()
        came = []
        while self._events:
            came.append(self._events.popleft())
        return came

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def failure(self, place: int) -> tuple[str, str] | None:
        """Why the grammar of a choice was given up, and the field of the request that asked for it."""
        constraint = self._constraints[place]
        return None if constraint is None or constraint.failure is None else (constraint.failure, constraint.param)

    def usage(self, prompts: int) -> dict[str, Any]:
        """Tokens of prompts, those of them that stored prefixes had, and generated ones, those of reasoning among them;
        the choices are equally many of each prompt.
        """
        firsts = self.requests[:: len(self.requests) // prompts]
        read = sum(len(request.prompt) for request in firsts)
        generated = sum(len(request.tokens) for request in self.requests)
        return {
            "prompt_tokens": read,
            "completion_tokens": generated,
            "total_tokens": read + generated,
            "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in firsts)},
            "completion_tokens_details": {"reasoning_tokens": sum(reply.reasoning_tokens for reply in self.replies)},
        }

    def _report(self, place: int, event: Event) -> None:
        self._events.append((place, event, time.perf_counter()))
        waits = self.whole and event.finish_reason is None and len(self._events) < _MANY_EVENTS
        if not (waits or self._told or self.cancelled):
            self._told = True
            self._bell.add(self._wake)


class Answer:
    """Writes the answer to one request while watching whether the client is still there.

    Args:
        generation: with all choices added.
        form: of the answer.
        prompts: from which the choices were made.
        begun: when the request arrived, by `time.perf_counter`.
        client_seconds: that the client may take for a piece.
        metrics: to count in.
        user: who asks, for the log.
    """

    def __init__(
        self,
        generation: Generation,
        form: Form,
        prompts: int,
        begun: float,
        client_seconds: float,
        metrics: Metrics,
        user: str | None,
    ) -> None:
        self._generation, self._form, self._prompts, self._begun = generation, form, prompts, begun
        self._client_seconds, self._metrics, self._user = client_seconds, metrics, user
        self._gone = False
        self._left = len(generation.requests)  # choices that go on
        self._loop = asyncio.get_running_loop()
        self._sending: float | None = None  # since when, by the event loop's clock

    async def write(
        self, scope: Scope, receive: Receive, send: Send, gone: asyncio.Task[None], *, stream: bool
    ) -> None:
        """Send the answer, whole or as a stream; whatever ends this cancels what has not ended, and so does the end of
        `gone`.

        Raises:
            Refusal: the model failed or the server is shutting down, and nothing was sent.
        """
        gone.add_done_callback(self._client_gone)
        send = partial(self._send, send)
        try:
            async with asyncio.timeout(None) as self._patience:
                self._look()
                if stream:
                    await self._stream(send)
                else:
                    await (await self._whole())(scope, receive, send)
        except TimeoutError:
            self._leave("did not take the answer")
        except Refusal:
            if not self._gone:
                raise
        finally:
            self._next_look.cancel()
            gone.remove_done_callback(self._client_gone)
            self._generation.cancel()
            self._metrics.whole.add(time.perf_counter() - self._begun)
            self._log()

    def _headers(self) -> dict[str, str]:
        return {"x-request-id": self._form.id}

    def _client_gone(self, gone: asyncio.Task[None]) -> None:
        if not all(request.finished for request in self._generation.requests):
            self._leave("went away")

    def _leave(self, how: str) -> None:
        logger.info("%s: the client %s.", self._form.id, how)
        self._gone = True
        self._metrics.gone += 1
        self._generation.cancel()

    async def _send(self, send: Send, message: Message) -> None:
        self._sending = self._loop.time()
        await send(message)
        self._sending = None

    def _look(self) -> None:
        """End the answer if the client takes too long for a piece; a timer for each piece would cost more."""
        now = self._loop.time()
        end = (self._sending or now) + self._client_seconds
        if end > now:
            self._next_look = self._loop.call_at(end, self._look)
        else:
            self._patience.reschedule(now)

    async def _steps(self) -> AsyncIterator[dict[int, Step]]:
        """What came of the choices that went on; several steps at once if the client or the event loop is slower than
        the engine (Refusal: a choice ended without an answer).
        """
        newest: dict[int, float] = {}
        while self._left:
            brought: dict[int, list[Event]] = {}
            for place, event, when in await self._generation.events():
                self._left -= event.finish_reason is not None
                if event.tokens:
                    if place in newest:
                        self._metrics.between_tokens.add(when - newest[place])
                    elif not newest:
                        self._metrics.first_token.add(when - self._begun)
                    newest[place] = when
                if event.finish_reason == "error":
                    raise Refusal(500, "The model failed while it served this request.", code="model_failed")
                if event.finish_reason == "cancelled":
                    raise _ending()
                brought.setdefault(place, []).append(event)
            yield {place: self._step(place, events) for place, events in brought.items()}

    def _step(self, place: int, events: list[Event]) -> Step:
        reply, reason = self._generation.replies[place], events[-1].finish_reason
        if reason is not None and (given_up := self._generation.failure(place)) is not None:
            failure, param = given_up
            message = f"The answer's form takes too much to hold it to ({failure.rstrip('.')}); simplify its schema."
            if failure.startswith(NOTHING_FITS):
                message = "No answer fits its JSON schema, as where a $ref leads to itself; change the schema."
            raise Refusal(400, message, param=param, code="grammar_too_complex")
        piece = Piece()
        for event in events:
            piece += reply.feed(event.text, last=event.finish_reason is not None, tokens=len(event.tokens))
        ended: str | None = "tool_calls" if reason == "stop" and reply.called else reason
        told = [each for event in events if event.logprobs for each in zip(event.tokens, event.logprobs, strict=True)]
        return Step(piece, ended, told)

    async def _whole(self) -> Response:
        choices = [Step() for _ in self._generation.requests]
        async for steps in self._steps():
            for place, step in steps.items():
                choices[place] += step

        def made() -> Response:
            return JSONResponse(self._form.whole(choices, self._usage()), headers=self._headers())

        # A hundred thousand probabilities take long to write down, and others are not to wait for it.
        return await asyncio.to_thread(made) if self._form.tells_logprobs else made()

    async def _stream(self, send: Send) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self._headers()}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        form, known = self._form, list[str]()
        try:
            if opening := form.opening(self._left):
                await send(_part(opening))
            async for steps in self._steps():
                known = form.events({place: step for place, step in steps.items() if step}, self._usage)
                if known and self._left:
                    await send(_part(known))
            last = [*known, *form.closing(self._usage())]
        except Refusal as refusal:
            last = [form.failed(refusal)]
        await send(_part(last, more=False))

    def _usage(self) -> dict[str, Any]:
        return self._generation.usage(self._prompts)

    def _log(self) -> None:
        requests = self._generation.requests
        usage = self._usage()
        logger.info(
            "%s: %d prompt tokens, %d new, %s, %.2f s%s",
            self._form.id,
            usage["prompt_tokens"],
            usage["completion_tokens"],
            "+".join(request.finish_reason or "cancelled" for request in requests),
            time.perf_counter() - self._begun,
            "" if self._user is None else f", user {printable(self._user)}",
        )


def _ending() -> Refusal:
    return Refusal(503, "The server is shutting down; send the request again.", code="shutting_down")


def _part(events: list[str], more: bool = True) -> Message:
    return {"type": "http.response.body", "body": "".join(events).encode(), "more_body": more}
