"""What agents ask of `kvconvert serve`: tools, answers in a form, reasoning, logprobs, and biases."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
import torch
from fake_model import FakeModel
from pydantic import BaseModel
from serving import NAME, Letters, serving, wait_for

from kvconvert import load
from kvconvert.models.responses import PROBE_NAME, CallFormat
from kvconvert.runtime.engine import sampling
from kvconvert.serve.forms import Step
from kvconvert.serve.grammars import MOST_WAITING
from kvconvert.serve.refusal import Refusal
from kvconvert.serve.replies import Piece
from kvconvert.serve.requests import Message
from kvconvert.serve.responses import ResponsesChat, ResponsesForm

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function | tojson }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    """{% for c in m.tool_calls %}<call>{{ '{"name": "' + c.function.name + '", "arguments": ' }}"""
    "{{ c.function.arguments | tojson }}}</call>{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if thinks %}<think>{% endif %}{% endif %}{# </think> #}"
)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER}}]
TURNS = [{"role": "user", "content": "Oslo?"}]
CALL = '<call>{"name": "weather", "arguments": {"city": "Oslo"}}</call>'


class Templated(Letters):
    """Letters with a template of tools."""

    chat_template = TEMPLATE


class Scripted(FakeModel):
    """Says what it is told after "assistant:", and the prompt's answer by hash where it is told nothing."""

    says = ""

    def _read(self, cache, ids, positions):
        logits = super()._read(cache, ids, positions)
        for row, sequence in enumerate(cache.rows):
            _, begun, said = Letters().decode(sequence or [], False).rpartition("assistant:")
            if begun and self.says:
                rest = self.says.removeprefix("<think>") if said.startswith("<think>") else self.says
                count = len(said.removeprefix("<think>")) if said.startswith("<think>") else len(said)
                logits[row, 0, ord(rest[count]) - 31 if count < len(rest) else 0] += 1000
        return logits


@pytest.fixture(scope="module")
def model():
    return Scripted()


@pytest.fixture(scope="module")
def here(model):
    with serving(model, Templated()) as here:
        yield here


@pytest.fixture(scope="module")
def client(here):
    with here.client() as client:
        yield client


@pytest.mark.parametrize("stream", [True, False])
def test_a_tool_is_called_and_its_result_is_answered(here, model, client, stream):
    def ask(messages, **options):
        options = {"model": NAME, "messages": messages, "tools": TOOLS, "temperature": 0} | options
        if not stream:
            return client.chat.completions.create(**options).choices[0]
        with client.chat.completions.stream(**options) as events:
            for _ in events:
                pass
            return events.get_final_completion().choices[0]

    model.says = "I look. " + CALL
    choice = ask(TURNS, tool_choice="auto")
    assert (choice.finish_reason, choice.message.content.strip()) == ("tool_calls", "I look.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", '{"city": "Oslo"}')
    model.says = "Rain."
    called = {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]}
    called["tool_calls"][0].pop("index", None)
    read = here.engine.stats().prompt_tokens
    told = [*TURNS, called, {"role": "tool", "tool_call_id": call.id, "content": "wet"}]
    choice = ask(told)
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "Rain.", None)
    prompt = json.dumps(TOOLS[0]["function"]) + ";user:Oslo?;assistant:" + CALL + ";tool:wet;assistant:"
    assert here.engine.stats().prompt_tokens - read == len(prompt)


