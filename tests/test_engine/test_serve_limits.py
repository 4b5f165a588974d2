"""What one client of `kvconvert serve` may take: threads that read, places, memory of bodies, connections."""

import asyncio
import contextlib
import gc
import http.client
import json
import re
import socket
import threading
import time
import types

import pytest
from fake_model import FakeModel
from pydantic import ValidationError
from serving import Letters, request, serving, wait_for
from starlette.requests import ClientDisconnect

from kvconvert.errors import UsageError
from kvconvert.runtime.engine import Event
from kvconvert.runtime.engine.sampling import TokenLogprobs
from kvconvert.serve import connections, listen
from kvconvert.serve.access import Hosts, origin_of
from kvconvert.serve.answers import Bell, Generation
from kvconvert.serve.forms import Form, Step
from kvconvert.serve.places import Bodies, Places, network
from kvconvert.serve.readers import LARGE, Readers
from kvconvert.serve.refusal import Refusal
from kvconvert.serve.replies import Reply
from kvconvert.serve.requests import Chat, Completion, Limits, Tool, entries, fields_of
from kvconvert.serve.responses import ResponsesChat


class Chatty(Letters):
    """Letters with a chat template that calls tools."""

    chat_template = (
        "{% for turn in messages %}{{ turn.content }}{% for call in turn.tool_calls %}<c>"
        """{{ '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}}</c>"""
        "{% endfor %}{% endfor %}"
    )


def test_readers_take_the_client_that_used_them_least_and_one_large_job_at_a_time():
    readers, free, order = Readers("test"), threading.Event(), []

    def job(name):
        order.append(name)
        if not name.startswith("small"):
            assert free.wait(30)

    async def run():
        loop = asyncio.get_running_loop()
        large = [asyncio.ensure_future(readers.run("a", LARGE + 1, lambda n=n: job(f"large {n}"))) for n in range(4)]
        await asyncio.sleep(0.1)
        assert order == ["large 0"]
        left = asyncio.ensure_future(readers.run("b", LARGE + 1, lambda: job("of one who left")))
        other = asyncio.ensure_future(readers.run("c", LARGE + 1, lambda: job("large of another")))
        await asyncio.sleep(0)
        left.cancel()
        begun = loop.time()
        await asyncio.gather(*(readers.run("a", 10, lambda n=n: job(f"small {n}")) for n in range(5)))
        assert loop.time() - begun < 20
        free.set()
        await asyncio.gather(*large, other)

    asyncio.run(run())
    readers.close()
    wait_for(lambda: not readers.busy)
    assert order[1:6] == [f"small {n}" for n in range(5)]
    assert order[6] == "large of another"
    assert order[7:] == [f"large {n}" for n in (1, 2, 3)]


def test_readers_count_the_time_that_jobs_take_not_their_bytes():
    readers, begun, free, order = Readers("test"), threading.Event(), threading.Event(), []

    def slow(number):
        begun.set()
        assert free.wait(30)
        order.append(f"slow {number}")
        time.sleep(0.0 if number else 1.0)

    async def run():
        jobs = [asyncio.ensure_future(readers.run("a", 10, lambda n=n: slow(n))) for n in range(3)]
        assert await asyncio.to_thread(begun.wait, 30)
        jobs += [asyncio.ensure_future(readers.run("b", 60_000, lambda n=n: order.append(n))) for n in range(3)]
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*jobs)

    asyncio.run(run())
    readers.close()
    assert order == ["slow 0", 0, 1, 2, "slow 1", "slow 2"]


def test_an_error_in_a_reader_is_its_callers():
    readers = Readers("test")

    def fail():
        raise Refusal(400, "no")

    async def run():
        with pytest.raises(Refusal, match="no"):
            await readers.run("a", 1, fail)
        return await readers.run("a", 1, lambda: 3)

    assert asyncio.run(run()) == 3
    readers.close()


