"""Serve a bundle over HTTP, many clients from one low-bit cache (pip install ".[serve]"):

    python examples/serve.py BUNDLE --port 8000
    curl -N localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 50, "stream": true}'

Bad input is answered with 400 and a sentence, a full queue with 503; a client that goes away cancels its request.
"""

import asyncio
import contextlib
import json
import threading

import click
import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvconvert import KvconvertError, load
from kvconvert.errors import QueueFullError
from kvconvert.models.processors import tokenizer_of
from kvconvert.runtime import Engine, Sampling


class Completion(BaseModel, extra="forbid", strict=True):
    """The body of a request; a temperature of 0 is greedy."""

    prompt: str | list[int]
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] = []
    stream: bool = False


def application(engine: Engine, tokenizer) -> Starlette:
    """The web application around an engine, which a thread steps as long as the application runs."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        threading.Thread(target=engine.run, args=[over := threading.Event()]).start()
        yield
        over.set()

    def refuse(http, error: Exception) -> Response:
        said = str(error) if isinstance(error, KvconvertError) else "{loc}: {msg}.".format(**error.errors()[0])
        full = isinstance(error, QueueFullError)
        return JSONResponse({"error": said}, 503 if full else 400, {"Retry-After": "1"} if full else {})

    async def complete(http) -> Response:
        asked = Completion.model_validate_json(await http.body())
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        request = engine.add(
            tokenizer(asked.prompt).input_ids if isinstance(asked.prompt, str) else asked.prompt,
            max_new_tokens=asked.max_tokens,
            sampling=Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed),
            stop=asked.stop,
            on_event=lambda event: loop.call_soon_threadsafe(events.put_nowait, event),
        )

        async def answer():
            reason = None
            while reason is None:
                event = await events.get()
                reason = event.finish_reason
                if asked.stream:
                    yield f"data: {json.dumps({'text': event.text, 'finish_reason': reason})}\n\n"
            if not asked.stream:
                yield json.dumps({"text": request.text, "finish_reason": reason})

        gone = BackgroundTask(request.cancel)  # runs when the client has left, too
        return StreamingResponse(answer(), 200, None, "text/event-stream" if asked.stream else "application/json", gone)

    routes = [Route("/v1/completions", complete, methods=["POST"])]
    handlers = {KvconvertError: refuse, ValidationError: refuse}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


@click.command(help=__doc__)
@click.argument("bundle")
@click.option("--host", default="127.0.0.1")
@click.option("--port", default=8000)
@click.option("--device", default="cpu")
@click.option("--max-batch", default=32)
@click.option("--max-waiting", default=256)
@click.option("--kv-memory", metavar="BYTES", type=int, help="For pages of the cache, which otherwise grows.")
def serve(bundle: str, host: str, port: int, device: str, **limits: int) -> None:  # noqa: D103
    model, processor = load(bundle)
    tokenizer = tokenizer_of(processor)
    uvicorn.run(application(Engine(model.to(device), tokenizer, **limits), tokenizer), host=host, port=port)


if __name__ == "__main__":
    serve()