def test_without_tools_a_call_is_text(model, client):
    model.says = CALL
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = client.chat.completions.create(model=NAME, messages=TURNS, temperature=0, **options).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_several_calls_are_one_where_the_client_says_so(model, client):
    model.says = CALL + CALL.replace("Oslo", "Bergen")
    ask = {"model": NAME, "messages": TURNS, "temperature": 0, "tools": TOOLS}
    for parallel, cities in ((True, ["Oslo", "Bergen"]), (False, ["Oslo"])):
        message = client.chat.completions.create(**ask, parallel_tool_calls=parallel).choices[0].message
        assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == cities


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_reasoning_is_no_content(here, model, stream, thinks):
    model.says = "<think>Two and two.</think> Four."
    body = {"messages": TURNS, "temperature": 0, "stream": stream, "chat_template_kwargs": {"thinks": thinks}}
    if not stream:
        message = here.ask("/v1/chat/completions", body)[2]["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Four.")
        return
    connection, response = here.open("/v1/chat/completions", body)
    with contextlib.closing(connection):
        events = response.read().decode().split("\n\n")[:-2]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Two and two."
    assert "".join(delta.get("content", "") for delta in deltas) == "Four."


@pytest.mark.parametrize("variable", [{"answer": False}, {"add_generation_prompt": True}])
def test_a_variable_of_the_template_may_have_any_name(here, model, variable):
    model.says = "Four."
    body = {"messages": TURNS, "temperature": 0, "chat_template_kwargs": variable}
    status, _, told = here.ask("/v1/chat/completions", body)
    assert status == 200, told
    assert told["choices"][0]["message"]["content"] == "Four."


@pytest.mark.parametrize(
    "variable",
    [
        *[{"messages": False}, {"tools": "x"}, {"self": 1}, {"chat_template": "{{ 1 }}"}, {"eos_token": "x"}],
        *[{"add_generation_prompt": False}, {"continue_final_message": True}],
    ],
    ids=str,
)
def test_what_a_template_gets_from_others_is_no_variable(here, variable):
    body = {"messages": TURNS, "temperature": 0, "chat_template_kwargs": variable}
    status, _, told = here.ask("/v1/chat/completions", body)
    assert (status, told["error"]["param"]) == (400, f"chat_template_kwargs.{next(iter(variable))}")


@pytest.mark.parametrize(
    ("arguments", "written"),
    [("null", "{}"), ('{"a": "\\ud800"}', None), ('{"a": 1e999}', None), ('{"a": "\\ud83d\\ude00"}', '{"a": "😀"}')],
)
def test_arguments_that_no_template_can_write_are_text(arguments, written):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    turn = Message.model_validate(call).turn(arguments_as_text=False)
    found = turn["tool_calls"][0]["function"]["arguments"]
    assert found == (arguments if written is None else json.loads(written))


