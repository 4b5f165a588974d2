"""A transformers that was not tried is refused in one sentence, before anything is imported from it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvconvert.models import TRIED

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1"
SAID = "kvconvert was tried with 5.23 and 5.24 only; run pip install 'transformers==5.24.*'."


def run(code, version, folder):
    """Python with the metadata of another version of transformers, whose package lacks everything."""
    metadata = folder / f"transformers-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    (folder / "transformers.py").write_text("")
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.quick("4.57.6", "5.25.0")
@pytest.mark.parametrize("version", ["4.57.6", "5.22.2", "5.25.0", "5.24.0.dev0", "5.240.0", "6.0.0"])
def test_load_refuses_it(version, tmp_path):
    found = run("from kvconvert import load", version, tmp_path)
    assert found.stderr.splitlines()[-1] == f"kvconvert.errors.MissingError: transformers is {version}, and {SAID}"


@pytest.mark.quick("calibrate m", "serve")
@pytest.mark.parametrize(
    "command", ["calibrate m -o w", f"verify {GOLDEN}", "recipes", f"serve {GOLDEN}", f"generate {GOLDEN} --prompt x"]
)
def test_a_command_says_one_sentence(command, tmp_path):
    code = f"sys.argv = ['kvconvert', *{command.split()!r}]; from kvconvert.cli import main; main()"
    found = run(code, "5.25.0", tmp_path)
    assert (found.returncode, found.stderr) == (1, f"Error: transformers is 5.25.0, and {SAID}\n")


def test_a_python_without_docstrings_is_named():
    code = "from kvconvert.cli import main; main()"
    found = subprocess.run([sys.executable, "-OO", "-c", code, "plan", str(GOLDEN)], capture_output=True, text=True)
    assert (found.returncode, found.stderr.startswith("Error: Python runs with -OO or PYTHONOPTIMIZE=2")) == (1, True)


def test_doctor_says_which_versions_are_needed(tmp_path):
    code = "from kvconvert.commands.doctor import check_package, requirements; print(check_package("
    code += "next(r for r in requirements() if r.name == 'transformers')).problem)"
    said = run(code, "5.25.0", tmp_path).stdout
    assert said.startswith("transformers is 5.25.0, and kvconvert needs <5.25,>=5.23; install it with")


def test_the_range_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    major, minor = map(int, TRIED[-1].split("."))
    assert f"transformers>={TRIED[0]},<{major}.{minor + 1}" in project["dependencies"]
    pinned = re.search(r"^transformers==(.*)$", Path(__file__).parents[2].joinpath("constraints.txt").read_text(), re.M)
    assert pinned[1].startswith(TRIED[-1])
