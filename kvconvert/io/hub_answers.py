"""What the Hub, or whoever answers in its place, may say to the Hub's client.

The client makes paths of its cache from headers and from names in JSON, reads answers into memory at any length,
follows pages without end, and waits for as long as it is told. So each answer is looked at before the client sees it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from kvconvert.io.json_text import parse_json

# Of all answers to one call that are read into memory; JSON takes up to thirty times as much there.
MOST_BYTES = 2**24
# Of a file whose length is not announced, which those of weights always is.
MOST_UNANNOUNCED = 2**28
MOST_ANSWERS = 200
ANSWER_SECONDS, SILENCE_SECONDS, UPLOAD_SECONDS, MOST_WAIT = 60.0, 30.0, 300.0, 300.0

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_ETAG = re.compile(r"(?!\.+\Z)[\w.+=:-]{1,128}", re.ASCII)
_FIRST = "kvconvert.first"  # path of the request that led to this one by redirections


class WrongAnswer(Exception):
    """An answer that no Hub gives; the message completes "it answers with ..."."""


class _Budget:
    """What is left for the answers to one call."""

    def __init__(self) -> None:
        self.size, self.answers = MOST_BYTES, MOST_ANSWERS


_budget: ContextVar[_Budget | None] = ContextVar("_budget", default=None)


@contextmanager
def checked_answers() -> Iterator[None]:
    """Let the Hub's client in this process see only answers that pass, from now on; in the block they have limits."""
    from huggingface_hub.utils import _http, set_client_factory

    former = _http._GLOBAL_CLIENT_FACTORY
    if not isinstance(former, _CheckedClients):
        set_client_factory(_CheckedClients(former))
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


class _CheckedClients:
    """Makes clients, as another function does, that look at each answer."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        client = self._make()
        client.event_hooks["request"].append(_prepare)
        client.event_hooks["response"].append(_check)
        return client


def _prepare(request: Any) -> None:
    """Neither wait for ever nor ask for what unpacks into more than was announced."""
    seconds = SILENCE_SECONDS if request.method in ("GET", "HEAD") else UPLOAD_SECONDS
    timeout = request.extensions.setdefault("timeout", {})
    timeout |= {kind: seconds for kind in ("connect", "read", "write", "pool") if timeout.get(kind) is None}
    request.extensions.setdefault(_FIRST, request.url.path)
    request.headers["Accept-Encoding"] = "identity"


def _check(response: Any) -> None:
    request, headers = response.request, response.headers
    if headers.get("Content-Encoding", "identity") != "identity":
        raise WrongAnswer("a compressed text, which was not asked for")
    if (commit := headers.get("X-Repo-Commit")) is not None and not _COMMIT.fullmatch(commit):
        raise WrongAnswer(f"a commit that is none ({commit[:80]!r})")
    for name in ("ETag", "X-Linked-Etag"):
        etag = headers.get(name) if request.method == "HEAD" else None
        if etag is not None and not _ETAG.fullmatch(etag.lstrip("W/").strip('"')):
            raise WrongAnswer(f"an {name} that names no content ({etag[:80]!r})")
    _check_wait(headers)
    following = response.links.get("next", {}).get("url")
    if following is not None and not _is_further_page(following, request.url):
        raise WrongAnswer(f"further pages elsewhere ({following[:80]!r})")
    is_file = request.method == "GET" and "/api/" not in request.extensions[_FIRST] and response.status_code < 300
    if not is_file:
        content = response._content = _read(response)
        if response.status_code < 300 and content and request.method != "PUT":
            _check_content(content)
    elif "Content-Length" not in headers:
        response.iter_bytes = partial(_bounded, response.iter_bytes)


def _check_wait(headers: Any) -> None:
    """Of what the client sleeps for when it is told that there were too many requests."""
    reset = re.search(r"\bt=(\d+)", headers.get("ratelimit", ""))
    for text in (headers.get("Retry-After", ""), reset[1] if reset else ""):
        if text.strip().isdigit() and (len(text) > 9 or int(text) > MOST_WAIT):
            raise WrongAnswer(f"too many requests, and the demand to wait {text[:20]} seconds")


def _is_further_page(address: str, asked: Any) -> bool:
    try:
        parts = urlsplit(address)
        return (parts.scheme, parts.hostname, parts.port) == (asked.scheme, asked.host, asked.port) and (
            "/api/" in parts.path
        )
    except ValueError:
        return False


def _read(response: Any) -> bytes:
    """The whole answer, within what is left of bytes, answers, and seconds."""
    budget = _budget.get() or _Budget()  # the client's own threads fetch files, and little besides
    budget.answers -= 1
    if budget.answers < 0:
        raise WrongAnswer(f"more than {MOST_ANSWERS} pages")
    end, parts = time.monotonic() + ANSWER_SECONDS, []
    for part in response.iter_bytes(2**16):
        parts.append(part)
        budget.size -= len(part)
        if budget.size < 0:
            raise WrongAnswer(f"more than {MOST_BYTES >> 20} MiB")
        if time.monotonic() > end:
            raise WrongAnswer(f"a text that takes more than {ANSWER_SECONDS:.0f} seconds")
    return b"".join(parts)


def _check_content(content: bytes) -> None:
    """Refuse JSON whose names or hashes, of which the client makes paths, are none."""
    if not content.lstrip().startswith((b"{", b"[")):
        return  # the client says that it is no JSON where it needs some
    try:
        value = parse_json(content)
    except ValueError as error:
        raise WrongAnswer(str(error)) from error
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        siblings = entry.get("siblings") if isinstance(entry, dict) else None
        _check_entries([entry, *(siblings if isinstance(siblings, list) else ())])


def _check_entries(entries: Iterable[Any]) -> None:
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        for key in ("path", "rfilename"):
            if key in entry and not _is_plain(entry[key]):
                raise WrongAnswer(f"a file of the name {str(entry[key])[:80]!r}")
        lfs = entry.get("lfs")
        hashes = {"sha": entry.get("sha"), "oid": entry.get("oid"), "commitOid": entry.get("commitOid")}
        hashes |= {f"lfs.{key}": lfs.get(key) for key in ("oid", "sha256")} if isinstance(lfs, dict) else {}
        for key, found in hashes.items():
            if found is not None and not (isinstance(found, str) and _HASH.fullmatch(found)):
                raise WrongAnswer(f"{key} that is no hash ({str(found)[:80]!r})")


def _is_plain(name: object) -> bool:
    """Whether this names a file below a directory on every system."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name or ":" in name[:2]:
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) < 256 for part in name.split("/"))


def _bounded(read: Callable[[int | None], Iterator[bytes]], chunk_size: int | None = None) -> Iterator[bytes]:
    """The parts of a file, until it is too long."""
    size = 0
    for part in read(chunk_size):
        size += len(part)
        if size > MOST_UNANNOUNCED:
            raise WrongAnswer(f"a file of more than {MOST_UNANNOUNCED >> 20} MiB without its length")
        yield part
