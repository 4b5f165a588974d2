"""The library's errors name arguments; the command line shows its own options in their place."""

import ast
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny.sources import parsed

from kvconvert import Recipe, calibrate, export
from kvconvert.cli import cli
from kvconvert.errors import RecipeError, UsageError

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def folder(converted, tmp_path_factory):
    """A copy of a tiny model, a recipe, its finished calibration and its bundle."""
    folder = shutil.copytree(converted, tmp_path_factory.mktemp("messages"), dirs_exist_ok=True)
    (folder / "file").write_text("text")
    return folder


def calibration(folder, **changed):
    """Arguments of a calibration of few tokens, some of them changed."""
    arguments = {"recipe": str(folder / "recipe.toml"), "samples": 2, "seq_len": 16}
    return arguments | changed


# The command, the function's arguments, and what the message says of them: in the library, and on the command line.
CASES = {
    "device": (calibration, {"device": "abacus"}, "`device` may be", "--device may be"),
    "length": (calibration, {"seq_len": 10**6}, "`seq_len` is 1,000,000", "--seq-len is 1,000,000"),
    "other inputs": (
        calibration,
        {"seed": 1},
        "with `restart=True`, or choose another `work`",
        "with --restart, or choose another -o",
    ),
    "a file": (calibration, {"work": "file"}, "`work` has to be a directory", "-o has to be a directory"),
    "output": (dict, {}, "replace it with `force=True`", "replace it with --force"),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_name_arguments_and_the_command_line_its_options(folder, case):
    command, changed, said, shown = CASES[case]
    if command is dict:
        with pytest.raises(UsageError, match=re.escape(said)):
            export(folder / "work", folder / "bundle", progress=False)
        words = ["export", folder / "work", "-o", folder / "bundle"]
    else:
        arguments = calibration(folder, **changed)
        work = folder / arguments.pop("work", "work")
        with pytest.raises(UsageError, match=re.escape(said)):
            calibrate(folder / "model", work, **arguments, progress=False)
        options = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", value)]
        words = ["calibrate", folder / "model", "-o", work, *options]
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert result.exit_code == 2
    assert shown in result.stderr
    assert "`" not in result.stderr


def test_an_option_of_another_command_is_shown_too(folder):
    damaged = folder / "damaged"
    damaged.mkdir()
    (damaged / "state.json").write_text("no JSON")
    result = CliRunner().invoke(cli, ["export", str(damaged), "-o", str(folder / "new")])
    assert result.stderr.strip().endswith("; calibrate again with --restart.")
    with pytest.raises(RecipeError, match="lacks its part 'name'; calibrate again with `restart=True`"):
        Recipe.from_dict({"a": {"b": []}})


@pytest.mark.parametrize("room", ["kvconvert", "calibration", "kernels", "runtime"])
def test_no_message_of_the_library_names_an_option(room):
    options = {name for command in cli.commands.values() for parameter in command.params for name in parameter.opts}
    options = {name for name in options if name.startswith("-")}
    for path in (ROOT / room).rglob("*.py"):
        if path.name == "cli.py" or path.parent.name == "commands":
            continue
        raised = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Raise))
        for node in raised:
            found = options & set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", ast.unparse(node)))
            assert not found, f"{path}, line {node.lineno}: {found}"


# What stands before a noun as text, or is a number of at most three digits.
_NAMES = "only|only_tokens|modality|name|MOST|UNIT|text|dtype|listed|join|PAGE_SIZES?|page|group_size|min|first|last"


@pytest.mark.parametrize("room", ["kvconvert", "calibration", "kernels", "runtime"])
def test_numbers_in_messages_have_separators(room):
    nouns = r" (new )?(tokens|positions|bytes|characters|pixels|inputs|numbers|values|sequences)\b"
    for path in (ROOT / room).rglob("*.py"):
        for text in (node for node in ast.walk(parsed(path)) if isinstance(node, ast.JoinedStr)):
            for value, after in pairwise(text.values):
                if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                    bare = value.format_spec is None and value.conversion == -1 and re.match(nouns, after.value)
                    is_text = re.search(rf"(?<![a-z])({_NAMES})(\b|$)", ast.unparse(value.value), re.IGNORECASE)
                    assert is_text or not bare, f"{path}, line {value.lineno}: {ast.unparse(value.value)}"