def test_one_client_cannot_have_all_places():
    places = Places(4, 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(places.take("a"))
        with pytest.raises(Refusal, match="One client may have 3 choices") as told:
            places.check("a")
        assert (told.value.status, told.value.code) == (429, "too_many_requests")
        with places.take("b") as more, pytest.raises(Refusal, match="4 choices"):
            more(1)
        with places.take("b"), pytest.raises(Refusal, match="4 choices are being served or wait"):
            places.check("c")
        stack.enter_context(places.take("b"))
    with places.take("a") as more:
        pass
    more(3)  # a thread that did not know
    places.check("a", 3)


def test_choices_that_were_cancelled_have_no_answer_even_if_their_work_is_done():
    async def run(end):
        generation = Generation(None, Bell())
        gone = asyncio.ensure_future(asyncio.sleep(0 if end == "gone" else 60))
        work = asyncio.ensure_future(asyncio.sleep(0, "done"))
        await asyncio.sleep(0.01)
        if end == "cancelled":
            generation.cancel()
        try:
            return await generation.unless_over(asyncio.wait_for(work, 1), gone)
        finally:
            gone.cancel()

    assert asyncio.run(run(None)) == "done"
    with pytest.raises(ClientDisconnect):
        asyncio.run(run("gone"))
    with pytest.raises(Refusal, match="shutting down"):
        asyncio.run(run("cancelled"))


def test_a_step_wakes_the_event_loop_once_and_for_a_whole_answer_at_its_end():
    calls, listeners, woken = [], [], []
    loop = types.SimpleNamespace(call_soon_threadsafe=calls.append)
    engine = types.SimpleNamespace(
        add=lambda prompt, on_event, **options: listeners.append(on_event) or types.SimpleNamespace(cancel=list)
    )

    def tokens(place, count, reason=None):
        for number in range(count):
            listeners[place](Event(None, (1,), "a", reason if number == count - 1 else None))
        bell.ring(loop)

    async def take(place):
        woken.append((place, len(await generations[place].events())))

    async def run():
        generations.extend(Generation(engine, bell) for _ in range(3))
        generations[2].whole = True
        for generation in generations:
            generation.add([1], Reply())
        tasks = [asyncio.ensure_future(take(place)) for place in range(3)]
        await asyncio.sleep(0)
        for place in range(3):
            listeners[place](Event(None, (1,), "a", None))
        bell.ring(loop)
        assert len(calls) == 1
        calls.pop()()
        await asyncio.wait(tasks[:2])
        assert woken == [(0, 1), (1, 1)]
        tokens(2, 5)
        assert not calls
        tokens(2, 1, "length")
        calls.pop()()
        await tasks[2]
        assert woken[2] == (2, 7)
        tokens(2, 70)
        assert len(calls) == 1

    bell, generations = Bell(), []
    asyncio.run(run())
    closed = asyncio.new_event_loop()
    closed.close()
    bell.add(list)
    bell.ring(closed)


def test_addresses_of_one_network_are_one_client():
    assert network("::ffff:10.0.0.1") == network("10.0.0.1") == "10.0.0.1"
    assert network("2001:db8::1%eth0") == network("2001:db8::ffff:1") != network("2001:db8:0:1::1")
    assert network("") == ""


def test_bodies_that_do_not_arrive_give_way():
    async def run():
        bodies, ended = Bodies(800_000), []

        async def arrive(client, size):
            with bodies.hold(client) as body:
                bodies.grow(body, size)
                try:
                    async with asyncio.timeout(60) as body.arriving:
                        await asyncio.sleep(60)
                except TimeoutError:
                    ended.append((client, body.gave_way))

        held = [asyncio.ensure_future(arrive(b"a", 200_000)) for _ in range(3)]
        await asyncio.sleep(0)
        assert isinstance(held[2].exception(), Refusal)  # half of the room is another's
        held.append(asyncio.ensure_future(arrive(b"b", 400_000)))
        await asyncio.sleep(0)
        with bodies.hold(b"c") as body:
            bodies.grow(body, 10_000)  # a small one needs none
            with pytest.raises(Refusal, match="try again later"):
                bodies.grow(body, 100_000)
            await asyncio.sleep(1.1)
            bodies.grow(body, 100_000)
            await asyncio.sleep(0.01)
        assert ended == [(b"a", True)]
        for task in held:
            task.cancel()

    asyncio.run(run())


@pytest.mark.each_value
@pytest.mark.parametrize("field", ["messages", "prompt", "stop", "whatever"])
@pytest.mark.parametrize("value", [b"0", b"[]", b"{}", b'""', b"[[0]]", b'{"a":[]}'])
def test_values_of_a_body_are_counted_before_they_are_made(field, value):
    body = b'{"%s":[%s]}' % (field.encode(), b",".join([value] * 500_000))
    assert entries(body) >= 500_000
    with pytest.raises(Refusal, match="values; this server takes at most 65,536") as told:
        fields_of(body, 65_536)
    assert told.value.status == 413


@pytest.mark.parametrize("text", [',[{"\\', "\\\\", '\\"],', "a,b", "\u2603,"])
def test_what_a_text_holds_counts_as_one_value(text):
    fields = {"prompt": [text * 20_000, text], "stop": ["\\"]}
    body = json.dumps(fields).encode()
    assert entries(body) <= 8
    assert fields_of(body, 100) == fields


@pytest.mark.parametrize(
    "fields",
    [
        lambda wide: {"logit_bias": wide},
        lambda wide: {"chat_template_kwargs": wide},
        lambda wide: {"tool_choice": wide},
        lambda wide: {"tool_choice": {"type": "function", "function": wide}},
        lambda wide: {"response_format": wide},
        lambda wide: {"response_format": {"type": "json_schema", "json_schema": wide}},
    ],
)
def test_an_object_of_many_fields_makes_few_errors(fields):
    body = {"messages": [{"role": "user", "content": "x"}]} | fields({f"field {n}": [] for n in range(3000)})
    with pytest.raises(ValidationError) as told:
        Chat.of(body)
    assert told.value.error_count() < 20


@pytest.mark.parametrize("value", ["0", "[]", '{"a": 1}'])
def test_values_in_the_arguments_of_calls_are_counted_before_they_are_made(value):
    calls = [{"function": {"name": "f", "arguments": f"[{','.join([value] * 9_000)}]"}} for _ in range(8)]
    asked = Chat.of({"messages": [{"role": "assistant", "tool_calls": calls}]})
    with pytest.raises(Refusal, match=r"have [\d,]+ values; this server takes at most 65,536") as told:
        asked.check(Limits(), 1)
    assert (told.value.status, told.value.param) == (413, "messages")
    call = {"function": {"name": "f", "arguments": json.dumps({"text": "[{,:" * 20_000})}}
    Chat.of({"messages": [{"role": "assistant", "tool_calls": [call]}]}).check(Limits(), 1)


def test_what_is_answered_keeps_nothing_else_of_its_body():
    gate, model = threading.Event(), FakeModel()
    model.before_pass = lambda: gate.wait(60)
    turns = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "x"}}]
    with serving(model, Chatty()) as here, contextlib.ExitStack() as stack:
        stack.callback(gate.set)
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": turns, "tools": tools, "tool_choice": "none"}),
            ("/v1/responses", {"input": "x"}),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=60)
            stack.callback(connection.close)
            content = json.dumps(body | {"metadata": {"a": "x"}})
            connection.request("POST", path, content, {"Content-Type": "application/json"})
        wait_for(lambda: here.engine.stats().running + here.engine.stats().waiting == 3)

        def kept():
            gc.collect()
            return [found for found in gc.get_objects() if type(found) in (Completion, Chat, ResponsesChat, Tool)]

        wait_for(lambda: not kept())


