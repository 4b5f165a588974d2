import functools
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types

import pytest
import torch
from click.testing import CliRunner
from tiny.bundle import write_tiny_bundle
from tiny.commands import kvconvert
from tiny.llama import write_recipe, write_tiny_llama

from kvconvert.cli import cli
from kvconvert.convert.work_files import read_sealed, sealed_json
from kvconvert.models import CACHE


def refusal(code, *arguments):
    """The one sentence on stderr of a command that fails with `code`."""
    result = kvconvert(*arguments)
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("Error: ")
    assert "Traceback" not in result.output
    return lines[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, calibrated and exported through the command line."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("cli")
    write_tiny_llama(folder / "model", tied=True)
    recipe = write_recipe(folder / "tiny.toml", method="awq")
    options = ["--recipe", recipe, "--samples", "2", "--seq-len", "32"]
    result = kvconvert("calibrate", folder / "model", "-o", folder / "work", *options)
    assert result.exit_code == 0, result.output
    result = kvconvert("export", folder / "work", "-o", folder / "bundle")
    assert result.exit_code == 0, result.output
    assert "Exported" in result.stdout
    return folder


@pytest.mark.parametrize(("stated", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_importing_kvconvert_lets_no_thread_spin_unless_that_is_asked_for(stated, found):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if stated is None else {"OMP_WAIT_POLICY": stated}
    code = "import sys, os, kvconvert; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == found


@pytest.mark.parametrize(
    ("name", "typed"), [("bundle", "bundle"), ("-b", "./-b"), ("a bundle", "'a bundle'"), ("-a b", "'./-a b'")]
)
def test_the_next_command_can_be_typed_as_it_is_said(folder, monkeypatch, tmp_path, name, typed):
    monkeypatch.chdir(tmp_path)
    result = kvconvert("export", folder / "work", "-o", f"./{name}")
    assert result.stdout.endswith(f"next: kvconvert generate {typed} TEXT\n")
    assert kvconvert("inspect", *shlex.split(typed)).exit_code == 0


def test_a_fresh_bundle_verifies_and_says_what_was_checked(folder):
    result = kvconvert("verify", folder / "bundle")
    assert result.exit_code == 0, result.output
    for word in ("SHA-256", "scales: 14", "KV plan: 2 layers", "intact"):
        assert word in result.stdout
    told = json.loads(kvconvert("verify", folder / "bundle", "--json").stdout)
    assert told["bundle"] == str(folder / "bundle")
    assert [f"ok  {line}" for line in told["checks"]] == result.stdout.splitlines()[:-1]


def test_inspect_shows_coverage_and_labels_its_estimate(folder):
    result = kvconvert("inspect", folder / "bundle")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) <= 12
    for words in ("bits each", "2 with 2-bit keys", "not measured", "--layers"):
        assert words in result.stdout
    result = kvconvert("inspect", folder / "bundle", "--layers")
    for words in (
        "model.layers.*.mlp.down_proj",
        "4-bit awq, groups of 16",
        "shares the embedding",
        "2-bit keys",
        "not measured",
    ):
        assert words in result.stdout


def test_inspect_json_is_the_manifest_with_the_size_of_the_cache(folder):
    values = json.loads(kvconvert("inspect", folder / "bundle", "--json").stdout)
    # Per layer, one head of 16 channels: 2-bit keys with 32/32 bits of scale and minimum, 2-bit values with 32/16,
    # and a norm per token.
    in_pages, lengths = 16 * (2 + 1) + 16 * (2 + 2) + 16, range(385, 513)
    exact, sinks = sum(n % 128 for n in lengths) / sum(lengths), 4 * len(lengths) / sum(lengths)
    size = values["kv_size"]
    assert size["context"] == 512, "the positions that the model has"
    assert size["bytes_per_token"] == pytest.approx(2 * (in_pages * (1 - exact) + 2 * 16 * 16 * (exact + sinks)) / 8)
    assert {"format_version", "modules", "layers", "files", "source"} <= values.keys()


def test_generate_streams_a_continuation(folder):
    result = kvconvert("generate", folder / "bundle", "--prompt", "It was", "--max-new-tokens", "5")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_chat_answers_each_line_and_says_that_there_is_no_template(folder):
    result = kvconvert(
        "generate", folder / "bundle", "--chat", "--max-new-tokens", "4", stdin="Hello\n\nHow are you?\n"
    )
    assert result.exit_code == 0, result.output
    assert "no chat template" in result.stderr
    assert len([line for line in result.stdout.splitlines() if line.strip()]) >= 2


def test_a_second_turn_continues_the_cache_of_the_first(folder, monkeypatch):
    from kvconvert.console import Console

    console = Console(folder / "bundle", 4)
    seen = []
    generate = console.model.generate

    def spy(ids, **options):
        cache = options[CACHE]
        seen.append((ids.shape[1], None if cache is None else cache.get_seq_length()))
        return generate(ids, **options)

    monkeypatch.setattr(console.model, "generate", spy)
    console.chat(iter(["Hello\n", "How are you?\n"]))
    (first, none), (second, cached) = seen
    assert none is None
    assert first + 4 - 1 == cached < second  # everything but the last generated token is in the cache


def test_with_a_chat_template_each_turn_renders_the_whole_conversation(folder, monkeypatch):
    from kvconvert.console import Console

    console = Console(folder / "bundle", 4)
    console.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    prompts = []
    generate = console.model.generate

    def spy(ids, **options):
        prompts.append(console.tokenizer.decode(ids[0]))
        return generate(ids, **options)

    monkeypatch.setattr(console.model, "generate", spy)
    console.chat(iter(["Hello\n", "How are you?\n"]))
    assert prompts[0] == "user: Hello\n"
    assert prompts[1].startswith("user: Hello\nassistant: ")
    assert prompts[1].endswith("user: How are you?\n")


def test_a_prompt_longer_than_the_model_is_refused(folder):
    message = refusal(2, "generate", folder / "bundle", "--prompt", "word " * 600)
    assert "512 positions" in message


@pytest.mark.parametrize("options", [[], ["--prompt", "x", "--chat"]])
def test_generate_wants_either_a_prompt_or_a_chat(folder, options):
    assert "--prompt TEXT or --chat" in refusal(2, "generate", folder / "bundle", *options)


def test_a_prompt_may_come_after_the_bundle_or_as_standard_input(folder):
    options = ["--max-new-tokens", "5", "--temperature", "0"]
    stated = kvconvert("generate", folder / "bundle", "--prompt", "It was", *options)
    assert kvconvert("generate", folder / "bundle", "It was", *options).stdout == stated.stdout
    command = ["generate", str(folder / "bundle"), *options]
    for dash in ([], ["-"], ["--prompt", "-"]):
        assert CliRunner().invoke(cli, [*command, *dash], input="It was\n").stdout == stated.stdout
    assert "one of PROMPT, --prompt" in refusal(2, "generate", folder / "bundle", "It was", "--prompt", "x")


def test_without_arguments_the_five_steps_are_shown():
    result = kvconvert()
    assert result.exit_code == 0
    steps = re.findall(r"^  kvconvert (\w+)", result.stdout, re.MULTILINE)
    assert steps == ["plan", "convert", "eval", "generate", "push"]


def test_what_only_tells_something_does_not_wait_for_torch(folder):
    bundle = str(folder / "bundle")
    commands = [["recipes"], ["recipes", "default", "--json"], ["inspect", bundle], ["inspect", bundle, "--layers"]]
    program = (
        "import json, sys\nfrom kvconvert.cli import cli\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    cli(command, standalone_mode=False)\n    print('END')\n"
        "    assert not {'torch', 'transformers'} & sys.modules.keys(), command"
    )
    command = [sys.executable, "-c", program, json.dumps(commands)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    said = ran.stdout.split("END\n")
    assert [bool(text) for text in said] == [True] * len(commands) + [False]


MISTAKES = """
plan nowhere
plan MODEL --recipe defalt
plan BUNDLE
convert nowhere OUT
convert MODEL OUT --data nowhere.txt
convert MODEL BUNDLE
convert BUNDLE OUT
calibrate MODEL -o BUNDLE
export nowhere -o OUT
export nowhere -o OUT --format onnx
eval nowhere
eval BUNDLE
eval BUNDLE --against nowhere
eval BUNDLE --harness ours.yaml
eval BUNDLE --against MODEL --only perplexty
eval BUNDLE --against MODEL --data nowhere.txt
bench MODEL
generate MODEL TEXT
serve MODEL
serve BUNDLE --dtype int8
warm MODEL
inspect MODEL
report MODEL
report BUNDLE --fidelity nowhere.json
report BUNDLE --model nowhere
verify MODEL
push MODEL user/name
push BUNDLE name
pull name
rm name
recipes defalt
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "perplexty"], "'perplexty' is not a part"),
        (["--only", ","], "no part is named"),
        (["--task", "gsm8k", "--tokens", "5"], "--tokens does not apply to --task"),
        (["--harness", "x", "--data", "nowhere.txt"], "--data does not apply to --harness"),
    ],
)
def test_mistakes_in_arguments_of_eval_come_before_missing_files(options, said):
    assert said in refusal(2, "eval", "nowhere", "--against", "nowhere either", *options)


def test_help_and_mistakes_do_not_wait_for_torch(folder):
    places = {"MODEL": folder / "model", "BUNDLE": folder / "bundle", "OUT": folder / "nothing"}
    mistakes = [[str(places.get(word, word)) for word in line.split()] for line in MISTAKES.split("\n") if line]
    asked = [[name, "--help"] for name in cli.commands]
    program = """
import json, os, sys
from kvconvert.cli import cli
sys.modules["lm_eval"] = None  # as where it is not installed
sys.stdout = open(os.devnull, "w")
for arguments in json.loads(sys.argv[1]):
    try:
        cli(arguments)
    except SystemExit as ended:
        assert bool(ended.code) == ("--help" not in arguments), arguments
    assert not {"torch", "transformers"} & sys.modules.keys(), arguments
"""
    command = [sys.executable, "-c", program, json.dumps(asked + mistakes)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder / "work", check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("Error: ") == len(mistakes)


def test_threads_that_still_compute_do_not_abort_the_process():
    program = """
import os, sys, threading, torch
from kvconvert.cli import main

def work():
    ones = torch.ones(100, 100)
    while True:
        ones @ ones

for arguments, code in ((["recipes"], 0), (["recipes", "defalt"], 2)):
    process = os.fork()
    if process == 0:
        threading.Thread(target=work, daemon=True).start()
        sys.argv = ["kvconvert", *arguments]
        main()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == code, arguments
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "terminate called" not in ran.stderr
    assert ran.stderr.startswith("Error: ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_one_command(shell, monkeypatch, capsys):
    source = kvconvert("completion", shell).stdout
    assert "_KVCONVERT_COMPLETE" in source
    assert ("compinit" in source) == (shell == "zsh")
    assert ('string split --max 1 ","' in source) == (shell == "fish")
    words = {"COMP_WORDS": "kvconvert rec", "COMP_CWORD": "rec" if shell == "fish" else "1"}
    for name, value in {"_KVCONVERT_COMPLETE": f"{shell}_complete", **words}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli(["rec"], prog_name="kvconvert")
    assert "recipes" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("words", ["verify", "calibrate", "convert MODEL BUNDLE --data", "eval BUNDLE --against"])
def test_completion_leaves_paths_to_the_shell(shell, words, monkeypatch, capsys):
    words = f"kvconvert {words}"
    place = {"fish": "ne"}.get(shell, str(len(words.split())))
    known = {"_KVCONVERT_COMPLETE": f"{shell}_complete", "COMP_WORDS": f"{words} ne", "COMP_CWORD": place}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli([], prog_name="kvconvert")
    assert capsys.readouterr().out.replace("\n", ",").startswith("file,ne")


_CHOICES = {
    "calibrate MODEL --recipe kv": ["file,kv", "plain,kv-only"],
    "recipes kv": ["file,kv", "plain,kv-only"],
    "serve BUNDLE --dtype bf": ["plain,bfloat16"],
    "serve BUNDLE --device ": ["plain,cpu", "plain,cuda"],
    "eval BUNDLE --only k": ["plain,kl"],
    "eval BUNDLE --only kl,pr": ["plain,kl,probes"],
    "eval BUNDLE --only kl,k": [],
    "plan MODEL --weights g": ["plain,gptq"],
    "generate BUNDLE --system a": [],  # words of one's own are no paths
    "recipes default --key-bits ": [],
}


@pytest.mark.parametrize("words", _CHOICES)
def test_completion_offers_the_values_that_there_are(words, monkeypatch, capsys):
    words = f"kvconvert {words}"
    known = {"_KVCONVERT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": words.count(" ")}
    for name, value in known.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit):
        cli([], prog_name="kvconvert")
    assert capsys.readouterr().out.split() == _CHOICES[words.removeprefix("kvconvert ")]


def test_what_prints_a_table_prints_json(monkeypatch, tmp_path):
    listed = json.loads(kvconvert("recipes", "--json").stdout)
    shown = kvconvert("recipes").stdout
    by_name = {row["recipe"]: row for row in listed}
    assert by_name["default"]["weights_bits"] == 4
    for name in ("default", "oscar"):
        assert f"{by_name[name]['cache_bits_per_value']:.2f}" in shown
    for name, cache in (("auto", "as asked"), ("weights-only", "kept")):
        assert (by_name[name]["cache"], by_name[name]["cache_bits_per_value"]) == (cache, None)
    assert (by_name["kv-only"]["weights_method"], by_name["kv-only"]["weights_bits"]) == ("none", None)
    assert json.loads(kvconvert("recipes", "default", "--json").stdout)["weights"]["method"] == "auto"
    findings = json.loads(kvconvert("doctor", "--json").stdout)["findings"]
    assert {"python", "torch"} <= {finding["name"] for finding in findings}
    assert json.loads(kvconvert("list", "--json").stdout) == []


def test_eval_prints_one_json_object_with_the_figures_of_the_contract(folder):
    command = ["eval", folder / "bundle", "--against", folder / "model", "--tokens", "64", "--json"]
    result = kvconvert(*command)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["probes"], report["free_running"]) == (None, None)
    assert "Leaving out probes and free-running; --full measures them" in result.stderr
    result = kvconvert(*command, "--full")
    assert "Leaving out" not in result.stderr
    report = json.loads(result.stdout)
    for name in (
        *("perplexity.source", "perplexity.bundle", "kl.mean", "kl.p99", "top1_agreement"),
        *("kl.p999", "retrieval.source", "retrieval.bundle", "probes.json.source", "verdict"),
        *("kv.bits_per_value", "kv.bytes_per_token", "weights.bytes", "weights.bits_per_weight"),
    ):
        value = report
        for part in name.split("."):
            value = value[part]


def test_eval_measures_the_parts_that_are_chosen_and_refuses_others(folder):
    options = ["--against", folder / "model", "--only", "weights, cache", "--device", "cpu"]
    result = kvconvert("eval", folder / "bundle", *options)
    assert result.exit_code == 0, result.output
    rows = result.stdout.splitlines()
    assert [row.partition("  ")[0] for row in rows[1:4]] == [
        "KV cache, bytes per token",
        "KV cache, bits per value",
        "weights, bytes",
    ]
    assert "Measuring cache, weights: about" in result.stderr
    for options, said in (
        (["--only", "speed"], "'speed' is not a part"),
        (["--context", "100000"], "more than the"),
        (["--device", "abacus"], "--device may be cpu or cuda"),
        (["--dtype", "int8"], "--dtype is int8"),
        (["--limit", "3"], "--limit counts problems"),
        (["--full", "--only", "kl"], "--full is a whole evaluation; leave --only out"),
    ):
        assert said in refusal(2, "eval", folder / "bundle", "--against", folder / "model", *options)


def test_bench_prints_a_table_or_json(folder, monkeypatch):
    from kvconvert.benchmark import Measurement, worker
    from kvconvert.benchmark.bench import bench as run

    measured = []

    def once(job):
        """What the worker answers, in this process."""
        if not measured:
            worker.work(job, answers := io.StringIO())
            measured.extend(Measurement(**json.loads(line)["measured"]) for line in answers.getvalue().splitlines())
        return measured

    monkeypatch.setitem(inspect.unwrap(run).__globals__, "_run", once)
    options = ["--context", "16", "--context", "200", "--new-tokens", "3", "--device", "cpu"]
    result = kvconvert("bench", folder / "bundle", *options)
    assert result.exit_code == 0, result.output
    assert "sequences that fill no page of " in result.stdout
    rows = result.stdout.splitlines()
    assert rows[0].split()[:3] == ["batch", "context", "model"]
    assert [row.split()[:3] for row in rows[1:3]] == [["1", "16", "bundle"], ["1", "200", "bundle"]]
    report = json.loads(kvconvert("bench", folder / "bundle", *options, "--json").stdout)
    assert [measured["context"] for measured in report["measurements"]] == [16, 200]
    assert all(measured["tokens_per_second"] > 0 for measured in report["measurements"])


def test_bench_refuses_wrong_usage_with_2_before_it_measures_anything(folder, tmp_path, monkeypatch):
    from kvconvert.benchmark.bench import bench as run

    monkeypatch.setitem(inspect.unwrap(run).__globals__, "_run", None)
    for options, said in (
        (["--context", "500"], "lower --context or --new-tokens"),
        (["--device", "abacus"], "--device may be cpu or cuda"),
        (["--dtype", "int8"], "--dtype is int8"),
    ):
        assert said in refusal(2, "bench", folder / "bundle", *options)
    refusal(1, "bench", folder / "bundle", "--against", tmp_path / "gone")
    for options in (["--context", "0"], ["--batch", "0"], ["--new-tokens", "1"]):
        assert kvconvert("bench", folder / "bundle", *options).exit_code == 2


def test_an_existing_output_is_wrong_usage(folder):
    assert "--force" in refusal(2, "export", folder / "work", "-o", folder / "bundle")


@pytest.fixture
def limited_work(folder, tmp_path):
    """The calibration with a limit that no quantized model meets."""
    work = shutil.copytree(folder / "work", tmp_path / "work")
    state = read_sealed(work / "state.json")
    state["recipe"]["limits"]["max_kl"] = 1e-9
    (work / "state.json").write_text(sealed_json(state))
    return work


def test_a_missed_limit_is_exit_code_3_and_writes_nothing(limited_work, tmp_path, monkeypatch):
    report = types.SimpleNamespace(to_dict=lambda: {"kl": {"mean": 0.5}}, losses=list)
    monkeypatch.setattr("kvconvert.fidelity.evaluate.evaluate", lambda *a, **k: report)
    assert "max_kl is 1e-09" in refusal(3, "export", limited_work, "-o", tmp_path / "bundle")
    assert os.listdir(tmp_path) == ["work"]


def test_force_writes_a_bundle_that_misses_its_limit_with_what_was_measured(limited_work, tmp_path, monkeypatch):
    from kvconvert.fidelity.evaluate import evaluate

    bundle = tmp_path / "bundle"
    monkeypatch.setattr("kvconvert.fidelity.evaluate.evaluate", functools.partial(evaluate, tokens=64, full=False))
    assert kvconvert("export", limited_work, "-o", bundle, "--force").exit_code == 0
    assert re.search(r"limit missed: .*max_kl is 1e-09", kvconvert("inspect", bundle).stdout)
    assert "misses the fidelity limits of its own recipe" in (bundle / "README.md").read_text()
    assert kvconvert("verify", bundle).exit_code == 0
    assert json.loads((bundle / "kvconvert.json").read_text())["fidelity"]["report"]["kl"]["mean"] > 0


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_damaged_bundle_fails_with_one_sentence(tmp_path, command):
    write_tiny_bundle(tmp_path / "bundle")
    os.truncate(tmp_path / "bundle" / "config.json", 10)
    assert "config.json" in refusal(1, command, tmp_path / "bundle")


@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["eval"], ["bench"], ["generate", "--prompt", "x"]])
def test_what_is_not_a_bundle_fails_with_one_sentence(tmp_path, command):
    refusal(1, *command, tmp_path)
    refusal(1, *command, tmp_path / "gone")


