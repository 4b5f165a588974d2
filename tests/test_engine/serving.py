"""A server in a thread of the test, and clients of it."""

import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass

from openai import OpenAI

from kvconvert.runtime import Engine
from kvconvert.serve.app import Service
from kvconvert.serve.listen import bind
from kvconvert.serve.requests import Limits
from kvconvert.serve.server import Server

NAME = "tiny"


class Letters:
    """A tokenizer of a fake model: token n is the n-th printable character."""

    chat_template = None
    added_tokens_decoder, all_special_tokens = {}, []

    @property
    def special_tokens_map(self):
        return {"eos_token": "\n"}

    def get_chat_template(self):
        return self.chat_template

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": [ord(letter) - 31 for letter in text]}

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(id + 31) for id in ids if id)


@dataclass
class Serving:
    """What `serving` gives."""

    engine: Engine
    service: Service
    server: Server
    port: int

    def client(self, **options):
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, **options)

    def open(self, path="/v1/completions", body=None, headers=None, method=None):
        """A connection and its open response; `body` is sent as JSON, or as it is if it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body)
        headers = {"Content-Type": "application/json"} | (headers or {})
        connection.request(method or ("GET" if body is None else "POST"), path, content, headers)
        return connection, connection.getresponse()

    def ask(self, path="/v1/completions", body=None, headers=None, method=None):
        """Status, headers, and JSON of a whole response."""
        connection, response = self.open(path, body, headers, method)
        with contextlib.closing(connection):
            return response.status, response.headers, json.loads(response.read())

    def metrics(self):
        connection, response = self.open("/metrics")
        with contextlib.closing(connection):
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            lines = response.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    def idle(self):
        """Wait until nothing is under way, and see that nothing was kept."""
        stats = self.engine.stats
        wait_for(lambda: not (self.service.active or stats().running or stats().waiting or stats().pages_reserved))
        assert self.engine._scheduler.free_rows == self.engine._scheduler.rows


@contextlib.contextmanager
def serving(
    model, tokenizer, *, capacity=64, limits=None, grace=30.0, send_buffer=None, of_service=None, keys=(), **options
):
    """A running server of an Engine with these options, and a Service with those of `of_service`."""
    engine = Engine(model, tokenizer, **options)
    of_service = {"capacity": capacity, "limits": limits or Limits(), "keys": keys} | (of_service or {})
    service = Service(engine, model, tokenizer, NAME, **of_service)
    listening = bind("127.0.0.1", 0)
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    ready = threading.Event()
    server = Server(service, grace=grace, ready=ready.set)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        assert ready.wait(60)
        yield Serving(engine, service, server, port)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()


def request(body, length=None):
    """The bytes of a completion request; `length` is stated where it is not the body's."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length or len(body)}", "", ""]).encode() + body


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)