def test_how_likely_each_token_was_is_told_in_both_forms(model, client):
    model.says = ""
    chat = {"model": NAME, "messages": TURNS, "temperature": 0, "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=3).choices[0]
    assert whole.message.content == "".join(token.token for token in whole.logprobs.content)
    assert len(whole.logprobs.content) == 4
    for token in whole.logprobs.content:
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob > token.top_logprobs[1].logprob > -10
        assert bytes(token.bytes).decode() == token.token
    streamed = client.chat.completions.create(**chat, logprobs=True, top_logprobs=3, stream=True)
    pieces = [piece.choices[0].logprobs for piece in streamed]
    assert [token for piece in pieces if piece for token in piece.content] == whole.logprobs.content
    plain = client.chat.completions.create(**chat, logprobs=True).choices[0].logprobs.content
    assert [token.logprob for token in plain] == [token.logprob for token in whole.logprobs.content]
    assert not any(token.top_logprobs for token in plain)
    text = {"model": NAME, "prompt": "user:Oslo?;assistant:", "temperature": 0, "max_tokens": 4}
    text |= {"extra_body": {"ignore_eos": True}}
    told = client.completions.create(**text, logprobs=2).choices[0].logprobs
    assert told.tokens == [token.token for token in whole.logprobs.content]
    assert told.token_logprobs == [token.logprob for token in whole.logprobs.content]
    assert [len(likeliest) for likeliest in told.top_logprobs] == [2] * 4
    assert told.text_offset == [0, 1, 2, 3]
    streamed = [piece.choices[0].logprobs for piece in client.completions.create(**text, logprobs=2, stream=True)]
    assert [offset for piece in streamed if piece for offset in piece.text_offset] == told.text_offset


def test_log_probabilities_are_those_of_the_logits():
    logits = torch.randn(3, 50)
    chosen = torch.tensor([4, 9, 49])
    packed = sampling.log_probabilities(logits, chosen, 2).tolist()
    expected = logits.log_softmax(-1)
    for row, numbers in enumerate(packed):
        told = sampling.TokenLogprobs.of(numbers, 1)
        assert told.chosen == pytest.approx(expected[row, chosen[row]].item())
        assert told.likeliest == ((expected[row].argmax().item(), pytest.approx(expected[row].max().item())),)


@pytest.mark.parametrize("stream", [True, False])
def test_the_responses_interface_is_the_same_in_other_words(model, client, stream):
    function = {"type": "function", **TOOLS[0]["function"]}

    def ask(**options):
        if not stream:
            return client.responses.create(model=NAME, temperature=0, **options)
        with client.responses.stream(model=NAME, temperature=0, **options) as stream_of_events:
            events = list(stream_of_events)
        assert events[0].type == "response.created"
        assert events[-1].type in ("response.completed", "response.incomplete")
        return events[-1].response

    model.says = "<think>Hm.</think>I look. " + CALL
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]}]
    called = ask(input=asked, tools=[function], instructions="Be brief.")
    assert called.status == "completed"
    thought, said, call = called.output
    assert called.usage.output_tokens_details.reasoning_tokens == len(">Hm.</think>")
    assert (thought.type, thought.content[0].text, said.content[0].text.strip()) == ("reasoning", "Hm.", "I look.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Oslo"})
    model.says = "Rain."
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    items = [item.to_dict(exclude_none=True) for item in called.output]
    final = ask(input=[*asked, *items, result], tools=[function])
    assert (final.output_text, final.usage.output_tokens) == ("Rain.", len("Rain.") + 1)
    short = ask(input="Oslo?", max_output_tokens=2)
    assert (short.status, short.output_text) == ("incomplete", "Ra")
    assert short.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": [{"type": "web_search_call"}]}, "input.0.type: 'web_search_call' is not served"),
        ({"input": 3}, "input: give text"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type: 'web_search' is not served"),
        (
            {"input": "x", "previous_response_id": "r"},
            "which keeps no responses",
        ),
        ({"input": "x", "truncation": "auto"}, "truncation is not served by kvconvert; leave it out."),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include is not served"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "image_url of a part is no object",
        ),
        (
            {
                "input": [
                    {"role": "assistant", "content": "x", "tool_calls": "y"},
                    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
                ]
            },
            "input.0.tool_calls: give a list",
        ),
        ({"input": "x", "max_output_tokens": 10**8}, "max_output_tokens is 100,000,000, but after a prompt of 1"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens: Input should be"),
        ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format is not served: the model's"),
        ({"input": [{"role": "user"}]}, "input.content: Field required"),
        ({"input": [{"role": "messages"}]}, "input.role: Input should be"),
    ],
)
def test_a_response_that_cannot_be_served_is_a_sentence(here, body, said):
    status, _, told = here.ask("/v1/responses", body)
    assert status == 400
    assert said in told["error"]["message"]
    assert told["error"]["param"] not in ("messages", "max_completion_tokens", "response_format")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"instructions": 5}, "instructions: give text."),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort is not served by kvconvert; leave it out."),
        ({"stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats is not served here"),
        ({"messages": TURNS}, "messages is not served by kvconvert; did you mean input?"),
        ({"max_completion_tokens": 5}, "is not served by kvconvert; did you mean max_output_tokens?"),
        ({"max_tokens": 5}, "max_tokens is not served by kvconvert; did you mean max_output_tokens?"),
        ({"response_format": {"type": "text"}}, "is not served by kvconvert; did you mean text.format?"),
        ({"temprature": 0}, "temprature is not served by kvconvert; did you mean temperature?"),
        ({"tool_choice": {"type": "allowed_tools"}}, 'required, or {"type": "function", "name": NAME}.'),
        ({"input": [{"type": "x"}]}, "'x' is not served; give messages, calls of functions, and outputs."),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name: String should match"),
        ({"tools": [{"type": "function", "name": "f", "x": 1}]}, "tools.0.x is no field of this request"),
    ],
)
def test_a_refusal_of_a_response_names_the_fields_that_were_sent(here, body, said):
    status, _, told = here.ask("/v1/responses", {"input": "x"} | body)
    assert status == 400
    assert said in told["error"]["message"]
    assert told["error"]["param"].partition(".")[0] == next(iter(body))


