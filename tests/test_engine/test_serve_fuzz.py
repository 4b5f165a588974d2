"""Whatever a body holds, it is served or refused in a sentence, soon, and nothing of it is kept."""

import json
import math
import time

import pytest
from fake_model import FakeModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import NAME, Letters, serving

from kvconvert.serve.requests import IGNORED, UNSERVED, Chat, Completion, Limits
from kvconvert.serve.responses import ResponsesChat

LIMITS = Limits(body_bytes=2**18, new_tokens=3, client_seconds=10.0)
HOSTILE = [
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 1e-46, 1e-300, 1e39, 1.7e308, math.nan, math.inf, -math.inf),
    *(2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400, 10**4299, -(10**4299)),
    *("", "x", "\x00", "\ud800", "\U0010ffff", "a" * 70_000, "{{ 7 * 7 }}", "\n" * 1000),
    *([], {}, [[]], [{}], [None], [0] * 30_000, [[0]] * 9000, ["x"] * 17, {"": {"": []}}, [10**4299]),
    {f"key {n}": n for n in range(5000)},
]


class Chatty(Letters):
    """Letters with a chat template."""

    chat_template = (
        "{% for turn in messages %}{{ turn.role[0] }}:{{ turn.content }}{% for call in turn.tool_calls %}<c>"
        """{{ '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}}</c>"""
        "{% endfor %};{% endfor %}"
    )


def nested(depth):
    return st.sampled_from("[{").map(lambda kind: Raw(("[" if kind == "[" else '{"a":') * depth))


class Raw(str):
    """JSON as it is sent."""


def written(value):
    """JSON of a value that may hold raw JSON and numbers that are none."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(item, dict | list | Raw) for item in value):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


VALUES = st.one_of(
    st.sampled_from(HOSTILE),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=8,
    ),
    st.integers(1, 100_000).flatmap(nested),
)
GOOD = {
    **{"model": [NAME], "max_tokens": [1, 2], "max_completion_tokens": [1], "temperature": [0, 1.0, 1e-45, 3e38]},
    **{"top_p": [1.0, 1e-300, 0.9], "top_k": [0, 2, 2**63 - 1], "n": [1, 3, 16], "seed": [7, -(2**63), 2**63 - 1]},
    **{"stop": ["a", ["b"] * 16], "ignore_eos": [True], "stream": [True, False], "user": ["me"]},
    "stream_options": [{"include_usage": True}, {"include_obfuscation": False}],
    "prompt": ["hello", [1, 2, 3], ["a", [4]]],
    "messages": [[{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": "assistant"}]],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], []],
    "tool_choice": ["auto", "required", {"type": "function", "function": {"name": "f"}}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}],
    "logprobs": [True, 1],
    "top_logprobs": [2],
    "logit_bias": [{"5": 3}],
    "chat_template_kwargs": [{"a": 1}],
    "input": ["x", [{"role": "user", "content": "x"}, {"type": "function_call_output", "call_id": "1", "output": "y"}]],
    "instructions": ["x"],
    "max_output_tokens": [2],
    "text": [{"format": {"type": "text"}}],
}
PART = st.dictionaries(st.sampled_from(["type", "text", "cache_control", "x"]), st.just("text") | VALUES)
PART |= st.sampled_from(["text", "image_url"])
ROLE = st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | VALUES
ARGUMENTS = ("{}", "", "[", "3", "[" * 900 + "]" * 900, '{"a":' * 700 + "1" + "}" * 700)
CALLS = [[{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}] for text in ARGUMENTS]
TURN = st.fixed_dictionaries(
    {"role": ROLE},
    optional={"content": VALUES | st.lists(PART, max_size=3)}
    | dict.fromkeys(["name", "refusal", "tool_call_id", "reasoning_content"], VALUES)
    | {"tool_calls": st.sampled_from(CALLS) | VALUES},
)
TURNS = st.lists(TURN | VALUES, max_size=4) | VALUES


def bodies(kind):
    """Bodies of one kind of request: good ones of which some fields were changed."""
    own = ("input", "instructions", "max_output_tokens", "text") if kind is ResponsesChat else ()
    fields = [*own, *kind.model_fields, *UNSERVED, *sorted(IGNORED), "whatever", "\ud800"]
    values = {name: st.sampled_from(GOOD[name]) if name in GOOD else VALUES for name in fields}
    optional = {name: values[name] for name in GOOD if name in fields and name != kind.prompt_field}
    good = st.fixed_dictionaries({kind.prompt_field: values[kind.prompt_field]}, optional=optional)
    changes = st.dictionaries(st.sampled_from(fields), VALUES, max_size=2)
    changed = st.tuples(good, changes).map(lambda both: both[0] | both[1])
    if kind is Chat:
        changed |= st.tuples(good, TURNS).map(lambda both: both[0] | {"messages": both[1]})
    if kind is ResponsesChat:
        changed |= st.tuples(good, TURNS).map(lambda both: both[0] | {"input": both[1]})
    text = changed.map(lambda fields: written(fields).encode("utf8", "surrogatepass"))
    cut = st.tuples(text, st.integers(0, 100), st.binary(max_size=3)).map(
        lambda t: t[0][: t[1]] + t[2] + t[0][t[1] + 1 :]
    )
    return text | cut | VALUES.map(lambda value: written(value).encode("utf8", "surrogatepass"))


@pytest.fixture(scope="module")
def here():
    with serving(FakeModel(max_positions=600), Chatty(), limits=LIMITS, prompt_chunk=128) as here:
        assert here.ask("/v1/chat/completions", {"messages": GOOD["messages"][0]})[0] == 200  # its process has started
        yield here


def memory():
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


PATHS = {Completion: "/v1/completions", Chat: "/v1/chat/completions", ResponsesChat: "/v1/responses"}


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("count", [15, pytest.param(4000, marks=pytest.mark.full)])
def test_any_body_is_served_or_refused_in_a_sentence(here, kind, count):
    path = PATHS[kind]
    before = memory()

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(kind))
    def check(body):
        begun = time.monotonic()
        connection, response = here.open(path, body)
        content = response.read()
        connection.close()
        assert time.monotonic() - begun < 10
        assert response.status in (200, 400, 404, 413), content
        if response.status != 200:
            error = json.loads(content)["error"]
            assert error["type"] == "invalid_request_error"
            assert len(content) < 10_000
            assert "\n" not in error["message"]
        else:
            assert b'"error":{' not in content

    check()
    here.idle()
    assert not here.service.active
    assert memory() - before < 200 * 2**20
