"""The web application: routes, the API key, and a request's way from its body to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import threading
import time
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from kvconvert.errors import KvconvertError
from kvconvert.models.chat import ChatPrompts
from kvconvert.models.processors import tokenizer_of
from kvconvert.models.prompts import encode_text
from kvconvert.runtime import Engine
from kvconvert.runtime.engine.processors import recommended
from kvconvert.serve.answers import Answer, Form, Generation
from kvconvert.serve.metrics import CONTENT_TYPE, Metrics
from kvconvert.serve.refusal import Refusal, refusal_of
from kvconvert.serve.requests import Chat, Completion, Limits


class Service:
    """An engine as a web application.

    Args:
        engine: which a thread steps as long as the application runs.
        processor: the bundle's tokenizer or processor.
        name: under which the bundle is served.
        capacity: requests that are served or wait at once; further ones are refused before they are read.
        limits: of each request.
        keys: of which a client has to send one; anyone is served where there are none.
        parse_special: take special tokens that are spelled in messages for the tokens themselves, not for text.

    Attributes:
        app: for an ASGI server.
        draining: set to refuse new requests while running ones finish.
        active: requests that are being read, wait, or are served.
        metrics: what was counted.
    """

    def __init__(
        self,
        engine: Engine,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        name: str,
        *,
        capacity: int,
        limits: Limits,
        keys: Collection[str] = (),
        parse_special: bool = False,
    ) -> None:
        self.engine, self.name, self.capacity, self.limits = engine, name, capacity, limits
        self.draining, self.active, self.metrics = False, 0, Metrics()
        self._defaults = recommended(engine.generation.values, unstated=1.0)  # OpenAI's
        self._tokenizer, self._chat = tokenizer_of(processor), ChatPrompts(processor, model.config, parse_special)
        self._created = int(time.time())
        self._digests = [_digest(key) for key in keys]
        self._running: set[Generation] = set()
        # One thread parses and tokenizes, so that the event loop never waits and a tokenizer has one caller at a time.
        self._reader = ThreadPoolExecutor(1, "kvconvert-reader")
        self._stepper: threading.Thread | None = None
        routes = [
            Route("/v1/completions", _Generate(self, Completion), methods=["POST"]),
            Route("/v1/chat/completions", _Generate(self, Chat), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers: dict[Any, Any] = {
            Refusal: lambda http, error: error.response(),
            KvconvertError: lambda http, error: refusal_of(error).response(),
            ValidationError: lambda http, error: refusal_of(error).response(),
            HTTPException: lambda http, error: _no_such(http, error).response(),
            Exception: lambda http, error: Refusal(500, "The server failed; its log says how.").response(),
        }
        self._paths = {route.path for route in routes}
        self.app: ASGIApp = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)
        self.app = self._guarded(self.app)

    def cut(self) -> int:
        """End all running requests with an error; how many there were."""
        for generation in (running := list(self._running)):
            generation.cancel()
        return len(running)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        over = threading.Event()
        self._stepper = threading.Thread(target=self.engine.run, args=[over], name="kvconvert-engine", daemon=True)
        self._stepper.start()
        try:
            yield
        finally:
            over.set()
            self._reader.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(self._stepper.join, 30)

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        """Ask for the key before anything is read, and count responses."""

        async def guard(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)

            async def counted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"] if scope["path"] in self._paths else "other"
                    self.metrics.responses[path, message["status"]] += 1
                await send(message)

            if scope["path"].startswith("/v1") and not self._is_allowed(scope):
                message = "Send a valid API key as `Authorization: Bearer KEY`."
                refusal = Refusal(401, message, code="invalid_api_key")
                return await refusal.response()(scope, receive, counted)
            return await app(scope, receive, counted)

        return guard

    def _is_allowed(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, in constant time.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return not matches or (kind.lower() == b"bearer" and any(matches))

    def _entry(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "kvconvert"}

    async def _models(self, http: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def _model(self, http: HTTPRequest) -> Response:
        self.check_name(http.path_params["name"])
        return JSONResponse(self._entry())

    async def _health(self, http: HTTPRequest) -> Response:
        if self.draining:
            raise Refusal(503, "The server is shutting down.", code="shutting_down")
        if self._stepper is None or not self._stepper.is_alive():
            raise Refusal(503, "The engine has stopped; restart the server.", code="engine_stopped")
        return JSONResponse({"status": "ok"})

    async def _metrics(self, http: HTTPRequest) -> Response:
        return PlainTextResponse(self.metrics.text(self.engine.stats()), media_type=CONTENT_TYPE)

    def check_name(self, name: str | None) -> None:
        """Refuse the name of another model (Refusal); none means the only one."""
        if name is not None and name != self.name:
            message = f"There is no model {name!r} here; the one served is {self.name!r}."
            raise Refusal(404, message, param="model", code="model_not_found")

    @contextlib.contextmanager
    def admitted(self, generation: Generation):
        """A request's time in the server (Refusal: there is no place for it)."""
        if self.draining:
            raise Refusal(503, "The server is shutting down; send the request again.", code="shutting_down")
        if self.active >= self.capacity:
            raise Refusal(429, f"{self.active} requests are being served or wait; try again later.", code="queue_full")
        self.active += 1
        self._running.add(generation)
        try:
            yield
        finally:
            self.active -= 1
            self._running.remove(generation)
            generation.cancel()

    async def read(self, http: HTTPRequest) -> bytes:
        """The body of a request (Refusal: it is no JSON by its type, too long, or comes too slowly)."""
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "The body has to be JSON; send `Content-Type: application/json`.")
        most = self.limits.body_bytes
        too_long = Refusal(413, f"The body may have {most} bytes at most.", code="body_too_long")
        if int(http.headers.get("content-length", 0)) > most:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.client_seconds):
                async for part in http.stream():
                    body += part
                    if len(body) > most:
                        raise too_long
        except TimeoutError as error:
            message = f"The body did not arrive within {self.limits.client_seconds:g} seconds."
            raise Refusal(408, message, code="body_too_slow") from error
        return bytes(body)

    async def submit(self, kind: type[Completion | Chat], body: bytes, generation: Generation) -> Completion | Chat:
        """Check a body and queue its choices.

        Raises:
            Refusal, ValidationError, KvconvertError: it is not served.
        """
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._submit, kind, body, generation)

    def _submit(self, kind: type[Completion | Chat], body: bytes, generation: Generation) -> Completion | Chat:
        asked = kind.model_validate_json(body)
        self.check_name(asked.model)
        asked.check(self.limits, len(asked.prompt) if isinstance(asked, Completion) else 1)
        for prompt in self._ids(asked):
            new = asked.new_tokens(self.limits, len(prompt), self.engine.room(len(prompt)))
            for choice in range(asked.n or 1):
                generation.add(
                    prompt,
                    max_new_tokens=new,
                    sampling=asked.sampling(self._defaults, choice),
                    stop=asked.stop or (),
                    stop_token_ids=[] if asked.ignore_eos else None,
                )
        return asked

    def _ids(self, asked: Completion | Chat) -> list[list[int]]:
        """Token ids of the prompts (Refusal: the model has no chat template)."""
        if isinstance(asked, Completion):
            return [encode_text(self._tokenizer, p) if isinstance(p, str) else p for p in asked.prompt]
        if not self._chat.templated:
            raise Refusal(400, "This model has no chat template; use /v1/completions.", param="messages")
        # "developer" is what newer clients call the system.
        roles = {"developer": "system"}
        turns = [self._chat.message(roles.get(turn.role, turn.role), turn.content) for turn in asked.messages]
        return [self._chat.encode(turns)["input_ids"][0].tolist()]


class _Generate:
    """One of the two routes that generate, as an ASGI application."""

    def __init__(self, service: Service, kind: type[Completion | Chat]) -> None:
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, service = time.perf_counter(), self._service
        generation = Generation(service.engine)
        with service.admitted(generation), contextlib.suppress(ClientDisconnect):
            body = await service.read(HTTPRequest(scope, receive))
            asked = await service.submit(self._kind, body, generation)
            prompts = len(asked.prompt) if isinstance(asked, Completion) else 1
            form = Form(isinstance(asked, Chat), service.name)
            answer = Answer(
                generation, form, prompts, begun, service.limits.client_seconds, service.metrics, asked.user
            )
            await answer.write(scope, receive, send, stream=bool(asked.stream), usage=asked.include_usage)


def _no_such(http: HTTPRequest, error: HTTPException) -> Refusal:
    if error.status_code == 404:
        return Refusal(404, f"There is no {http.url.path} here.", code="unknown_path")
    return Refusal(error.status_code, f"{http.method} {http.url.path}: {error.detail}.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
