"""What someone meets in the first hour: wrong arguments answered at once, in one sentence that helps."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from tiny import forked
from tiny.hub import standing_in
from tiny.llama import write_recipe, write_tiny_llama

from kvconvert import commands, load
from kvconvert.bundle.locate import BUNDLE, CHECKPOINT, ONNX_EXPORT, WRITTEN, check_output
from kvconvert.cli import cli
from kvconvert.commands import Place
from kvconvert.errors import UsageError

GOLDEN = Path(__file__).parent / "golden" / "format-1"
# Whether a process has ended, which is told again when it is waited for.
GONE = os.WEXITED | os.WNOHANG | os.WNOWAIT
# A process for each case, forked from one that has imported the command line and what most commands begin with, and
# pydantic for those that read a recipe.
FAST = """
import json, os, sys
import kvconvert.bundle.locate, kvconvert.data.sources
from kvconvert.cli import cli
cases = json.load(sys.stdin)
for number, (arguments, has_recipe) in sorted(enumerate(cases), key=lambda case: case[1][1]):
    if has_recipe:
        import pydantic
    if os.fork() == 0:
        os.chdir(str(number))
        with open("../said-%d" % number, "w") as said:
            sys.stdout = sys.stderr = said
            os.environ["HF_HOME"] = os.path.abspath("../hub-%d" % number)
            try:
                cli(arguments, prog_name="kvconvert")
            except SystemExit as stopped:
                code = stopped.code
            heavy = [name for name in ("pydantic", "torch", "transformers", "datasets") if name in sys.modules]
            print("AFTER", code, heavy)
        os._exit(0)
    os.wait()
