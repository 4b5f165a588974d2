"""Chat templates in a process of their own: the same text as transformers writes, and limits of what they take."""

import json
import multiprocessing
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from threading import local
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, GPT2Config

from kvconvert.errors import CheckpointError, UsageError
from kvconvert.models import template_process
from kvconvert.models.chat import ChatPrompts
from kvconvert.models.processors import load_processor, load_tokenizer
from kvconvert.models.prompts import MARK
from kvconvert.models.templates import (
    TemplateLimitError,
    TemplateRenderer,
    panics_as_errors,
    quickly,
    shared_renderer,
)

REFERENCE = Path(__file__).parents[2] / "examples" / "reference-lm"
TURNS = [{"role": "system", "content": "Be \u2603 brief."}, {"role": "user", "content": "Why?\n"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if loop.first %}\n  {%- continue %}{% endif %}<{{ m.role }}>"
    "{{ m.content | trim | tojson }}{% generation %}!{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def renderer():
    renderer = TemplateRenderer(seconds=1, memory=128 * 2**20)
    yield renderer
    renderer.close()


def test_a_conversation_is_written_as_transformers_writes_it(renderer):
    text = renderer.render(TEMPLATE, TURNS, {"bos_token": "<s>"})
    assert text == '<s><user>"Why?"!<assistant>'
    assert renderer.render("{{ messages[0].content }}{{ x }}", TURNS, {}) == "Be \u2603 brief."


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (10 ** (10 ** 9)) % 7 }}",
    "memory": "{{ ('x' * 10 ** 10) | length }}",
    "width": "{{ '%10000000000d' | format(1) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "text": "{{ 'x' * 10 ** 7 }}",
    "attribute": "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}{{ raise_exception('end') }}",
    "syntax": "{% if %}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_template_that_takes_too_much_is_a_sentence_and_the_next_one_is_rendered(renderer, kind):
    renderer.render("ready", TURNS, {})
    with pytest.raises(
        UsageError, match=r"^The model's chat template (takes more|refuses the conversation \()"
    ) as told:
        renderer.render(HOSTILE[kind], TURNS, {})
    assert "\n" not in str(told.value)
    assert renderer.render("{{ messages | length }}", TURNS, {}) == "2"


# Each takes longer to compile than what others wait for: jinja computes what is constant, also where it is never used.
SLOW_TO_COMPILE = {
    "text": "{{ 'q' * 20000000 }}",
    "length": "{{ messages }}" * 20_000,
}


@pytest.mark.parametrize("kind", ["text", pytest.param("length", marks=pytest.mark.full)])
def test_a_template_is_compiled_once_for_all_that_wait_for_others(kind):
    slow = "{% if messages | length > 1 %}" + SLOW_TO_COMPILE[kind] + "{% endif %}{{ messages[0].content }}"
    renderer = TemplateRenderer(seconds=20)
    renderer.start(slow)
    try:
        with quickly():
            assert renderer.render(slow, TURNS[:1], {}) == TURNS[0]["content"]
            with pytest.raises(TemplateLimitError):
                renderer.render(HOSTILE["loops"], TURNS, {})
            assert renderer.render(slow, TURNS[:1], {}) == TURNS[0]["content"]
            renderer._process.kill()
            renderer._process.wait()
            renderer._own = local()
            assert renderer.render(slow, TURNS[:1], {}) == TURNS[0]["content"]
    finally:
        renderer.close()


