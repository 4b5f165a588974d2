"""Several sources share the samples by weight, and what is unlike the model is said."""

import ast
import hashlib
import json
import re
import textwrap
from pathlib import Path

import pytest
from test_data import CHAT, spoken, word_tokenizer, words, write_jsonl
from transformers import LlamaConfig

from kvconvert.data.samples import (
    CHAT_TOKENS,
    TEXT_TOKENS,
    default_tokens,
    load_held_out_mixture,
    load_mixture,
    shares,
    text_shape,
    unlike_the_model,
)
from kvconvert.data.sources import CONVERSATIONS, check_sources, local_files, weighted_sources
from kvconvert.data.text import load_token_samples
from kvconvert.errors import DataError, UsageError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("weights", "samples", "counts"),
    [([3, 1], 64, [48, 16]), ([1, 1, 1], 8, [3, 3, 2]), ([1, 0.5], 3, [2, 1]), ([1, 2], 2, [1, 1])],
)
def test_samples_are_shared_by_weight(weights, samples, counts):
    assert shares(weights, samples) == counts


def test_a_source_that_would_get_nothing_is_refused():
    for weights, samples, told in (([100, 1], 4, "4 samples"), ([1, 1], 1, "1 sample")):
        with pytest.raises(UsageError, match=f"^{told} cannot be divided among 2 sources .+ one gets none"):
            shares(weights, samples)


def test_a_mixture_holds_what_each_source_gives_alone(tmp_path):
    tokenizer = word_tokenizer()
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text(words(0, 500))
    second.write_text(words(500, 1000))
    data = load_mixture([f"{first}=3", f"{second}"], tokenizer, 8, 16, seed=1)
    assert data.ids[:6].equal(load_token_samples(str(first), tokenizer, 6, 16, seed=1).ids)
    assert data.ids[6:].equal(load_token_samples(str(second), tokenizer, 2, 16, seed=1).ids)
    assert data.info.source == "a.txt=3, b.txt=1"
    assert data.info.samples == 8
    assert data.info.sha256 == hashlib.sha256(data.ids.numpy().astype("<i8").tobytes()).hexdigest()


