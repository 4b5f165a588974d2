"""Ids of repositories on the Hub, and what the Hub client's errors mean.

The access token is the Hub client's affair (`hf auth login`, HF_TOKEN). Its exceptions hold the request with the token
in a header, so none of them is passed on, not even as the cause of ours.

The client makes paths of its cache from headers and from names in JSON, reads answers into memory at any length,
follows pages without end, and waits for as long as it is told. So each answer of the Hub, or of whoever answers in its
place, is looked at before the client sees it (`checked_answers`).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar
from urllib.parse import urlsplit

from kvconvert.errors import HubError, KvconvertError, MissingError, UsageError, printable
from kvconvert.io.json_text import parse_json

Result = TypeVar("Result")
_MAX_REASON = 300
_FULL, _READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), (errno.EACCES, errno.EPERM, errno.EROFS)


def is_hub_id(name: str | Path) -> TypeGuard[str]:
    """Whether a name can be the id of a repository, owner/name, and does not look like a path.

    What begins with `.`, `/` or `~`, ends in `/`, or has a backslash or more than one slash is a path.
    """
    if isinstance(name, Path) or name.startswith((".", "/", "~")) or "\\" in name or name.count("/") != 1:
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def missing_below(name: str) -> Path | None:
    """The local directory that the first part of owner/name is, without a second part in it.

    Such a name is taken for a path with a mistake in it, not for an id: asking the Hub would tell it what directories
    are called here, and could fetch something else than was meant.
    """
    owner = Path(name).parent
    return owner if os.path.isdir(owner) and not os.path.lexists(name) else None


def check_id(repository: str) -> None:
    """Refuse what is no id of a repository (UsageError)."""
    if not is_hub_id(repository):
        raise UsageError(f"{repository!r} is no id of a repository on the Hub; give one of the form user/name.")


def check_can_push(repository: str) -> None:
    """Refuse what is no id, and that no access token is there (UsageError); the Hub is not asked."""
    from huggingface_hub import get_token

    check_id(repository)
    if ask_hub(repository, get_token) is None:
        raise MissingError(
            "Pushing needs an access token of the Hub with the right to write; log in with `hf auth login`, or set "
            "HF_TOKEN."
        )


def ask_hub(
    repository: str,
    call: Callable[[], Result],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    or_path: bool = False,
) -> Result:
    """Return the result of `call`, a function that uses the Hub client; its errors become sentences.

    Args:
        repository: its id.
        call: what is asked.
        revision, token: that `call` uses.
        or_path: whether `repository` may have been meant as a path, which then does not exist.

    Raises:
        HubError: with that sentence, and without the client's own exception.
    """
    _check_token(token)
    try:
        with checked_answers():
            return call()
    except KvconvertError:
        raise
    except Exception as error:  # the client raises errors of any kind where an answer is not as it expects
        sentence = _sentence(error, repository, revision, token, or_path)
    raise HubError(sentence)


def check_content(file: Path, sha256: str | None = None) -> None:
    """Refuse (HubError) a file of the Hub's cache that has not the content that the Hub says it has.

    The client names it after what the Hub says, SHA-256 or git's hash, and compares no more than its size.

    Args:
        file: link to it; any other file passes.
        sha256: of the file, if it is known.
    """
    target = Path(os.path.realpath(file))
    if target.parent.name != "blobs" or re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", target.name) is None:
        return
    if len(target.name) == 40:
        content = target.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    elif sha256 is not None:
        found = sha256
    else:
        with target.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != target.name:
        raise HubError(
            f"{file.name} in the Hub's cache is not what the Hub says it has (hash {target.name}, found {found}); "
            f"remove {target} and fetch it again."
        )


def _token(given: str | bool | None) -> str | None:
    from huggingface_hub import get_token

    return given if isinstance(given, str) else None if given is False else get_token()


def _check_token(given: str | bool | None) -> None:
    """Refuse a token that no header can hold: the client's message about it would show it."""
    token = _token(given)
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise HubError(
            "The access token for the Hub (HF_TOKEN, or the one that is stored) has characters that no token has; "
            "set it again, for instance with `hf auth login`."
        )