"""


def kvconvert(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


TOO_LONG = "more than the 512 positions this model has; choose a shorter one."
WRONG = [
    (["--help"], 0, "convert"),
    (["calibrate", "--help"], 0, "--recipe"),
    (["calibrate", "gone/gone/gone", "-o", "WORK"], 1, "There is no model directory"),
    (["calibrate", "MODEL", "-o", "WORK", "--recipe", "defualt"], 2, "did you mean default?"),
    (["calibrate", "MODEL", "-o", "WORK", "--kv-bits", "2.5"], 2, "choose the --recipe auto"),
    (["calibrate", "MODEL", "-o", "WORK", "--set", "kv.bits=3"], 2, "bits is not a field of a KV scheme"),
    (["calibrate", "MODEL", "-o", "WORK", "--recipe", "my.toml"], 1, "There is no recipe file my.toml;"),
    (["calibrate", "MODEL", "-o", "WORK", "--set", "kv.sink_token=8"], 2, "did you mean sink_tokens?"),
    (["calibrate", "MODEL", "-o", "WORK", "--weights", "awg"], 2, "choose 'auto',"),
    (["calibrate", "MODEL", "-o", "WORK", "--data", "gone.txt"], 1, "gone.txt does not exist"),
    (["calibrate", "someone/gone", "-o", "WORK"], 1, "because HF_HUB_OFFLINE is set"),
    (["eval", "BUNDLE", "--data", "gone.jsonl"], 1, "gone.jsonl does not exist"),
    (["eval", "BUNDLE", "--data", "MODEL/model.safetensors"], 1, "is not of a known kind"),
    (["calibrate", "MODEL", "-o", "BUNDLE"], 2, "BUNDLE is a bundle;"),
    (["calibrate", "MODEL", "-o", "EMPTY/.."], 2, "not kvconvert's"),
    (["quantize", "MODEL"], 2, "kvconvert convert quantizes"),
    (["chat", "BUNDLE"], 2, "kvconvert generate BUNDLE --chat"),
    (["convert", "EMPTY", "NEW"], 1, "is empty"),
    (["convert", "BARE", "NEW"], 1, "holds no weights"),
    (["convert", "MODEL", "BUNDLE"], 2, "replace it with --force"),
    (["convert", "gone/gone/gone", "NEW"], 1, "There is no model directory"),
    (["convert", "MODEL", "NEW", "--device", "cudaa"], 2, "--device may be cpu or cuda"),
    (["plan", "gone/gone/gone"], 1, "There is no model directory"),
    (["plan", "gone.gguf"], 1, "There is no GGUF file gone.gguf; check the path"),
    (["plan", "EMPTY/gone.gguf"], 1, "There is no GGUF file EMPTY/gone.gguf; check the path"),
    (["plan", "user/gone/gone.gguf"], 1, "fetch the file from the Hub first"),
    (["version"], 2, "kvconvert --version says it"),
    (["inspect", "BUNDLE", "--format", "json"], 2, "Did you mean '--json'?"),
    (["calibrate", "MODEL", "-o", "WORK", "--force"], 2, "Did you mean '--restart'?"),
    (["plan", "MODEL", "--gpu-memory", "24"], 2, "with its unit, as in 24GB"),
    (["export", "gone", "-o", "NEW"], 1, "is not a working directory"),
    (["export", "gone", "-o", "BUNDLE"], 1, "is not a working directory"),
    (["generate", "BUNDLE", "--prompt", "x", "--dtype", "fp16"], 2, "--dtype is fp16; choose one of float32,"),
    (["generate", "MODEL", "--prompt", "x"], 1, "kvconvert convert"),
    (["eval", "gone"], 1, "no such directory"),
    (["inspect", "gone"], 1, "no such directory; check the path"),
    (["verify", "EMPTY"], 1, "is not a kvconvert bundle"),
    (["serve", "BEGUN"], 1, "write its bundle with `kvconvert export`"),
    (["plan", "BEGUN"], 1, "not a model; give the model that it is of"),
    (["export", "BUNDLE", "-o", "NEW"], 1, "is a bundle already"),
    (["convert", "MODEL", "BUNDLE/new"], 2, "which stays as it was sealed"),
    (["calibrate", "MODEL", "-o", "BUNDLE/new"], 2, "which stays as it was sealed"),
    (["report", "gone"], 1, "no such directory"),
    (["recipes", "defualt"], 2, "did you mean default?"),
    (["pull", "someone"], 2, "user/name"),
    (["eval", "BUNDLE", "--against", "gone/gone/gone"], 1, "There is no model directory"),
    (["bench", "gone"], 1, "no such directory"),
    (["push", "BUNDLE", "someone/model"], 1, "needs an access token"),
    (["run", "BUNDLE"], 2, "kvconvert generate answers a prompt"),
    (["quantise", "MODEL"], 2, "kvconvert convert quantizes"),
    (["download", "someone/model"], 2, "kvconvert pull"),
    (["inspct", "BUNDLE"], 2, "Did you mean"),
    (["generate", "gone", "x"], 1, "no such directory"),
    (["serve", "gone"], 1, "no such directory"),
    (["serve", "BUNDLE", "--api-key-file", "gone.txt"], 1, "; check the file and its permissions."),
    (["warm", "gone"], 1, "no such directory"),
    (["warm", "BUNDLE", "--cache", "BUNDLE"], 2, "which stays as it was sealed"),
    (["rm", "someone/gone"], 1, "no bundle"),
    (["completion", "csh"], 2, "is not one of"),
    (["eval", "BUNDLE", "--full", "--only", "kl"], 2, "leave --only out"),
    (["list"], 0, ""),
    (["help"], 2, "kvconvert --help lists"),
    (["inspect", ""], 2, "BUNDLE is ''; give a bundle's directory"),
    (["plan", ""], 2, "MODEL is ''; give its directory"),
    (["recipes", ""], 2, "There is no recipe preset ''"),
    (["rm", ""], 2, "'' is no id"),
    (["report", "BUNDLE", "-o", ""], 2, "'-o' / '--output': it is empty; give a path."),
    (["convert", "MODEL", "/"], 2, "/ exists and is a directory of other files"),
    (["convert", "MODEL", ""], 2, "'BUNDLE': it is empty; give a path."),
    (["calibrate", "MODEL", "-o", ""], 2, "'-o' / '--output': it is empty; give a path."),
    (["serve", "BUNDLE", "--api-key-file", ""], 2, "it is empty; give a path."),
    (["eval", "BUNDLE", "--against", ""], 2, "is ''; give its directory"),
    (["eval", "BUNDLE", "--only", ""], 2, "--only: no part is named; choose"),
    (["serve", "BUNDLE", "--max-model-len", "9"], 2, "Did you mean '--max-prompt-tokens'?"),
    (["serve", "BUNDLE", "--port", "80x"], 2, "'80x' is not a valid whole number."),
    (["warm", "BUNDLE", "--jobs", "many"], 2, "'many' is not a valid whole number."),
    (["generate", "BUNDLE", "x", "--seed", "one"], 2, "'one' is not a valid whole number."),
    (["generate", "BUNDLE", "x", "--top-p", "x"], 2, "'x' is not a valid number."),
    (["generate", "BUNDLE", "x", "--temperature", "-1"], 2, "--temperature is -1; give 0 (greedy) or a positive"),
    (["generate", "BUNDLE", "x", "--top-p", "2"], 2, "--top-p is 2; give a number above 0 and at most 1"),
    (["generate", "BUNDLE", "x", "--top-k", "-2"], 2, "--top-k is -2; give a whole number of at least 0"),
    (["generate", "BUNDLE", "x", "--stop", ""], 2, "--stop is empty text"),
    (["generate", "BUNDLE", "x", "--temperature", "0", "--seed", "1"], 2, "leave --top-p, --top-k and --seed out"),
    (["generate", "BUNDLE", "What", "is", "it?"], 2, "(is it?). Put a prompt of several words in quotes."),
    (["eval", "BUNDLE", "MODEL"], 2, "(MODEL). Name the model to compare with by --against."),
    (["generate", "BUNDLE", ""], 2, "The prompt has no tokens; give some text."),
    (["generate", "BUNDLE", "x", "--raw", "--system", "x"], 2, "--raw continues the text as it is, which has no place"),
    (
        ["generate", "BUNDLE", "x", "--raw", "--image", "MODEL/bad.txt"],
        2,
        "no place for an image or a --system message",
    ),
    (["generate", "BUNDLE", "x", "--seed", "1"], 2, "so --seed changes nothing; give a --temperature above 0"),
    (["generate", "BUNDLE", "x", "--image", "gone.png"], 1, "--image: there is no image gone.png"),
    (["generate", "BUNDLE", "x", "--image", "https://a.b/c.png"], 1, "c.png is on the network; fetch it"),
    (["eval", "BUNDLE", "--only", "kl,images"], 2, "--only: the bundle's model reads text alone"),
    (["eval", "BUNDLE", "--task", "gsm8k"], 2, "give --data, JSON lines with question and answer"),
    (["eval", "BUNDLE", "--task", "gsm8k", "--data", "gone.jsonl"], 1, "cannot be read (No such file or directory)"),
    (["eval", "BUNDLE", "--data", "MODEL/bad.jsonl"], 1, "cannot be read (Expecting ',' delimiter"),
    (["eval", "BUNDLE", "--data", "MODEL/bad.txt"], 1, "is not UTF-8 text"),
    (
        ["calibrate", "MODEL", "-o", "WORK", "--recipe", "default", "--auto-from", "BEGUN"],
        2,
        "--auto-from means nothing",
    ),
    (["plan", "MODEL", "--kv-bytes-per-token", "x"], 2, "'x' is not a valid number."),
    (["serve", "BUNDLE", "--grace", "x"], 2, "'x' is not a valid number."),
    (["-version"], 2, "No such option '-version'. Did you mean '--version'?"),
    (["plan", "-help"], 2, "Did you mean '--help'?"),
    (["convert", "MODEL", "NEW", "-recipes=auto"], 2, "No such option '-recipes'. Did you mean '--recipe'?"),
    (["convert", "MODEL", "-o", "NEW"], 2, "No such option '-o'. Write MODEL BUNDLE without an option."),
    (["convert", "MODEL", "NEW", "--resume"], 2, "The same command without it goes on where it stopped."),
    (["convert", "MODEL", "NEW", "--quant", "4"], 2, "No such option '--quant'. Did you mean '--recipe'?"),
    (["generate", "BUNDLE", "--model", "x"], 2, "No such option '--model'."),
    (["inspect", "--", "-json"], 1, "no such directory"),
    (["calibrate", "MODEL", "-o=WORK"], 2, "Option '-o' takes a space, not an equals sign, before its value."),
    (["export", "BEGUN", "-o="], 2, "takes a space"),
    (["generate", "gone", "--prompt", "-seed"], 1, "no such directory"),
    (
        ["export", "BEGUN", "-o", "NEW", "--format", "compressed-tensors"],
        2,
        "write --weights-format compressed-tensors.",
    ),
    (["export", "BEGUN", "-o", "NEW", "--weights-format", "onnx"], 2, "write --format onnx."),
    (
        ["convert", "MODEL", "NEW", "--recipe", "auto", "--kv-bits", "3", "--kv-bytes-per-token", "9"],
        2,
        "Error: --kv-bits and --kv-bytes-per-token are two ways to say one budget; give one of them.",
    ),
    (
        ["convert", "MODEL", "NEW", "--recipe", "auto", "--kv-bits", "3", "--set", "auto.kv_bytes_per_token=9"],
        2,
        "Error: --kv-bits would replace the value that is set of auto.kv_bytes_per_token; give one of them.",
    ),
    (["convert", "MODEL", "FULL/new"], 2, "BUNDLE-work has to be a new or empty directory."),
    (["convert", "MODEL", "NEW", "--weight-bits", "4", "--set", "weights.bits=3"], 2, "set of weights.bits;"),
    (["convert", "MODEL", "NEW", "--recipe", "kv-only", "--weight-bits", "4"], 2, "kv-only keeps every weight; leave"),
    (["convert", "MODEL", "NEW", "--recipe", "default", "--seq-len", "513"], 2, f"--seq-len is 513, {TOO_LONG}"),
    (["calibrate", "MODEL", "-o", "WORK", "--recipe", "default", "--seq-len", "513"], 2, TOO_LONG),
    (["calibrate", "MODEL", "-o", "WORK", "--recipe", "auto", "--kv-bits", "3", "--context", "513"], 2, TOO_LONG),
    (["plan", "MODEL", "--recipe", "default", "--seq-len", "513"], 2, TOO_LONG),
    (["plan", "MODEL", "--recipe", "default", "--context", "513"], 2, f"--context is 513, {TOO_LONG}"),
    (["eval", "BUNDLE", "--against", "MODEL", "--context", "513"], 2, TOO_LONG),
    (["eval", "BUNDLE", "--against", "MODEL", "--context", "255"], 2, "take at least 256"),
    (["eval", "BUNDLE", "--against", "MODEL", "--task", "humaneval", "--context", "513"], 2, TOO_LONG),
    (["export", "HALF", "-o", "NEW"], 2, "The calibration in HALF stopped after 1 of 2 layers; calibrate again"),
    (["export", "HALF", "-o", "NEW", "--format", "onnx"], 2, "stopped after 1 of 2 layers"),
    (["eval", "BUNDLE", "--harness", ","], 2, "Error: --harness: no task is named;"),
    (["eval", "BUNDLE", "--harness", "gone.yaml"], 1, "There is no task file gone.yaml; check its path."),
    (["eval", "BUNDLE", "--data", "MODEL/numbers.csv"], 1, "has none of the text columns messages,"),
    (["eval", "BUNDLE", "--data", "MODEL/numbers.csv::z"], 1, "has no column 'z'"),
    (["eval", "BUNDLE", "--data", "EMPTY"], 1, "Data directory EMPTY holds no"),
    (["plan", "MODEL", "--data", "MODEL/numbers.csv"], 1, "its columns are x and y; rename one"),
    (["calibrate", "MODEL", "-o", "WORK", "--data", "EMPTY"], 1, "name the directory that does."),
    (["plan", "MODEL", "--data", "https://a.b/c.txt"], 1, "is an address, which is not fetched"),
    (["generate", "BUNDLE", "x", "--temp", "1"], 2, "No such option '--temp'. Did you mean '--temperature'?"),
    (["plan", "MODEL", "--data", "PAPERS"], 1, "Data directory PAPERS holds no"),
    (["bench", "BUNDLE", "--context", "500"], 2, "lower --context or --new-tokens"),
    (["convert", "MODEL", "NEW", "--weight-bits", "4", "--set", "weights.modules=[]"], 2, "set of weights.modules;"),
]


def test_a_gpu_without_a_driver_is_refused_before_torch_is_imported_but_for_those_of_amd(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(commands.ctypes, "CDLL", missing)
    there = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) != "/dev/kfd" and there(path))
    result = kvconvert("generate", GOLDEN, "x", "--device", "cuda:0")
    assert (result.exit_code, "no GPU driver here for the device cuda:0" in result.stderr) == (
        2,
        True,
    )
    result = kvconvert("warm", GOLDEN)
    assert (result.exit_code, "There is no GPU here to compile" in result.stderr) == (1, True)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert commands.check_device(None, None, "cuda") == "cuda"


def test_a_model_is_not_served_without_a_name():
    result = kvconvert("serve", GOLDEN, "--port", 0, "--served-model-name", "")
    assert (result.exit_code, "named ''; give it a name" in result.stderr) == (2, True)


def test_no_path_is_created_below_a_folder_named_as_the_home_directory_is_to_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = kvconvert("calibrate", GOLDEN, "--output=~/work")
    assert (result.exit_code, "no shell has replaced the ~; write $HOME" in result.stderr) == (2, True)
    assert not any(tmp_path.iterdir())
    (tmp_path / "~").mkdir()
    assert "is a kvconvert bundle, not a model" in kvconvert("calibrate", GOLDEN, "--output=~/work").stderr


def test_an_export_for_onnx_runtime_is_told_from_a_model_whose_weights_are_missing(tmp_path):
    for name in ("config.json", "genai_config.json", "model.onnx"):
        (tmp_path / name).write_text("{}")
    for command in (["plan", tmp_path], ["convert", tmp_path, tmp_path.with_name("new")]):
        result = kvconvert(*command)
        assert (result.exit_code, "is an export for ONNX Runtime, not a model" in result.stderr) == (1, True)


def test_no_file_is_refused_by_the_option_that_names_it_for_whoever_reads_it_knows_what_to_do():
    paths = [p.type for command in cli.commands.values() for p in command.params if isinstance(p.type, click.Path)]
    assert len(paths) > 5
    assert not any(path.readable or path.exists for path in paths)


def test_no_option_takes_an_empty_path_for_the_current_directory():
    paths = [p for command in cli.commands.values() for p in command.params if isinstance(p.type, click.Path)]
    assert len(paths) > 5
    assert all(isinstance(parameter.type, Place) for parameter in paths)


def test_no_option_calls_a_number_by_the_name_of_a_type():
    types = {parameter.type.name for command in cli.commands.values() for parameter in command.params if parameter.type}
    assert not types & {"integer", "float", "integer range", "float range"}


def test_help_states_no_bound_that_there_is_not():
    for name in cli.commands:
        said = kvconvert(name, "--help").stdout
        assert "Show this message" in said
        assert "None" not in said, name


def test_every_long_option_with_one_dash_is_answered_with_two_dashes():
    for command in cli.commands.values():
        names = {name for p in command.params if isinstance(p, click.Option) for name in (*p.opts, *p.secondary_opts)}
        for name in (name for name in names if name.startswith("--")):
            for given in ([name[1:]], [f"{name[1:]}=x"], [name[1:], "x"]):
                result = kvconvert(command.name, "x", *given)
                assert result.exit_code == 2
                assert f"No such option '{name[1:]}'. Did you mean '{name}'?" in result.stderr
                assert f"Usage: cli {command.name} " in result.stderr


def test_what_is_missing_ends_with_1_and_a_wrong_command_line_with_2_everywhere():
    missing = {arguments[0] for arguments, code, _ in WRONG if code == 1}
    # The others name nothing that could be missing.
    assert set(cli.commands) - missing == {"completion", "doctor", "list", "pull", "recipes"}
    for name, command in cli.commands.items():
        needed = ["x" for p in command.params if isinstance(p, click.Argument) and p.required]
        assert kvconvert(name, *needed, "--no-such-option").exit_code == 2, name
        if needed:
            assert kvconvert(name).exit_code == 2, name


def has_recipe(arguments):
    return not {"--recipe", "--kv-bits", "--set", "--weights", "recipes"}.isdisjoint(arguments)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Code, modules and text of every case, and what is in its folder afterwards."""
    folder = tmp_path_factory.mktemp("answers")
    for number in range(len(WRONG)):
        for name in ("EMPTY", "MODEL", "BARE", "PAPERS"):
            (folder / str(number) / name).mkdir(parents=True)
        (folder / str(number) / "PAPERS" / "one.pdf").touch()
        (folder / str(number) / "BEGUN").mkdir()
        (folder / str(number) / "BEGUN" / "state.json").write_text("{}")
        (folder / str(number) / "FULL" / "new-work" / "mine").mkdir(parents=True)
        for name in ("MODEL", "BARE"):
            (folder / str(number) / name / "config.json").write_text('{"max_position_embeddings": 512}')
        (folder / str(number) / "MODEL" / "bad.jsonl").write_text('{"text": 1\n')
        (folder / str(number) / "MODEL" / "bad.txt").write_bytes(b"\xff")
        (folder / str(number) / "MODEL" / "numbers.csv").write_text("x,y\n1,2\n")
        (folder / str(number) / "HALF" / "layers").mkdir(parents=True)
        (folder / str(number) / "HALF" / "layers" / "00000.json").write_text("{}")
        (folder / str(number) / "HALF" / "state.json").write_text('{"complete": false, "num_layers": 2}')
        (folder / str(number) / "MODEL" / "model.safetensors").touch()
        shutil.copytree(GOLDEN, folder / str(number) / "BUNDLE")
    offline = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    given = json.dumps([(arguments, has_recipe(arguments)) for arguments, _, _ in WRONG])
    subprocess.run(
        [sys.executable, "-c", FAST], cwd=folder, input=given, text=True, env=offline | {"HF_HUB_OFFLINE": "1"}
    )
    return folder


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[" ".join(arguments) for arguments, _, _ in WRONG])
def test_help_and_wrong_arguments_are_answered_before_torch_is_imported(answers, number):
    arguments, code, expected = WRONG[number]
    said = (answers / f"said-{number}").read_text()
    assert f"AFTER {code} {['pydantic'] if has_recipe(arguments) else []}" in said
    assert expected in said
    names = ["BARE", "BEGUN", "BUNDLE", "EMPTY", "FULL", "HALF", "MODEL", "PAPERS"]
    assert sorted(os.listdir(answers / str(number))) == names


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("kvconvert.json", "{}", BUNDLE),
        ("genai_config.json", "{}", ONNX_EXPORT),
        ("config.json", '{"quantization_config": {"quant_method": "compressed-tensors"}}', CHECKPOINT),
        ("config.json", '{"quantization_config": []}', "a model"),
        ("config.json", "{", "a model"),
        ("state.json", "{}", "a working directory"),
        ("notes.txt", "mine", "a directory of other files"),
    ],
)
def test_force_replaces_what_is_of_the_same_kind_and_the_message_says_what_else_is_there(
    tmp_path, name, content, found
):
    output = tmp_path / "output"
    output.mkdir()
    (output / name).write_text(content)
    for kind in WRITTEN:
        if kind == found:
            check_output(output, True, kind)
        else:
            advice = "choose another path, or remove it" if found in WRITTEN else r"choose another path\."
            with pytest.raises(UsageError, match=f"is {found}, not {kind}, .* {advice}"):
                check_output(output, True, kind)
    with pytest.raises(UsageError, match="is a file, not a bundle"):
        check_output(Path(__file__), True)