@pytest.mark.quick("refuses")
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'q' * 10**10 }}" + "{{ messages }}" * 200_000, "takes more than 0.5 seconds or 64 MiB of memory"),
        ("{% if %}", "refuses the conversation"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_not_tried_for_each_conversation(template, reason):
    renderer = TemplateRenderer(seconds=0.5, memory=2**26)
    renderer.start(template)
    try:
        assert renderer.render("{{ messages | length }}", TURNS, {}) == "2"
        process = renderer._process.pid
        with renderer.connect() as unused:
            renderer._own.connection = unused  # which is not asked
            for _ in range(2):
                with pytest.raises(UsageError, match=reason):
                    renderer.render(template, TURNS, {})
        assert renderer._process.pid == process
    finally:
        renderer.close()


def test_what_cannot_be_sent_to_a_worker_leaves_it_as_it_was(renderer):
    nested = []
    for _ in range(5000):
        nested = [nested]
    template = "{{ messages[0].content }} again"
    with pytest.raises(RecursionError):
        renderer.render(template, [{"role": "user", "content": nested}], {})
    assert renderer.render(template, [{"role": "user", "content": "here"}], {}) == "here again"


def test_a_forked_process_has_workers_of_its_own(renderer):
    text = "{{ messages[0].content }}"
    assert renderer.render(text, [{"content": "parent"}], {}) == "parent"

    def child():
        renderer.render(text, [{"content": "child"}], {})
        renderer.close()

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    forked.join(120)
    assert forked.exitcode == 0
    assert renderer.render(text, [{"content": "again"}], {}) == "again"


def test_nothing_of_the_environment_reaches_the_process(renderer, monkeypatch):
    monkeypatch.setenv("KVCONVERT_API_KEY", "a-key-that-nobody-else-has")
    renderer._end()
    renderer._own = local()
    renderer.render("ready", TURNS, {})
    with open(f"/proc/{renderer._process.pid}/environ", "rb") as file:
        assert b"a-key-that-nobody-else-has" not in file.read()


def prompts(template, renderer):
    tokenizer = SimpleNamespace(
        chat_template=template,
        get_chat_template=lambda: template,
        special_tokens_map={"eos_token": "</s>"},
        all_special_tokens=["</s>"],
        added_tokens_decoder={},
    )
    return ChatPrompts(tokenizer, None, renderer)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content[0].text }}{% endfor %}",
        "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}",
    ],
)
def test_contents_have_the_form_that_the_template_asks_for(renderer, template):
    chat = prompts(template + "{% if add_generation_prompt %}>{% endif %}", renderer)
    assert chat.text([chat.message("user", "hello")]) == "hello>"
    marked = chat.text([chat.message("user", "bye</s>now")])
    assert "</s>" not in marked
    assert marked.replace(MARK, "") == "bye</s>now>"


def test_a_template_that_never_ends_is_given_up_where_its_form_is_found_out(renderer):
    chat = prompts(HOSTILE["loops"], renderer)
    with pytest.raises(TemplateLimitError, match="takes more than 1 seconds"):
        chat.text([chat.message("user", "hello")])


def test_a_vision_language_model_without_a_template_is_asked_in_plain_text():
    directory = Path(__file__).parents[2] / "examples" / "reference-vlm"
    processor = load_processor(directory)
    processor.chat_template = None
    chat = ChatPrompts(processor, AutoConfig.from_pretrained(directory))
    turns = [
        chat.message("user", "What is it?", images=1),
        chat.message("assistant", "A dog."),
        chat.message("user", "Oh"),
    ]
    assert chat.text(turns) == "<image>What is it?\nA dog.\nOh"


def stated(tmp_path, **changes):
    """A directory with the reference tokenizer, changed."""
    fields = json.loads((REFERENCE / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields | changes))
    shutil.copy(REFERENCE / "tokenizer_config.json", tmp_path)
    return tmp_path


def replace(pattern, content, times=1):
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