def test_places_of_many_tokens_in_the_text():
    step = Step(logprobs=[(5, TokenLogprobs(-1.0, ()))] * 20_000, offset=7)
    texts = types.SimpleNamespace(text=lambda id: "ab")
    (choice,) = Form(False, "tiny", texts, 0).whole([step], {})["choices"]
    assert choice["logprobs"]["text_offset"] == list(range(7, 40_007, 2))


@pytest.mark.parametrize("item", [{"type": "function_call"}, {}, {"type": "reasoning"}])
def test_items_of_an_input_are_counted_before_anything_is_made_of_them(item):
    with pytest.raises(Refusal, match="input: a conversation has 8,192 items at most, and this one has 50,000") as told:
        ResponsesChat.of({"input": [item] * 50_000})
    assert told.value.param == "input"


HOSTS = {
    ("127.0.0.1", "127.0.0.1"): (["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000"], ["10.0.0.1", "gpu"]),
    ("gpu", "10.0.0.5"): (["gpu:8000", "10.0.0.5", "gpu."], ["127.0.0.1", "localhost", "10.0.0.6"]),
    ("0.0.0.0", "0.0.0.0"): (["10.0.0.5:80", "[2001:db8::1]:80", "localhost", socket.gethostname()], ["evil.example"]),
    ("::", "::"): (["10.0.0.5:80", "[2001:db8::1]"], ["evil.example:80", "10.0.0.5.evil.example"]),
}