def test_held_out_samples_of_a_mixture_are_none_of_its_samples(tmp_path):
    tokenizer = word_tokenizer()
    for name, start in (("a.txt", 0), ("b.txt", 500)):
        (tmp_path / name).write_text(words(start, start + 500))
    sources = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    taken = set(load_mixture(sources, tokenizer, 8, 16, seed=1).ids.flatten().tolist())
    rest = load_held_out_mixture(sources, tokenizer, 4, 16, seed=1, apart_from=(8, 16))
    assert not taken & set(rest.ids.flatten().tolist())
    assert {int(word[1:]) // 500 for row in rest.ids for word in spoken(tokenizer, row)} == {0, 1}


def test_a_path_with_an_equals_sign_is_a_path(tmp_path):
    file = tmp_path / "x=2"
    file.mkdir()
    assert weighted_sources(str(file))[0].source == str(file)
    with pytest.raises(UsageError, match="weight 0"):
        weighted_sources("a.txt=0")
    for weight in ("-1", "abc"):
        with pytest.raises(UsageError, match=f"the weight {weight}; leave it out"):
            weighted_sources(f"{file}={weight}")


def test_code_is_plain_text_with_the_texts_beside_it(tmp_path):
    tokenizer = word_tokenizer()
    (tmp_path / "a.py").write_text(words(0, 40))
    (tmp_path / "notes.txt").write_text(words(40, 80))
    (tmp_path / "README.md").write_text(words(80, 120))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hook.sh").write_text(words(500, 600))
    data = load_token_samples(str(tmp_path), tokenizer, 12, 10, seed=0)
    numbers = {int(word[1:]) for row in data.ids for word in spoken(tokenizer, row) if word[0] == "w"}
    assert numbers <= set(range(120))
    assert {number // 40 for number in numbers} == {0, 1, 2}
    assert load_token_samples(str(tmp_path / "a.py"), tokenizer, 4, 10, seed=0).info.source == "a.py"


def test_a_readme_beside_data_is_no_data(tmp_path):
    tokenizer = word_tokenizer()
    (tmp_path / "README.md").write_text(words(0, 200))
    write_jsonl(tmp_path / "rows.jsonl", [{"text": words(500, 600)}])
    data = load_token_samples(str(tmp_path), tokenizer, 5, 10, seed=0)
    assert all(int(word[1:]) >= 500 for row in data.ids for word in spoken(tokenizer, row) if word[0] == "w")
    (tmp_path / "more.txt").write_text(words(0, 200))
    with pytest.raises(DataError, match="mixes"):
        load_token_samples(str(tmp_path), tokenizer, 5, 10, seed=0)


def test_the_ending_of_a_file_may_be_in_capitals(tmp_path):
    tokenizer = word_tokenizer()
    write_jsonl(tmp_path / "rows.JSONL", [{"text": words(500, 600)}])
    (tmp_path / "README.MD").write_text(words(0, 200))
    (tmp_path / "about.Json").write_text("[]")
    for source in (tmp_path, tmp_path / "rows.JSONL", f"{tmp_path / 'rows.JSONL'}::text"):
        check_sources(str(source))
        data = load_token_samples(str(source), tokenizer, 5, 10, seed=0)
        assert all(int(word[1:]) >= 500 for row in data.ids for word in spoken(tokenizer, row) if word[0] == "w")
    (tmp_path / "analysis.R").write_text(words(0, 200))
    assert local_files(str(tmp_path / "analysis.R")) == [tmp_path / "analysis.R"]
    with pytest.raises(DataError, match=r"missing\.CSV does not exist; check the path"):
        check_sources("missing.CSV")


def said(tmp_path, text, template=None):
    tokenizer, file = word_tokenizer(chat_template=template), tmp_path / "text.txt"
    file.write_text(text)
    return unlike_the_model(str(file), load_mixture(str(file), tokenizer, 4, 10, seed=0), tokenizer)


def test_plain_text_for_a_model_with_a_chat_template_is_said(tmp_path):
    assert said(tmp_path, words(100, 200)) == []
    (found,) = said(tmp_path, words(100, 200), CHAT)
    assert "chat template" in found
    tokenizer = word_tokenizer(chat_template=CHAT)
    rows = [{"messages": [{"role": "user", "content": words(0, 60)}]}]
    source = write_jsonl(tmp_path / "chat.jsonl", rows)
    assert unlike_the_model(source, load_mixture(source, tokenizer, 2, 10, seed=0), tokenizer) == []


def test_text_that_the_tokenizer_does_not_know_is_said(tmp_path):
    (found,) = said(tmp_path, " ".join(f"w{i} other" for i in range(100, 200)))
    assert found.startswith("50% of the calibration tokens of text.txt are unknown")


def test_tokens_of_hardly_any_text_are_said(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["a"])
    file = tmp_path / "a.txt"
    file.write_text("a" * 400)
    data = load_mixture(str(file), tokenizer, 4, 10, seed=0)
    data.ids[:] = tokenizer.convert_tokens_to_ids("a")
    tokenizer.clean_up_tokenization_spaces = False
    found = unlike_the_model(str(file), data, tokenizer)
    assert any("bytes of text per token" in sentence for sentence in found)


def test_by_default_novels_and_code_are_read_in_equal_parts():
    tokenizer = word_tokenizer()
    data = load_mixture(None, tokenizer, 4, 16, seed=0)
    assert data.info.source == "kvconvert:books-calib.txt=1, kvconvert:code-calib.txt=1"
    assert data.ids[2:].equal(load_token_samples("kvconvert:code-calib.txt", tokenizer, 2, 16, seed=0).ids)
    assert load_mixture(None, tokenizer, 1, 16, seed=0).info.source == "kvconvert:books-calib.txt"
    assert load_held_out_mixture(None, tokenizer, 4, 16, seed=0, apart_from=(1, 16)).ids.shape == (4, 16)


def test_by_default_models_with_a_template_read_conversations_too(tmp_path):
    tokenizer = word_tokenizer(chat_template=CHAT)
    data = load_mixture(None, tokenizer, 6, 16, seed=0)
    assert data.info.source.endswith("code-calib.txt=1, kvconvert:chat-calib.jsonl=1")
    assert data.ids[4:].equal(load_token_samples("kvconvert:chat-calib.jsonl", tokenizer, 2, 16, seed=0).ids)
    assert not any("chat template" in sentence for sentence in unlike_the_model(None, data, tokenizer))


@pytest.mark.parametrize(
    ("template", "hidden_size", "data", "samples"),
    [
        (CHAT, 1536, None, 24),
        (CHAT, 2048, None, 16),
        (None, 1536, None, 16),
        (CHAT, 1536, "kvconvert:books-calib.txt", 16),
    ],
)
def test_small_chat_models_read_more_by_default(template, hidden_size, data, samples):
    config = LlamaConfig(hidden_size=hidden_size, max_position_embeddings=4096)
    tokens = default_tokens(config, data, word_tokenizer(chat_template=template))
    assert text_shape(None, None, 4096, tokens) == (samples, 2048)


def test_conversations_that_ship_end_in_an_answer_whose_python_parses_and_are_as_many_as_the_notes_say():
    rows = [json.loads(line) for line in local_files(CONVERSATIONS)[0].read_text("utf8").splitlines()]
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert row.keys() == {"messages"}
        assert turns == ["user", "assistant"] * (len(turns) // 2) != []
        for message in row["messages"]:
            if message["role"] == "assistant":
                for code in re.findall(r"```python\n(.*?)\n```", message["content"], re.DOTALL):
                    ast.parse(textwrap.dedent(code))
    notes = (Path(__file__).parents[2] / "benchmarks" / "WEIGHTS.md").read_text("utf8")
    said = re.search(r"(\d+) conversations .*?\(`chat-calib.jsonl`: (\d+) .*?, (\d+) .*?, (\d+) others\)", notes)
    total, *kinds = map(int, said.groups())
    assert len({json.dumps(row) for row in rows}) == len(rows) == total == sum(kinds)


def test_the_pages_state_how_many_samples_are_read_by_default():
    usual, more = (text_shape(None, None, None, tokens)[0] for tokens in (TEXT_TOKENS, TEXT_TOKENS + CHAT_TOKENS))
    pages = [(DOCS / page).read_text("utf8") for page in ("quickstart.md", "runtime.md")]
    quickstart, runtime = (" ".join(page.split()) for page in pages)
    assert f"runs {usual} text samples ({more} for small chat models)" in quickstart
    assert f"`samples` ({usual} or {more})" in runtime


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT


def test_conversations_have_no_system_message_where_the_template_takes_none():
    tokenizer = word_tokenizer(chat_template=NO_SYSTEM)
    data = load_mixture(None, tokenizer, 6, 16, seed=0)
    assert data.info.source.endswith("kvconvert:chat-calib.jsonl=1")
    assert "<user>" in spoken(
        tokenizer, load_token_samples("kvconvert:chat-calib.jsonl", tokenizer, 1, 400, seed=0).ids[0]
    )


def test_a_template_that_writes_no_answers_leaves_conversations_out():
    refusing = "{{ raise_exception('nothing') }}"
    data = load_mixture(None, word_tokenizer(chat_template=refusing), 6, 16, seed=0)
    assert data.info.source.endswith("kvconvert:code-calib.txt=1")
