"""Paths that do not exist, text that is none, and output that goes nowhere: one sentence each, and no network."""

import errno
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner
from tiny.bundle import edit_json, reseal
from transformers import AutoTokenizer

from kvconvert.bundle.locate import check_output
from kvconvert.cli import cli
from kvconvert.commands.generate import _lines, _whole_input
from kvconvert.console import Printer
from kvconvert.convert.work_files import check_place
from kvconvert.errors import UsageError, first_line
from kvconvert.tables import text_table

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1"


def refusal(arguments, **options):
    result = CliRunner().invoke(cli, arguments, **options)
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("Error: ")
    return lines[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            [command, place]
            for command in ("inspect", "verify", "bench", "eval")
            for place in ("/nope", "./nope", "nope/dir/")
        ),
        *(["generate", place, "--prompt", "x"] for place in ("/nope", "./nope", "nope/dir/x")),
        *(["calibrate", place, "-o", "work"] for place in ("/nope", "./nope", "../nope", "nope/dir/x", "nope/")),
    ],
    ids=" ".join,
)
def test_a_path_that_does_not_exist_never_asks_the_network(arguments, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, name, lambda *_, **__: pytest.fail("asked the Hub"))
    assert "nope" in refusal(arguments)
    assert os.listdir(tmp_path) == []


def test_a_prompt_that_is_not_text_is_refused_before_anything_is_loaded():
    assert "not UTF-8" in refusal(["generate", "/nope", "--prompt", b"caf\xe9".decode("utf-8", "surrogateescape")])


def test_utf_8_is_text_in_a_locale_whose_encoding_does_not_have_it(monkeypatch):
    text = "\u00fc \u65e5\u672c"
    passed = text.encode().decode("ascii", "surrogateescape")  # as Python does in the locale C without its UTF-8 mode
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode("ascii", "surrogateescape"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(passed))
    assert [*_lines()] == [text]
    options, loaded = ["--prompt", passed, "--system", passed, "--stop", passed], []

    class Loaded:
        def __init__(self, bundle, choice, system, **others):
            loaded.extend([system, *choice.stop])

        def complete(self, prompt, images, raw):
            loaded.append(prompt)

    monkeypatch.setattr("kvconvert.console.Console", Loaded)
    monkeypatch.setattr("kvconvert.bundle.locate.check_system", lambda bundle: None)
    assert CliRunner().invoke(cli, ["generate", str(GOLDEN), *options]).exit_code == 0
    assert loaded == [text] * 3


def test_lines_of_a_conversation_that_are_not_text_are_refused(monkeypatch):
    for content, errors in ((b"a\ncaf\xe9\n", "strict"), (b"a\ncaf\xe9\n", "surrogateescape")):
        stream = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(UsageError, match="standard input is not"):
            list(_lines())


@pytest.mark.parametrize("check", [check_output, check_place])
def test_an_output_whose_path_is_no_text_is_refused(check, tmp_path):
    for path in (tmp_path / "b\udcff", tmp_path / "b\udcff" / "c"):
        with pytest.raises(UsageError, match=r"b\\udcff.* is not UTF-8 text"):
            check(path, *[False] * (check is check_output))


@pytest.mark.parametrize("check", [check_output, check_place])
def test_an_output_in_a_working_directory_is_refused(check, tmp_path):
    (tmp_path / "state.json").write_text("{}")
    check(tmp_path / "hidden", *[False] * (check is check_output))  # a file of that name may be anybody's
    (tmp_path / "lock").touch()
    for path in (tmp_path / "hidden", tmp_path / "auto" / "bundle"):
        with pytest.raises(UsageError, match="lies in the working directory"):
            check(path, *[False] * (check is check_output))


