"""What `kvconvert serve` refuses: OpenAI's errors with the right status, before anything reaches the engine."""

import contextlib
import http.client
import json
import re
import socket
import time

import pytest
from fake_model import FakeModel
from serving import Letters, request, serving, wait_for

from kvconvert.errors import UsageError
from kvconvert.serve.listen import bind
from kvconvert.serve.requests import Chat, Limits
from kvconvert.serve.responses import ResponsesChat

LIMITS = Limits(
    body_bytes=3000,
    prompt_tokens=500,
    new_tokens=200,
    choices=4,
    stops=2,
    stop_characters=5,
    client_seconds=0.5,
)


class Chatty(Letters):
    """Letters with a chat template."""

    chat_template = "{% for turn in messages %}{{ turn.role[0] }}:{{ turn.content }};{% endfor %}"


@pytest.fixture(scope="module")
def here():
    with serving(FakeModel(), Chatty(), kv_memory=5, limits=LIMITS) as here:
        yield here


COMPLETIONS = [
    (b"", 400, "invalid_json", "Invalid JSON: Expecting value"),
    (b"{", 400, "invalid_json", "Invalid JSON"),
    (b"[" * 2000, 400, "invalid_json", "nested too deeply"),
    (b'{"prompt": "\xff"}', 400, "invalid_json", "Invalid JSON"),
    (b'{"prompt": "\\ud800"}', 400, "invalid_json", "not UTF-8 text"),
    (b'{"prompt": "x", "metadata": 1e999}', 400, "invalid_json", "is too large"),
    (b"3", 400, "invalid_value", "should be an object"),
    ({"prompt": "x", "repetition_penalty": 1e-39}, 400, "invalid_value", r"greater than or equal to 0\.000001"),
    ({"prompt": "x", "logit_bias": {"01": 1}}, 400, "invalid_value", "'01' is no token id"),
    ({"prompt": "x", "logit_bias": {"99999": 1}}, 400, "invalid_value", "token 99999; the model's ids are 0 to"),
    ({}, 400, "invalid_value", "prompt: Field required"),
    ({"prompt": None}, 400, "invalid_value", "prompt: give text, token ids"),
    ({"prompt": []}, 400, "invalid_value", "prompt: give text, token ids"),
    ({"prompt": ["x", 3]}, 400, "invalid_value", "prompt: give text, token ids"),
    ({"prompt": [True]}, 400, "invalid_value", "prompt: give text, token ids"),
    ({"prompt": ""}, 400, None, "no tokens"),
    ({"prompt": [[]]}, 400, None, "no tokens"),
    ({"prompt": [1000]}, 400, None, "token 1000"),
    ({"prompt": [1] * 501}, 400, "context_length_exceeded", "501 tokens, which is too long.*at most 500"),
    ({"prompt": [1] * 500, "max_tokens": 141}, 400, "context_length_exceeded", "room for 140"),
    ({"prompt": [1] * 500, "max_tokens": 999}, 400, "context_length_exceeded", "room for 140"),  # not "at most 200"
    ({"prompt": "x", "max_tokens": 201}, 400, None, "max_tokens is 201; this server generates at most 200"),
    ({"prompt": "x", "max_tokens": 0}, 400, "invalid_value", "max_tokens: .*greater than or equal to 1"),
    ({"prompt": "x", "max_tokens": 3.5}, 400, "invalid_value", "max_tokens: .*valid integer"),
    ({"prompt": "x", "temperature": -1.0}, 400, None, "`temperature` is -1.0"),
    ({"prompt": "x", "temperature": "hot"}, 400, "invalid_value", "temperature: .*valid number"),
    (b'{"prompt": "x", "temperature": NaN}', 400, "invalid_json", "a number is none"),
    (b'{"prompt": "x", "temperature": 1e999}', 400, "invalid_json", "a number is none, is too large"),
    (b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}", 400, "invalid_value", "temperature: .*valid number"),
    (b'{"prompt": ["a", "b"], "n": ' + b"9" * 2300 + b"}", 400, "invalid_value", "n: .*less than or equal"),
    (b'{"prompt": [' + b"9" * 2300 + b"]}", 400, None, "give the ids of its tokens"),
    ({"prompt": "x", "top_p": 0.0}, 400, None, "`top_p` is 0.0"),
    ({"prompt": "x", "top_k": -2}, 400, None, "`top_k` is -2"),
    ({"prompt": "x", "seed": 2**64}, 400, "invalid_value", "seed: .*less than or equal"),
    ({"prompt": "x", "seed": True}, 400, "invalid_value", "seed: .*valid integer"),
    ({"prompt": "x", "n": 5}, 400, None, "n times prompts is 5; at most 4"),
    ({"prompt": ["x", "y", "z"], "n": 2}, 400, None, "n times prompts is 6; at most 4"),
    ({"prompt": "x", "stop": ["a", "b", "c"]}, 400, None, "stop may have 2 strings of 1 to 5 characters"),
    ({"prompt": "x", "stop": "abcdef"}, 400, None, "stop may have 2 strings of 1 to 5 characters"),
    ({"prompt": "x", "stop": [""]}, 400, None, "stop may have 2 strings of 1 to 5 characters"),
    ({"prompt": "x", "stop": [3]}, 400, "invalid_value", "stop.0: .*valid string"),
    ({"prompt": "x", "stream": "yes"}, 400, "invalid_value", "stream: .*valid boolean"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, None, "stream_options needs stream = true"),
    ({"prompt": "x", "stream": True, "stream_options": {"x": 1}}, 400, "unknown_parameter", r"stream_options\.x is no"),
    (
        {"prompt": "x", "stream": True, "stream_options": {"include_obfuscation": True}},
        *(400, "unsupported_parameter", r"stream_options\.include_obfuscation is not served"),
    ),
    ({"prompt": "x", "best_of": 3}, 400, "unsupported_parameter", "best_of is not served"),
    (
        {"prompt": "x", "\n" * 1200: 1},
        400,
        "unknown_parameter",
        r"^(\\n){100} is no field of this request; leave it out",
    ),
    (b'{"prompt": "x", "\\ud800": 1}', 400, "invalid_json", "not UTF-8 text"),
    ({"prompt": "x", "model": "m" * 257}, 400, "invalid_value", "model: .*256"),
    ({"prompt": "x", "echo": True}, 400, "unsupported_parameter", "echo is not served"),
    ({"prompt": "x", "frequency_penalty": 0.5}, 400, "unsupported_parameter", "frequency_penalty is not served"),
    ({"prompt": "x", "whatever": 1}, 400, "unknown_parameter", "whatever is no field"),
    ({"prompt": "x", "model": "other"}, 404, "model_not_found", "no model 'other'"),
    ({"prompt": "x", "user": "u" * 257}, 400, "invalid_value", "user: .*256"),
    (b'"' + b"x" * 3000 + b'"', 413, "body_too_long", "3,000 bytes at most"),
]
USER = {"role": "user", "content": "x"}
CHATS = [
    ({}, 400, "invalid_value", "messages: Field required"),
    ({"messages": []}, 400, "invalid_value", "messages: .*at least 1"),
    ({"messages": [{"role": "x", "content": "x"}]}, 400, "invalid_value", r"messages\.0\.role: .*'system'"),
    ({"messages": [{"role": "user"}]}, 400, "invalid_value", r"messages\.0\.content: Field required"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_value", r"messages\.0\.content: .*valid string"),
    ({"messages": [USER | {"x": 1}]}, 400, "unknown_parameter", r"messages\.0\.x is no field"),
    ({"messages": [USER | {"content": None}]}, 400, "invalid_value", r"messages\.0\.content: Field required"),
    (
        {"messages": [USER | {"content": [{"type": "text", "text": "x", "bold": 1}]}]},
        *(400, "unknown_parameter", "a part's bold is no field"),
    ),
    ({"messages": [USER | {"content": [{"type": "x" * 500}]}]}, 400, "invalid_value", "the type 'x{59} is not served"),
    ({"messages": [USER], "prompt": "x"}, 400, "unknown_parameter", "prompt is no field"),
    ({"messages": [USER], "response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({"messages": [USER], "reasoning": {"effort": "low"}}, 400, "unsupported_parameter", "reasoning.effort is not"),
    ({"messages": [USER], "max_tokens": 3, "max_completion_tokens": 3}, 400, None, "max_tokens is the older name"),
    ({"messages": [USER], "max_completion_tokens": 201}, 400, None, "max_completion_tokens is 201"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "context_length_exceeded", "603 tokens"),
]


def short(case):
    return str(case)[:40] if isinstance(case, dict | bytes) else None


@pytest.mark.parametrize(("body", "status", "code", "said"), COMPLETIONS, ids=short)
def test_a_completion_that_is_not_served(here, body, status, code, said):
    refused(here, "/v1/completions", body, status, code, said)


@pytest.mark.parametrize(("body", "status", "code", "said"), CHATS, ids=short)
def test_a_chat_that_is_not_served(here, body, status, code, said):
    refused(here, "/v1/chat/completions", body, status, code, said)


def refused(here, path, body, status, code, said):
    found, _, told = here.ask(path, body)
    assert (found, told["error"]["type"], told["error"]["code"]) == (status, "invalid_request_error", code)
    assert re.search(said, told["error"]["message"])
    assert "\n" not in told["error"]["message"]
    if named := re.match(r"`(\w+)` ", told["error"]["message"]):
        assert told["error"]["param"] == named[1]
    assert here.engine.stats().prompt_tokens == here.service.active == 0


def test_fields_that_ask_for_nothing_are_taken(here):
    idle = {"logprobs": None, "best_of": 1, "echo": False, "presence_penalty": 0, "logit_bias": {}, "suffix": None}
    with serving(FakeModel(), Chatty()) as fresh:
        assert fresh.ask(body={"prompt": "x", "max_tokens": 2, "seed": None, "stop": None} | idle)[0] == 200
        idle = {"logprobs": False, "tools": [], "response_format": {"type": "text"}, "n": 1, "temperature": 1}
        idle |= {"min_p": None, "another": None, "min_tokens": 0, "repetition_penalty": 1.0, "stream_options": {}}
        idle |= {"metadata": {"a": "b"}, "store": True, "service_tier": "flex", "cache_control": {"type": "x"}}
        answered = USER | {"role": "assistant", "refusal": None, "tool_calls": None, "reasoning_content": "so"}
        parts = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "annotations": []}]
        silent = {"role": "assistant", "content": None}
        turns = [USER, answered, USER | {"content": parts}, silent, USER]
        status, _, told = fresh.ask("/v1/chat/completions", {"messages": turns, "max_tokens": 2, "user": "me"} | idle)
        assert status == 200
        assert told["usage"]["prompt_tokens"] == len("u:x;a:x;u:x;a:;u:x;")
        options = {"include_usage": True, "include_obfuscation": False}
        connection, response = fresh.open(body={"prompt": "x", "stream": True, "stream_options": options})
        with contextlib.closing(connection):
            assert response.read().endswith(b"[DONE]\n\n")


def test_fields_that_change_nothing_are_dropped():
    idle = {"cache_control": {"type": "ephemeral"}}
    call = {"function": {"name": "f", "arguments": "{}"} | idle} | idle
    tool = {"type": "function", "function": {"name": "f"} | idle} | idle
    turn = {"role": "assistant", "tool_calls": [call]} | idle
    chat = Chat.of({"messages": [turn], "tools": [tool], "metadata": {"a": "b"}} | idle)
    chat.check(Limits(), 1)
    assert "cache_control" not in repr(chat)
    assert "metadata" not in repr(chat)
    response = ResponsesChat.of({"input": "x", "request_id": "7", "cache_salt": "s", "unknown": []} | idle)
    assert response == ResponsesChat.of({"input": "x"})


def test_null_stands_for_a_field_that_is_left_out_at_any_depth():
    call = {"type": None, "id": None, "function": {"name": "f", "arguments": None}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    form = {"type": "json_schema", "json_schema": {"schema": {}, "strict": None, "other": None}, "other": None}
    choice = {"type": "function", "function": {"name": "f", "other": None}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": None}}]
    chat = Chat.of({"messages": [turn], "tools": tools, "tool_choice": choice})
    chat.check(Limits(), 1)
    assert chat.messages[0].turn(False)["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert Chat.of({"messages": [turn], "response_format": form}).answer_schema == {}
    item = {"type": None, "role": "user", "content": "x", "status": None}
    assert ResponsesChat.of({"input": [item]}).messages[0].content == "x"


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/v1/nothing", "POST", {}, 404),
        ("/", "GET", {}, 404),
        ("/v1/completions", "GET", {}, 405),
        ("/v1/completions", "POST", {"Content-Type": "text/plain"}, 415),
        ("/v1/completions", "POST", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("/v1/completions", "POST", {"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
    ],
)
def test_another_path_method_or_type_is_refused(here, path, method, headers, status):
    found, answered, told = here.ask(path, b'{"prompt": "x"}' if method == "POST" else None, headers, method)
    assert found == status
    assert told["error"]["type"] == "invalid_request_error"
    if status == 405:
        assert told["error"]["message"] == "/v1/completions is not answered to GET; send POST."
        assert answered["Allow"] == "POST"


def test_a_key_is_needed_for_everything_that_costs_or_tells_something(capfd):
    keys = ["first-key", "second-\u00e9"]
    with serving(FakeModel(), Letters(), keys=keys) as here:
        ask = {"prompt": "x", "max_tokens": 1}
        for key in keys:
            given = {"Authorization": f"Bearer {key}".encode()}
            assert here.ask(body=ask, headers=given)[0] == 200
            assert here.ask("/v1/models", headers=given)[0] == 200
        wrong = ("", "Bearer", "Bearer ", "Bearer first-ke", "Bearer first-key2", "Basic first-key", "first-key")
        for value in wrong:
            status, headers, told = here.ask(body=ask, headers={"Authorization": value} if value else {})
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert told["error"]["code"] == "invalid_api_key"
        assert here.ask("/v1/models")[0] == 401
        assert here.ask("/v1/completions", b"x" * 10**6)[0] == 401
        assert here.ask("/health")[0] == 200
        assert here.metrics()['kvconvert_http_responses_total{path="/v1/completions",status="401"}'] == len(wrong) + 1
    assert "first-key" not in "".join(capfd.readouterr())


def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_long(here):
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=60)
    chunks = iter([b"x" * 1000] * 4)
    connection.request("POST", "/v1/completions", chunks, {"Content-Type": "application/json"}, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "body_too_long"
    connection.close()


def test_a_body_that_comes_too_slowly_is_refused(here):
    with socket.create_connection(("127.0.0.1", here.port), timeout=60) as client:
        client.sendall(request(b'{"prompt"', length=100))
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"])
def test_a_connection_on_which_no_request_comes_is_closed(here, sent):
    with socket.create_connection(("127.0.0.1", here.port), timeout=60) as client:
        client.sendall(sent)
        begun, closed = time.monotonic(), False
        while not closed and time.monotonic() < begun + 20:
            try:
                closed = not client.recv(1000)
            except ConnectionResetError:
                closed = True
        assert closed
    wait_for(lambda: not here.server.server_state.connections)


def test_a_port_that_is_taken_and_a_host_that_does_not_exist_are_refused(here):
    with pytest.raises(UsageError, match=f"127.0.0.1:{here.port} cannot be served .*choose another `host` or `port`"):
        bind("127.0.0.1", here.port)
    with pytest.raises(UsageError, match=r"no\.such\.host\.invalid:1 cannot be served"):
        bind("no.such.host.invalid", 1)
    for host in ("a" * 300, "a..b", "\ud800"):
        with pytest.raises(UsageError, match=r"^[^\n]{1,81}:1 cannot be served \(this is no name of a host\)"):
            bind(host, 1)


def test_a_port_is_taken_from_the_beginning():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port} cannot be served"):
            bind("127.0.0.1", port)
