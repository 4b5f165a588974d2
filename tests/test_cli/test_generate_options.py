"""`generate`: how tokens are chosen, where an answer ends, and what a model with a chat template is given."""

import pytest
import torch
from tiny.commands import kvconvert

from kvconvert.choice import Choice
from kvconvert.console import Console
from kvconvert.errors import UsageError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)


@pytest.fixture(scope="module")
def bundle(converted):
    torch.set_num_threads(1)
    return converted / "bundle"


def run(bundle, *options, stdin=""):
    return kvconvert("generate", bundle, "--device", "cpu", "--max-new-tokens", 12, *options, stdin=stdin)


def text(bundle, *options):
    result = run(bundle, *options)
    assert result.exit_code == 0, result.output
    return result.stdout


def prompted(console, call):
    """The text that the model is given by `call(console)`, and the calls' generation configs."""
    seen, generate = [], console.model.generate

    def spy(ids, **options):
        seen.append((console.tokenizer.decode(ids[0]), options["generation_config"]))
        return generate(ids, **options)

    console.model.generate = spy
    call(console)
    return seen


def test_a_seed_draws_the_same_text_again_and_a_temperature_of_0_is_greedy(bundle):
    prompt = ["--prompt", "It was a dark night"]
    drawn = [*prompt, "--temperature", "1.5", "--top-p", "0.95", "--top-k", "500", "--seed"]
    assert text(bundle, *drawn, 1) == text(bundle, *drawn, 1) != text(bundle, *drawn, 2)
    greedy = text(bundle, *prompt)
    assert greedy == text(bundle, *prompt, "--temperature", 0) == text(bundle, *prompt, "--top-k", 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (True, 0.6, 0.5, 7)),
        ({"temperature": 0.0}, (False, None, None, None)),
        ({"temperature": 2.0}, (True, 2.0, 0.5, 7)),
        ({"top_k": 0, "top_p": 0.25}, (True, 0.6, 0.25, 0)),
    ],
)
def test_options_change_what_the_models_generation_config_says(bundle, given, expected):
    from transformers import GenerationConfig

    own = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.5, top_k=7)
    config = Choice(**given).config(own)
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == expected
    assert own.temperature == 0.6  # the model's own is left as it is


def test_an_answer_ends_before_a_stop_text_wherever_its_tokens_are_cut(bundle):
    prompt = ["--prompt", "It was a dark night"]
    whole = text(bundle, *prompt)
    for begin, end in ((3, 5), (6, 16)):
        stop = whole[begin:end]
        expected = whole[: whole.index(stop)] + "\n"
        assert text(bundle, *prompt, "--stop", "never said", "--stop", stop) == expected


def test_stop_strings_of_a_generation_config_end_an_answer(bundle, capsys):
    console = Console(bundle, 12, "cpu")
    console.complete("It was a dark night", raw=True)
    whole = capsys.readouterr().out
    console.generation_config.stop_strings = [whole[4:8]]
    console.complete("It was a dark night", raw=True)
    assert len(capsys.readouterr().out) < len(whole)


def test_a_chat_template_is_used_for_a_prompt_unless_it_is_raw(bundle):
    console = Console(bundle, 2, "cpu", system="Be brief.")
    console.tokenizer.chat_template = TEMPLATE
    ((given, _),) = prompted(console, lambda console: console.complete("Who?"))
    assert given == "<system>Be brief.\n<user>Who?\n<model>"
    console.system = None
    ((given, _),) = prompted(console, lambda console: console.complete("Who?", raw=True))
    assert given == "Who?"


def test_a_token_that_the_model_does_not_have_is_refused(bundle):
    console = Console(bundle, 2, "cpu")
    console.tokenizer.add_tokens(["<beyond>"])
    with pytest.raises(UsageError, match="the model's ids are 0 to"):
        console.complete("It was <beyond>", raw=True)


def test_a_conversation_begins_with_the_system_message_and_keeps_answers_as_they_were_shown(bundle, capsys):
    console = Console(bundle, 12, "cpu", system="Be brief.")
    console.tokenizer.chat_template = TEMPLATE
    console.chat(iter(["Who?\n"]))
    shown = capsys.readouterr().out.removesuffix("\n")
    console.choice = Choice(stop=(shown[4:7],))
    calls = prompted(console, lambda console: console.chat(iter(["Who?\n", "Why?\n"])))
    answer = shown[: shown.index(shown[4:7])]
    assert calls[1][0] == f"<system>Be brief.\n<user>Who?\n<assistant>{answer}\n<user>Why?\n<model>"


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_dtype_is_that_of_the_computation(bundle, name):
    assert Console(bundle, 2, "cpu", dtype=name).model.dtype == getattr(torch, name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "--temperature is -1;"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--top-p", "0"], "--top-p is 0;"),
        (["--top-k", "-1"], "--top-k is -1"),
        (["--temperature", "0", "--top-p", "0.5"], "leave --top-p, --top-k and --seed out"),
        (["--seed", "1"], "--seed changes nothing"),
        (["--stop", ""], "--stop is empty"),
        (["--dtype", "int8"], "--dtype is int8"),
        (["--device", "abacus"], "--device may be cpu or cuda"),
        (["--system", "x"], "no chat template"),
        (["--raw", "--system", "x"], "--raw continues"),
        (["--prompt", ""], "no tokens"),
    ],
)
def test_what_cannot_mean_anything_is_refused_with_one_sentence(bundle, options, said):
    result = run(bundle, "--prompt", "It", *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.strip().startswith("Error: ")


def test_raw_is_refused_in_a_conversation(bundle):
    assert "--raw is for a PROMPT" in run(bundle, "--chat", "--raw").stderr


def test_a_template_that_refuses_a_conversation_is_one_sentence(bundle):
    console = Console(bundle, 2, "cpu", system="Be brief.")
    console.tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(UsageError, match="chat template refuses the conversation"):
        console.complete("Who?")


def test_a_template_that_writes_nothing_is_said(bundle):
    console = Console(bundle, 2, "cpu")
    console.tokenizer.chat_template = "{# nothing #}"
    with pytest.raises(UsageError, match="writes nothing"):
        console.complete("Hello")
    with pytest.raises(UsageError, match="writes nothing"):
        console.chat(iter(["Hello"]))
