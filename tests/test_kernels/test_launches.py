"""Notes of launches: what tells them apart, that other processes compile them, and that Triton finds them again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import forked

from kvconvert.commands.warm import compile_kernels
from kvconvert.errors import KvconvertError, UsageError
from kvconvert.kernels import device
from kvconvert.kernels import launches as launches_module
from kvconvert.kernels.device import GPU, imagined
from kvconvert.kernels.launches import Pointer, begin_to_compile, record_specializations
from kvconvert.kernels.linear import QuantizedLinear

# Scripts in processes without the interpreter, forked from one that has imported torch and Triton.
SERVER = """
import json, os, sys, traceback
import kvconvert.kernels.launches, triton
for line in sys.stdin:
    script, cache, arguments = json.loads(line)
    process = os.fork()
    if process == 0:
        code = 1
        try:
            sys.argv, os.environ["TRITON_CACHE_DIR"] = ["", *arguments], cache
            exec(script, {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print("END", os.waitpid(process, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def run():
    """What a script prints in a process of its own, whose Triton caches there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)}, **pipes) as server:

        def run(script, cache, *arguments):
            server.stdin.write(json.dumps([script, str(cache), arguments]) + "\n")
            server.stdin.flush()
            words = []
            while words[-2:-1] != ["END"]:
                line = server.stdout.readline()
                assert line, "the process that starts the others has ended"
                words += line.split()
            assert words.pop() == "0"
            return words[:-1]

        yield run
        server.stdin.close()


def test_launches_are_noted_once_for_all_arguments_that_are_compiled_alike():
    linear = QuantizedLinear(256, 512)
    with imagined(GPU((9, 0), 132)), record_specializations() as launches:
        for rows in range(1, 40):
            linear(torch.empty(rows, 256, dtype=torch.bfloat16))
    shapes = [dict(launch.arguments)["S"].rows for launch in launches]
    assert shapes == [2, 8, 16, 32]
    for launch in launches:
        assert dict(launch.arguments)["x"] == Pointer(torch.bfloat16, aligned=True)
        assert dict(launch.options)["num_warps"] == dict(launch.arguments)["S"].warps
    with imagined(GPU((9, 0), 1)), record_specializations() as others:
        linear(torch.empty(1, 256, dtype=torch.bfloat16))
    assert not others.keys() & launches.keys()  # a GPU of one multiprocessor takes two tiles a program


def test_kernels_that_cannot_be_compiled_beside_other_work_are_left_to_who_needs_them(monkeypatch, caplog):
    def fail(*asked):
        assert asked == ((), 90)
        raise KvconvertError("no compiler")

    monkeypatch.setattr(launches_module, "compile_launches", fail)
    with imagined(GPU((9, 0), 132)):
        thread = begin_to_compile((), torch.device("cpu"))
    thread.join()
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_a_cache_that_cannot_be_written_is_one_sentence_before_the_model_is_read(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(launches_module, "cache_directory", lambda: tmp_path / "file" / "cache")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "gpu", lambda _: GPU((9, 0), 132))
    with pytest.raises(
        KvconvertError, match=r"cannot be kept in .*/file/cache \(Not a directory\); set TRITON_CACHE_DIR"
    ):
        compile_kernels("nowhere")


def test_a_cpu_that_passes_for_no_gpu_launches_nothing():
    linear = QuantizedLinear(256, 512)
    with record_specializations() as launches:
        linear(torch.empty(1, 256))
    assert not launches


COMPILE = """
import torch, triton
from kvconvert.kernels.device import GPU, imagined
from kvconvert.kernels.elementwise import Gate, gated
from kvconvert.kernels.launches import compile_launches, record_specializations
from kvconvert.kernels.launches.triton import compiled
from kvconvert.kernels.launches.triton_processes import _Target
x = torch.empty(3, 64, dtype=torch.bfloat16)
with imagined(GPU((9, 0), 132)), record_specializations() as launches:
    gated(x, x, Gate("silu"))
    gated(x.half(), x.half(), Gate("silu"))
print(compile_launches(launches, 90, jobs=2), compile_launches(launches, 90))
hits = []
triton.knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])
triton.runtime.driver.set_active(_Target(90))
for launch in launches:
    compiled(launch)
print(*hits)
"""


def test_noted_launches_are_compiled_by_other_processes_and_found_in_the_cache(run, tmp_path):
    assert run(COMPILE, tmp_path) == ["2", "0", "True", "True"]
    assert run(COMPILE, tmp_path) == ["0", "0", "True", "True"]


MOVED = """
import torch
from kvconvert.kernels.device import GPU, imagined
from kvconvert.kernels.elementwise import Gate, gated
from kvconvert.kernels.launches import record_specializations
from kvconvert.kernels.launches.triton_processes import _marker, unready
x = torch.empty(3, 64, dtype=torch.bfloat16)
with imagined(GPU((9, 0), 132)), record_specializations() as launches:
    gated(x, x, Gate("silu"))
print(len(unready(launches, 90)))
for launch in launches:
    _marker(launch, 90).parent.mkdir(exist_ok=True)
    _marker(launch, 90).touch()
"""


def test_a_cache_that_was_moved_is_known_to_hold_nothing_that_triton_finds(run, tmp_path):
    (tmp_path / "a").mkdir()
    assert run(MOVED, tmp_path / "a") + run(MOVED, tmp_path / "a") == ["1", "0"]
    (tmp_path / "a").rename(tmp_path / "b")
    assert run(MOVED, tmp_path / "b") == ["1"]


def test_an_interrupt_ends_all_processes_that_compile(tmp_path, monkeypatch):
    processes = pytest.importorskip("kvconvert.kernels.launches.triton_processes", reason="needs Triton")
    (tmp_path / "python").write_text(f"#!/bin/sh\nsleep 60 &\necho $! >{tmp_path}/pid\necho ready\nwait\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.compile_in_processes([], 90, 1, interrupt)
    status = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    for _ in range(1000):
        if ended := not status.exists() or ") Z " in status.read_text():
            break
        time.sleep(0.01)
    assert ended


LAUNCH = """
import functools, torch, triton
from kvconvert.kernels.device import GPU, imagined
from kvconvert.kernels.elementwise import Gate, gated
from kvconvert.kernels.launches import record_specializations
from kvconvert.kernels.launches.triton import compiled
from kvconvert.kernels.launches.triton_processes import _Target
x = torch.empty(3, 64, dtype=torch.bfloat16)
with imagined(GPU((9, 0), 132)), record_specializations() as launches:
    gated(x, x, Gate("silu"))
triton.runtime.driver.set_active(_Target(90))
for launch in launches:
    compiled(launch)
asked = []
triton.knobs.compilation.listener = lambda **what: asked.append(what["metadata"]["name"])
# All of a launch but the kernel's run.
triton.JITFunction.__getitem__ = lambda self, grid: functools.partial(self.run, grid=grid, warmup=True)
with imagined(GPU((9, 0), 132)):
    gated(x, x, Gate("silu"))
    gated(x.half(), x.half(), Gate("silu"))
print(*asked)
"""


def test_a_kernel_that_was_made_ready_is_not_looked_for_when_it_is_launched(run, tmp_path):
    assert run(LAUNCH, tmp_path) == ["gated_kernel"]  # for float16, which was not recorded


KEYS = """
import sys
import kvconvert.kernels.pages.triton.feedback as feedback
import kvconvert.kernels.pages.triton.quantize as quantize
kernels = [quantize.page_kernel, feedback.key_feedback_kernel]
found = {kernel: kernel.key for kernel in (kernels if sys.argv[1] == "forth" else kernels[::-1])}
print(*(found[kernel] for kernel in kernels))
"""


def test_keys_of_the_cache_do_not_depend_on_which_kernel_was_launched_first(run, tmp_path):
    assert run(KEYS, tmp_path, "forth") == run(KEYS, tmp_path, "back")


def test_where_triton_is_not_installed_launches_are_named_and_not_imported():
    def import_anew():
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvconvert"]:
            del sys.modules[name]
        sys.modules["triton"] = None
        from kvconvert.kernels import blocks, pages, ragged
        from kvconvert.runtime.cache import prompt_pass

        assert prompt_pass.__name__ in sys.modules
        assert all(function.__name__ for function in (blocks.locate, pages.quantize_at, ragged.append))

    assert forked.wait(forked.start(import_anew)) == 0


def test_where_there_is_no_gpu_warming_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU here"):
        compile_kernels("nowhere")


def test_a_gpu_that_there_are_no_kernels_for_is_refused_by_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "gpu", lambda _: GPU((7, 5), 40))
    with pytest.raises(UsageError, match=r"7\.5 is below 8\.0"):
        compile_kernels("nowhere")
