"""Samples are what was asked for, the same each time, or a sentence that says why not."""

import gzip
import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import torch
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvconvert.data import rows, sources
from kvconvert.data.sources import (
    CALIBRATION,
    EVALUATION,
    HubSource,
    JsonRows,
    SourceTable,
    check_sources,
    holds_conversations,
    local_files,
)
from kvconvert.data.text import load_held_out_samples, load_token_samples, token_data, with_random_tokens
from kvconvert.errors import DataError, UsageError
from kvconvert.io.disk import remove_tree

CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {{ m.name if m.name is defined }} {% endfor %}"


def word_tokenizer(start: bool = False, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per word "w0" ... "w999"; </s> ends a document, <s> begins a text if `start`."""
    words = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(1000)), "<user>", "<assistant>"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if start:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    return tokenizer


def words(first: int, last: int) -> str:
    return " ".join(f"w{i}" for i in range(first, last))


def spoken(tokenizer, row) -> list[str]:
    return tokenizer.convert_ids_to_tokens(row.tolist())


def write_jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_text_windows_do_not_overlap_are_contiguous_and_chosen_by_the_seed(tmp_path):
    tokenizer = word_tokenizer()
    (tmp_path / "book.txt").write_text(words(0, 1000))
    source = str(tmp_path / "book.txt")
    data = load_token_samples(source, tokenizer, 10, 16, seed=3)
    numbers = torch.tensor([[int(word[1:]) for word in spoken(tokenizer, row)] for row in data.ids])
    assert data.ids.shape == (10, 16)
    assert data.ids.dtype == torch.int64
    assert (numbers.diff(dim=1) == 1).all(), "a window is a stretch of the text"
    assert len(set(numbers.flatten().tolist())) == 160, "no token is in two windows"
    assert torch.equal(data.ids, load_token_samples(source, tokenizer, 10, 16, seed=3).ids)
    assert not torch.equal(data.ids, load_token_samples(source, tokenizer, 10, 16, seed=4).ids)


def test_info_fingerprints_the_ids_and_keeps_private_paths_to_itself(tmp_path):
    (tmp_path / "book.txt").write_text(words(0, 100))
    data = load_token_samples(str(tmp_path / "book.txt"), word_tokenizer(), 3, 16, seed=0)
    assert data.info.sha256 == hashlib.sha256(data.ids.numpy().astype("<i8").tobytes()).hexdigest()
    assert (data.info.source, data.info.samples, data.info.length, data.info.seed) == ("book.txt", 3, 16, 0)


@pytest.mark.parametrize("source", [*CALIBRATION, EVALUATION])
def test_texts_that_ship_with_kvconvert_are_named_as_sources(source):
    assert load_token_samples(source, word_tokenizer(chat_template=CHAT), 2, 64, seed=0).info.source == source
    with pytest.raises(DataError, match="does not ship with kvconvert; name kvconvert:books"):
        load_token_samples(f"{source}x", word_tokenizer(), 2, 64, seed=0)


def test_every_sample_begins_as_the_tokenizer_begins_a_text(tmp_path):
    tokenizer = word_tokenizer(start=True)
    (tmp_path / "book.txt").write_text(words(0, 60))
    data = load_token_samples(str(tmp_path / "book.txt"), tokenizer, 4, 16, seed=0)
    assert all(spoken(tokenizer, row)[0] == "<s>" and spoken(tokenizer, row)[1] != "<s>" for row in data.ids)
    assert spoken(tokenizer, data.ids[1])[1] == "w15", "15 tokens of text and one <s> to a sample"


def test_a_directory_of_texts_is_joined_with_document_ends(tmp_path):
    tokenizer = word_tokenizer()
    for name, first in (("b.txt", 5), ("a.txt", 0)):
        (tmp_path / name).write_text(words(first, first + 5))
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.txt").write_text("not data")
    data = load_token_samples(str(tmp_path), tokenizer, 1, 11, seed=0)
    assert spoken(tokenizer, data.ids[0]) == [*words(0, 5).split(), "</s>", *words(5, 10).split()]


def test_a_directory_of_tables_says_which_of_its_files_were_read(tmp_path):
    (tmp_path / "page.md").write_text(words(0, 20))
    (tmp_path / "settings.json").write_text('{"width": 3}')
    with pytest.raises(DataError, match=r"\(its \.json files\) has none of the text columns .+ its columns are width"):
        load_token_samples(str(tmp_path), word_tokenizer(), 1, 11, seed=0)


def test_a_folder_that_goes_away_while_files_are_looked_for_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    (tmp_path / "a.txt").write_text(words(0, 20))
    scandir = os.scandir

    def scan(folder="."):
        if Path(folder).name == "gone":
            raise FileNotFoundError(2, "No such file or directory", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    check_sources(str(tmp_path))
    assert local_files(str(tmp_path)) == [tmp_path / "a.txt"]


@pytest.mark.parametrize("name", ["guide.md", "guide.txt"])
def test_prose_that_begins_with_a_bracket_and_quotes_a_message_is_prose(tmp_path, name):
    text = "[![tests](badge.svg)](tests)\n\n" + 40 * "How to call the server.\n" + json.dumps(SAID[0]) + "\n"
    (tmp_path / name).write_text(text)
    assert sources.read_text(tmp_path / name) == text


def nest(directory, levels):
    """Make folders in each other."""
    inner = os.open(directory, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)


def test_a_thousand_folders_in_each_other_are_looked_into_and_removed(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text(words(0, 20))
    nest(tmp_path / "data", 1200)
    check_sources(str(tmp_path / "data"))
    assert local_files(str(tmp_path / "data")) == [tmp_path / "data" / "a.txt"]
    remove_tree(tmp_path / "data")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_shuffled_by_the_seed_and_joined_whole(tmp_path, kind):
    tokenizer = word_tokenizer()
    rows = [{"id": i, "content": words(10 * i, 10 * i + 7)} for i in range(40)] + [{"id": 40, "content": ""}]
    source = str(tmp_path / f"rows.{kind}")
    if kind == "jsonl":
        write_jsonl(tmp_path / "rows.jsonl", rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    data = load_token_samples(source, tokenizer, 11, 29, seed=1)
    documents = " ".join(spoken(tokenizer, data.ids.flatten())).split(" </s> ")
    assert sorted(map(len, map(str.split, documents))) == [7] * 40, "all 40 rows, each of them whole"
    assert torch.equal(data.ids, load_token_samples(source, tokenizer, 11, 29, seed=1).ids)
    assert not torch.equal(data.ids, load_token_samples(source, tokenizer, 11, 29, seed=2).ids)


def test_messages_go_through_the_chat_template(tmp_path):
    tokenizer = word_tokenizer(chat_template=CHAT)
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    # The second row has a field that the first lacks: the table form fills it with null, the template must not see it.
    named = [{"role": "user", "content": "w1", "name": "w9"}, {"role": "assistant", "content": "w2"}]
    source = write_jsonl(
        tmp_path / "chat.jsonl", [{"messages": turns, "text": "w5"}, {"messages": named, "text": "w5"}]
    )
    text = spoken(tokenizer, load_token_samples(source, tokenizer, 1, 10, seed=0).ids[0])
    assert sorted(" ".join(text).split(" </s> ")) == ["<user> w1 <assistant> w2", "<user> w1 w9 <assistant> w2"]


def test_questions_and_answers_in_columns_of_their_own_are_conversations(tmp_path):
    tokenizer = word_tokenizer(chat_template=CHAT)
    rows = [{"instruction": "w1", "input": "", "output": "w2"}, {"instruction": "w1", "input": "w3", "output": "w4"}]
    source = write_jsonl(tmp_path / "rows.jsonl", [*rows, {"instruction": "w5", "input": "", "output": None}])
    assert holds_conversations(source)
    text = " ".join(spoken(tokenizer, load_token_samples(source, tokenizer, 1, 10, seed=0).ids[0]))
    assert sorted(text.split(" </s> ")) == ["<user> w1 <assistant> w2", "<user> w1 w3 <assistant> w4"]
    # One column alone can still be named.
    answers = " ".join(spoken(tokenizer, load_token_samples(f"{source}::output", tokenizer, 1, 3, seed=0).ids[0]))
    assert set(answers.split()) <= {"w2", "w4", "</s>"}


def test_messages_without_a_chat_template_are_refused_by_name(tmp_path):
    source = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "w1"}]}])
    with pytest.raises(DataError, match="no chat template"):
        load_token_samples(source, word_tokenizer(), 1, 4, seed=0)


def test_short_data_says_how_many_tokens_were_found_and_needed(tmp_path):
    (tmp_path / "short.txt").write_text(words(0, 40))
    with pytest.raises(DataError, match="holds 40 tokens, but one sample needs 64"):
        load_token_samples(str(tmp_path / "short.txt"), word_tokenizer(), 1, 64, seed=0)
    with pytest.raises(DataError, match=r"40 tokens, which make 2 samples of 16, but 3 samples \(48 tokens\)"):
        load_token_samples(str(tmp_path / "short.txt"), word_tokenizer(), 3, 16, seed=0)


def test_bad_sources_are_one_sentence_each(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "blank.jsonl").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "table.xml").write_text("a,b")
    (tmp_path / "broken.jsonl").write_text('{"text": "w1"}\n{"tex')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    write_jsonl(tmp_path / "columns.jsonl", [{"question": "w1", "label": 3}])
    write_jsonl(tmp_path / "numbers.jsonl", [{"text": 3}])
    write_jsonl(tmp_path / "nothing.jsonl", [{"prompt": "w1", "output": None}] * 2)
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "none").mkdir()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("w1")
    write_jsonl(tmp_path / "mixed" / "b.jsonl", [{"text": "w1"}])
    expected = {
        "empty.txt": "is empty",
        "blank.txt": "holds no text",
        "blank.jsonl": "is empty; give a file with rows",
        "latin.txt": r"not UTF-8 text \(byte 3\)",
        "table.xml": "not of a known kind; convert it to .txt, .jsonl, .json, .csv or .parquet",
        "broken.jsonl": "cannot be read",
        "broken.parquet": "cannot be read",
        "columns.jsonl": "its columns are question and label",
        "numbers.jsonl": "int is neither text nor a list of messages",
        "nothing.jsonl": "has no text in columns prompt and output of any row; name another column",
        "none": "holds no .txt, .jsonl, .json, .csv or .parquet file",
        "mixed": "mixes .jsonl and .txt files",
        "missing.txt": "does not exist",
        "latin.txt:text": "only Hub data sets take that",
        "pipe.txt": "is neither a file nor a directory; write what it gives to a file",
    }
    for name, message in expected.items():
        with pytest.raises(DataError, match=message) as caught:
            load_token_samples(str(tmp_path / name), word_tokenizer(), 1, 4, seed=0)
        assert str(caught.value).count("\n") == 0, name
    for source in ("", "a:b:c:d:e", "not a name", "owner//name"):
        with pytest.raises(DataError):
            load_token_samples(source, word_tokenizer(), 1, 4, seed=0)
    with pytest.raises(UsageError):
        load_token_samples(EVALUATION, word_tokenizer(), 0, 4, seed=0)


def test_what_is_below_a_local_directory_is_no_hub_source(tmp_path, monkeypatch):
    (tmp_path / "owner").mkdir()
    monkeypatch.chdir(tmp_path)
    for source in ("owner/name", "owner/name:config:train:text"):
        with pytest.raises(DataError, match="as owner is a directory here, the Hub was not asked"):
            local_files(source)
    assert local_files("somebody/name") is None


def test_hub_sources_are_taken_apart():
    assert HubSource.parse("wikitext:wikitext-2-raw-v1:test:text") == HubSource(
        "wikitext", "wikitext-2-raw-v1", "test", "text"
    )
    assert HubSource.parse("owner/name::validation") == HubSource("owner/name", None, "validation", None)
    assert HubSource.parse("owner/name") == HubSource("owner/name", None, "train", None)


@pytest.fixture
def hub_files(tmp_path, monkeypatch):
    """The folder of the files of owner/name, which stands for a data set of the Hub."""
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return folder


STORIES = [{"text": "w1 w1", "story": words(10 * i, 10 * i + 5)} for i in range(10)]


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv", "jsonl", "field.json"])
def test_hub_rows_are_read_here_with_the_named_column(hub_files, kind):
    card = {"config_name": "part", "data_files": [{"split": "test", "path": f"part/*.{kind}"}]}
    file = hub_files / "part" / f"x.{kind}"
    file.parent.mkdir()
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(STORIES), file)
    elif kind in ("csv", "tsv"):
        cell = "," if kind == "csv" else "\t"
        file.write_text("\n".join(cell.join(row) for row in [STORIES[0], *(row.values() for row in STORIES)]))
        card |= {"sep": cell}
    elif kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, STORIES)))
    else:
        file.write_text(json.dumps({"rows": STORIES, "about": 1}))
        card |= {"field": "rows"}
    (hub_files / "README.md").write_text(f"---\nconfigs: {json.dumps([card])}\n---\n")
    table = SourceTable.open("owner/name:part:test", None)
    assert table.first(20) == STORIES
    assert table.columns == ["text", "story"]
    assert table.folder is None
    with pytest.raises(DataError, match="there is no split 'train'; there are test"):
        SourceTable.open("owner/name:part", None)
    with pytest.raises(DataError, match="no column 'plot'; name one of its columns, text and story"):
        _ = SourceTable.open("owner/name:part:test:plot", None).text_column


def test_each_line_of_a_text_file_of_the_hub_is_a_row(hub_files):
    (hub_files / "train.txt").write_bytes("\ufeffone\r\n\ntwo é\n".encode())
    assert SourceTable.open("owner/name", None).first(9) == [{"text": "one"}, {"text": ""}, {"text": "two é"}]
    (hub_files / "train.txt").write_bytes(b"one\n\xff")
    with pytest.raises(DataError, match="line 2 is not UTF-8"):
        SourceTable.open("owner/name", None)


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ({"data_files": "{outside}/secret.txt"}, "names the files .* not its own"),
        ({"data_files": "../../secret.txt"}, "names the folder .* not its own"),
        ({"data_dir": "{outside}", "data_files": "*.txt"}, "names the folder .* not its own"),
        ({"data_dir": "../..", "data_files": "*.txt"}, "names the folder .* not its own"),
        ({"data_files": "http://127.0.0.1:9/a.txt"}, "names the files .* not its own"),
        ({"data_files": "hf://datasets/owner/other/a.txt"}, "names the files .* not its own"),
        ({"data_files": "zip://*.txt::{outside}/a.zip"}, "names the files .* not its own"),
        ({"data_files": "own.txt", "sample_by": "document"}, "its card sets sample_by to 'document'"),
        ({"data_files": "own.png"}, "files are of the kind ImageFolder"),
    ],
    ids=str,
)
def test_the_card_of_a_hub_data_set_leads_nowhere_else(tmp_path, hub_files, card, reason):
    (tmp_path / "secret.txt").write_text("secret")
    for name in ("own.txt", "own.png"):
        (hub_files / name).write_text("own")
    stated = json.loads(json.dumps([{"config_name": "default"} | card]).replace("{outside}", str(tmp_path)))
    (hub_files / "README.md").write_text(f"---\nconfigs: {json.dumps(stated)}\n---\n")
    with pytest.raises(DataError, match=f"Data source owner/name cannot be read through datasets .*{reason}"):
        SourceTable.open("owner/name", None)


class Repository:
    """What the Hub says of a data set whose card is this file."""

    def __init__(self, card):
        self.card = card

    def dataset_info(self, name, expand):
        return SimpleNamespace(sha="0" * 40)

    def get_paths_info(self, name, paths, repo_type, revision):
        return [SimpleNamespace(path=self.card.name, size=self.card.stat().st_size)]

    def hf_hub_download(self, name, path, repo_type, revision):
        assert revision == "0" * 40
        return str(self.card)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("---\na: &a [x, x]\nb: [*a, *a]\n---\n# Title\n", "refers to parts of itself"),
        ("---\na: 1\n---x: 2\nb: &b [x, x]\nc: [*b, *b]\n---\n", "refers to parts of itself"),
        ("---\na: 1" + ":1" * 500 + "\n---\n", "too large a number"),
        ("---\na: {class_label: {names: {'0': a, '9999999': b}}}\n---\n", "too large a number"),
        ("---\na: [{x: 1, num_classes: 0xfffffff}]\n---\n", "too large a number"),
        ("---\nnum_bytes: 99999999\na: {names: {'0': a, '1': 99999999}, num_classes: 12345}\n---\n", None),
        ("---\na: " + "[" * 200 + "\n---\n", "more than 100 levels"),
        ("---\na: [\n---\n", "cannot be read"),
        ("---\na: b\n---\n" + "x" * 2**22, "a card of more than 4 MiB"),
        ("# Title\n\n---\n\n* and *this*\n\n---\n", None),
        ("---\nlicense: mit\n---\n*a* and &b\n", None),
    ],
)
def test_the_card_of_a_hub_data_set_is_small_and_plain(tmp_path, monkeypatch, text, reason):
    import datasets

    def loaded(name, config, revision):
        raise DataError(f"commit {revision}")

    (tmp_path / "README.md").write_text(text)
    monkeypatch.setattr(datasets, "load_dataset_builder", loaded)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: Repository(tmp_path / "README.md"))
    with pytest.raises(DataError, match=reason or "commit 0000"):
        SourceTable.open("owner/name", None)


def test_without_network_a_hub_data_set_is_one_sentence_before_datasets_tries_again(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset_builder", None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="cannot be reached for owner/name"):
        load_token_samples("owner/name", word_tokenizer(), 2, 12, seed=0)
    with pytest.raises(DataError, match="cannot be reached for owner/name"):  # before torch is imported, too
        check_sources(["owner/name::test=2"])


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz"])
def test_json_of_a_hub_data_set_costs_what_its_text_does(tmp_path, monkeypatch, kind):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    wide = [{f"c{20 * i + n}": n for n in range(20)} | {"text": words(10 * i, 10 * i + 9)} for i in range(1000)]
    text = json.dumps(wide) if kind == "json" else "\n".join(map(json.dumps, wide))
    opened = gzip.open if kind.endswith("gz") else open
    with opened(tmp_path / "owner" / "name" / f"train.{kind}", "wt") as file:
        file.write(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Json, "_generate_tables", None)  # of all columns at once
    table = SourceTable.open("owner/name", None)
    assert "text" in table.columns
    assert [row["text"] for row in table.first(3)] == [row["text"] for row in wide[:3]]
    assert table.place == "owner/name"
    with pytest.raises(DataError, match="there is no split 'test'; there are train"):
        SourceTable.open("owner/name::test", None)
    nested = tmp_path / "owner" / "deep"
    nested.mkdir()
    (nested / "train.jsonl").write_text('{"text": "a", "x": ' + "[" * 10**5 + "]" * 10**5 + "}\n")
    with pytest.raises(DataError, match=r"train\.jsonl cannot be read"):
        SourceTable.open("owner/deep", None)


def test_held_out_text_is_what_calibration_leaves_over(tmp_path):
    tokenizer = word_tokenizer()
    words = [tokenizer.convert_ids_to_tokens(3 + i % 4) for i in range(120)]
    (tmp_path / "book.txt").write_text(" ".join(words))
    source = str(tmp_path / "book.txt")
    apart = (10, 10)
    consecutive = load_held_out_samples(source, tokenizer, 1, 10, 0, apart)
    assert consecutive.ids.shape == (1, 10)
    # 20 tokens are left, and wherever the samples lie, no 19 of them need be in a row.
    joined = load_held_out_samples(source, tokenizer, 3, 19, 0, apart)
    assert joined.ids.shape == (1, 19)
    with pytest.raises(DataError, match=r"leaves 20 tokens .* and 21 are needed"):
        load_held_out_samples(source, tokenizer, 1, 21, 0, apart)


ROWS = [{"answer": f"w{i} w{i}", "text": f"w{500 + i} w{500 + i}"} for i in range(40)]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_column_of_a_local_file_is_named_after_two_colons(tmp_path, kind):
    tokenizer = word_tokenizer()
    file = tmp_path / f"rows.{kind}"
    if kind == "csv":
        lines = ["answer,text", *(f'"{row["answer"]}","{row["text"]}"' for row in ROWS)]
        file.write_text("\n".join(lines) + "\n")
    else:
        file.write_text(json.dumps(ROWS) if kind == "json" else "\n".join(map(json.dumps, ROWS)))
    plain = load_token_samples(str(file), tokenizer, 2, 16, 0)
    named = load_token_samples(f"{file}::answer", tokenizer, 2, 16, 0)
    assert all(word == "</s>" or int(word[1:]) >= 500 for word in spoken(tokenizer, plain.ids.flatten()))
    assert all(word == "</s>" or int(word[1:]) < 500 for word in spoken(tokenizer, named.ids.flatten()))
    assert (plain.info.source, named.info.source) == (f"rows.{kind}", f"rows.{kind}::answer")
    assert torch.equal(load_token_samples(f"{tmp_path}::answer", tokenizer, 2, 16, 0).ids, named.ids)
    with pytest.raises(DataError, match="no column 'question'; name one of its columns, answer and text"):
        load_token_samples(f"{file}::question", tokenizer, 2, 16, 0)


def test_plain_text_has_no_column_and_settings_beside_data_are_no_data(tmp_path):
    tokenizer = word_tokenizer()
    (tmp_path / "a.txt").write_text("w1 w2 w3 " * 20)
    (tmp_path / "about.json").write_text("{}")
    assert load_token_samples(str(tmp_path), tokenizer, 1, 16, 0).info.source == tmp_path.name
    with pytest.raises(DataError, match="plain text, which has no column 'text'"):
        load_token_samples(f"{tmp_path / 'a.txt'}::text", tokenizer, 1, 16, 0)


def test_the_last_samples_become_random_tokens(monkeypatch):
    monkeypatch.setattr("kvconvert.data.text.RANDOM_SHARE", 8)
    tokenizer = word_tokenizer()
    ids = torch.full((17, 400), 5)
    data = token_data(ids, "book.txt", 3)
    found = with_random_tokens(data, tokenizer, len(tokenizer) - 10, 3)
    assert (found.random, found.info.source) == (2, "book.txt, 2 of them random tokens")
    assert torch.equal(found.ids[:15], ids[:15])
    drawn = found.ids[15:].unique()
    assert len(drawn) > 300
    assert drawn.max() < len(tokenizer) - 10
    assert not set(drawn.tolist()) & set(tokenizer.all_special_ids)
    assert found.info.sha256 != data.info.sha256
    assert torch.equal(with_random_tokens(data, tokenizer, len(tokenizer) - 10, 3).ids, found.ids)
    begun = with_random_tokens(data, word_tokenizer(start=True), len(tokenizer), 3)
    assert (begun.ids[15:, 0] == tokenizer.bos_token_id).all()
    few = token_data(ids[:7], "book.txt", 3)
    assert with_random_tokens(few, tokenizer, len(tokenizer), 3) is few


@pytest.mark.parametrize("name", ["deep.jsonl", "deep.json"])
@pytest.mark.parametrize("depth", [150, 900, 100_000])
def test_rows_nested_by_the_thousand_are_refused(tmp_path, name, depth):
    row = '{"text": "w1", "a": ' + "[" * depth + "]" * depth + "}"
    (tmp_path / name).write_text(row if name.endswith("l") else f"[{row}]")
    with pytest.raises(DataError, match="more than 100 lists and objects in each other"):
        load_token_samples(str(tmp_path / name), word_tokenizer(), 1, 4, seed=0)


def test_rows_with_a_column_of_their_own_each_take_no_more_than_their_text(tmp_path):
    rows = [{"text": words(i, i + 4), f"column{i}": i} for i in range(5000)]
    source = write_jsonl(tmp_path / "wide.jsonl", rows)
    tracemalloc.start()
    wide = load_token_samples(source, word_tokenizer(), 8, 16, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6
    narrow = write_jsonl(tmp_path / "narrow.jsonl", [{"text": row["text"]} for row in rows])
    assert torch.equal(wide.ids, load_token_samples(narrow, word_tokenizer(), 8, 16, seed=0).ids)


def test_of_many_columns_those_that_are_read_are_kept_and_one_that_is_named(tmp_path):
    rows = [{"text": "w1 w2 w3 w4", "mine": "w5 w6 w7 w8"} | {f"c{i}": i for i in range(300)}]
    source = write_jsonl(tmp_path / "wide.jsonl", rows)
    assert SourceTable.open(source, [tmp_path / "wide.jsonl"]).columns == ["text"]
    assert spoken(word_tokenizer(), load_token_samples(f"{source}::mine", word_tokenizer(), 1, 4, 0).ids[0]) == [
        "w5", "w6", "w7", "w8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        '["w1 w2", "w3 w4"]',
        '{"text": ["w1 w2", "w3 w4"],\n"n": [1, 2]}',
        '{"text": ["w1 w2", "w3 w4"], "n": [1, 2]}\n\n',
        '{\n"text":\n "w1 w2 w3 w4"}',
    ],
    ids=["texts", "columns", "columns in a line", "object"],
)
@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n"])
def test_json_in_each_of_its_forms_gives_rows(tmp_path, content, start):
    (tmp_path / "x.json").write_text(start + content, encoding="utf-8")
    assert "w1" in " ".join(
        spoken(word_tokenizer(), load_token_samples(str(tmp_path / "x.json"), word_tokenizer(), 1, 4, 0).ids[0])
    )


SAY = {"role": "user", "content": "w1"}


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ({"text": ["w1", "w2"], "n": [1, 2]}, [{"text": "w1", "n": 1}, {"text": "w2", "n": 2}]),
        ({"messages": [[SAY], [SAY, SAY]]}, [{"messages": [SAY]}, {"messages": [SAY, SAY]}]),
        ({"messages": [SAY, SAY]}, None),
        ({"conversations": [{"from": "human", "value": "w1"}]}, None),
        ({"text": ["w1", "w2"], "n": [1]}, None),
        ({"input_ids": [1, 2]}, None),
        ({"text": "w1", "n": [1]}, None),
    ],
)
def test_one_object_is_columns_or_a_row_however_many_lines_it_takes(tmp_path, content, rows, spread):
    (tmp_path / "x.json").write_text(json.dumps(content, indent=1 if spread else None))
    assert [*JsonRows([tmp_path / "x.json"])] == (rows or [content])


def test_an_object_of_lists_before_other_lines_is_a_row(tmp_path):
    lines = [{"text": ["w1", "w2"]}, {"text": ["w3"]}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [*JsonRows([tmp_path / "x.jsonl"])] == lines


@pytest.mark.parametrize("line", ["3", '"w1"', "[1]", "{", "\ufffe{"])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    (tmp_path / "x.jsonl").write_text('{"text": "w1 w2 w3"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 2"):
        load_token_samples(str(tmp_path / "x.jsonl"), word_tokenizer(), 1, 64, seed=0)


@pytest.mark.parametrize("source", ["x" * 300, "a/" + "b" * 300, "~nobody-of-that-name/x", "a=9" + "9" * 5000])
def test_a_source_that_can_be_no_path_is_a_sentence(source):
    with pytest.raises(DataError):
        load_token_samples(source if "=" not in source else f"{source}/x", word_tokenizer(), 1, 4, seed=0)


SAID = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 " * 40}]
NO_TEXT = {
    "a list": ({"instruction": "w1", "input": SAID, "output": "w2 " * 40}, "column input: list is no text"),
    "an object": ({"instruction": "w1", "input": {"w": 1}, "output": "w2 " * 40}, "column input: dict is no text"),
    "spelled": ({"question": "w1", "answer": json.dumps(SAID)}, "column answer holds conversations spelled"),
    "as Python": ({"question": str(SAID), "answer": "w1"}, "column question holds conversations spelled"),
}


@pytest.mark.parametrize("kind", NO_TEXT)
def test_questions_and_answers_that_are_no_text_are_refused(tmp_path, kind):
    row, message = NO_TEXT[kind]
    source = write_jsonl(tmp_path / "rows.jsonl", [row] * 8)
    with pytest.raises(DataError, match=message):
        load_token_samples(source, word_tokenizer(chat_template=CHAT), 1, 16, 0)


def test_a_csv_file_of_many_columns_costs_what_its_text_does(tmp_path, monkeypatch):
    monkeypatch.setattr(Csv, "_generate_tables", None)  # of all columns at once
    many = 20_000
    lines = [",".join(f"c{i}" for i in range(many)) + ",text", *["," * many + words(0, 40)] * 4]
    (tmp_path / "wide.csv").write_text("\n".join(lines))
    data = load_token_samples(str(tmp_path / "wide.csv"), word_tokenizer(), 2, 16, 0)
    assert spoken(word_tokenizer(), data.ids[0])[:3] == ["w0", "w1", "w2"]


def test_cells_are_their_text_and_rows_that_fit_no_header_are_refused(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text(f'\ufefftext,n,text\n"w1 ""w2""\nw3 {words(5, 40)}",{10**30},\n,,w9\n{words(50, 90)}\n')
    assert SourceTable.open(str(table), [table]).first(3) == [
        {"text": f'w1 "w2"\nw3 {words(5, 40)}', "n": str(10**30)},
        {"text": None, "n": None},
        {"text": words(50, 90), "n": None},
    ]
    load_token_samples(str(table), word_tokenizer(), 2, 16, 0)
    for content in ("text\nw1,w2\n", 'text\n"w1', 'text\n"w1"x\n'):
        table.write_text(content)
        with pytest.raises(DataError, match=r"row 2.*; check the file"):
            load_token_samples(str(table), word_tokenizer(), 1, 16, 0)


def test_what_a_parquet_file_says_of_itself_for_datasets_means_nothing(tmp_path):
    table = pyarrow.table({"text": [words(0, 40)]}).replace_schema_metadata({b"huggingface": b'{"info": 5}'})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert load_token_samples(str(tmp_path / "rows.parquet"), word_tokenizer(), 1, 16, 0).ids.shape == (1, 16)


def test_long_rows_leave_the_shuffled_buffer_early(monkeypatch):
    monkeypatch.setattr(sources, "SHUFFLE_BYTES", 500)
    made = []

    def rows():
        for number in range(20):
            made.append(number)
            yield {"text": "x" * 40, "number": number}

    shuffled = sources._shuffled(rows(), 0)
    assert next(shuffled)["number"] < 3
    assert len(made) == 3
    assert len([*shuffled]) == 19


def test_names_of_parquet_columns_that_are_no_text_are_one_sentence(tmp_path):
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"], "é": [1]}), file, store_schema=False)
    file.write_bytes(file.read_bytes().replace("é".encode(), b"\xff\xff"))
    with pytest.raises(DataError, match="cannot be read"):
        SourceTable.open(str(file), [file])


@pytest.mark.parametrize("suffix", [".txt", ".py", ".md", ".jsonl", ".json", ".csv"])
def test_a_file_of_terabytes_without_a_line_is_refused(tmp_path, monkeypatch, suffix):
    for module in (sources, rows):
        monkeypatch.setattr(module, "MOST_AT_ONCE", 2**22)
    file = tmp_path / f"x{suffix}"
    with file.open("wb") as sparse:
        sparse.truncate(10**13)
    with pytest.raises(DataError, match=r"more than 4,?194,?304"):
        load_token_samples(str(file), word_tokenizer(), 1, 8, seed=0)


def test_a_json_document_of_many_lines_is_bounded_as_one_of_a_single_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MOST_AT_ONCE", 1000)
    (tmp_path / "x.json").write_text("[\n" + "{},\n" * 1000 + "{}]")
    with pytest.raises(DataError, match="a JSON document has more than 1,000 bytes"):
        load_token_samples(str(tmp_path / "x.json"), word_tokenizer(), 1, 8, seed=0)


def test_a_file_whose_name_is_no_text_is_read(tmp_path):
    file = os.path.join(os.fsencode(tmp_path), b"a\xff.txt")
    with open(file, "wb") as text:
        text.write(words(0, 50).encode())
    assert load_token_samples(os.fsdecode(file), word_tokenizer(), 1, 8, seed=0).info.source == r"a\udcff.txt"


@pytest.mark.parametrize("row", [{"x" * 1_000_000: 1}, {f"{i}" * 70: 1 for i in range(100)}, {"\x1b[31m\n": 1}])
def test_a_sentence_does_not_quote_all_names_of_columns(tmp_path, row):
    file = write_jsonl(tmp_path / "x.jsonl", [row])
    for source in (file, f"{file}::y"):
        with pytest.raises(DataError) as caught:
            load_token_samples(source, word_tokenizer(), 1, 8, seed=0)
        assert len(str(caught.value)) < 4000
        assert str(caught.value).isprintable()