def test_no_output_takes_the_place_of_the_current_directory(tmp_path, monkeypatch):
    shutil.copytree(GOLDEN, tmp_path / "bundle")
    (tmp_path / "empty").mkdir()
    for current, output in (("empty", "."), ("bundle", "."), ("bundle/kvconvert", "..")):
        monkeypatch.chdir(tmp_path / current)
        with pytest.raises(UsageError, match="takes the place of the current directory"):
            check_output(Path(output), True)
        check_output(tmp_path / "new", True)


def test_inspect_and_verify_are_ten_lines_and_import_no_modeling_code():
    program = (
        "import sys; from kvconvert.cli import cli\n"
        "for command in ('inspect', 'verify'):\n"
        f"    try: cli([command, {str(GOLDEN)!r}])\n    except SystemExit as stopped: assert stopped.code == 0\n"
        "    print('END')\n"
        "found = [name for name in sys.modules if 'modeling_' in name or name.startswith('kvconvert.runtime')]\n"
        "assert not found, found\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert all(8 <= len(said.strip().splitlines()) <= 12 for said in found.stdout.split("END\n")[:2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int8"}, "`dtype` is 'int8'; it may be auto, torch.float32"),
        ({"dtype": torch.int8}, "`dtype` is torch.int8;"),
        ({"verify": "fast"}, "`verify` is 'fast'; give 'full' or 'headers'"),
    ],
)
def test_load_refuses_in_a_sentence_what_it_cannot_do(options, said):
    with pytest.raises(UsageError, match=said):
        load(GOLDEN, **options)