def test_options_that_do_not_exist_are_wrong_usage(tmp_path):
    assert kvconvert("verify", tmp_path, "--surprise").exit_code == 2
    assert kvconvert("calibrate", tmp_path).exit_code == 2
    assert kvconvert("eval", tmp_path, "--tokens", "0").exit_code == 2
    for arguments in (
        ["serve", tmp_path, "--prompt-lookup-num-tokens", "4"],
        ["serve", tmp_path, "--assistant-model", tmp_path],
        ["export", tmp_path, "-o", tmp_path / "bundle", "--gpu", "sm_90"],
    ):
        result = kvconvert(*arguments)
        assert result.exit_code == 2
        assert re.search(f"No such option:? '?{arguments[-2]}", result.stderr)


def test_an_interrupted_command_says_so_and_fails(folder, tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvconvert.convert.export.export", interrupt)
    assert "Interrupted" in refusal(130, "export", folder / "work", "-o", tmp_path / "bundle")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_is_for_calibrate_alone(tmp_path, monkeypatch, rank):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bundle").mkdir()
    found = CliRunner().invoke(cli, ["export", str(tmp_path / "work"), "-o", str(tmp_path / "bundle"), "--force"])
    assert found.exit_code == 2
    said = "torchrun started 2 processes, and kvconvert export runs in one; start it without torchrun"
    assert (said in found.stderr) == (rank == "0")
    assert "torchrun" not in CliRunner().invoke(cli, ["calibrate", "--help"]).stderr