def test_a_response_begins_with_the_same_spaces_whether_it_is_streamed_or_not():
    asked = ResponsesChat.of({"input": "x"})
    usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    usage |= {"prompt_tokens_details": {}, "completion_tokens_details": {"reasoning_tokens": 2}}
    for said in (["\n", " ", "Rain."], ["\n", " "]):
        whole, streamed = (ResponsesForm(asked, "tiny", None) for _ in range(2))
        text = [item["content"][0]["text"] for item in whole.whole([Step(Piece("".join(said)))], usage)["output"]]
        events = [line for part in said for line in streamed.events({0: Step(Piece(part))})]
        told = [json.loads(event.partition("data: ")[2]) for event in events]
        deltas = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
        assert text == ([deltas] if deltas else []) == (["\n Rain."] if "Rain." in said else [])


REFUSED = [
    ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": TOOLS * 2}, "two functions have one name"),
    ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "at most 128"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 2**18}}]}, "262,144 bytes at most"),
    ({"tool_choice": "required"}, "there are no tools"),
    *(
        ({"tools": TOOLS, "tool_choice": wrong}, 'required, or {"type": "function", "function": {"name": NAME}}.')
        for wrong in ("any", 5, {"type": "function", "name": "f"}, {"type": "function", "function": {"name": 5}})
    ),
    ({"chat_template_kwargs": {"x": []}}, "chat_template_kwargs.x: give text, a number, true or false."),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "there is no tool 'x'"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "leave one of them out"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice is not served: the model's tokenizer"),
    ({"response_format": {"type": "json_object"}}, "response_format is not served: the model's tokenizer"),
    ({"response_format": {"type": "json_schema"}}, "json_schema belongs to the type json_schema"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "leave ignore_eos out"),
    ({"max_token": 3}, "max_token is no field of this request; did you mean max_tokens?"),
    ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "less than or equal to 20"),
    ({"logprobs": True, "top_logprobs": 20, "n": 16, "max_tokens": 4000}, "could have 1,344,000; lower max_tokens"),
    ({"logit_bias": {"x": 1}}, "'x' is no token id"),
    ({"logit_bias": {"5": 101}}, "less than or equal to 100"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "at most 1024"),
    ({"messages": [{"role": "tool"}]}, "messages.0.content: Field required"),
    ({"messages": [*TURNS, {"role": "user", "content": "x", "tool_calls": []}]}, None),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "no object with a url",
    ),
    ({"messages": [{"role": "user", "content": ["text"]}]}, "a part is an object with a type, not 'text'"),
    ({"messages": [{"role": "user", "content": ["image_url"]}]}, "a part is an object with a type, not 'image_url'"),
    ({"presence_penalty": 0.5}, "presence_penalty is not served"),
    ({"chat_template_kwargs": {"x" * 3000: None}}, "give text, a number, true or false."),
]


@pytest.mark.parametrize(("body", "said"), REFUSED)
def test_what_cannot_be_served_is_a_sentence(here, body, said):
    status, _, told = here.ask("/v1/chat/completions", {"messages": TURNS, "max_tokens": 2} | body)
    if said is None:
        assert status == 200
        return
    assert status == 400
    assert said in told["error"]["message"]
    assert "\n" not in told["error"]["message"]


