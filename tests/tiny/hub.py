"""A stand-in for the Hub: as much of its HTTP interface as huggingface_hub uses to create, upload, list and fetch."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

TOKEN = "hf_standInTokenThatNobodyMaySee"


@dataclass
class Repository:
    """Commits by their id, each with all of its files, and branches."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        return name

    def files(self, revision: str = "main") -> dict[str, bytes] | None:
        return self.commits.get(self.branches.get(revision, revision))


@dataclass
class Hub:
    """What the server holds, what it was asked, and how it is to fail.

    Attributes:
        cut: how many bytes of a file are sent before the connection ends, by the file's name.
        status: answered to everything instead of serving it.
        alter: files that are stored with another content than was sent.
        headers: in place of those of every answer, or beside them.
        change: what is answered in place of a JSON value.
        raw: in place of all JSON.
        pages: whether lists of files name themselves as their next page, or the address that they name.
        endless: part of the paths that are answered without end.
        pause: seconds before each byte of an answer in JSON, and how many bytes are sent so.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    status: int | None = None
    alter: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    change: Callable[[Any], Any] = field(default=lambda value: value)
    raw: bytes | None = None
    pages: bool | str = False
    endless: str | None = None
    pause: tuple[float, int] = (0, 0)
    endpoint: str = ""

    def fetched(self) -> list[str]:
        """Names of files whose content was asked for."""
        return [path.split("/", 5)[5] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


def is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


def blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(name: str, content: bytes) -> dict:
    found = {"type": "file", "path": name, "size": len(content), "oid": blob(content)}
    if is_lfs(name):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return found


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, value: object = None, status: int = 200, error: str = "", **headers: str) -> None:
            content = b"" if value is None else json.dumps(hub.change(value)).encode()
            content = content if hub.raw is None or "/api/" not in self.path else hub.raw
            self.send_response(status)
            if hub.pages and "/tree/" in self.path:
                self.send_header(
                    "Link", f'<{hub.endpoint + self.path if hub.pages is True else hub.pages}>; rel="next"'
                )
            for name, text in headers.items():
                self.send_header(name.replace("_", "-"), text)
            if error:
                self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", str(len(content) + hub.pause[1]))
            self.end_headers()
            with suppress(OSError):  # the client has gone
                for _ in range(hub.pause[1]):
                    time.sleep(hub.pause[0])
                    self.wfile.write(b" ")
                self.wfile.write(content if self.command != "HEAD" else b"")

        def send_header(self, name: str, text: str) -> None:
            if name not in hub.headers:
                super().send_header(name, text)

        def end_headers(self) -> None:
            for name, text in hub.headers.items():
                super().send_header(name, text)
            super().end_headers()

        def stream(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with suppress(OSError):  # the client has had enough
                while True:
                    self.wfile.write(b"10000\r\n" + b" " * 2**16 + b"\r\n")

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if hub.endless is not None and hub.endless in path and self.command == "GET":
                return self.stream()
            if hub.status is not None:
                return self.answer({"error": "the stand-in fails"}, hub.status)
            may_write = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if path.startswith("/objects/"):  # a signed address: no token is sent along
                hub.objects[path.rpartition("/")[2]] = body
                return self.answer({})
            if self.command in ("POST", "PUT") and not may_write:
                return self.answer({"error": "Invalid username or password."}, 401)
            if path == "/api/validate-yaml":
                return self.answer({"warnings": [], "errors": []})
            if path == "/api/repos/create":
                return self.create(json.loads(body))
            parts = path.strip("/").split("/")
            parts = parts[2:] if parts[:2] == ["api", "models"] else parts
            name = "/".join(parts[:2]).removesuffix(".git")
            repository = hub.repositories.get(name)
            if repository is None or (repository.private and not may_write):
                return self.answer({"error": "Repository not found"}, 401, "RepoNotFound")
            if repository.gated:
                return self.answer({"error": "Access to it is restricted"}, 403, "GatedRepo")
            return self.repository(repository, name, parts[2:], body)

        do_GET = do_HEAD = do_POST = do_PUT = serve

        def create(self, asked: dict) -> None:
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.repositories:
                return self.answer({"error": "You already created this model repo"}, 409)
            made = hub.repositories[name] = Repository(private=asked.get("visibility") == "private")
            made.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
            return self.answer({"url": f"{hub.endpoint}/{name}"})

        def repository(self, repository: Repository, name: str, rest: list[str], body: bytes) -> None:
            what = rest[0] if rest else "revision"
            if rest[:2] == ["info", "lfs"]:
                return self.batch(json.loads(body))
            if what == "branch":
                repository.branches["/".join(rest[1:])] = repository.branches["main"]
                return self.answer({})
            revision = rest[1] if len(rest) > 1 else "main"
            files = repository.files(revision)
            if files is None:
                return self.answer({"error": "Invalid rev id"}, 404, "RevisionNotFound")
            commit = repository.branches.get(revision, revision)
            if what == "revision":
                siblings = [{"rfilename": file} for file in files]
                return self.answer(
                    {"id": name, "sha": commit, "private": repository.private, "siblings": siblings, "tags": []}
                )
            if what == "tree":
                return self.answer([entry(file, content) for file, content in files.items()])
            if what == "preupload":
                asked = [file["path"] for file in json.loads(body)["files"]]
                return self.answer({"files": [self.mode(file, files) for file in asked]})
            if what == "commit":
                parent = json.loads(body.splitlines()[0])["value"].get("parentCommit")
                if parent not in (None, commit):
                    error = "A commit has happened since. Please refresh and try again."
                    return self.answer({"error": error}, 412)
                done = repository.commit(revision, files | self.changes(body, files))
                return self.answer({"commitUrl": f"{hub.endpoint}/{name}/commit/{done}", "commitOid": done})
            return self.resolve(files, "/".join(rest[2:]), commit)

        def mode(self, file: str, files: dict[str, bytes]) -> dict:
            found = files.get(file)
            oid = None if found is None else hashlib.sha256(found).hexdigest() if is_lfs(file) else blob(found)
            return {"path": file, "uploadMode": "lfs" if is_lfs(file) else "regular", "shouldIgnore": False, "oid": oid}

        def batch(self, asked: dict) -> None:
            objects = []
            for item in asked["objects"]:
                upload = {"upload": {"href": f"{hub.endpoint}/objects/{item['oid']}"}}
                objects.append(item if item["oid"] in hub.objects else item | {"actions": upload})
            self.answer({"transfer": "basic", "objects": objects})

        def changes(self, body: bytes, files: dict[str, bytes]) -> dict[str, bytes]:
            found = {}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    found[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    found[value["path"]] = hub.objects[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            return found | {name: content for name, content in hub.alter.items() if name in found}

        def resolve(self, files: dict[str, bytes], name: str, commit: str) -> None:
            content = files.get(name)
            if content is None:
                return self.answer({"error": "Entry not found"}, 404, "EntryNotFound", X_Repo_Commit=commit)
            etag = hashlib.sha256(content).hexdigest() if is_lfs(name) else blob(content)
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if "Range" in self.headers else 0
            self.send_response(206 if start else 200)
            for header, text in {
                "ETag": f'"{etag}"',
                "X-Repo-Commit": commit,
                "Accept-Ranges": "bytes",
                "Content-Length": str(len(content) - start),
                **({"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}),
            }.items():
                self.send_header(header, text)
            self.end_headers()
            if self.command == "HEAD":
                return
            end = hub.cut.get(name, len(content))
            self.wfile.write(content[start : max(start, end)])
            if end < len(content):
                self.wfile.flush()
                self.close_connection = True

    return Handler


@contextmanager
def serving():
    """A `Hub` whose `endpoint` answers while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def standing_in(monkeypatch: pytest.MonkeyPatch, folder: Path):
    """A `Hub` that the client asks while the block runs; it reads its environment when imported, which was long ago."""
    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub-cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
        template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
