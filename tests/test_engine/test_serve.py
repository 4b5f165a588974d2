"""examples/serve.py on a free port: streams, answers in one piece, refuses, and cancels when a client goes away."""

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import serve
import torch
import uvicorn
from fake_model import END, FakeModel
from tiny.llama import write_tiny_bundle

from kvconvert import load
from kvconvert.runtime import Engine


class Letters:
    """A tokenizer of a fake model: token n is the n-th printable character."""

    def __call__(self, text):
        return type("Encoded", (), {"input_ids": [ord(letter) - 31 for letter in text]})

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(id + 31) for id in ids if id != END)


@contextlib.contextmanager
def serving(engine, tokenizer):
    """The port at which an engine is served."""
    config = uvicorn.Config(serve.application(engine, tokenizer), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def post(port, **body):
    """The open response to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection, connection.getresponse()


def answer(port, **body):
    connection, response = post(port, **body)
    with contextlib.closing(connection):
        return response.status, json.loads(response.read())


def streamed(port, **body):
    """Pieces of text, and why they ended."""
    connection, response = post(port, stream=True, **body)
    with contextlib.closing(connection):
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = response.read().decode().split("\n\n")
    assert lines.pop() == ""
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    return [event["text"] for event in events], events[-1]["finish_reason"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    return write_tiny_bundle(folder)


@pytest.fixture
def slow():
    """A fake model that waits for permission before each pass, which `open` gives for good."""
    model = FakeModel()
    gate = threading.Semaphore(0)

    def wait():
        assert gate.acquire(timeout=60)

    model.before_pass, model.gate = wait, gate
    yield model
    model.before_pass = lambda: None
    gate.release(1000)


def test_a_bundle_streams_its_text_to_several_clients(bundle):
    model, tokenizer = load(bundle, dtype=torch.float32)
    prompts = ["Once upon a time", "It was a dark night, and", "The miller"]
    expected = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)
        whole = tokenizer.decode(tokens[0], skip_special_tokens=True)
        expected.append(whole[len(tokenizer.decode(inputs.input_ids[0], skip_special_tokens=True)) :])
    engine = Engine(model, tokenizer, max_batch=2)
    heard = {}
    with serving(engine, tokenizer) as port:

        def client(prompt):
            heard[prompt] = streamed(port, prompt=prompt, max_tokens=20, temperature=0.0)

        clients = [threading.Thread(target=client, args=[prompt]) for prompt in prompts]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(timeout=60)
        for prompt, text in zip(prompts, expected, strict=True):
            pieces, reason = heard[prompt]
            assert "".join(pieces) == text
            assert len(pieces) > 5
            assert reason == "length"
        ids = tokenizer(prompts[0]).input_ids
        assert answer(port, prompt=ids, max_tokens=20, temperature=0.0) == (
            200,
            {"text": expected[0], "finish_reason": "length"},
        )


def test_a_seed_gives_the_same_text_again_and_a_stop_string_ends_it():
    engine = Engine(FakeModel(), Letters())
    with serving(engine, Letters()) as port:
        options = {"prompt": "hello", "max_tokens": 40, "temperature": 2.0, "top_k": 50, "top_p": 0.95, "seed": 5}
        (_, first), (_, again) = answer(port, **options), answer(port, **options)
        assert first == again
        assert answer(port, **options | {"seed": 6})[1] != first
        stop = first["text"][3:5]
        pieces, reason = streamed(port, **options, stop=[stop])
        assert ("".join(pieces), reason) == (first["text"][: first["text"].index(stop)], "stop")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["running", "waiting"])
def test_a_client_that_goes_away_cancels_its_request(slow, stream, state):
    engine = Engine(slow, Letters(), kv_memory=20, max_batch=1 if state == "waiting" else 2)
    with serving(engine, Letters()) as port:
        if state == "waiting":
            other = engine.add([1] * 5, max_new_tokens=500, stop_token_ids=[])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"prompt": "hello", "max_tokens": 500, "stream": stream, "seed": 1}
        connection.request("POST", "/v1/completions", json.dumps(body))
        wait_for(lambda: engine.stats().running + engine.stats().waiting == (2 if state == "waiting" else 1))
        if state == "running":
            slow.gate.release(3)
            if stream:
                assert connection.getresponse().read(5) == b"data:"
        connection.sock.close() if not stream else connection.close()
        for _ in range(200):
            if engine.stats().cancelled:
                break
            slow.gate.release()
            time.sleep(0.05)
        assert engine.stats().cancelled == 1
        if state == "waiting":
            assert not other.finished
            other.cancel()
        slow.before_pass = lambda: None
        slow.gate.release(10)
        wait_for(lambda: engine.stats().pages_reserved == 0)
        assert slow.pool.used == 0


def test_a_full_queue_answers_503_and_says_when_to_come_back(slow):
    engine = Engine(slow, Letters(), max_batch=1, max_waiting=0)
    with serving(engine, Letters()) as port:
        request = engine.add([1, 2], max_new_tokens=500, stop_token_ids=[])
        connection, response = post(port, prompt="hello")
        with contextlib.closing(connection):
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert "waiting" in json.loads(response.read())["error"]
        request.cancel()
        slow.before_pass = lambda: None
        slow.gate.release(10)
        wait_for(lambda: request.finished)
        assert answer(port, prompt="hello", max_tokens=3)[0] == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompt.*Field required"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": [1000]}, "token 1000"),
        ({"prompt": "x", "max_tokens": 0}, "max_new_tokens"),
        ({"prompt": "x", "temperature": -1.0}, "temperature = -1.0"),
        ({"prompt": "x", "temperature": "hot"}, "temperature.*valid number"),
        ({"prompt": "x", "top_p": 0.0}, "top_p"),
        ({"prompt": "x", "best_of": 3}, "best_of.*not permitted"),
        ({"prompt": "x", "stop": "x"}, "stop.*valid array"),
    ],
)
def test_bad_input_answers_400_with_one_sentence(body, said):
    with serving(Engine(FakeModel(), Letters()), Letters()) as port:
        status, told = answer(port, **body)
        assert status == 400
        assert re.search(said, told["error"])
        assert "\n" not in told["error"]


def test_a_failed_step_ends_its_requests_and_the_server_goes_on():
    model = FakeModel()
    with serving(Engine(model, Letters()), Letters()) as port:

        def fail():
            model.before_pass = lambda: None
            raise MemoryError

        model.before_pass = fail
        assert answer(port, prompt="hello", max_tokens=3)[1]["finish_reason"] == "error"
        assert answer(port, prompt="hello", max_tokens=3, seed=1)[1]["finish_reason"] in ("length", "stop")


@pytest.mark.full
def test_the_script_serves_a_bundle(bundle):
    script = Path(serve.__file__)
    command = [sys.executable, str(script), str(bundle), "--port", "0", "--max-batch", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = next(int(found[1]) for line in process.stderr if (found := re.search(r"http://[\d.]+:(\d+)", line)))
            pieces, reason = streamed(port, prompt="Once upon a time", max_tokens=5, temperature=0.0)
            assert pieces
            assert reason in ("length", "stop")
        finally:
            process.terminate()


def test_the_script_is_short_enough_to_read_at_once():
    assert len(Path(serve.__file__).read_text().splitlines()) < 100
