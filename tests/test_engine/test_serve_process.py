"""The command `kvconvert serve` as a process: its signals, its exit codes, its keys, and what it says."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny import forked
from tiny.models import ARCHITECTURES

from kvconvert.cli import cli, main
from kvconvert.commands.serve import _keys
from kvconvert.convert.export import export
from kvconvert.convert.pipeline import calibrate
from kvconvert.recipes.recipe import Recipe
from kvconvert.serve.requests import Chat, Completion

KEY = "a-key-that-nobody-else-has"
LONG = {"prompt": "Once upon a time", "max_tokens": 150, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def bundle(converted):
    return converted / "bundle"


class Process:
    """A forked process that serves."""

    def __init__(self, bundle, *options):
        read, write = os.pipe()

        def serve():
            os.close(read)
            os.dup2(write, 2)
            sys.stderr = os.fdopen(2, "w", 1, "utf8")
            os.environ["KVCONVERT_API_KEY"] = KEY
            sys.argv = ["kvconvert", "serve", str(bundle), *options]
            main()

        self.pid, self.returncode = forked.start(serve), None
        os.close(write)
        self.stderr = os.fdopen(read, encoding="utf8")

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self):
        if self.returncode is None:
            self.returncode = forked.wait(self.pid)


@contextlib.contextmanager
def process(bundle, *options):
    """A process that serves, its port, and the lines of its standard error."""
    started, said, port = Process(bundle, *options), [], None
    stop = threading.Timer(300, started.send_signal, (signal.SIGKILL,))
    stop.start()
    try:
        while port is None:
            said.append(started.stderr.readline())
            assert said[-1], "".join(said)
            found = re.match(r"Serving (\w+) at http://127\.0\.0\.1:(\d+)/v1$", said[-1])
            port = found and int(found[2])
        yield started, port, said
    except BaseException:
        started.send_signal(signal.SIGKILL)
        raise
    finally:
        said.extend(started.stderr)
        started.wait()
        stop.cancel()


@pytest.mark.parametrize(
    ("options", "rest"),
    [(["--kv-memory", "1MB"], "holds pages of"), pytest.param([], "the pages grow", marks=pytest.mark.full)],
)
def test_it_says_what_the_states_of_a_full_batch_take(tmp_path, options, rest):
    source, recipe = ARCHITECTURES["qwen3_5_text"].write(tmp_path / "model"), Recipe.of("kv-only")
    calibrate(source, tmp_path / "work", recipe=recipe, samples=2, seq_len=140, progress=False)
    bundle = export(tmp_path / "work", tmp_path / "hybrid", progress=False)
    with process(bundle, "--port", "0", "--max-batch", "3", *options) as (started, _, said):
        started.send_signal(signal.SIGTERM)
    found = re.search(r"Recurrent states of 3 sequences take ([\d,]+) bytes, and (.+)\.", "".join(said))
    assert int(found[1].replace(",", "")) > 0
    assert rest in found[2]


def test_what_a_cpu_keeps_of_shapes_is_bounded_before_torch_reads_the_bound():
    program = (
        "import os, sys; from click.testing import CliRunner; from kvconvert.cli import cli;"
        "CliRunner().invoke(cli, ['serve', './missing']);"
        "print(*[os.environ.get(name) for name in sys.argv[1:]], 'torch' in sys.modules)"
    )
    names = ["LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"]
    others = {name: value for name, value in os.environ.items() if name not in names}
    for given, found in (({}, "128 128 False"), ({names[0]: "7"}, "7 128 False")):
        command = [sys.executable, "-c", program, *names]
        assert subprocess.check_output(command, env=others | given, text=True).strip() == found


def ask(port, body, key=KEY):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection, connection.getresponse()


@pytest.mark.parametrize("killed_before", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_server_finishes_when_it_is_terminated_even_one_that_follows_a_killed_one(bundle, killed_before):
    port = 0
    if killed_before:
        with process(bundle, "--port", "0") as (killed, port, _):
            connection, response = ask(port, LONG | {"stream": True})
            assert response.read(5) == b"data:"
            killed.send_signal(signal.SIGKILL)
            with contextlib.closing(connection), pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                response.read()
        assert killed.returncode == -signal.SIGKILL
    options = ("--port", str(port), "--max-batch", "2", "--log-requests", "--served-model-name", "mine")
    with process(bundle, *options) as (terminated, port, said):
        assert ask(port, LONG, "another")[1].status == 401
        connection, response = ask(port, LONG | {"stream": True, "user": "me\n"})
        assert response.read(5) == b"data:"
        terminated.send_signal(signal.SIGTERM)
        with contextlib.closing(connection):
            pieces = response.read().decode().removesuffix("\n\n").split("\n\ndata: ")
    assert terminated.returncode == 0
    assert pieces[-1] == "[DONE]"
    assert json.loads(pieces[-2])["model"] == "mine"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert re.search(r"cmpl-\w+: 5 prompt tokens, 150 new, length, [\d.]+ s, user me\\n$", said[-1])
    assert any(line.endswith("POST /v1/completions: answered with 401\n") for line in said)
    assert KEY not in "".join(said)


@pytest.mark.full
def test_a_deadline_that_ends_requests_is_told_by_the_exit_code(bundle):
    with process(bundle, "--port", "0", "--grace", "0") as (terminated, port, said):
        connection, response = ask(port, LONG | {"stream": True})
        assert response.read(5) == b"data:"
        terminated.send_signal(signal.SIGTERM)
        with contextlib.closing(connection):
            assert b"shutting_down" in response.read()
    assert terminated.returncode == 1
    assert said[-1] == "Error: Requests that were ended unfinished: 1; a longer --grace gives them more time.\n"


@pytest.mark.parametrize(
    ("options", "variable", "said"),
    [
        (["--port", "PORT"], None, r"127\.0\.0\.1:\d+ cannot be served .*choose another --host or --port"),
        (["--host", "no.such.host.invalid"], None, r"no\.such\.host\.invalid:8000 cannot be served"),
        (["--api-key-file", "missing"], None, r"--api-key-file missing cannot be read \(No such file"),
        (["--api-key-file", "/dev/zero"], None, "--api-key-file /dev/zero has more than 1,048,576 bytes"),
        (["--api-key-file", "empty"], None, "--api-key-file empty has no key"),
        (["--api-key-file", "binary"], None, r"--api-key-file binary cannot be read \(not UTF-8"),
        (["--api-key-file", "keys"], "x", "There are keys in KVCONVERT_API_KEY and in --api-key-file"),
        ([], " ", "KVCONVERT_API_KEY is empty"),
        ([], "\udcff", "KVCONVERT_API_KEY is not UTF-8 text"),
        (["--port", "0", "--allowed-host", "http://x"], None, "--allowed-host 'http://x' is no name of a host"),
        (["--port", "0", "--cors-origin", "x:3000"], None, "--cors-origin 'x:3000' is no origin of web pages"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_bundle_is_loaded(
    bundle, options, variable, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, content in (("empty", b" \n"), ("binary", b"\xff"), ("keys", b"one\n")):
        (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("KVCONVERT_API_KEY", variable) if variable else monkeypatch.delenv("KVCONVERT_API_KEY", False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = [str(taken.getsockname()[1]) if option == "PORT" else option for option in options]
        result = CliRunner().invoke(cli, ["serve", str(bundle), *options])
    assert result.exit_code == (1 if "cannot be" in said else 2)
    assert re.match(f"Error: {said}", result.stderr)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--grace", "inf", "inf is not in the range"),
        ("--grace", "1e10", "is not in the range"),
        ("--grace", "nan", "nan is no number of seconds"),
        ("--client-timeout", "inf", "inf is not in the range"),
        ("--client-timeout", "nan", "nan is no number of seconds"),
        ("--max-batch", "1000000000000", "1000000000000 is not in the range"),
        ("--served-model-name", "x\udcff", r"No client can ask for a model named 'x\udcff'"),
        ("--served-model-name", "x\x1b[31m", "No client can ask for a model named"),
        ("--served-model-name", "x" * 257, "No client can ask for a model named"),
    ],
)
def test_what_no_timer_no_memory_and_no_client_can_take_is_refused(bundle, option, value, said):
    result = CliRunner().invoke(cli, ["serve", str(bundle), "--port", "0", option, value])
    assert result.exit_code == 2
    assert said in result.stderr


def test_the_mark_of_an_encoding_is_no_part_of_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("KVCONVERT_API_KEY", False)
    (tmp_path / "keys").write_text("one\r\ntwo\n", encoding="utf-8-sig")
    assert _keys(tmp_path / "keys") == ["one", "two"]


def test_without_the_server_packages_the_command_says_what_to_install(bundle, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kvconvert.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(cli, ["serve", str(bundle)])
    assert result.exit_code == 1
    assert result.stderr == "Error: Serving needs uvicorn; run pip install '.[serve]' in a clone of kvconvert.\n"


def test_the_page_describes_every_option_and_every_field():
    page = (Path(__file__).resolve().parents[2] / "docs" / "runtime.md").read_text(encoding="utf8")
    page = page.split("## kvconvert serve")[1].split("\n## ")[0]
    options = {option.opts[0] for option in cli.commands["serve"].params if option.opts[0].startswith("--")}
    common = {"--device", "--dtype", "--served-model-name"}
    assert not [name for name in options - common if name not in page]
    fields = {*Completion.model_fields, *Chat.model_fields} - {"model"}
    assert not [name for name in fields if f"`{name}`" not in page]
