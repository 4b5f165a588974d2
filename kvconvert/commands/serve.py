"""kvconvert serve BUNDLE."""

from __future__ import annotations

import gc
import ipaddress
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any

import click

from kvconvert.commands import ByteSize, Place, Whole, check_device, dtype_option, head_option, quiet
from kvconvert.errors import KvconvertError, MissingError, UsageError, unreadable
from kvconvert.io.process import end_process

KEY_VARIABLE = "KVCONVERT_API_KEY"
_COUNT = Whole(min=1)
# Programs for products of 16 bits, one for each number of tokens, that torch and oneDNN keep on a CPU: 1,024 each by
# default, which come to a gigabyte over thousands of prompts.
_KEPT_PROGRAMS = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
_MOST_ROWS, _MOST_SECONDS, _MOST_LETTERS, _MOST_KEYS = 2**16, 10**9, 256, 2**20


class _Seconds(click.FloatRange):
    """Seconds for which a timer can wait; click takes what is no number as one of any range."""

    name = "number"

    def __init__(self, least: float) -> None:
        super().__init__(least, _MOST_SECONDS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, if it is one."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return seconds


@click.command()
@click.argument("bundle")
@click.option("--host", metavar="H", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    metavar="P",
    type=Whole(0, 65535),
    default=8000,
    show_default=True,
    help="Port; 0 takes a free one.",
)
@click.option("--device", callback=check_device, metavar="D", help="cpu or cuda; a GPU by default if there is one.")
@dtype_option("what the bundle loads in")
@head_option()
@click.option("--served-model-name", "name", metavar="NAME", help="Name of the model; by default BUNDLE's own.")
@click.option(
    "--kv-memory",
    metavar="SIZE",
    type=ByteSize(bare=True, least=100_000),
    help="Memory for the cache's pages and states, as 8GB; else it grows.",
)
@click.option(
    "--max-batch",
    metavar="N",
    type=Whole(1, _MOST_ROWS),
    default=32,
    show_default=True,
    help="Requests decoded together.",
)
@click.option(
    "--prompt-chunk",
    metavar="N",
    type=_COUNT,
    default=2048,
    show_default=True,
    help="Tokens of one prompt read at once.",
)
@click.option(
    "--max-batch-tokens",
    metavar="N",
    type=_COUNT,
    default=8192,
    show_default=True,
    help="Tokens of all prompts read at once.",
)
@click.option(
    "--prefix-caching/--no-prefix-caching",
    default=None,
    help="Share what is stored of prompts that begin alike, by whole chunks. [default: where it is possible]",
)
@click.option(
    "--keep-weights", is_flag=True, help="Keep weights in 16 bits, too, on a GPU: faster prompts, 2 bytes each."
)
@click.option(
    "--max-waiting",
    metavar="N",
    type=Whole(min=0),
    default=256,
    show_default=True,
    help="Requests that may wait; more are answered with 429.",
)
@click.option(
    "--max-per-client",
    metavar="N",
    type=_COUNT,
    help="Choices that one API key or address may have served or waiting. [default: three quarters of all]",
)
@click.option(
    "--max-tokens",
    metavar="N",
    type=_COUNT,
    default=4096,
    show_default=True,
    help="Tokens generated per choice at most, and for a chat that states no number.",
)
@click.option("--max-prompt-tokens", metavar="N", type=_COUNT, help="The longest prompt; by default what fits.")
@click.option(
    "--max-body",
    metavar="SIZE",
    type=ByteSize(bare=True, least=1000),
    help="Size of a request at most. [default: 4 MiB; 16 where the model reads images]",
)
@click.option(
    "--client-timeout",
    metavar="S",
    type=_Seconds(0.1),
    default=60.0,
    show_default=True,
    help="Seconds that a client may take to send a request, or to read a piece of its answer.",
)
@click.option(
    "--grace",
    metavar="S",
    type=_Seconds(0),
    default=30.0,
    show_default=True,
    help="Seconds that running requests have after SIGTERM.",
)
@click.option(
    "--api-key-file",
    metavar="FILE",
    type=Place(dir_okay=False),
    help=f"API keys, one a line; {KEY_VARIABLE} may hold one instead. Without a key anyone is served.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="Further host that clients may ask for, such as a proxy's name; * for any. Repeatable.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    metavar="ORIGIN",
    multiple=True,
    help="Web pages that may ask, such as http://localhost:3000; * for any. Repeatable. [default: none]",
)
@click.option("--share-prefixes", is_flag=True, help="Share stored prefixes between API keys, too.")
@click.option("--parse-special", is_flag=True, help="Read special tokens that messages spell as such, and not as text.")
@click.option("--no-page", is_flag=True, help="Serve no page to chat with the model at /.")
@click.option("--log-requests", is_flag=True, help="Log a line for each request, refused ones too, without text.")
def serve(
    bundle: str,
    host: str,
    port: int,
    device: str | None,
    dtype: str | None,
    head_bits: int | None,
    name: str | None,
    kv_memory: int | None,
    max_batch: int,
    prompt_chunk: int,
    max_batch_tokens: int,
    prefix_caching: bool | None,
    keep_weights: bool,
    max_waiting: int,
    max_per_client: int | None,
    max_tokens: int,
    max_prompt_tokens: int | None,
    max_body: int | None,
    client_timeout: float,
    grace: float,
    api_key_file: Path | None,
    allowed_hosts: tuple[str, ...],
    cors_origins: tuple[str, ...],
    share_prefixes: bool,
    parse_special: bool,
    no_page: bool,
    log_requests: bool,
) -> None:
    """Serve BUNDLE over HTTP with the interface of OpenAI's clients.

    /v1/completions, /v1/chat/completions, /v1/responses, /v1/models, /health, /metrics, and at / a page to chat with
    the model. On SIGTERM or Ctrl-C new requests are refused and running ones finish: exit code 0, or 1 if some were
    ended by --grace or a second signal.
    """
    keys = _keys(api_key_file)
    for variable, count in _KEPT_PROGRAMS.items():  # read when torch is imported
        os.environ.setdefault(variable, count)
    from kvconvert.bundle.locate import check_place
    from kvconvert.models.positions import check_chunk

    check_place(bundle)
    check_chunk(prompt_chunk, max_batch_tokens)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        message = f"Serving needs {error.name}; run pip install '.[serve]' in a clone of kvconvert."
        raise MissingError(message) from error
    from kvconvert.serve.listen import bind

    listening = bind(host, port)  # before minutes are spent on loading
    address = listening.getsockname()
    from kvconvert.serve.access import Hosts, origin_of

    hosts, origins = Hosts.of(host, address[0], allowed_hosts), [origin_of(origin) for origin in cors_origins]
    if name is None:
        name = Path(bundle).resolve().name if os.path.exists(bundle) else bundle
    if not 0 < len(name) <= _MOST_LETTERS or not name.isprintable():
        raise UsageError(
            f"No client can ask for a model named {name!r:.100}; give it a name of up to {_MOST_LETTERS} letters with "
            "--served-model-name."
        )
    if log_requests:
        _log_requests()
    if not keys and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        click.echo(f"There is no API key: whoever reaches {address[0]} is served.", err=True)
    click.echo(f"Loading {bundle} ...", err=True)
    quiet()
    from kvconvert.kernels.page_formats import PAGE_SIZE
    from kvconvert.models.devices import choose_device, compute_dtype
    from kvconvert.models.processors import tokenizer_of
    from kvconvert.runtime import Engine, load
    from kvconvert.serve.app import Service
    from kvconvert.serve.page import BundleFacts
    from kvconvert.serve.requests import Limits
    from kvconvert.serve.server import Server

    place = choose_device(device)
    stated = None if dtype is None else compute_dtype(dtype, place, None)

    wanted = stated or ("auto" if place.type == "cuda" else None)
    model, processor = load(bundle, dtype=wanted, head_bits=head_bits)
    model = model.to(place)  # type: ignore[arg-type]
    engine = Engine(
        model,
        tokenizer_of(processor),
        kv_memory=kv_memory,
        max_batch=max_batch,
        prompt_chunk=prompt_chunk,
        max_batch_tokens=max_batch_tokens,
        max_waiting=max_waiting,
        prefix_caching=prefix_caching,
        keep_weights=keep_weights,
    )
    service = Service(
        engine,
        model,
        processor,
        name,
        capacity=max_batch + max_waiting,
        limits=Limits(
            body_bytes=max_body or (4 if tokenizer_of(processor) is processor else 16) * 2**20,
            prompt_tokens=max_prompt_tokens,
            new_tokens=max_tokens,
            client_seconds=client_timeout,
        ),
        capacity_of_one=max_per_client,
        keys=keys,
        hosts=hosts,
        origins=origins,
        share_prefixes=share_prefixes,
        parse_special=parse_special,
        facts=None if no_page else BundleFacts.of(bundle, model.config),
    )
    stats = engine.stats()
    if stats.state_bytes:
        beside = "and the pages grow beside them"
        if stats.pages_free is not None:
            beside = f"and the rest of --kv-memory holds pages of {PAGE_SIZE * stats.pages_free:,} tokens"
        click.echo(f"Recurrent states of {max_batch:,} sequences take {stats.state_bytes:,} bytes, {beside}.", err=True)
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    ready = f"Serving {name} at http://{shown}:{address[1]}/v1"
    if not no_page:
        ready = f"Its page is http://{shown}:{address[1]}/\n{ready}"
    # Garbage is looked for among what requests leave, not in the model as well: passes would wait for that.
    gc.collect()
    gc.freeze()
    server = Server(service, grace=grace, ready=lambda: click.echo(ready, err=True), ending=_end_within)
    server.run(sockets=[listening])
    gc.unfreeze()
    if server.cut:
        raise KvconvertError(
            f"Requests that were ended unfinished: {server.cut}; a longer `grace` gives them more time."
        )


def _end_within(seconds: float) -> None:
    """End this process after some seconds, whatever it does then."""
    timer = threading.Timer(seconds, end_process, [1])
    timer.daemon = True
    timer.start()


def _keys(file: Path | None) -> list[str]:
    """The API keys; they appear in no message.

    Raises:
        UsageError: the file cannot be read, or there is no key where one was meant.
    """
    variable = os.environ.get(KEY_VARIABLE)
    if file is None:
        if variable is not None and not variable.strip():
            raise UsageError(f"{KEY_VARIABLE} is empty; give it a key, or unset it to serve anyone.")
        try:
            (variable or "").encode()
        except UnicodeError as error:
            raise UsageError(f"{KEY_VARIABLE} is not UTF-8 text; give it a key of letters and digits.") from error
        return [] if variable is None else [variable.strip()]
    if variable is not None:
        raise UsageError(f"There are keys in {KEY_VARIABLE} and in --api-key-file; use one of them.")
    try:
        with file.open("rb") as stream:  # which may be a pipe, or have no end
            content = stream.read(_MOST_KEYS + 1)
        if len(content) > _MOST_KEYS:
            raise UsageError(f"--api-key-file {file} has more than {_MOST_KEYS:,} bytes; write one key a line.")
        keys = [line.strip() for line in content.decode("utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise MissingError(f"--api-key-file {unreadable(file, error)}") from error
    except UnicodeDecodeError as error:
        raise MissingError(f"--api-key-file {file} cannot be read (not UTF-8 text); save it as that.") from error
    if not keys:
        raise UsageError(f"--api-key-file {file} has no key; write one a line.")
    return keys


def _log_requests() -> None:
    log = logging.getLogger("kvconvert.serve")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
