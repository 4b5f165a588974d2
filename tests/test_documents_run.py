"""README.md and docs/quickstart.md: every command, every example and every recipe in them runs, on a tiny model.

They speak of MODEL, WORK and BUNDLE; here these are folders of that name. The reference model's commands are those of
test_quickstart.py.
"""

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from tiny.checkpoints import save_checkpoint
from tiny.commands import kvconvert
from tiny.sources import parsed

from kvconvert.cli import cli
from kvconvert.models import CACHE
from kvconvert.recipes.recipe import Recipe, preset_names

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kvconvert", "calibration", "kernels", "runtime")
PAGES = ("README.md", "docs/quickstart.md")
DOCUMENTS = [
    "README.md",
    *(
        path.relative_to(ROOT).as_posix()
        for room in ("docs", "benchmarks")
        for path in sorted(ROOT.glob(f"{room}/*.md"))
    ),
]
# What a test cannot run: it would install packages, run the tests, or need an account.
NOT_RUN = ("pip install", "make ", "kvconvert push", "hf auth")


def text(page):
    return (ROOT / page).read_text(encoding="utf8")


def blocks(page, language):
    """Fenced blocks of a page without the output of `make quickstart-page`."""
    shown = re.sub(r"<!-- quickstart: .*?<!-- end of quickstart -->", "", text(page), flags=re.DOTALL)
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", shown, re.MULTILINE | re.DOTALL)
    return [block for kind, block in fenced if kind == language]


def commands(page):
    """Command lines of a page, as words."""
    lines = [line for block in blocks(page, "console") for line in block.splitlines() if line.strip()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(words):
    result = kvconvert(*words)
    assert result.exit_code == 0, (words, result.output)
    return result.stdout


# `make test` runs README.md's by themselves, with the wheel and the newest packages.
@pytest.mark.full
@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_run_in_their_order(page, tmp_path, monkeypatch, capsys):
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "MODEL", head_dim=32, max_position_embeddings=2048)
    (tmp_path / "text.txt").write_text("It was a dark night, and the old house stood. " * 6000)
    for index, block in enumerate(blocks(page, "toml")):
        (tmp_path / "mine.toml").write_text(block)
        assert Recipe.load("./mine.toml").name == "mine", index
    ran = []
    for words in commands(page):
        if any(" ".join(words).startswith(known) for known in NOT_RUN):
            continue
        assert words[0] == "kvconvert", words
        ran.append(words[1])
        run(words[1:])
    assert {"inspect", "verify", "eval", "generate"} <= {*ran}
    examples = "".join(blocks(page, "python"))
    assert examples
    capsys.readouterr()
    given = {}
    exec(compile(examples.replace("cache=cache", f"{CACHE}=cache"), page, "exec"), given)
    if "KVCache" in examples:
        stats = given["cache"].stats()
        assert str(stats) in capsys.readouterr().out
        assert stats.pages > 0
        assert stats.bits_per_value < 8


@pytest.mark.parametrize("page", DOCUMENTS)
def test_commands_and_their_options_exist_wherever_they_are_named(page):
    targets = re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE)
    inline = [shlex.split(code) for code in re.findall(r"`((?:kvconvert|make) [^`.']+)`", text(page))]
    for words in [*commands(page), *inline]:
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "kvconvert" and words[1] in cli.commands:
            known = {option for parameter in cli.commands[words[1]].params for option in parameter.opts}
            assert {word for word in words[2:] if re.match(r"--?[a-z]", word)} <= known, words
        elif words[0] == "kvconvert":
            assert words[1].isupper() or words[1].startswith("-"), words


def test_the_list_of_commands_is_complete():
    listed = text("docs/quickstart.md").split("## Commands")[1].split("## ")[0]
    assert not [command for command in cli.commands if f"`{command}`" not in listed]


def messages():
    """Every text that kvconvert's sources hold, formatted parts as {}."""
    for path in [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_that_troubleshooting_explains_are_the_programs():
    rows = re.findall(r"^\| `([^`]+)` \|", text("docs/troubleshooting.md"), re.MULTILINE)
    known = [*messages()]
    assert len(rows) >= 20
    for row in rows:
        parts = [part.strip() for part in row.split("...") if part.strip()]
        assert any(all(part in message for part in parts) for message in known), row


def test_every_recipe_that_the_readme_names_is_a_preset():
    table = text("README.md").split("## Which recipe")[1].split("## ")[0]
    named = [cell.split("`")[1].split()[0] for cell in re.findall(r"^\| [^|]+ \| ([^|]*`[^|]*)\|", table, re.MULTILINE)]
    assert len(named) >= 6
    assert {*named} <= {*preset_names()}


def test_the_readme_says_of_a_bundle_what_choosing_does():
    """Sizes of the weights, and shares of the problems that are solved."""
    choosing = text("docs/choosing.md")
    size = re.search(r"Qwen2.5-Coder-1.5B-Instruct \| default \| ([\d,]+) \|", choosing)[1]
    shares = r"^\|[^|\n]+\|([^|\n]+)\| ?([\d.]+)[^|\n]*\| ?([\d.]+)[^|\n]*\|$"
    solved = [found for cache, *found in re.findall(shares, choosing, re.MULTILINE) if "kv-only" not in cache]
    rows = re.findall(r"^\|[^|\n]+\|([\d,]*)\|[\d.]+\|([\d.]+)%\|([\d.]+)%\|$", text("README.md"), re.MULTILINE)
    assert [found for _, *found in rows] == solved
    assert [weights for weights, *_ in rows] == ["3,087", size, size, "", ""]


def test_a_page_of_the_documentation_that_a_source_names_exists():
    sources = [path for room in (*ROOMS, "tests", "benchmarks", "examples") for path in (ROOT / room).rglob("*.py")]
    named = {
        (path, page)
        for path in sources
        for page in re.findall(r"\bdocs/[\w.-]+\.(?:md|json|svg|png)\b", path.read_text("utf8"))
    }
    assert len(named) > 10
    assert not [(path.name, page) for path, page in named if not (ROOT / page).exists()]


@pytest.mark.parametrize("page", DOCUMENTS)
def test_blocks_of_python_and_toml_can_be_read(page):
    for block in blocks(page, "python"):
        ast.parse(block)
    for block in blocks(page, "toml"):
        tomllib.loads(block)
    assert text(page).count("```") % 2 == 0


def anchors(page):
    """Of every heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCUMENTS)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text(page)):
        assert (folder / target).exists(), target
        if anchor:
            assert anchor in anchors(((folder / target) if target else ROOT / page).read_text("utf8")), (target, anchor)


def test_the_documentation_stays_readable():
    """Ten pages of 22,000 words, a short one for vLLM, and a README of 700, were asked for."""
    words = {page.stem: len(page.read_text("utf8").split()) for page in ROOT.glob("docs/*.md")}
    assert words.pop("vllm") <= 700
    assert len(words) == 10
    assert sum(words.values()) <= 22_000
    assert len(text("README.md").split()) <= 700
