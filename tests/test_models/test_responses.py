"""How models write calls of tools, learned from their templates, and read back from their answers piece by piece."""

import json
import random

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvconvert.models.chat import ChatPrompts
from kvconvert.models.responses import CallFormat, ResponseFormat, response_format
from kvconvert.serve.replies import Piece, Reply

# Short forms of the templates of Qwen 2.5, Mistral, Llama 3.1, DeepSeek, Qwen 3 Coder, GLM 4.5, and Mistral Large 3.
TEMPLATES = {
    "between_marks": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}{% if m.content or "
        "not loop.first %}\n{% endif %}<tool_call>\n"
        """{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}' }}"""
        "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "list": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}"
        "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have nine letters') }}{% endif %}"
        """{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}"""
        """, "id": "{{ c.id }}"}"""
        "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}<|im_end|>{% endif %}{% endfor %}"
    ),
    "bare": (
        "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
        "{{ raise_exception('one call at a time') }}{% endif %}{% set c = m.tool_calls[0].function %}"
        """{{ '{"name": "' + c.name + '", "parameters": ' + c.arguments | tojson + '}' }}"""
        "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "named_in_a_fence": (
        "{% for m in messages %}{% if m.role == 'user' %}[User]{{ m.content }}{% else %}[Assistant]"
        "{% if m.tool_calls %}[calls]{% for c in m.tool_calls %}{{ '[call]function[sep]' + c.function.name + "
        "'\n```json\n' + c.function.arguments + '\n```[end]' }}"
        "{% if not loop.last %}\n{% endif %}{% endfor %}[/calls]{% else %}"
        "{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[Assistant]<think>\n{% endif %}"
    ),
    "tagged": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n"
        "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        "{% if not loop.last %}\n{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "tagged_pairs": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
        "{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "named": (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}[TOOL_CALLS]"
        "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
}
TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "no-op": {"type": "object"},
}
CALLS = [("weather", {"city": 'Oslo "{}" </x>', "days": 3}), ("no-op", {"note": "é"})]


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<|im_end|>")


def chat_of(tokenizer, template):
    tokenizer.chat_template = template
    return ChatPrompts(tokenizer, None)


def said(text, reply, dice=None):
    """What a reply makes of a text that comes in pieces."""
    whole = Piece()
    while text:
        length = len(text) if dice is None else dice.randint(1, 6)
        whole += reply.feed(text[:length])
        text = text[length:]
    whole += reply.feed("", last=True)
    return whole


def called(piece):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in piece.calls]


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_a_template_writes_are_read_from_it(tokenizer, name):
    chat = chat_of(tokenizer, TEMPLATES[name])
    format = response_format(chat, ["<|im_end|>"])
    assert format.calls is not None
    dice = random.Random(0)
    for calls in (CALLS[:1], CALLS[1:], CALLS) if name != "bare" else (CALLS[:1], CALLS[1:]):
        written = []
        for place, (function, arguments) in enumerate(calls):
            arguments = json.dumps(arguments) if format.calls.as_text else arguments
            call = {"name": function, "arguments": arguments}
            written.append({"id": f"call0000{place}", "type": "function", "function": call})
        user = {"role": "user", "content": "x"}
        head = chat.text([user])
        text = chat.text([user, {"role": "assistant", "content": "", "tool_calls": written}], answer=False)
        text = text[len(head.removesuffix("<think>\n")) :].partition("<|im_end|>")[0]
        for reply_dice in (None, dice, dice):
            made = said(text, Reply(format, TOOLS), reply_dice)
            assert called(made) == calls
            assert [call["index"] for call in made.calls] == list(range(len(calls)))
            assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in made.calls)
            assert made.content.strip() in ("", "[calls]", "[/calls]", "[calls][/calls]")
        assert called(said(text, Reply(format, TOOLS, parallel=False))) == calls[:1]
        # Nothing is called where nothing may be.
        assert said(text, Reply(format, None)).content == text


@pytest.mark.parametrize("opened", ["", "<think>\n"])
@pytest.mark.parametrize("name", ["between_marks", "tagged"])
def test_empty_reasoning_before_a_call_is_no_part_of_it(tokenizer, name, opened):
    plain = response_format(chat_of(tokenizer, TEMPLATES[name]), ["<|im_end|>"]).calls
    begin = "<|im_start|>{{ m.role }}\n"
    thinks = TEMPLATES[name].replace(begin, begin + "{% if m.tool_calls %}<think>\n\n</think>\n\n{% endif %}")
    thinks = thinks.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n" + opened)
    assert response_format(chat_of(tokenizer, thinks), ["<|im_end|>"]).calls == plain