def _sentence(error: Exception, repository: str, revision: str | None, token: str | bool | None, or_path: bool) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    errors: list[BaseException] = [error]
    while (cause := errors[-1].__cause__ or errors[-1].__context__) is not None and cause not in errors:
        errors.append(cause)

    def find(kind: type[BaseException]) -> BaseException | None:
        return next((found for found in errors if isinstance(found, kind)), None)

    login = "`hf auth login` or HF_TOKEN"
    if (wrong := find(WrongAnswer)) is not None:
        return (
            f"What answers at {constants.ENDPOINT} in place of the Hub cannot be trusted: asked for {repository}, it "
            f"gives {printable(str(wrong))}; check HF_ENDPOINT and the network."
        )
    for failed in (found for found in errors if isinstance(found, OSError)):
        name, full = failed.filename2 or failed.filename, failed.errno in _FULL
        if full or (name is not None and failed.errno in _READ_ONLY):  # without a name it is the network's
            place = "" if name is None else f"{printable(os.fsdecode(name))}: "
            advice = "make room" if full else "make it writable"
            return (
                f"{repository} could not be stored ({place}{failed.strerror}); {advice} or choose another place, and "
                "run the same command again."
            )
    if find(GatedRepoError):
        return (
            f"{repository} is gated: accept its conditions at {constants.ENDPOINT}/{repository}, and log in "
            f"({login}) as the user who did."
        )
    if find(RevisionNotFoundError):
        return f"{repository} on the Hub has no revision {revision}; name a branch, tag or commit that it has."
    if find(RepositoryNotFoundError):
        missing = f"neither a path {repository} nor a repository of that name" if or_path else f"no {repository}"
        return f"There is {missing} on the Hub that can be seen; check the name, and log in ({login}) if it is private."
    if find(OfflineModeIsEnabled):
        if not or_path:
            return f"The Hub cannot be asked about {repository}, because HF_HUB_OFFLINE is set; unset it."
        return (
            f"There is no path {repository}, and the Hub cannot be asked about a repository of that name, because "
            "HF_HUB_OFFLINE is set, and its cache lacks it."
        )
    response = getattr(find(HfHubHTTPError), "response", None)
    if response is not None:
        status, said = response.status_code, _reason(find(HfHubHTTPError), token)
        if status in (401, 403):
            return f"The Hub refuses access to {repository} ({said}); log in ({login}) with a token that has the right."
        known = {429: "too many requests, so wait", 413: "a file is too large for it"}
        known[412] = "somebody else changed it meanwhile, so look at what it holds and run the same command again"
        advice = known.get(status, "try again later")
        return f"The Hub answers {status} about {repository} ({said}); {advice}."
    if (unreachable := find(HTTPError)) is not None:
        return (
            f"The Hub at {constants.ENDPOINT} cannot be reached for {repository} ({_reason(unreachable, token)}); "
            f"check {'HF_ENDPOINT and ' * ('HF_ENDPOINT' in os.environ)}the network and run the same command again."
        )
    if isinstance(error, LocalEntryNotFoundError):
        return f"{repository} is not, or not completely, in the Hub's cache, and nothing may be fetched; pull it first."
    return f"The Hub client failed on {repository} ({_reason(error, token)}); run the same command again."


def _reason(error: BaseException | None, token: str | bool | None) -> str:
    """The first line of an error, short, printable and without the token."""
    said = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
    secret = _token(token)
    said = said.replace(secret, "***") if secret else said
    return printable(said.strip().split("\n")[0])[:_MAX_REASON].rstrip(".: ")


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
    from huggingface_hub import constants
    from huggingface_hub.utils import _http, set_client_factory

    if constants.HUGGINGFACE_CO_URL_HOME.rstrip("/") != constants.ENDPOINT:
        # Its client has connections of its own, whose answers nobody looks at: it waits for ever, or fills the memory.
        constants.HF_HUB_DISABLE_XET = True
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
