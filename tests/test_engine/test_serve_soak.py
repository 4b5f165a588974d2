"""Hostile and honest clients together: the honest ones are served, and the server keeps nothing of any of them."""

import contextlib
import gc
import json
import os
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_model import FakeModel
from serving import Letters, request, serving, wait_for

from kvconvert.serve.requests import Limits

LIMITS = Limits(body_bytes=2**18, new_tokens=8, client_seconds=5.0)
TOGETHER = 16


class Chatty(Letters):
    """Letters with a chat template."""

    chat_template = "{% for turn in messages %}{{ turn.role[0] }}:{{ turn.content }};{% endfor %}"


def honest(here, dice):
    """A request, whole or as a stream, and whether it had its answer."""
    if dice.random() < 0.3:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * dice.randint(1, 20)}]}
    else:
        path, body = "/v1/completions", {"prompt": [1 + dice.randrange(90) for _ in range(dice.randint(1, 300))]}
    body |= {"max_tokens": 8, "stream": dice.random() < 0.5, "ignore_eos": True}
    for _ in range(50):
        connection, response = here.open(path, body)
        with contextlib.closing(connection):
            content = response.read()
        if response.status == 429:  # in a hurry
            time.sleep(0.1)
            continue
        assert response.status == 200, content
        return (
            content.endswith(b"[DONE]\n\n")
            if body["stream"]
            else json.loads(content)["usage"]["completion_tokens"] == 8
        )
    return False


def raw(here, sent, seconds=0.0, read=False):
    """Send bytes, wait, read what comes if wanted, and leave."""
    with socket.create_connection(("127.0.0.1", here.port), timeout=30) as client, contextlib.suppress(OSError):
        client.sendall(sent)
        time.sleep(seconds)
        if read:
            client.shutdown(socket.SHUT_WR)
            while client.recv(2**16):
                pass


def hostile(here, dice):
    """One of the ways to be a burden."""
    whole = {"prompt": "x" * dice.randint(1, 200), "max_tokens": 8, "stream": dice.random() < 0.5}
    large = json.dumps({"prompt": "x" * 200_000}).encode()
    ways = [
        lambda: raw(here, request(json.dumps(whole).encode())),
        lambda: raw(here, request(json.dumps(whole).encode()), read=True),
        lambda: raw(here, request(large)),
        lambda: raw(here, request(large[:100_000], length=200_000), dice.random() / 2),
        lambda: raw(here, b"POST /v1/completions HTTP/1.1\r\nHo", dice.random() / 2),
        lambda: raw(here, os.urandom(300), read=True),
        lambda: raw(here, request(b'{"prompt":[' + b"[]," * 60_000 + b"[]]}"), read=True),
        lambda: raw(here, request(b"[" * 100_000), read=True),
        lambda: raw(here, request(b'{"prompt":"x","n":' + b"9" * 4000 + b"}"), read=True),
        lambda: raw(here, request(b"{}").replace(b"localhost", b"evil.example"), read=True),
        lambda: raw(here, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20, read=True),
        lambda: raw(here, request(json.dumps(whole | {"n": 16, "stream": True}).encode()), 0.05),
    ]
    dice.choice(ways)()


def held():
    """Bytes of memory and open descriptors of this process; of its libraries the system keeps what it likes."""
    gc.collect()
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    kilobytes = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    return 1024 * kilobytes, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", [110, pytest.param(10_000, marks=pytest.mark.full)])
def test_hostile_and_honest_clients_leave_nothing_behind(count):
    options = {"kv_memory": 40, "max_batch": 8, "prompt_chunk": 128, "limits": LIMITS, "capacity": 40}
    with serving(FakeModel(max_positions=2000), Chatty(), **options) as here:

        def client(number):
            dice = random.Random(number)
            return honest(here, dice) if number % 2 else hostile(here, dice)

        def settled():
            here.idle()
            wait_for(lambda: not here.server.server_state.connections)
            return held()

        with ThreadPoolExecutor(TOGETHER) as pool:
            warm = max(90, count // 2)  # allocators hold more and more for some thousands of requests
            list(pool.map(client, range(warm)))
            memory, descriptors = settled()
            outcomes = Counter(pool.map(client, range(warm, count)))
            memory_after, descriptors_after = settled()
        assert outcomes[False] == 0
        assert outcomes[True] == (count - warm) // 2
        assert descriptors_after <= descriptors
        assert memory_after - memory < 12 * 2**20
        statuses = Counter(status for _, status in here.service.metrics.responses.elements())
        assert 500 not in statuses
        assert {200, 400, 403, 413} <= set(statuses)
        assert not here.service._running
        assert here.engine.stats().failed == 0
