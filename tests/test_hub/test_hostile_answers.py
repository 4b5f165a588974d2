"""What answers in the Hub's place may say what it likes: nothing is written outside of the cache, read without end, or
followed for ever, and each refusal is one sentence.
"""

import time

import pytest
from huggingface_hub import constants
from tiny import commands
from tiny.hub import Repository
from tiny.llama import write_tiny_llama

from kvconvert.bundle.hub import fetch, upload
from kvconvert.bundle.locate import locate
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import HubError
from kvconvert.io import hub as client
from kvconvert.models.source import open_source

NAME = "somebody/tiny"


@pytest.fixture
def published(hub, golden):
    files = {path.relative_to(golden).as_posix(): path.read_bytes() for path in golden.rglob("*") if path.is_file()}
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit("main", files)
    return hub


def refused(call, words):
    with pytest.raises(HubError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.each_value
@pytest.mark.parametrize("etag", ['"../../../../evil"', '"/evil"', '""', '"."', '".."', '"a/b"', f'"{"a" * 300}"'])
@pytest.mark.parametrize("where", ["ETag", "X-Linked-Etag"])
def test_an_etag_is_no_path(published, tmp_path, etag, where):
    published.headers = {where: etag}
    refused(lambda: locate(NAME), f"cannot be trusted.*{where} that names no content")
    refused(lambda: fetch(NAME, tmp_path / "copy"), "names no content")
    outside = [path for path in tmp_path.rglob("*") if "evil" in path.name]
    assert not outside


@pytest.mark.parametrize("commit", ["../../../evil", "", "main", "0" * 41, 5, [], {"a": 1}, True])
def test_a_commit_is_a_hash(published, tmp_path, commit):
    if isinstance(commit, str):
        published.headers = {"X-Repo-Commit": commit}
        refused(lambda: locate(NAME), "a commit that is none")
        published.headers = {}
    published.change = lambda value: value | {"sha": commit} if isinstance(value, dict) and "sha" in value else value
    refused(lambda: fetch(NAME, tmp_path / "copy"), "sha that is no hash")
    refused(lambda: fetch(NAME), "sha that is no hash")


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../x", ".", "", "a//b", "a\\b", "C:x", "a\nb", "x" * 256, None, 5, []]
)
def test_a_name_is_that_of_a_file_below_the_repository(published, tmp_path, name):
    def change(value):
        if isinstance(value, dict) and "siblings" in value:
            return value | {"siblings": [*value["siblings"], {"rfilename": name}]}
        return (
            [*value, {"type": "file", "path": name, "size": 1, "oid": "0" * 40}] if isinstance(value, list) else value
        )

    published.change = change
    refused(lambda: fetch(NAME, tmp_path / "copy"), "a file of the name")
    published.change = lambda value: change(value) if isinstance(value, list) else value
    refused(lambda: locate(NAME), "a file of the name")


@pytest.mark.parametrize("value", [None, 5, "x", [5], [None], {"siblings": 5}, {"siblings": [5]}, {"sha": None}, {}])
def test_answers_of_another_kind_are_one_sentence(published, golden, tmp_path, value):
    published.change = lambda answered: value
    refused(lambda: fetch(NAME, tmp_path / "copy"), NAME)
    refused(lambda: fetch(NAME), NAME)
    refused(lambda: upload(open_bundle(golden), NAME), NAME)
    result = commands.kvconvert("pull", NAME)  # which fails on any other exception
    assert result.exit_code == 1


@pytest.mark.parametrize("content", [b"[" * 10_000, b'{"sha": "\xff"}', b"<html>", b'{"a": "' + b"x" * 2**24 + b'"}'])
def test_text_that_is_no_answer_is_refused(published, tmp_path, content):
    published.raw = content
    refused(lambda: fetch(NAME, tmp_path / "copy"), NAME)


def test_answers_without_end_are_given_up(published, tmp_path, monkeypatch):
    published.pages = True  # each names itself as the next
    refused(lambda: locate(NAME), "more than 200 pages")
    published.pages = "http://127.0.0.1:9/api/models"
    refused(lambda: locate(NAME), "further pages elsewhere")
    published.pages = False
    published.endless = "/api/"
    refused(lambda: fetch(NAME, tmp_path / "copy"), "more than 16 MiB")
    monkeypatch.setattr(client, "MOST_UNANNOUNCED", 2**20)
    published.endless = "/resolve/"
    refused(lambda: locate(NAME), "more than 1 MiB without its length")


def test_answers_that_come_slowly_or_never_are_given_up(published, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(client, "SILENCE_SECONDS", 0.5)
    published.pause = 0.1, 100
    began = time.monotonic()
    refused(lambda: fetch(NAME, tmp_path / "copy"), "takes more than")
    published.pause = 2, 1
    refused(lambda: fetch(NAME, tmp_path / "copy"), "timed out")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("header", ["Retry-After", "ratelimit"])
def test_the_demand_to_wait_for_years_is_not_followed(published, tmp_path, header):
    published.status = 429
    published.headers = {header: "999999999" if header == "Retry-After" else '"api";r=0;t=999999999'}
    refused(lambda: locate(NAME), "the demand to wait 999999999 seconds")


def test_what_was_not_asked_for_compressed_is_not_unpacked(published, tmp_path):
    published.headers = {"Content-Encoding": "gzip"}
    refused(lambda: fetch(NAME, tmp_path / "copy"), "a compressed text")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_source_has_the_content_that_the_hub_says(hub, tmp_path, name):
    source = write_tiny_llama(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit("main", files)
    opened = open_source(NAME)
    opened.info()
    assert name in files
    target = opened.directory / name
    content = bytearray(target.read_bytes())
    content[-2] ^= 1
    target.resolve().write_bytes(content)
    refused(lambda: open_source(NAME).info(), f"{name} in the Hub's cache is not what the Hub says")


def test_files_of_another_commit_than_was_named_are_no_source(hub, tmp_path):
    source = write_tiny_llama(tmp_path / "source")
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit("main", {path.name: path.read_bytes() for path in source.iterdir()})
    hub.headers = {"X-Repo-Commit": "f" * 40}
    refused(lambda: open_source(NAME), f"has no files of {NAME}")


def test_what_others_make_of_the_hub_goes_through_the_same_checks(published, monkeypatch):
    """Clients that are made later, as after an error of the connection, check as well."""
    from huggingface_hub.utils import _http

    locate(NAME, weights=False)
    _http.close_session()
    published.headers = {"ETag": '"../evil"'}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{constants.HF_HUB_CACHE}-2")
    refused(lambda: locate(NAME), "names no content")


def test_storage_whose_answers_nobody_looks_at_is_not_asked(published, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    published.headers = {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": f"{published.endpoint}/xet-read-token"}
    directory, _ = fetch(NAME, tmp_path / "copy")
    open_bundle(directory)
    assert not [path for _, path, _ in published.requests if "xet" in path]