@pytest.mark.parametrize("depth", [100, 400, 900, 5000])
@pytest.mark.parametrize("where", ["tool", "arguments", "schema"])
def test_nothing_that_is_nested_deeply_fails_the_server(here, where, depth):
    nested = '{"a":' * depth + "{}" + "}" * depth
    body = {"messages": TURNS, "tools": TOOLS, "max_tokens": 2}
    if where == "arguments":
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": nested}}
        body["messages"] = [*TURNS, {"role": "assistant", "tool_calls": [call]}, *TURNS]
    elif where == "tool":
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": "NESTED"}}]
    else:
        body = {"messages": TURNS, "response_format": {"type": "json_schema", "json_schema": {"schema": "NESTED"}}}
    status, _, told = here.ask("/v1/chat/completions", json.dumps(body).replace('"NESTED"', nested).encode())
    assert status == 400 or (status == 200 and where != "schema"), told
    if status == 400:
        assert "\n" not in told["error"]["message"]


def test_a_template_without_tools_is_told():
    tokenizer = Letters()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(FakeModel(), tokenizer) as here:
        status, _, told = here.ask("/v1/chat/completions", {"messages": TURNS, "tools": TOOLS})
        assert status == 400
        assert "chat template writes no calls of tools" in told["error"]["message"]


class Person(BaseModel):
    """A schema as the `openai` package makes it."""

    name: Literal["Ann", "Bob"]
    age: int
    tags: list[str]


@pytest.fixture(scope="module")
def tiny(converted):
    """A model of random weights, which follows no form by itself."""
    model, tokenizer = load(converted / "bundle", dtype=torch.float32)
    tokenizer.chat_template = TEMPLATE.partition("{# ")[0]  # which does not reason
    with serving(model, tokenizer, max_batch=3) as here:
        yield here


def test_biases_and_penalties_change_what_is_said(tiny):
    def tokens(**options):
        ask = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 0} | options
        status, _, told = tiny.ask(body=ask)
        return told["choices"][0]["logprobs"]["tokens"] if status == 200 else told["error"]["message"]

    plain, letter = tokens(), tiny.service.texts.text(40)
    assert tokens(logit_bias={"40": 100}) == [letter] * 5
    first = next(id for id in range(4096) if tiny.service.texts.text(id) == plain[0])
    assert tokens(logit_bias={str(first): -100})[0] != plain[0]
    assert len(set(tokens(logit_bias={"40": 3}, repetition_penalty=50.0))) == 5
    assert tokens(repetition_penalty=1.0, min_p=0) == plain
    assert "the model's ids are 0 to 4095" in tokens(logit_bias={"4096": 1})