@pytest.mark.parametrize(("host", "address"), HOSTS)
def test_a_server_is_asked_for_by_its_own_names(host, address):
    good, bad = HOSTS[host, address]
    hosts = Hosts.of(host, address)
    assert [name for name in good if not hosts.allow(name)] == []
    bad = [
        *bad,
        "",
        "localhost.evil.example",
        "[::1",
        "[::1].evil.example",
        "127.0.0.1:80.evil.example",
        "evil.example",
    ]
    assert [name for name in bad if hosts.allow(name)] == []
    assert all(Hosts.of(host, address, ["Proxy.example"]).allow(name) for name in [*good, "proxy.EXAMPLE:443"])
    assert Hosts.of(host, address, ["*"]).allow("evil.example")


def test_a_server_of_all_addresses_is_not_one_of_all_names():
    hosts = Hosts.of("*", "0.0.0.0")
    assert hosts.allow("10.0.0.5:80")
    assert not hosts.allow("evil.example")


@pytest.mark.parametrize("stated", ["proxy.example:8443", "PROXY.example.", " proxy.example", "proxy.example.:80"])
def test_a_further_host_is_the_name_that_clients_send_however_it_is_written(stated):
    assert Hosts.of("127.0.0.1", "127.0.0.1", [stated]).allow("proxy.example:8443")
    assert all(
        Hosts.of("127.0.0.1", "127.0.0.1", [v6]).allow("[2001:db8::1]:80") for v6 in ("2001:db8::1", "[2001:db8::1]")
    )


@pytest.mark.parametrize("stated", ["https://proxy.example", "", ":80", "a/b"])
def test_what_no_client_can_ask_for_is_no_host(stated):
    with pytest.raises(UsageError, match="is no name of a host"):
        Hosts.of("127.0.0.1", "127.0.0.1", [stated])


def test_an_origin_is_written_as_browsers_do_or_refused():
    for stated in ("http://Localhost:3000/", "HTTP://localhost:3000", " http://localhost:3000"):
        assert origin_of(stated) == "http://localhost:3000"
    assert [origin_of(kept) for kept in ("*", "null", "app://x")] == ["*", "null", "app://x"]
    for stated in ("localhost:3000", "http://localhost:3000/page", "http://", "", "http://me@localhost"):
        with pytest.raises(UsageError, match="is no origin of web pages"):
            origin_of(stated)


def test_pages_of_other_origins_and_other_names_are_refused():
    ask = {"prompt": "x", "max_tokens": 1}
    with serving(FakeModel(), Letters()) as here:
        for headers, code in (
            ({"Host": f"evil.example:{here.port}"}, "host_not_allowed"),
            ({"Origin": f"http://127.0.0.1:{here.port + 1}"}, "origin_not_allowed"),
            ({"Origin": "null"}, "origin_not_allowed"),
        ):
            for path, body in (("/v1/completions", ask), ("/v1/models", None), ("/metrics", None), ("/health", None)):
                status, _, told = here.ask(path, body, headers)
                assert (status, told["error"]["code"]) == (403, code)
        assert here.engine.stats().prompt_tokens == 0
    page = "http://localhost:3000"
    with serving(FakeModel(), Letters(), keys=["one"], of_service={"origins": [page]}) as here:
        preflight = {"Origin": page, "Access-Control-Request-Method": "POST"}
        connection, response = here.open(
            headers=preflight | {"Access-Control-Request-Headers": "authorization"}, method="OPTIONS"
        )
        with contextlib.closing(connection):
            assert response.status == 200
            assert response.headers["Access-Control-Allow-Origin"] == page
        status, headers, _ = here.ask(body=ask, headers={"Origin": page, "Authorization": "Bearer one"})
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, page)
        assert here.ask(body=ask, headers={"Origin": page})[0] == 401
        assert here.ask(body=ask, headers={"Origin": "http://localhost:3001", "Authorization": "Bearer one"})[0] == 403


