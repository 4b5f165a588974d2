"""The web application: routes, and a request's way from its body to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from kvconvert.errors import KvconvertError, counted, listed
from kvconvert.models.chat import ChatPrompts
from kvconvert.models.processors import tokenizer_of
from kvconvert.models.prompts import MARK, encode_text
from kvconvert.models.responses import ResponseFormat, response_format
from kvconvert.models.templates import TemplateLimitError, TemplateRenderer, bounded, quickly
from kvconvert.models.token_bytes import TokenTexts, token_bytes
from kvconvert.runtime import Engine
from kvconvert.runtime.engine.sampling import recommended
from kvconvert.serve.access import Access, Hosts, in_origin_form
from kvconvert.serve.answers import Answer, Bell, Generation
from kvconvert.serve.forms import Form
from kvconvert.serve.grammars import Constraint, Grammars
from kvconvert.serve.images import read_images
from kvconvert.serve.metrics import CONTENT_TYPE, Metrics
from kvconvert.serve.page import BundleFacts, page
from kvconvert.serve.places import Bodies, Body, Places
from kvconvert.serve.readers import THREADS, Readers, T
from kvconvert.serve.refusal import Refusal, refusal_of
from kvconvert.serve.replies import Reply
from kvconvert.serve.requests import Chat, Completion, Limits, fields_of
from kvconvert.serve.responses import ResponsesChat

logger = logging.getLogger(__name__)

# Bodies of the largest size that may arrive at once.
LARGE_BODIES = 16
# Of what processors made of images, of all requests that wait or are served.
IMAGE_BYTES = 2**30
# Values that any body may have; more only where prompts of token ids may.
VALUES = 2**16


class Queued(NamedTuple):
    """What is kept of a request while it waits or is answered; the rest of its body may be megabytes.

    Attributes:
        form: the form of the answer.
        prompts: the number of prompts.
        stream: whether the answer is streamed.
        user: the user named in the request, for the log.
    """

    form: Form
    prompts: int
    stream: bool
    user: str | None


class Service:
    """An engine as a web application.

    Args:
        engine: which a thread steps as long as the application runs.
        processor: the bundle's tokenizer or processor.
        name: under which the bundle is served.
        capacity: choices of requests that are served or wait at once.
        limits: of each request.
        capacity_of_one: the same of one client: of one key, or without keys of one address; by default three quarters,
            or as many as one request may have.
        keys: of which a client has to send one; anyone is served where there are none.
        hosts: names under which the server may be asked for.
        origins: of web pages that may ask it.
        share_prefixes: whether requests of different keys share stored prefixes.
        parse_special: take special tokens that are spelled in messages for the tokens themselves, not for text.
        facts: of the bundle, for its page; None for a server without one.

    Attributes:
        app: for an ASGI server.
        draining: set to refuse new requests while running ones finish.
        metrics: what was counted.
        bell: rings after each step of the engine.
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
        capacity_of_one: int | None = None,
        keys: Collection[str] = (),
        hosts: Hosts | None = None,
        origins: Collection[str] = (),
        share_prefixes: bool = False,
        parse_special: bool = False,
        facts: BundleFacts | None = None,
    ) -> None:
        self.engine, self.name, self._facts = engine, name, facts
        # What fits beside one token, for refusals that say what is served.
        longest = [tokens for tokens in (limits.prompt_tokens, engine.room(1)) if tokens is not None]
        self.limits = replace(limits, prompt_tokens=min(longest, default=None))
        self.draining, self.metrics = False, Metrics()
        self.places = Places(capacity, capacity_of_one or max(capacity - capacity // 4, min(capacity, limits.choices)))
        self.bodies = Bodies(LARGE_BODIES * limits.body_bytes)
        self.images = Bodies(IMAGE_BYTES)
        self._defaults = recommended(engine.generation.values, unstated=1.0)  # OpenAI's
        tokenizer = tokenizer_of(processor)
        self._renderer = TemplateRenderer(tokenizer)
        self._tokenizer = bounded(tokenizer, self._renderer)
        self._token_bytes, self.texts = token_bytes(tokenizer), TokenTexts(tokenizer)
        self._vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._grammars = Grammars(tokenizer, self._vocabulary, engine.generation.stops, self._renderer)
        self._format: ResponseFormat | None = None
        # Each is used by one thread at a time.
        self._chats: SimpleQueue[ChatPrompts] = SimpleQueue()
        for _ in range(2 * THREADS):
            chat = ChatPrompts(processor, model.config, self._renderer, parse_special=parse_special)
            self._templated, self._reads_images = chat.templated, chat.images is not None and chat.templated
            self._chats.put(chat)
        self._created = int(time.time())
        self._salted = bool(keys) and not share_prefixes
        self._running: set[Generation] = set()
        self.bell = Bell()
        self._readers, self._template_readers = Readers("kvconvert-reader"), Readers("kvconvert-template")
        self._slow_readers = Readers("kvconvert-slow")
        self._stepper: threading.Thread | None = None
        routes = [
            Route("/v1/completions", _Generate(self, Completion), methods=["POST"]),
            Route("/v1/chat/completions", _Generate(self, Chat), methods=["POST"]),
            Route("/v1/responses", _Generate(self, ResponsesChat), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        if facts is not None:
            routes += [Route("/", self._page), Route("/v1/bundle", self._bundle)]
        handlers: dict[Any, Any] = {
            Refusal: lambda http, error: error.response(),
            KvconvertError: lambda http, error: refusal_of(error).response(),
            ValidationError: lambda http, error: refusal_of(error).response(),
            HTTPException: lambda http, error: _no_such(http, error).response(),
            Exception: lambda http, error: Refusal(500, "The server failed; its log says how.").response(),
        }
        self._paths = {route.path for route in routes}
        app: ASGIApp = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)
        self.app = self._guarded(app, Access(keys, hosts or Hosts(), origins), origins)

    def cut(self) -> int:
        """End all running requests with an error; how many there were."""
        for generation in (running := list(self._running)):
            generation.cancel()
        return len(running)

    @property
    def active(self) -> int:
        """Requests that are being read, wait, or are served."""
        return len(self._running)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        over = threading.Event()
        template = None
        with contextlib.suppress(KvconvertError), self._chat() as chat:  # each chat is told why there is none
            template = chat.template if chat.templated else None
        self._renderer.start(template)
        ring = partial(self.bell.ring, asyncio.get_running_loop())
        self._stepper = threading.Thread(
            target=self.engine.run, args=[over, ring], name="kvconvert-engine", daemon=True
        )
        self._stepper.start()
        try:
            yield
        finally:
            over.set()
            for readers in (self._readers, self._template_readers, self._slow_readers):
                readers.close()
            self._renderer.close()
            # A step, or the tokenizer, may take longer than there is time for.
            end = time.monotonic() + 2
            while self.busy and time.monotonic() < end:
                await asyncio.sleep(0.02)

    @property
    def busy(self) -> bool:
        """Whether a thread still computes something."""
        stepping = self._stepper is not None and self._stepper.is_alive()
        return stepping or any(r.busy for r in (self._readers, self._template_readers, self._slow_readers))

    def _guarded(self, app: ASGIApp, access: Access, origins: Collection[str]) -> ASGIApp:
        """Ask for all that tells who asks before anything is read, and count responses."""

        async def with_key(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"].startswith("/v1"):
                try:
                    scope["kvconvert.client"] = access.client(scope)
                except Refusal as refusal:
                    return await refusal.response()(scope, receive, send)
            await app(scope, receive, send)

        served: ASGIApp = with_key
        if origins:  # a browser asks without a key what it may ask
            served = CORSMiddleware(
                with_key,
                allow_origins=list(origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )

        async def guard(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            scope = in_origin_form(scope)

            async def counted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"] if scope["path"] in self._paths else "other"
                    self.metrics.responses[path, message["status"]] += 1
                    if message["status"] >= 400:
                        logger.info("%s %s: answered with %d", scope["method"], path, message["status"])
                await send(message)

            try:
                access.check_page(scope)
            except Refusal as refusal:
                return await refusal.response()(scope, receive, counted)
            await served(scope, receive, counted)

        return guard

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

    async def _page(self, http: HTTPRequest) -> Response:
        return page()

    async def _bundle(self, http: HTTPRequest) -> Response:
        """What the page tells of the bundle, and of a cache of `tokens` tokens."""
        assert self._facts is not None
        stated = http.query_params.get("tokens", "0")
        if not (stated.isascii() and stated.isdigit() and len(stated) < 10):
            raise Refusal(400, f"tokens is {stated!r:.60}; give a number.", param="tokens", code="invalid_value")
        cache = self._facts.at(int(stated))
        told = {"name": self.name, "chat": self._templated, "images": self._reads_images}
        told["max_tokens"] = min(256, self.limits.new_tokens)  # that the page asks for where there is no chat
        return JSONResponse(told | {"facts": self._facts.rows, "cache": cache})

    def check_name(self, name: str | None) -> None:
        """Refuse the name of another model (Refusal); none means the only one."""
        if name is not None and name != self.name:
            message = f"There is no model {name!r:.300} here; the one served is {self.name!r}."
            raise Refusal(404, message, param="model", code="model_not_found")

    @contextlib.contextmanager
    def admitted(self, generation: Generation, client: Hashable):
        """A request's time in the server (Refusal: there is no place for it)."""
        if self.draining:
            raise Refusal(503, "The server is shutting down; send the request again.", code="shutting_down")
        self.places.check(client)
        self._running.add(generation)
        try:
            yield
        finally:
            self._running.remove(generation)
            generation.cancel()

    async def read(self, http: HTTPRequest, held: Body) -> None:
        """Receive the body of a request (Refusal: it is no JSON by its headers, too long, or comes too slowly)."""
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "The body has to be JSON; send `Content-Type: application/json`.")
        encoding = http.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise Refusal(415, f"A body encoded as {encoding!r:.60} is not read; send it without Content-Encoding.")
        most, stated = self.limits.body_bytes, int(http.headers.get("content-length", 0))
        too_long = Refusal(413, f"The body may have {most:,} bytes at most.", code="body_too_long")
        if stated > most:
            raise too_long
        self.bodies.grow(held, stated)
        try:
            async with asyncio.timeout(self.limits.client_seconds) as held.arriving:
                async for part in http.stream():
                    held.content += part
                    if len(held.content) > most:
                        raise too_long
                    self.bodies.grow(held, len(held.content))
        except TimeoutError as error:
            message = f"The body did not arrive within {self.limits.client_seconds:g} seconds."
            if held.gave_way:
                message = "The body came too slowly, and others needed its room."
            raise Refusal(408, message, code="body_too_slow") from error
        finally:
            held.arriving = None

    async def submit(
        self,
        kind: type[Completion | Chat],
        body: Body,
        generation: Generation,
        take: Callable[[int], None],
        images: Body,
    ) -> Queued:
        """Check a body, take a place for each of its choices but the first and room for its images, and queue them.

        Raises:
            Refusal, ValidationError, KvconvertError: it is not served.
        """
        # Conversations have threads of their own, and so have images, and what a template or the tokenizer takes long
        # for.
        readers = self._readers if kind is Completion else self._template_readers
        size, job = len(body.content), partial(self._submit, kind, body, generation, take, images)
        try:
            try:
                queued = await readers.run(body.client, size, partial(_in_a_hurry, partial(job, hurried=True)))
            except (TemplateLimitError, _TakesLong) as reason:
                with self._grammars.waiting(body.client, reason):
                    queued = await self._slow_readers.run(body.client, size, job)
        except RecursionError as error:  # a tool, a schema, or arguments of a call
            raise Refusal(400, "The body is nested too deeply.", code="invalid_value") from error
        except (Refusal, ValidationError, KvconvertError) as error:
            raise kind.refusal(error) from error
        self.bodies.release(body)
        return queued

    def _submit(
        self,
        kind: type[Completion | Chat],
        body: Body,
        generation: Generation,
        take: Callable[[int], None],
        images: Body,
        hurried: bool = False,
    ) -> Queued:
        asked = body.asked = body.asked or self._checked(kind, body, take)
        samplings = [asked.sampling(self._defaults, choice, self._vocabulary) for choice in range(asked.n or 1)]
        format = self._response_format(asked) if isinstance(asked, Chat) else ResponseFormat()
        prompts = asked.prompt if isinstance(asked, Completion) else [self._text(asked, format)]
        for prompt in prompts:
            self._check_length(asked, prompt)
        salt = body.client if self._salted else b""
        generation.whole = not asked.stream
        constraint = None
        if isinstance(asked, Chat):
            constraint = self._constraint(asked, format, str(prompts[0]), salt)
            if hurried and asked.images:
                raise _TakesLong
        for prompt, (ids, extras) in zip(prompts, self._ids(asked, prompts), strict=True):
            if generation.cancelled:
                break
            self.images.grow(images, sum(x.nbytes for x in (extras or {}).values()))
            new = asked.new_tokens(self.limits, len(ids), self.engine.room(len(ids)))
            asked.check_logprobs(new, len(prompts) * len(samplings))
            text = prompt if isinstance(prompt, str) else ""
            for sampling in samplings:
                reply, special = self._reply(asked, format, text)
                generation.add(
                    ids,
                    reply,
                    copy.deepcopy(constraint),
                    max_new_tokens=new,
                    sampling=sampling,
                    stop=asked.stop or (),
                    stop_token_ids=[] if asked.ignore_eos else None,
                    likeliest=asked.likeliest,
                    special_tokens=special,
                    extras=extras,
                    prefix_salt=salt,
                )
        return Queued(asked.form(self.name, self.texts), len(prompts), bool(asked.stream), asked.user)

    def _checked(self, kind: type[Completion | Chat], body: Body, take: Callable[[int], None]) -> Completion | Chat:
        """What a body asks for, which has its places then."""
        values = len(body.content)
        if self.limits.prompt_tokens is not None:
            values = max(self.limits.choices * self.limits.prompt_tokens, VALUES)
        asked = kind.of(fields_of(body.content, values))
        body.content = bytearray()
        self.check_name(asked.model)
        count = len(asked.prompt) if isinstance(asked, Completion) else 1
        asked.check(self.limits, count)
        if isinstance(asked, Chat) and asked.images and not self._reads_images:
            message = "This bundle's model reads text alone, no images; leave them out, or serve another bundle."
            raise Refusal(400, message, param=asked.prompt_field, code="unsupported_parameter")
        take(count * (asked.n or 1) - 1)
        return asked

    @contextlib.contextmanager
    def _chat(self) -> Iterator[ChatPrompts]:
        chat = self._chats.get()
        try:
            yield chat
        finally:
            self._chats.put(chat)

    def _response_format(self, asked: Chat) -> ResponseFormat:
        """How the model calls tools and reasons (Refusal: its template does not, or there is none)."""
        with self._chat() as chat:
            if not chat.templated:
                raise Refusal(400, "This model has no chat template; use /v1/completions.", param="messages")
            format = self._format
            if format is None:  # or by two threads, of which neither may have to wait for the other
                ends = [self.texts.text(id) for id in sorted(self.engine.generation.stops)]
                format = self._format = response_format(chat, ends)
        if asked.tools and format.calls is None:
            message = "The model's chat template writes no calls of tools; leave tools out, or serve another model."
            raise Refusal(400, message, param="tools", code="unsupported_parameter")
        return format

    def _text(self, asked: Chat, format: ResponseFormat) -> str:
        """A conversation as the model's template writes it."""
        turns = [turn.turn(format.calls is not None and format.calls.as_text) for turn in asked.messages]
        variables: dict[str, Any] = dict(asked.chat_template_kwargs or {})
        if asked.tools and asked.tool_choice != "none":
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in asked.tools]
        with self._chat() as chat:
            return chat.text(turns, variables=variables)

    def _constraint(self, asked: Chat, format: ResponseFormat, prompt: str, salt: bytes) -> Constraint | None:
        """What an answer has to be, where the client says it (Refusal: it cannot be held to that)."""
        reasoning = None
        if format.reasoning is not None and not prompt.rstrip().endswith(format.reasoning[1]):  # it is not over
            reasoning = format.reasoning, format.reasons_at_once(prompt)
        if asked.forced is not None:
            return self._grammars.of(None, format.calls, asked.forced, reasoning, "tool_choice", salt)
        if asked.answer_schema is not None:
            return self._grammars.of(
                asked.answer_schema, format.calls, asked.schemas, reasoning, "response_format", salt
            )
        return None

    def _reply(self, asked: Completion | Chat, format: ResponseFormat, prompt: str) -> tuple[Reply, bool]:
        """What divides the text of one answer, and whether that text has to have special tokens in it."""
        if not isinstance(asked, Chat) or not (asked.schemas or format.reasoning):
            return Reply(), False
        special = self._tokenizer.all_special_tokens
        needed = any(token in mark for mark in format.marks for token in special)
        parallel = asked.parallel_tool_calls is not False
        tools = asked.schemas
        if format.calls is None or format.calls.kind != "tagged":  # then their names are enough
            tools = {name: {} for name in tools}
        schema = asked.answer_schema is not None
        return Reply(format, tools, prompt, parallel, special if needed else (), schema), needed

    def _check_length(self, asked: Completion | Chat, prompt: str | list[int]) -> None:
        """Refuse a prompt that is too long whatever its tokens are (Refusal), before they are made."""
        longest, least = self.limits.prompt_tokens, len(prompt)
        if isinstance(prompt, str):
            least = self._token_bytes.least_tokens(prompt.replace(MARK, "")) if self._token_bytes else 0
        if longest is not None and least > longest:
            length = counted(least, "token") if isinstance(prompt, list) else f"at least {counted(least, 'token')}"
            raise asked.too_long(length, self.limits)

    def _ids(
        self, asked: Completion | Chat, rendered: Sequence[str | list[int]] = ()
    ) -> list[tuple[list[int], dict[str, Tensor] | None]]:
        """Token ids of each prompt; of a chat, of the text that its template wrote, and the processor's tensors of its
        images.
        """
        if isinstance(asked, Completion):
            texts = asked.prompt
            return [(encode_text(self._tokenizer, t) if isinstance(t, str) else t, None) for t in texts]
        images = read_images(asked.images, self.limits.image_pixels, asked.prompt_field)
        with self._chat() as chat:
            made = [chat.encode_text(text, images) for text in rendered if isinstance(text, str)]
        ids = [inputs.pop("input_ids")[0].tolist() for inputs in made]
        for inputs in made:
            inputs.pop("attention_mask", None)
        return list(zip(ids, made if images else [None] * len(made), strict=True))


class _Generate:
    """One of the two routes that generate, as an ASGI application."""

    def __init__(self, service: Service, kind: type[Completion | Chat]) -> None:
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, service, client = time.perf_counter(), self._service, scope["kvconvert.client"]
        generation = Generation(service.engine, service.bell)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(ClientDisconnect))
            stack.enter_context(service.admitted(generation, client))
            body = stack.enter_context(service.bodies.hold(client))
            await generation.unless_over(service.read(HTTPRequest(scope, receive), body))
            take = stack.enter_context(service.places.take(client))
            images = stack.enter_context(service.images.hold(client))
            gone = asyncio.create_task(_gone(receive))
            stack.callback(gone.cancel)
            try:
                queued = await generation.unless_over(service.submit(self._kind, body, generation, take, images), gone)
            except ClientDisconnect:
                service.metrics.gone += 1
                raise
            seconds = service.limits.client_seconds
            answer = Answer(generation, queued.form, queued.prompts, begun, seconds, service.metrics, queued.user)
            await answer.write(scope, receive, send, gone, stream=queued.stream)


class _TakesLong(Exception):
    """Raised by a job for which others wait and that takes long by its nature."""


def _in_a_hurry(job: Callable[[], T]) -> T:
    """Do a job for which others wait (TemplateLimitError: it takes long)."""
    with quickly():
        return job()


async def _gone(receive: Receive) -> None:
    """Return when the client is gone, or has its answer."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _no_such(http: HTTPRequest, error: HTTPException) -> Refusal:
    if error.status_code == 404:
        return Refusal(404, f"There is no {http.url.path} here.", code="unknown_path")
    if error.status_code == 405:
        allowed = listed((error.headers or {})["Allow"].split(", "), "or")
        message = f"{http.url.path} is not answered to {http.method}; send {allowed}."
        return Refusal(405, message, code="method_not_allowed", headers=error.headers)
    return Refusal(error.status_code, f"{http.method} {http.url.path}: {error.detail}.")