def schema(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def test_an_answer_follows_its_schema_whatever_the_model_likes(tiny):
    strict = schema(name={"type": "string", "maxLength": 5}, age={"enum": [1, 20, 300]}, ok={"type": "boolean"})
    named = {"name": "person", "schema": strict, "strict": True}
    body = {"messages": TURNS, "n": 2, "seed": 1, "temperature": 2.0, "max_tokens": 400}
    body["response_format"] = {"type": "json_schema", "json_schema": named}
    first = tiny.ask("/v1/chat/completions", body)[2]["choices"]
    assert [choice["finish_reason"] for choice in first] == ["stop"] * 2
    for choice in first:
        said = json.loads(choice["message"]["content"])
        assert [*said] == ["name", "age", "ok"]
        assert len(said["name"]) <= 5
        assert said["age"] in (1, 20, 300)
    assert len({choice["message"]["content"] for choice in first}) > 1
    assert tiny.ask("/v1/chat/completions", body)[2]["choices"] == first
    tiny.idle()


def test_schemas_that_nothing_fits_or_that_are_too_deep_are_refused_in_plain_words(tiny):
    deep = {}
    for _ in range(300):
        deep = {"properties": {"a": deep}}
    for asked, said in (
        ({"$ref": "#"}, "No answer fits its JSON schema, as where a $ref leads to itself; change the schema."),
        (deep, "response_format cannot be served: it is nested too deeply; change its JSON schema."),
    ):
        form = {"type": "json_schema", "json_schema": {"schema": asked}}
        status, _, told = tiny.ask("/v1/chat/completions", {"messages": TURNS, "response_format": form})
        assert (status, told["error"]["message"]) == (400, said)
    tools = [{"type": "function", "function": {"name": "look", "parameters": deep}}]
    status, _, told = tiny.ask("/v1/chat/completions", {"messages": TURNS, "tools": tools})
    assert (status, told["error"]["message"][-19:]) == (400, "nested too deeply).")
    for nothing in ({"$ref": "#"}, {"type": "object", "properties": {"a": False}, "required": ["a"]}):
        tools[0]["function"]["parameters"] = nothing
        asked = {"messages": TURNS, "tools": tools, "tool_choice": "required"}
        status, _, told = tiny.ask("/v1/chat/completions", asked)
        assert (status, told["error"]["param"]) == (400, "tools")


def test_a_required_call_is_one_of_the_tools(tiny):
    tools = [
        {"type": "function", "function": {"name": f"tool-{n}", "parameters": schema(x={"enum": [n, n + 1]})}}
        for n in range(2)
    ]
    body = {"messages": TURNS, "n": 2, "seed": 3, "temperature": 1.0, "tools": tools, "max_tokens": 250}
    forced = {"type": "function", "function": {"name": "tool-1"}}
    for choice in ("required", forced):
        status, _, told = tiny.ask("/v1/chat/completions", body | {"tool_choice": choice})
        assert status == 200, told
        answered = told["choices"]
        assert [one["finish_reason"] for one in answered] == ["tool_calls"] * 2
        for one in answered:
            (call,) = one["message"]["tool_calls"]
            number = int(call["function"]["name"].removeprefix("tool-"))
            assert json.loads(call["function"]["arguments"])["x"] in (number, number + 1)
            assert choice == "required" or number == 1


def test_an_answer_in_a_form_may_call_tools_before(tiny):
    """As agents ask that want an object in the end."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema(x={"enum": [1]})}}]
    form = {"type": "json_schema", "json_schema": {"schema": schema(name={"enum": ["look"]}, y={"enum": [2]})}}
    body = {"messages": TURNS, "n": 6, "seed": 5, "temperature": 1.0, "max_tokens": 100}
    answered = tiny.ask("/v1/chat/completions", body | {"tools": tools, "response_format": form})[2]["choices"]
    calls = [one["message"].get("tool_calls") for one in answered]
    assert any(calls)
    assert not all(calls)
    for one, called in zip(answered, calls, strict=True):
        said = called[0]["function"]["arguments"] if called else one["message"]["content"]
        assert json.loads(said) == ({"x": 1} if called else {"name": "look", "y": 2})


def test_reasoning_that_a_prompt_has_ended_does_not_begin_again(converted):
    """As where `enable_thinking` is false."""
    model, tokenizer = load(converted / "bundle", dtype=torch.float32)
    tokenizer.chat_template = TEMPLATE.replace("{# </think> #}", "{% if ended %}<think></think>{% endif %}")
    (begin,) = (id for id in range(tokenizer.vocab_size) if tokenizer.decode([id]) == "<")
    form = {"type": "json_schema", "json_schema": {"schema": schema(y={"enum": [2]})}}
    body = {"messages": TURNS, "temperature": 0, "max_tokens": 50, "response_format": form, "logit_bias": {begin: 100}}
    with serving(model, tokenizer, max_batch=3) as here:
        begun, ended = (
            here.ask("/v1/chat/completions", body | {"chat_template_kwargs": {"ended": ended}})[2]["choices"][0]
            for ended in (False, True)
        )
    assert begun["message"].get("reasoning_content")
    assert not ended["message"].get("reasoning_content")
    assert ended["message"]["content"].startswith("{")


def test_schemas_of_all_tools_together_are_bounded(tiny):
    large = schema(**{f"p{n}": {"type": "string"} for n in range(300)})
    format = CallFormat("json", "<call>", "</call>", f'<call>{{"name": "{PROBE_NAME}", "arguments": ', "}</call>")
    with pytest.raises(Refusal, match="all JSON schemas may have 131,072 bytes at most"):
        tiny.service._grammars.of(None, format, {f"f{n}": large for n in range(20)}, None, "tool_choice")


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        ({"$ref": "http://127.0.0.1/x"}, "retriever does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "retriever does not fetch"),
        ({"type": "string", "pattern": "("}, "served: regex parse error: unclosed group; change its JSON schema."),
        ({"type": "thing"}, "response_format cannot be served: Invalid type: thing; change its JSON schema."),
        ({"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83)]}, "too much time or memory"),
        ({"type": "integer", "multipleOf": 10**6 + 3}, "too much time or memory"),
        ({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3000)}}, "32,768 bytes at most"),
        ({"anyOf": [{"type": "object", "properties": {str(n): {} for n in range(20)}} for _ in range(70)]}, None),
        ({"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}, None),
        ({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}, None),
        (
            {
                "$ref": "#/$defs/0",
                "$defs": {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(30)},
            },
            None,
        ),
    ],
)
def test_a_schema_takes_little_or_is_refused(tiny, hostile, said):
    body = {"messages": TURNS, "max_tokens": 3, "response_format": {"type": "json_schema"}}
    body["response_format"]["json_schema"] = {"schema": hostile}
    status, _, told = tiny.ask("/v1/chat/completions", body)
    assert (status, "error" in told) in ((400, True), (200, False))
    if said is not None:
        assert said in told["error"]["message"]
    tiny.idle()


@pytest.mark.parametrize(
    "forced", [{"const": "ab" * 15000}, {"type": "string", "pattern": "^(ab){15000}$"}, {"enum": [["ab"] * 3000]}]
)
def test_a_long_text_that_has_to_follow_is_not_read_anew_for_each_token(tiny, forced):
    constraint = tiny.service._grammars.of(forced, None, {}, None, "response_format")
    assert constraint._matcher.compute_ff_tokens() == []


def test_schemas_that_are_compiled_hold_up_nobody_who_has_none(tiny, monkeypatch):
    """Also of the same client."""
    wait, compile = threading.Event(), tiny.service._renderer.try_grammar

    def late(*arguments):
        assert wait.wait(60)
        return compile(*arguments)

    monkeypatch.setattr(tiny.service._renderer, "try_grammar", late)
    form = {"type": "json_schema", "json_schema": {"schema": schema(x={"enum": [1]})}}
    body = {"messages": TURNS, "max_tokens": 3}
    with ThreadPoolExecutor(8) as pool:
        held = [pool.submit(tiny.ask, "/v1/chat/completions", body | {"response_format": form}) for _ in range(8)]
        wait_for(lambda: tiny.service.active == 8)
        try:
            assert tiny.ask("/v1/chat/completions", body)[0] == 200
            assert tiny.ask("/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
            assert not any(answer.done() for answer in held)
        finally:
            wait.set()
        assert [answer.result(timeout=60)[0] for answer in held] == [200] * 8
    tiny.idle()


def asking(schema):
    return {"messages": TURNS, "max_tokens": 3, "response_format": {"type": "json_schema", "json_schema": schema}}


def test_a_schema_is_tried_once_whether_it_is_compiled_or_takes_too_long(tiny, monkeypatch):
    tried, compile = [], tiny.service._renderer.try_grammar
    monkeypatch.setattr(tiny.service._renderer, "try_grammar", lambda *a: (tried.append(a), compile(*a)))
    hostile = asking({"schema": {"allOf": [{"type": "integer", "multipleOf": n} for n in (101, 89, 83, 79)]}})
    for body, status in ((hostile, 400), (asking({"schema": schema(once={"enum": [7]})}), 200)):
        tried.clear()
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda _, body=body: tiny.ask("/v1/chat/completions", body), range(12)))
        assert [answer[0] for answer in answers] == [status] * 12
        assert len(tried) == 1
    tiny.idle()


def test_what_is_kept_of_schemas_is_bounded_and_of_one_salt(tiny, monkeypatch):
    grammars, tried = tiny.service._grammars, []
    monkeypatch.setattr(tiny.service._renderer, "try_grammar", lambda grammar, limits: tried.append(grammar))

    def tries(count, salt=b""):
        tried.clear()
        for n in range(count):
            grammars.of({"enum": [n]}, None, {}, None, "response_format", salt)
        return len(tried)

    assert (tries(3), tries(3), tries(3, b"another"), tries(3)) == (3, 0, 3, 0)
    assert tries(100) == 97
    assert len(grammars._kept) <= 8


def test_schemas_of_one_client_that_wait_are_bounded(tiny, monkeypatch):
    wait, compile = threading.Event(), tiny.service._renderer.try_grammar

    def late(*arguments):
        assert wait.wait(60)
        return compile(*arguments)

    monkeypatch.setattr(tiny.service._renderer, "try_grammar", late)
    bodies = [asking({"schema": schema(x={"enum": [n]})}) for n in range(100, 100 + MOST_WAITING + 4)]
    with ThreadPoolExecutor(2 * MOST_WAITING) as pool:
        held = [pool.submit(tiny.ask, "/v1/chat/completions", body) for body in bodies[:MOST_WAITING]]
        wait_for(lambda: sum(map(len, tiny.service._grammars._waiting.values())) == MOST_WAITING)
        try:
            held.append(pool.submit(tiny.ask, "/v1/chat/completions", bodies[0]))  # which waits already
            for body in bodies[MOST_WAITING:]:
                status, _, told = tiny.ask("/v1/chat/completions", body)
                assert (status, told["error"]["code"]) == (429, "too_many_requests")
                assert "JSON schemas that wait to be compiled" in told["error"]["message"]
        finally:
            wait.set()
        assert [answer.result(timeout=60)[0] for answer in held] == [200] * len(held)
    assert not tiny.service._grammars._waiting
    assert tiny.ask("/v1/chat/completions", bodies[-1])[0] == 200
    tiny.idle()


def test_a_grammar_that_is_given_up_ends_the_answer_with_an_error(tiny, monkeypatch):
    matcher = tiny.service._grammars._matchers
    calls = []

    class Failing:
        def __init__(self, *arguments, **options):
            self.inner = matcher(*arguments, **options)

        def deep_copy(self):
            return self

        def is_error(self):
            return len(calls) > 3

        def get_error(self):
            return "too many states"

        def consume_tokens(self, tokens):
            calls.append(tokens)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setattr(tiny.service._grammars, "_matchers", Failing)
    body = {"messages": TURNS, "max_tokens": 30, "response_format": {"type": "json_object"}}
    status, _, told = tiny.ask("/v1/chat/completions", body)
    assert (status, told["error"]["code"]) == (400, "grammar_too_complex")
    assert "too many states" in told["error"]["message"]
    tiny.idle()


@pytest.mark.full
def test_the_package_parses_answers_of_a_model_class(tiny):
    with tiny.client() as client:
        limited = {"min_p": 1.0}  # greedy, as a random model would write long names
        with contextlib.suppress(openai.LengthFinishReasonError):
            parsed = client.chat.completions.parse(
                model=NAME, messages=TURNS, response_format=Person, max_tokens=300, extra_body=limited
            )
            assert isinstance(parsed.choices[0].message.parsed, Person)