def test_a_target_in_absolute_form_is_a_path_and_a_host():
    """As clients of a proxy send it, and as RFC 9112 has every server take it."""
    with serving(FakeModel(), Letters()) as here:
        for target, header, status in (
            ("http://localhost/health", "localhost", 200),
            (f"HTTP://LOCALHOST:{here.port}/%68ealth?x=1", "evil.example", 200),
            ("https://127.0.0.1/v1/models", "localhost", 200),
            ("http://localhost/nothing", "localhost", 404),
            ("http://localhost", "localhost", 404),  # no page is served here
            ("http://evil.example/health", "localhost", 403),
            ("http://me@localhost/health", "localhost", 403),
            ("http:///health", "localhost", 404),
            ("ftp://localhost/health", "localhost", 404),
        ):
            assert here.ask(target, headers={"Host": header})[0] == status, target
        assert here.ask("http://localhost/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    with serving(FakeModel(), Letters(), keys=["one"]) as here:
        assert here.ask("http://localhost/v1/models")[0] == 401


@pytest.mark.parametrize("shared", [False, True])
def test_prefixes_are_shared_between_keys_only_on_request(shared):
    prompt = [1 + n % 90 for n in range(300)]
    options = {"of_service": {"share_prefixes": shared}, "keys": ["one", "two"], "prompt_chunk": 128}
    with serving(FakeModel(), Letters(), **options) as here:

        def cached(key):
            body = {"prompt": prompt, "max_tokens": 1}
            _, _, told = here.ask(body=body, headers={"Authorization": f"Bearer {key}"})
            return told["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached(key) for key in ("one", "two", "one", "two")] == [0, 256 if shared else 0, 256, 256]
        here.idle()


def test_idle_connections_give_way_to_a_client_that_asks():
    with serving(FakeModel(), Letters(), capacity=8) as here:
        here.server.config.limit_concurrency = 40
        with contextlib.ExitStack() as stack:
            for number in range(100):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", here.port), timeout=60))
                client.sendall([b"", b"POST /v1/comp", request(b'{"prompt"', length=100)][number % 3])
            for _ in range(3):
                assert here.ask(body={"prompt": "hello", "max_tokens": 3})[0] == 200
            wait_for(lambda: len(here.server.server_state.connections) <= 40)
        here.idle()


def test_connections_that_come_and_go_keep_no_client_from_being_accepted():
    asking = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.closing(listen.bind("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:
        listening.listen(2048)
        listening.setblocking(False)

        def clients(count, said=b"", ends=False, leaves=False):
            for _ in range(count):
                client = stack.enter_context(socket.create_connection(listening.getsockname(), timeout=60))
                client.sendall(said)
                if ends:
                    client.shutdown(socket.SHUT_WR)
                if leaves:
                    client.close()
            return client.getsockname() if count == 1 else None

        def accepted():
            """Addresses of what is accepted until the event loop has its turn."""
            made = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection, address = listening.accept()
                    stack.enter_context(connection)
                    made.append(address)
            return made

        clients(200, leaves=True)
        assert accepted() == []
        clients(60, said=b"G", leaves=True)
        half_closed = clients(1, said=asking, ends=True)
        clients(300, leaves=True)
        silent, asks = clients(1), clients(1, said=asking)
        first = accepted()
        assert first[:2] == [silent, asks]  # whoever came before and left again
        assert half_closed in first
        assert len(first) < 50
        clients(100, said=asking)
        assert [0 < len(accepted()) < 100 for _ in range(2)] == [True, True]  # the event loop goes on between them
        assert accepted() == []


def test_places_that_one_address_fills_with_requests_are_had_by_another_address():
    def client(address):
        return socket.create_connection(("127.0.0.1", here.port), timeout=60, source_address=(address, 0))

    def answer(connection):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with contextlib.closing(connection.makefile("rb")) as file:
            return file.readline()

    model, gate = FakeModel(), threading.Event()
    model.before_pass = lambda: gate.wait(60)
    with serving(model, Letters(), capacity=64) as here, contextlib.ExitStack() as stack:
        here.server.config.limit_concurrency = 22
        patient = stack.enter_context(client("127.0.0.3"))
        body = request(json.dumps({"prompt": "hello", "max_tokens": 1}).encode())
        for _ in range(20):
            stack.enter_context(client("127.0.0.1")).sendall(body)
        wait_for(lambda: here.service.active == 20)
        for _ in range(3):
            assert b" 503 " in answer(stack.enter_context(client("127.0.0.1")))
        assert here.service.active == 20
        stack.enter_context(client("127.0.0.1")).sendall(b"G")
        wait_for(lambda: len(here.server.server_state.connections) == 22)
        assert answer(patient).startswith(b"HTTP/1.1 200")  # which had a place before
        for _ in range(3):
            assert answer(stack.enter_context(client("127.0.0.2"))).startswith(b"HTTP/1.1 200")
        gate.set()


def test_a_client_whose_bytes_take_long_to_parse_has_few_read_at_a_time(monkeypatch):
    with serving(FakeModel(), Letters()) as here:
        served = here.server.server_state.connections
        with socket.create_connection(("127.0.0.1", here.port)) as client:
            client.sendall(request(b"", length=10**6))
            for long, size in (
                (1000, connections.READ_BYTES),
                (-1, connections._FEWEST_BYTES),
                (1000, connections.READ_BYTES),
            ):
                monkeypatch.setattr(connections, "_LONG", long)
                client.sendall(b" " * 40_000)
                wait_for(lambda size=size: {connection.transport.max_size for connection in served} == {size})
        here.idle()


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_a_request_has_a_hundred_headers_at_most(end):
    def answer(head, before=b""):
        with socket.create_connection(("127.0.0.1", here.port), timeout=60) as client:
            client.sendall(before + b"GET /health HTTP/1.1" + end + b"Host: localhost" + end + head + end)
            client.shutdown(socket.SHUT_WR)
            with client.makefile("rb") as file:
                return re.findall(rb"HTTP/1.1 \d+|A request[\w ]+\.", file.read())

    refused = [b"HTTP/1.1 431", b"A request has 100 headers at most."]
    with serving(FakeModel(), Letters()) as here:
        assert answer((b"a: b" + end) * 99) == [b"HTTP/1.1 200"]
        assert answer((b"a: b" + end) * 100) == refused
        first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert answer((b"a: b" + end) * 250, before=first) == [b"HTTP/1.1 200", *refused]
        here.idle()


@pytest.mark.parametrize("head", [b"GET /health HTTP/1.1\r\nHost: localhost\r\na: ", b"GET /"])
def test_a_client_whose_headers_are_too_long_reads_why(head):
    with serving(FakeModel(), Letters()) as here, socket.create_connection(("127.0.0.1", here.port), 60) as client:
        for _ in range(20):  # closing a connection with unread data would reset it
            client.sendall((head + b"b" * 2**16).ljust(2**16))
            head = b""
        with client.makefile("rb") as file:
            told = file.read()
        assert told.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert told.endswith(b"A request's line and headers have 16,384 bytes at most.")
        here.idle()


def test_a_client_with_all_its_places_leaves_some_to_others():
    model = FakeModel()
    gate = threading.Event()
    model.before_pass = lambda: gate.wait(60)
    options = {"capacity": 8, "max_batch": 2, "keys": ["one", "two"], "limits": Limits(choices=2)}
    with serving(model, Letters(), **options) as here:
        first, second = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"prompt": "hello", "max_tokens": 3, "stream": True}
        answers = [here.open(body=body | {"n": 2}, headers=first) for _ in range(3)]
        status, headers, told = here.ask(body=body, headers=first)
        assert (status, told["error"]["code"]) == (429, "too_many_requests")
        assert int(headers["Retry-After"]) > 0
        answers.append(here.open(body=body, headers=second))
        gate.set()
        for connection, response in answers:
            with contextlib.closing(connection):
                assert response.read().endswith(b"[DONE]\n\n")
        here.idle()


def test_large_bodies_that_are_held_do_not_fill_memory_or_places():
    limits = Limits(body_bytes=200_000, client_seconds=30.0)
    with serving(FakeModel(), Letters(), capacity=4, limits=limits) as here, contextlib.ExitStack() as stack:
        for _ in range(40):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", here.port), timeout=60))
            client.sendall(request(b'{"prompt": "' + b"x" * 150_000, length=190_000))
        responses = here.service.metrics.responses
        wait_for(lambda: sum(responses["/v1/completions", status] for status in (408, 429)) >= 32)
        assert sum(body.size for body in here.service.bodies._held) <= 8 * 200_000
        assert here.ask(body={"prompt": "hello", "max_tokens": 3})[0] == 200
        time.sleep(1.1)
        # One that sends gets the room of one that does not.
        before = responses["/v1/completions", 408]
        status, _, told = here.ask(body={"prompt": "x" * 150_000})
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        wait_for(lambda: responses["/v1/completions", 408] > before)


@pytest.mark.quick("GET")
@pytest.mark.parametrize("more", [b"GET", b" " * 300_000])
def test_a_client_that_left_is_given_up_although_it_has_sent_more_than_was_read(more):
    model, gate = FakeModel(), threading.Event()
    model.before_pass = lambda: gate.wait(60)
    with serving(model, Letters()) as here:
        asked = request(json.dumps({"prompt": "hello", "max_tokens": 5, "ignore_eos": True}).encode())
        with socket.create_connection(("127.0.0.1", here.port), timeout=60) as left:
            left.sendall(asked + more)
            wait_for(lambda: here.service.active == 1)
            time.sleep(0.5)
            assert here.service.metrics.gone == 0
        wait_for(lambda: here.service.metrics.gone == 1, seconds=20)
        gate.set()
        here.idle()
        with socket.create_connection(("127.0.0.1", here.port), timeout=60) as half:
            half.sendall(asked + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            half.shutdown(socket.SHUT_WR)
            with half.makefile("rb") as file:
                assert file.read().count(b"HTTP/1.1 200") == 2


@pytest.mark.quick("True")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_gets_the_answer_and_one_that_left_is_given_up(stream):
    model = FakeModel()
    gate = threading.Event()
    with serving(model, Letters(), max_batch=4) as here:
        model.before_pass = lambda: gate.wait(60)
        body = {"prompt": "hello", "max_tokens": 5, "stream": stream, "ignore_eos": True}
        asked = request(json.dumps(body).encode())
        with socket.create_connection(("127.0.0.1", here.port), timeout=60) as half:
            half.sendall(asked)
            half.shutdown(socket.SHUT_WR)
            with socket.create_connection(("127.0.0.1", here.port), timeout=60) as left:
                left.sendall(asked)
                wait_for(lambda: here.service.active == 2)
            wait_for(lambda: here.service.metrics.gone == 1)
            time.sleep(1.5)
            assert here.service.metrics.gone == 1
            gate.set()
            response = http.client.HTTPResponse(half)
            response.begin()
            assert response.status == 200
            content = response.read()
            assert content.endswith(b"data: [DONE]\n\n") if stream else json.loads(content)["usage"]
            assert half.recv(10) == b""
        here.idle()
        wait_for(lambda: not here.server.server_state.connections)


def test_places_of_clients_that_left_are_free_before_the_pass_ends():
    model, begun, gate = FakeModel(), threading.Event(), threading.Event()
    model.before_pass = lambda: begun.set() or gate.wait(60)
    with serving(model, Letters(), capacity=12, max_batch=2, max_waiting=10) as here:
        body = json.dumps({"prompt": "hello", "n": 4, "stream": True}).encode()
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", here.port), timeout=60) as client:
                client.sendall(request(body))
                assert client.recv(20).startswith(b"HTTP/1.1 200")
                assert begun.wait(60)  # what is cancelled before ends at once
        wait_for(lambda: not here.service.active and here.engine.stats().waiting == 0)
        assert here.engine.stats().running == 2
        threading.Timer(0.2, gate.set).start()
        assert here.ask(body={"prompt": "hello", "n": 9, "max_tokens": 3})[0] == 200
        here.idle()