HUNGRY = {
    "doubles spaces": {"normalizer": replace({"String": " "}, "  ", 40)},
    "doubles a word": {"normalizer": replace({"String": "Once"}, "OnceOnce", 40)},
    "normalizer": {"normalizer": replace({"Regex": "(\\w+\\s?)+="}, "x")},
    "exponential": {"pre_tokenizer": split("(a|aa)+$")},
    "cubic": {"pre_tokenizer": split("x*x*x*[yz]")},
    "decoder": {"decoder": {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 99}},
    "decoder's expression": {"decoder": {"type": "Replace", "pattern": {"Regex": "(e+)+$"}, "content": "e"}},
    "decoder's expression of letters that nobody tries": {
        "decoder": {"type": "Replace", "pattern": {"Regex": r"([\x{4e01}]+)+$"}, "content": "e"}
    },
    "decoder that cuts more than a token has": {"decoder": {"type": "Strip", "content": "e", "start": 1, "stop": 1}},
    "long token": {"added_tokens": [{"id": 0, "content": "e" * 2**17}]},
    "padding": {
        "padding": {"strategy": {"Fixed": 10**7}, "direction": "Right", "pad_to_multiple_of": None}
        | {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    },
}


@pytest.mark.parametrize("kind", HUNGRY)
def test_a_tokenizer_that_takes_too_much_is_refused_before_it_reads_any_text(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(shared_renderer(), "_seconds", 1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not applied to any text \(.*\); use") as told:
        load_tokenizer(stated(tmp_path, **HUNGRY[kind]))
    assert "\n" not in str(told.value)


def tekken(pattern="a", special=2, token="YQ=="):
    config = {"pattern": pattern, "default_num_special_tokens": special}
    special_tokens = [{"rank": 0, "token_str": "<s>"}]
    return json.dumps({"config": config, "vocab": [{"token_bytes": token}], "special_tokens": special_tokens})


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tekken.json", tekken(special=10**9), "special tokens"),
        ("tekken.json", tekken(token="YQ==" * 2000), "a token of more than"),
        ("tekken.json", tekken(pattern="(a+)+$"), "is not applied to any text"),
        ("tokenizer.model", "YQ== 0\n" + "YWFh" * 2000 + " 1\n", "a token of more than"),
    ],
)
def test_other_files_of_a_tokenizer_take_no_more_than_their_size(tmp_path, name, content, reason):
    (tmp_path / name).write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(CheckpointError, match=reason):
        load_tokenizer(tmp_path)


def test_a_path_that_only_python_finds_is_called_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    with pytest.raises(CheckpointError, match=r"ü is not found by all libraries .* is ascii; set PYTHONUTF8=1"):
        load_tokenizer(tmp_path / "ü")


def test_a_path_that_is_no_text_is_called_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"d\\udcff has a name that is not UTF-8 text, .*; rename it\."):
        load_tokenizer(tmp_path / "d\udcff")


@pytest.mark.parametrize(
    ("kind", "there", "missing"),
    [
        ("GPT2Tokenizer", {}, "vocab.json or merges.txt and no tokenizer.json, from which GPT2Tokenizer is made"),
        ("GPT2Tokenizer", {"vocab.json": '{"a": 0}'}, "merges.txt and no tokenizer.json"),
        ("BertTokenizer", {}, "vocab.txt and no tokenizer.json"),
        ("LlamaTokenizerFast", {}, "tokenizer.model and no tokenizer.json"),
        ("GemmaTokenizer", {}, "tokenizer.json, from which GemmaTokenizer is made"),
        ("T5Tokenizer", {}, "spiece.model and no tokenizer.json"),
        ("CTRLTokenizer", {}, "vocab.json or merges.txt and no tokenizer.json"),
        (None, {}, "vocab.json or merges.txt and no tokenizer.json, from which GPT2Tokenizer is made"),
    ],
)
def test_a_tokenizer_without_its_vocabulary_is_refused_by_the_names_of_the_files(tmp_path, kind, there, missing):
    GPT2Config().save_pretrained(tmp_path)
    files = there if kind is None else there | {"tokenizer_config.json": json.dumps({"tokenizer_class": kind})}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError) as told:
        load_tokenizer(tmp_path)
    assert str(told.value).startswith(f"{tmp_path} has no {missing}")


