"""`kvconvert serve` in bad company: floods, clients that go away or do not read, failing steps, and its own end."""

import contextlib
import http.client
import json
import math
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_model import FakeModel
from serving import Letters, request, serving, wait_for
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvconvert.serve.requests import Limits


@pytest.fixture
def slow():
    """A fake model that waits for permission before each pass, which `free` gives for good."""
    model = FakeModel()
    gate = threading.Semaphore(0)

    def wait():
        assert gate.acquire(timeout=60)

    def free():
        model.before_pass = lambda: None
        gate.release(1000)

    model.before_pass, model.gate, model.free = wait, gate, free
    yield model
    free()


@pytest.mark.parametrize("host", ["localhost", "elsewhere"])  # of which one is answered before its body
def test_a_body_that_is_no_http_is_told_so_once_and_leaves_no_line_in_the_log(caplog, host):
    head = request(b"", length=9).replace(b"localhost", host.encode())
    with serving(FakeModel(), Letters()) as here, socket.create_connection(("127.0.0.1", here.port)) as client:
        client.sendall(head.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked") + b"no size\r\n")
        answer = b"".join(iter(lambda: client.recv(2**16), b""))
        here.idle()
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["running", "waiting"])
def test_a_client_that_goes_away_cancels_its_request(slow, stream, state):
    with serving(slow, Letters(), kv_memory=20, max_batch=1 if state == "waiting" else 2) as here:
        stats = here.engine.stats
        if state == "waiting":
            other = here.engine.add([1] * 5, max_new_tokens=500, stop_token_ids=[])
        connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=60)
        body = {"prompt": "hello", "max_tokens": 500, "stream": stream, "n": 2, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        wait_for(lambda: stats().running + stats().waiting == (3 if state == "waiting" else 2))
        if state == "running":
            slow.gate.release(3)
            if stream:
                assert connection.getresponse().read(5) == b"data:"
        connection.sock.close() if not stream else connection.close()
        for _ in range(200):
            if stats().cancelled == 2:
                break
            slow.gate.release()
            time.sleep(0.05)
        assert stats().cancelled == 2
        assert here.service.metrics.gone == 1
        if state == "waiting":
            assert not other.finished
            other.cancel()
        slow.free()
        here.idle()
        assert slow.pool.used == 0


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_in_a_flood_each_client_is_served_or_told_to_come_back_and_nothing_is_kept(slow, count):
    dice = random.Random(0)
    plans = [dice.choice(["whole", "stream", "leave"]) for _ in range(count)]
    with serving(slow, Letters(), kv_memory=30, max_batch=4, max_waiting=16, capacity=24) as here:

        def client(place):
            prompt = [1 + (place + i) % 90 for i in range(dice.randint(1, 200))]
            body = {"prompt": prompt, "max_tokens": 20, "seed": place, "ignore_eos": True}
            connection, response = here.open(body=body | {"stream": plans[place] != "whole"})
            with contextlib.closing(connection):
                if response.status == 429:
                    assert int(response.headers["Retry-After"]) > 0
                    assert json.loads(response.read())["error"]["type"] == "rate_limit_error"
                elif plans[place] == "leave":
                    return "left"
                elif plans[place] == "whole":
                    assert json.loads(response.read())["usage"]["completion_tokens"] == 20
                else:
                    assert response.read().endswith(b"data: [DONE]\n\n")
                return response.status

        with ThreadPoolExecutor(200) as pool:
            answers = [pool.submit(client, place) for place in range(count)]
            wait_for(lambda: here.service.metrics.responses["/v1/completions", 429] > count // 3)
            slow.free()
            outcomes = Counter(answer.result(timeout=120) for answer in answers)
        assert set(outcomes) == {200, 429, "left"}
        here.idle()
        assert slow.pool.used == 0
        assert not here.service._running
        assert here.ask(body={"prompt": "hello", "max_tokens": 3, "ignore_eos": True})[0] == 200


def test_a_full_queue_says_when_to_come_back_and_keeps_no_part_of_a_request(slow):
    with serving(slow, Letters(), max_batch=1, max_waiting=1) as here:
        other = here.engine.add([1, 2], max_new_tokens=500, stop_token_ids=[])
        status, headers, told = here.ask(body={"prompt": "hello", "n": 3})
        assert status == 429
        assert int(headers["Retry-After"]) > 0
        assert "waiting" in told["error"]["message"]
        # The choice that found a place gives it back when the pass is over.
        slow.gate.release(2)
        wait_for(lambda: here.engine.stats().waiting == 0)
        other.cancel()
        slow.free()
        assert here.ask(body={"prompt": "hello", "max_tokens": 3})[0] == 200


def test_a_client_that_does_not_read_is_given_up_and_holds_up_nobody():
    limits = Limits(client_seconds=1.0)
    with serving(FakeModel(), Letters(), send_buffer=4096, limits=limits) as here, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", here.port))
        body = {"prompt": "x", "n": 16, "max_tokens": 100, "stream": True, "ignore_eos": True}
        client.sendall(request(json.dumps(body).encode()))
        wait_for(lambda: here.service.active == 1)
        assert here.ask(body={"prompt": "hello", "max_tokens": 3})[0] == 200
        wait_for(lambda: here.service.metrics.gone == 1, 20)
        here.idle()
        # What the client did not take is dropped, too.
        wait_for(lambda: not here.server.server_state.connections, 20)


def test_a_client_that_reads_no_answer_of_many_is_given_up():
    asking = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        serving(FakeModel(), Letters(), send_buffer=4096, limits=Limits(client_seconds=1.0)) as here,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", here.port))
        client.sendall(asking * 200)
        connections = here.server.server_state.connections
        wait_for(lambda: any(connection.flow.write_paused for connection in connections))
        wait_for(lambda: not connections, 20)


def test_a_slow_reader_gets_everything():
    with serving(FakeModel(), Letters(), send_buffer=4096, limits=Limits(client_seconds=5.0)) as here:
        body = {"prompt": "x", "n": 8, "max_tokens": 60, "stream": True, "ignore_eos": True}
        connection, response = here.open(body=body)
        with contextlib.closing(connection):
            parts = []
            while part := response.read1(1000):
                parts.append(part)
                time.sleep(0.002)
        pieces = b"".join(parts).split(b"\n\n")
        assert pieces[-2:] == [b"data: [DONE]", b""]
        here.idle()
        assert here.service.metrics.gone == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_step_is_an_error_and_the_server_goes_on(stream):
    model = FakeModel()
    with serving(model, Letters()) as here:

        def fail():
            model.before_pass = lambda: None
            raise MemoryError

        model.before_pass = fail
        connection, response = here.open(body={"prompt": "hello", "max_tokens": 3, "stream": stream})
        with contextlib.closing(connection):
            assert response.status == (200 if stream else 500)
            told = json.loads(response.read().decode().removeprefix("data: ").partition("\n\n")[0])["error"]
        assert (told["type"], told["code"]) == ("server_error", "model_failed")
        assert here.ask(body={"prompt": "hello", "max_tokens": 3})[0] == 200
        assert here.ask("/health")[0] == 200


class Infinite(FakeModel):
    """Computes no number as the logit of a token: of the first one after a prompt, or of those after it."""

    def __init__(self, logit, first):
        super().__init__()
        self.logit, self.first = logit, first

    def _read(self, cache, ids, positions):
        logits = super()._read(cache, ids, positions)
        for row, sequence in enumerate(cache.rows):
            if sequence and sequence[0] == ord("b") - 31 and (self.first or cache.open):
                logits[row, 0, 40] = self.logit
        return logits


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("logit", "first", "logprobs"), [(math.nan, True, None), (math.inf, True, 2), (math.nan, False, None)]
)
def test_what_is_no_number_is_an_error_and_no_token(logit, first, logprobs, stream):
    with serving(Infinite(logit, first), Letters()) as here:
        body = {"prompt": ["ask", "bad"], "max_tokens": 3, "ignore_eos": True, "logprobs": logprobs, "stream": stream}
        connection, response = here.open(body=body)
        with contextlib.closing(connection):
            assert response.status == (200 if stream else 500)
            last = response.read().decode().removesuffix("\n\n").split("\n\n")[-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "model_failed"
        assert here.ask(body=body | {"prompt": "ask", "stream": False})[0] == 200
        here.idle()
        assert here.engine.stats().failed == 1


def test_at_its_end_the_server_finishes_what_runs_and_refuses_what_comes(slow):
    with serving(slow, Letters()) as here:
        body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": True}
        connection, response = here.open(body=body)
        slow.gate.release(2)
        assert response.read(5) == b"data:"
        here.server.handle_exit(signal.SIGTERM, None)
        for path, more in (("/v1/completions", {"prompt": "x"}), ("/health", None)):
            status, headers, told = here.ask(path, more)
            assert (status, told["error"]["code"]) == (503, "shutting_down")
            assert int(headers["Retry-After"]) > 0
        assert not here.server.should_exit
        slow.free()
        with contextlib.closing(connection):
            assert response.read().endswith(b"data: [DONE]\n\n")
        wait_for(lambda: here.server.should_exit)
        assert here.server.cut == 0
        assert here.engine.stats().cancelled == 0


@pytest.mark.each_value
@pytest.mark.parametrize("second_signal", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_or_a_second_signal_ends_what_still_runs(slow, stream, second_signal):
    with serving(slow, Letters(), grace=60.0 if second_signal else 0.2) as here, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": stream}
        asked = pool.submit(here.open, body=body)
        wait_for(lambda: here.engine.stats().running == 1)
        here.server.handle_exit(signal.SIGTERM, None)
        if second_signal:
            here.server.handle_exit(signal.SIGINT, None)
        wait_for(lambda: here.server.should_exit)
        slow.gate.release(2)  # the pass under way ends
        connection, response = asked.result(timeout=60)
        with contextlib.closing(connection):
            assert response.status == (200 if stream else 503)
            told = response.read().decode()
        assert "shutting_down" in told
        assert "[DONE]" not in told
        assert here.server.cut == 1
        slow.free()
        here.idle()


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_loops_holds_up_nobody_and_not_the_end():
    tokenizer = Letters()
    slow = "{% if false %}{{ 'q' * 50000000 }}{% endif %}"  # to compile, in more than a chat may take beside others
    tokenizer.chat_template = slow + "{% if messages[0].content != 'loop' %}x{% else %}" + LOOPS + "{% endif %}"
    chat = "/v1/chat/completions"

    def turns(content):
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "ignore_eos": True}

    with serving(FakeModel(), tokenizer, grace=1.0) as here, ThreadPoolExecutor(4) as pool:
        here.service._renderer._seconds = 2
        assert here.ask(chat, turns("hello"))[0] == 200
        status, _, told = here.ask(chat, turns("loop"))
        assert status == 400
        assert re.search("chat template takes more than 2 seconds or 512 MiB", told["error"]["message"])
        assert here.ask(chat, turns("hello"))[0] == 200
        here.service._renderer._seconds = 60
        looping = [pool.submit(here.ask, chat, turns("loop")) for _ in range(4)]
        wait_for(lambda: here.service.active == 4)
        begun = time.monotonic()
        assert here.ask(body={"prompt": "hello", "max_tokens": 3, "ignore_eos": True})[0] == 200
        assert here.ask(chat, turns("hello"))[0] == 200
        assert here.ask("/health")[0] == 200
        assert time.monotonic() - begun < 10
        here.server.handle_exit(signal.SIGTERM, None)
        assert [answer.result(timeout=20)[0] for answer in looping] == [503] * 4
        wait_for(lambda: here.server.should_exit)
        assert here.server.cut == 4
    assert here.service._renderer._process is None
    assert not here.service.busy


def test_a_tokenizer_that_loops_holds_up_nobody():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "hi": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("(.*,)+=|[a-z]+"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    with serving(FakeModel(), tokenizer) as here, ThreadPoolExecutor(4) as pool:
        here.service._renderer._seconds = 2
        asked = {"max_tokens": 3, "ignore_eos": True}
        looping = [pool.submit(here.ask, body=asked | {"prompt": ("," * 21 + "x\n") * 50}) for _ in range(3)]
        begun = time.monotonic()
        for _ in range(3):
            assert here.ask(body=asked | {"prompt": "hi"})[0] == 200
        assert time.monotonic() - begun < 10
        for answer in looping:
            status, _, told = answer.result(timeout=60)
            assert status == 400
            assert re.search(r"tokenizer takes more than 2\.\d* seconds or 512 MiB", told["error"]["message"])