class Endless(io.RawIOBase):
    """The same bytes without an end."""

    def __init__(self, content):
        self.content, self.given = content, 0

    def readable(self):
        return True

    def readinto(self, buffer):
        assert self.given < 2**26, "it is read without end"
        part = (self.content * (len(buffer) // len(self.content) + 1))[: len(buffer)]
        buffer[:] = part
        self.given += len(part)
        return len(part)


@pytest.mark.parametrize(("content", "chat"), [(b"\0", False), (b"\0", True), (b"y\n" * 2**10, False)])
def test_standard_input_without_end_is_refused(content, chat, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless(content)), encoding="utf-8"))
    with pytest.raises(UsageError, match="more than 16,777,216 characters"):
        list(_lines()) if chat else _whole_input()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["inspect", str(GOLDEN)], ["--help"], ["--version"], []])
def test_output_that_cannot_be_written_is_one_sentence(arguments, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as caught:
            cli(arguments)
        monkeypatch.undo()
    assert caught.value.code == 1
    assert "could not be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", str(GOLDEN), "-o", "x" * 300],
        ["report", str(GOLDEN), "--model", "x" * 300],
        ["plan", "x" * 5000],
        ["generate", str(GOLDEN), "--prompt", "x", "--temperature", "1", "--seed", "9" * 30],
        ["recipes", "default", "--key-bits", "9" * 5000],
        ["recipes", "default", "--set", "kv.key_bits=" + "[" * 5000],
        ["serve", str(GOLDEN), "--host", "a..b", "--port", "0"],
        ["serve", str(GOLDEN), "--host", "a" * 70, "--port", "0"],
        ["calibrate", str(GOLDEN), "-o", "work", "--data", "~nobody-of-that-name/x"],
        ["pull", "someone/something", "-o", "/"],
    ],
    ids=lambda arguments: " ".join(part[:20] for part in arguments if not part.startswith("/")),
)
def test_an_argument_that_no_system_takes_is_a_sentence(arguments, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert refusal(arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", str(GOLDEN), "--kv-memory", "4", "--port", "0"], "'4' is less than 100,000 bytes"),
        (["serve", str(GOLDEN), "--max-body", "4", "--port", "0"], "'4' is less than 1,000 bytes"),
        (
            ["serve", str(GOLDEN), "--max-batch-tokens", "1000", "--port", "0"],
            "at least --prompt-chunk, which is",
        ),
        (["generate", str(GOLDEN), "Hi", "--system", "x"], "no chat template"),
    ],
    ids=["kv-memory", "max-body", "max-batch-tokens", "system"],
)
def test_what_can_be_known_before_a_bundle_is_loaded_is_said_before(arguments, said, monkeypatch):
    monkeypatch.setattr("kvconvert.console.load", None)  # first, for its import would keep the other
    monkeypatch.setattr("kvconvert.runtime.load", None)
    assert said in refusal(arguments)


@pytest.mark.parametrize("value", ["[" + "0, " * 50_000 + "]", '"' + "x" * 100_000 + '"'], ids=["list", "text"])
def test_a_message_does_not_quote_all_of_a_long_value(tmp_path, value):
    (tmp_path / "recipe.toml").write_text(f"[kv]\nkey_bits = {value}\n")
    message = refusal(["recipes", str(tmp_path / "recipe.toml")])
    assert "key_bits" in message
    assert " ... " in message
    assert len(message) < 3000


def test_long_paths_are_shortened_and_the_systems_numbers_left_out(monkeypatch):
    for command in ("plan", "inspect", "recipes"):
        message = refusal([command, "/" + "/".join(["b" * 200] * 30)])
        assert len(message) < 400
        assert message.count("bbb...bbb") + message.count("bbb... cannot be used (File name too long)") == 1
    assert first_line(OSError(errno.ENAMETOOLONG, "File name too long", "x")) == "File name too long: 'x'"


def test_a_seed_beyond_64_bits_is_refused_before_a_model_is_looked_for():
    for seed in ("9" * 30, "-1"):
        assert "from 0 to 2^63" in refusal(["calibrate", "/nope", "-o", "work", "--seed", seed])