def test_convert_gives_the_bytes_of_calibrate_and_export_and_leaves_nothing_else(tmp_path):
    torch.set_num_threads(1)
    write_tiny_llama(tmp_path / "model", tied=True)
    recipe = write_recipe(tmp_path / "tiny.toml", method="rtn")
    options = ["--recipe", recipe, "--samples", "2", "--seq-len", "32"]
    result = kvconvert("convert", tmp_path / "model", tmp_path / "one", *options)
    assert result.exit_code == 0, result.output
    assert "kvconvert generate" in result.stdout
    assert sorted(os.listdir(tmp_path)) == ["model", "one", "tiny.toml"]
    assert kvconvert("convert", tmp_path / "model", tmp_path / "one", *options, "--force").exit_code == 0
    assert kvconvert("calibrate", tmp_path / "model", "-o", tmp_path / "work", *options).exit_code == 0
    assert kvconvert("export", tmp_path / "work", "-o", tmp_path / "two").exit_code == 0
    for file in ("model.safetensors", "kvconvert/plan.safetensors", "kvconvert.json", "config.json", "README.md"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_pulled_bundles_are_listed_and_removed(tmp_path, monkeypatch):
    with standing_in(monkeypatch, tmp_path):
        assert "No bundle" in kvconvert("list").stdout
        bundle = shutil.copytree(GOLDEN, tmp_path / "bundle")
        assert kvconvert("push", bundle, "someone/golden").exit_code == 0
        assert kvconvert("pull", "someone/golden").exit_code == 0
        assert "someone/golden" in kvconvert("list").stdout
        [listed] = json.loads(kvconvert("list", "--json").stdout)
        assert datetime.fromisoformat(listed["modified"]).tzinfo == UTC
        refused = kvconvert("rm", "someone/goldne")
        assert refused.exit_code == 1
        assert "did you mean someone/golden?" in refused.stderr
        assert kvconvert("rm", "someone/golden").exit_code == 0
        assert "No bundle" in kvconvert("list").stdout


def test_a_hub_cache_that_is_a_file_is_said_so(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file"))
    for command in (("list",), ("rm", "someone/golden")):
        refused = kvconvert(*command)
        assert (refused.exit_code, "file, is no directory; set HF_HOME" in refused.stderr) == (1, True)
    assert "cannot be written" in kvconvert("doctor").stdout


class _Slow:
    """Stands for the model's time: Ctrl-C comes after three tokens of the first answer."""

    def __init__(self, console):
        self.put, self.count = console.Printer.put, 0

    def __call__(self, printer, value):
        self.put(printer, value)
        self.count += 1
        if self.count == 4:  # the prompt, and three tokens
            os.kill(os.getpid(), signal.SIGINT)


def test_in_a_conversation_ctrl_c_ends_the_answer_reset_forgets_and_bye_leaves(monkeypatch, capsys):
    from kvconvert import console

    slow = _Slow(console)
    monkeypatch.setattr(console.Printer, "put", lambda printer, value: slow(printer, value))
    talk = console.Console(GOLDEN, 12, "cpu")
    lengths = []
    generate = talk._generate

    def noted(inputs, cache, interruptible):
        sequence, cache, text = generate(inputs, cache, interruptible)
        lengths.append((inputs["input_ids"].shape[1], sequence.shape[1]))
        return sequence, cache, text

    monkeypatch.setattr(talk, "_generate", noted)
    before = signal.getsignal(signal.SIGINT)
    lines = [
        "Hello\n",
        "And\n",
        "/help\n",
        "/restart\n",
        "/image a b\n",
        "/reset\n",
        "Hello\n",
        "/bye\n",
        "never asked\n",
    ]
    talk.chat(iter(lines))
    told = capsys.readouterr().err
    assert told.count("/reset forgets what was said") == 3
    assert "There is no command /restart." in told
    assert "This model reads no images." in told
    assert signal.getsignal(signal.SIGINT) is before
    (first, ended), (second, _), (again, _) = lengths
    assert first + 3 <= ended <= first + 4  # of twelve
    assert second > ended  # the interrupted answer is part of the conversation
    assert again == first


def test_warnings_of_transformers_do_not_come_between_the_tokens(monkeypatch):
    from transformers.utils import logging

    from kvconvert import console

    warned, logger = [], logging.get_logger("transformers.models.mamba2")
    monkeypatch.setattr(console.Printer, "put", lambda printer, value: warned.append(logger.isEnabledFor(30)))
    console.Console(GOLDEN, 2, "cpu").complete("Hello")
    assert warned
    assert not any(warned)
    assert logger.isEnabledFor(30)


def test_closed_streams_are_no_failure():
    command = f"{sys.executable} -m kvconvert recipes default <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0


def test_an_interrupted_command_exits_with_130(tmp_path, capfd):
    torch.set_num_threads(1)
    write_tiny_llama(tmp_path / "model", tied=True)
    recipe = write_recipe(tmp_path / "tiny.toml", method="awq")
    command = ["calibrate", tmp_path / "model", "-o", tmp_path / "work", "--recipe", recipe]
    process = forked.start(lambda: cli([*map(str, command)], prog_name="kvconvert"))
    stop = threading.Timer(300, os.kill, (process, signal.SIGKILL))
    stop.start()
    while not (tmp_path / "work" / "state.json").exists() and os.waitid(os.P_PID, process, GONE) is None:
        time.sleep(0.05)
    os.kill(process, signal.SIGINT)
    code = forked.wait(process)
    stop.cancel()
    said = capfd.readouterr().err
    assert code == 130, said
    assert "run the same command again to go on from the last finished layer" in said


@pytest.mark.parametrize("module", ["click", "torch"])
def test_ctrl_c_while_modules_are_imported_is_a_sentence_and_no_abort(tmp_path, module):
    within = (
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    os.abort()\n"
    )
    (tmp_path / f"{module}.py").write_text(within)
    places = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "kvconvert", "generate", GOLDEN, "x"]
    found = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which programs in the background ignore
    )
    said = "Error: Interrupted before anything was begun; run the same command again.\n"
    assert (found.returncode, found.stderr) == (130, said)