def test_a_template_without_calls_writes_none(tokenizer):
    format = response_format(chat_of(tokenizer, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"), [])
    assert format == ResponseFormat()


def test_an_answer_of_many_brackets_is_no_call_and_is_not_looked_through(tokenizer):
    written = "{{ '[0,' * 900 + '0,' * 10000 if messages | length > 1 }}" + TEMPLATES["between_marks"]
    assert response_format(chat_of(tokenizer, written), ["<|im_end|>"]) == ResponseFormat()


def test_reasoning_is_what_stands_between_the_marks_of_the_template(tokenizer):
    tagged = response_format(chat_of(tokenizer, TEMPLATES["named_in_a_fence"]), ["<|im_end|>"])
    assert tagged.reasoning == ("<think>", "</think>")
    channels = (
        "{% for m in messages %}{% if m.thinking %}[assistant][analysis]{{ m.thinking }}[end]{% endif %}"
        "[{{ m.role }}][final]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert response_format(chat_of(tokenizer, channels), []).reasoning == ("[analysis]", "[end][assistant][final]")
    for dice in (None, random.Random(1)):
        assert said("<think>\nI add <b>.\n</think>\n\nIt is 4.", Reply(tagged), dice) == Piece("It is 4.", "I add <b>.")
        begun = Reply(tagged, prompt="[Assistant]<think>\n")
        assert said("I add.\n</think>\n\nIt is 4.", begun, dice) == Piece("It is 4.", "I add.")
        # A mark in the middle of an answer is text, and what does not end is reasoning.
        assert said("Use <think> here.", Reply(tagged), dice) == Piece("Use <think> here.")
        assert said("<think>\nI add", Reply(tagged), dice) == Piece("", "I add")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "weather", "arguments": {"city": "Oslo"}}',
        '{{"name": "weather", "arguments": {"city": "Oslo"}}}',
        '```json\n{"name": "weather", "arguments": {"city": "Oslo"}}\n```',
        '```json\n{\n  "name": "weather",\n  "parameters": {"city": "Oslo"}\n}\n```',
        '[{"type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}]',
    ],
)
def test_a_call_without_marks_is_one_if_it_names_a_tool(tokenizer, text):
    format = response_format(chat_of(tokenizer, TEMPLATES["between_marks"]), ["<|im_end|>"])
    for dice in (None, random.Random(2)):
        assert called(said(text, Reply(format, TOOLS), dice)) == [("weather", {"city": "Oslo"})]
        other = text.replace("weather", "whether")
        assert said(other, Reply(format, TOOLS), dice) == Piece(other)
        assert called(said(text, Reply(format, TOOLS, schema=True), dice)) == [("weather", {"city": "Oslo"})]


@pytest.mark.parametrize("text", ['{"name": "weather", "age": 42}', '{"name":"weather"}', '[{"name": "weather"}]'])
def test_json_of_a_schema_with_a_name_is_no_call(tokenizer, text):
    format = response_format(chat_of(tokenizer, TEMPLATES["between_marks"]), ["<|im_end|>"])
    for dice in (None, random.Random(2)):
        assert said(text, Reply(format, TOOLS, schema=True), dice) == Piece(text)
        assert called(said(text, Reply(format, TOOLS), dice)) == [("weather", {})]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "Oslo",
            " {x",
            "```python\nprint()\n```",
            '{"city": "Oslo"}',
            "a <tool_ca",
            "<tool_call>\nno JSON\n</tool_call>",
        ),
        *("<tool_call>\n" + "[" * 5000, '<tool_call>{"name": 3}</tool_call>', "<tool_call>", '{"name": "weather", '),
    ],
)
def test_what_is_no_call_is_text(tokenizer, text):
    format = response_format(chat_of(tokenizer, TEMPLATES["between_marks"]), ["<|im_end|>"])
    for dice in (None, random.Random(3)):
        made = said(text, Reply(format, TOOLS), dice)
        assert (made.content, made.calls) == (text, [])


def test_text_comes_as_soon_as_it_is_certain(tokenizer):
    format = response_format(chat_of(tokenizer, TEMPLATES["between_marks"]), ["<|im_end|>"])
    reply = Reply(format, TOOLS)
    pieces = [reply.feed(text).content for text in ("I ", "look", " <b> ", "it up.", "\n", "<tool_", "call>\n{")]
    assert pieces == ["I", " look", " <b>", " it up.", "", "", ""]


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "[" * 100_000], ids=["half of a pair", "no number", "deep"])
def test_a_call_that_no_client_could_read_is_text(value):
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'
    piece = said(text, Reply(ResponseFormat(CallFormat("json", "<tool_call>", "</tool_call>", "", "")), TOOLS))
    assert not piece.calls
    assert piece.content == text