@pytest.mark.parametrize("sign", ["\x07", "\x1b]0;title\x07", "\x9b2J", "\u202e"], ids=ascii)
def test_what_a_bundle_says_reaches_the_terminal_as_text_alone(tmp_path, sign):
    bundle = shutil.copytree(GOLDEN, tmp_path / "bundle")
    edit_json(bundle / "generation_config.json", early_stopping=f"{sign}x")
    reseal(bundle)
    assert f"is {ascii(sign)[1:-1]}x" in refusal(["generate", str(bundle), "--prompt", "x"])


def test_what_libraries_log_and_warn_of_reaches_the_terminal_as_text_alone():
    hostile = "model.x\x1b[31m\x1b]0;title\x07 \x9b2J\u202e"
    program = f"""
import logging, warnings
import kvconvert.cli
def say(prog_name):
    logging.getLogger("transformers").warning("\\x1b[1mREPORT\\x1b[0m\\n%s\\tUNEXPECTED", {hostile!r})
    warnings.warn({hostile!r})
kvconvert.cli.cli = say
kvconvert.cli.main()
"""
    said = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True).stderr
    assert "REPORT\nmodel.x\\x1b]0;title\\x07 \\x9b2J\\u202e  UNEXPECTED\n" in said
    assert "UserWarning: model.x\\x1b]0;title\\x07 \\x9b2J\\u202e\n" in said


def test_a_current_directory_that_was_removed_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "The current directory was removed; change to one that exists" in refusal(["inspect", "bundle"])


def test_a_file_that_goes_while_a_command_runs_is_one_sentence(tmp_path, monkeypatch):
    def read(*args):
        (tmp_path / "hidden.f32").read_bytes()

    monkeypatch.setattr("kvconvert.recipes.text.list_recipes", read)
    assert "hidden.f32 cannot be used (No such file or directory); check the path" in refusal(["recipes"])


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "make room or check the disk"), (errno.EFBIG, "make room"), (errno.EROFS, "check the path")],
)
def test_a_file_that_cannot_be_written_is_one_sentence(number, remedy, monkeypatch):
    error = OSError(number, os.strerror(number), "BUNDLE/.kvconvert.json.partial")
    monkeypatch.setattr("kvconvert.recipes.text.list_recipes", Mock(side_effect=error))
    said = refusal(["recipes"])
    assert f"BUNDLE/.kvconvert.json.partial cannot be used ({os.strerror(number)}); {remedy}" in said


@pytest.mark.parametrize(
    "variables",
    [
        {"HF_HUB_DOWNLOAD_TIMEOUT": "x"},
        {"HF_HUB_ETAG_TIMEOUT": ""},
        {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "x", "RANK": "0", "LOCAL_RANK": "0"},
        {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": None, "LOCAL_RANK": "0"},
        {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "9" * 5000},
    ],
)
def test_a_variable_of_the_environment_that_is_no_number_is_one_sentence(variables, monkeypatch):
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert re.search(r"The environment variable \w+ is .{1,45}, and has to be a whole number", refusal(["recipes"]))


def test_the_last_column_goes_on_below_itself_on_a_narrow_terminal_alone(monkeypatch):
    rows = [("default", "a good start: 3-bit keys"), ("auto", "by size")]
    assert text_table(("recipe", "when"), rows) == "recipe   when\ndefault  a good start: 3-bit keys\nauto     by size"
    monkeypatch.setenv("COLUMNS", "28")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert text_table(("recipe", "when"), rows).splitlines()[1:] == [
        "default  a good start: 3-bit",
        "         keys",
        "auto     by size",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_obeys_no_control_characters_of_a_model(terminal, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN)
    made = "a\x1b]0;title\x07 \x9b2J\r\n\tb \u200d"
    printer = Printer(tokenizer, ())
    for ids in tokenizer(["Hello", made], add_special_tokens=False).input_ids:
        printer.put(torch.tensor([ids]))
    printer.end()
    shown = "a\\x1b]0;title\\x07 \\x9b2J\n\tb \u200d" if terminal else made
    assert (printer.text, capsys.readouterr().out) == (made, f"{shown}\n")
