"""`kvconvert doctor`: one screen, and exit code 1 where something that is needed is broken."""

import importlib
import tomllib
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from tiny.commands import kvconvert

from kvconvert.commands import doctor

ROOT = Path(__file__).resolve().parents[2]


def test_a_working_machine_is_one_screen_and_exit_code_0():
    result = kvconvert("doctor")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert all(line.startswith("--  extra " if "not installed" in line else "ok  ") for line in lines[1:])
    shown = {line.split()[1]: line for line in lines[1:]}
    for name in ("torch", "transformers"):
        assert metadata.version(name) in shown[name]
    assert {"python", "cpu", "memory", "Hub"} <= shown.keys()
    assert "GiB free" in shown["memory"]


def test_what_is_known_is_shown_before_torch_is_imported(monkeypatch, capsys):
    load, shown = importlib.import_module, []

    def noting(name, *arguments):
        if name == "torch":
            shown.append(capsys.readouterr().out)
        return load(name, *arguments)

    monkeypatch.setattr(doctor, "importlib", types.SimpleNamespace(import_module=noting))
    doctor.doctor.main([], standalone_mode=False)
    assert "python" in shown[0]
    assert "torch" not in shown[0].partition("python")[0]
    assert "torch" in capsys.readouterr().out


def test_every_extra_is_present_or_comes_with_its_pip_line(monkeypatch):
    # As pyproject.toml says it now; an editable install keeps what it said when it was made.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    stated = list(project["dependencies"])
    for extra, needed in extras.items():
        for text in needed:
            requirement, _, marker = text.partition(";")
            own = f'({marker.strip()}) and extra == "{extra}"' if marker else f'extra == "{extra}"'
            stated.append(f"{requirement}; {own}")
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: stated)
    version = metadata.version

    def without_onnx(name):
        if name == "onnx":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor.metadata, "version", without_onnx)
    result = kvconvert("doctor")
    assert result.exit_code == 0
    assert '--  extra         onnx: onnx not installed; pip install ".[onnx]" in a clone of kvconvert' in result.stdout
    assert not [extra for extra in extras if extra not in ("dev", "site") and extra not in result.stdout]
    assert "dev" not in result.stdout


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ("surely-not-installed>=3", 'is not installed; install it with pip install "surely-not-installed>=3"'),
        (f"torch>={torch.__version__.split('+')[0]},<0", "and kvconvert needs"),
        ("numpy>=1", None),
    ],
)
def test_a_needed_package_is_there_and_new_enough(requirement, said):
    finding = doctor.check_package(Requirement(requirement))
    assert (said is None and finding.problem is None) or said in finding.problem


def test_a_package_that_does_not_load_is_broken_and_the_exit_code_1(monkeypatch):
    load = importlib.import_module

    def fail(name, *arguments):
        if name == "triton":
            raise ImportError("libcuda.so: no such file")
        return load(name, *arguments)

    monkeypatch.setattr(doctor, "importlib", types.SimpleNamespace(import_module=fail))
    result = kvconvert("doctor")
    assert result.exit_code == 1
    assert "!!  triton" in result.stdout
    assert result.stderr.startswith("Error: triton does not load (ImportError: libcuda.so: no such file)")


class Gpu:
    """What torch says of a GPU that is not there."""

    def __init__(self, monkeypatch, capability, fails=False):
        said = {
            "is_available": True,
            "device_count": 1,
            "get_device_name": "Some GPU",
            "get_device_capability": capability,
            "mem_get_info": (3 * doctor.GIB, 4 * doctor.GIB),
        }
        for name, value in said.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        monkeypatch.setattr("kvconvert.kernels.device.capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", None)

        def ones(*_, device):
            if fails:
                raise RuntimeError("CUDA error: no kernel image\nmore")
            return torch.tensor([1.0])

        monkeypatch.setattr(torch, "ones", ones)


def test_a_gpu_says_whether_it_runs_the_kernels(monkeypatch):
    Gpu(monkeypatch, (9, 0))
    (gpu, compiler) = [f for f in doctor._processors() if f.name != "cpu"]
    assert gpu.state == "Some GPU, compute capability 9.0, 3.0 of 4.0 GiB free; runs the kernels"
    assert compiler.name == "compiler"
    Gpu(monkeypatch, (7, 5))
    (gpu,) = [f for f in doctor._processors() if f.name != "cpu"]
    assert "plain PyTorch path: compute capability 7.5 is below 8.0" in gpu.state
    assert gpu.problem is None
    Gpu(monkeypatch, (9, 0), fails=True)
    (gpu,) = [f for f in doctor._processors() if f.name != "cpu"]
    assert "does not compute (CUDA error: no kernel image); use a torch" in gpu.problem


def test_kernels_need_a_compiler_and_pythons_headers(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "surely-no-compiler")
    assert "no C compiler" in doctor.check_compiler().problem
    monkeypatch.setenv("CC", "sh")
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h does not exist" in doctor.check_compiler().problem
    (tmp_path / "Python.h").touch()
    assert doctor.check_compiler().problem is None