def test_a_tokenizer_of_older_files_or_of_none_is_loaded(tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert load_tokenizer(tmp_path)("ab")["input_ids"] == [2]
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert len(load_tokenizer(tmp_path)("ab", add_special_tokens=False)["input_ids"]) == 2


@pytest.mark.parametrize("content", ["[]", "null", '"x"'])
def test_settings_that_are_no_object_are_refused_by_name(tmp_path, content):
    directory = stated(tmp_path)
    (directory / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json holds no JSON object; fetch"):
        load_tokenizer(directory)


def test_a_processor_whose_tokenizer_has_no_vocabulary_is_refused(tmp_path):
    shutil.copytree(REFERENCE.with_name("reference-vlm"), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.model and no tokenizer\.json, from which"):
        load_processor(tmp_path / "model")


@pytest.mark.parametrize("merge", [["a", "b"], "a b", ["a", "é"], ["a", "xé"]], ids=str)
def test_merges_that_end_the_process_where_they_are_read_are_refused(tmp_path, merge):
    vocabulary = {"a": 0, "b": 1, "é": 2, "xé": 3, "ab": 4, "aé": 5}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [merge], "continuing_subword_prefix": "x"}
    fine = "x" in merge[1]
    directory = stated(tmp_path, model=model, added_tokens=[], post_processor=None)
    with nullcontext() if fine else pytest.raises(CheckpointError, match="its merges lack the prefix"):
        load_tokenizer(directory)


def test_a_tokenizer_that_drops_merges_at_random_is_made_to_keep_them_and_says_so(tmp_path, caplog):
    ids = load_tokenizer(REFERENCE)("several words of a sentence", add_special_tokens=False)["input_ids"]
    shutil.copytree(REFERENCE, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    stated = json.loads(path.read_text())
    stated["model"]["dropout"] = 0.9
    path.write_text(json.dumps(stated))
    tokenizer = load_tokenizer(tmp_path / "model")
    assert "dropout 0.9" in caplog.text
    renderer = TemplateRenderer(tokenizer)
    try:
        for _ in range(5):
            assert tokenizer("several words of a sentence", add_special_tokens=False)["input_ids"] == ids
            assert renderer.encode("several words of a sentence", special=False) == ids
    finally:
        renderer.close()


def test_a_panic_of_tokenizers_is_an_error(capfd):
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]], "continuing_subword_prefix": "xxxx"}
    with pytest.raises(RuntimeError, match="out of range"), panics_as_errors():
        Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(KeyboardInterrupt), panics_as_errors():
        raise KeyboardInterrupt
    assert "panicked" in capfd.readouterr().err


def test_a_worker_tokenizes_as_transformers_does():
    tokenizer = load_tokenizer(REFERENCE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    renderer = TemplateRenderer(tokenizer)
    for text in (
        "",
        "Hello  world\n",
        "na\u00efve \u65e5\u672c \U0001f30d",
        "a<|im_end|>b",
        MARK * 3,
        "x" * 5000,
        "\0",
    ):
        for special in (True, False):
            assert renderer.encode(text, special) == tokenizer(text, add_special_tokens=special)["input_ids"]
    renderer.close()
    tokenizer.split_special_tokens = True
    assert not TemplateRenderer(tokenizer).tokenizes


def edited(directory, **changes):
    shutil.copytree(REFERENCE, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    return directory


@pytest.mark.parametrize("template", [5, True, {"default": 5}, {"default": {}}, {"default": "x", "tools": []}], ids=str)
def test_a_chat_template_that_is_no_text_is_refused_when_it_is_loaded(tmp_path, template):
    with pytest.raises(CheckpointError, match=r"its chat template is .* and no text"):
        load_tokenizer(edited(tmp_path / "model", chat_template=template))


def test_a_tokenizer_that_contradicts_itself_is_refused_before_a_server_starts(tmp_path):
    directory = edited(tmp_path / "model")
    contents = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = contents["model"]["vocab"]
    vocabulary["$"] = max(vocabulary.values())  # whose own token a merge makes
    (directory / "tokenizer.json").write_text(json.dumps(contents))
    # Which of two tokens with one id is forgotten differs from load to load, and one of them is not missed.
    with pytest.raises(CheckpointError, match="contradicts itself"):
        [TemplateRenderer(load_tokenizer(directory)) for _ in range(30)]


def test_the_process_of_templates_ends_in_silence_once_who_started_it_is_gone():
    here, there = socket.socketpair()
    with there:
        here.sendall(template_process.TEMPLATES)
        here.close()
        command = [sys.executable, "-P", template_process.__file__, str(2**29), "0"]
        done = subprocess.run(command, stdin=there, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
