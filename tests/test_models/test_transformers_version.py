"""A transformers that is too old or too new is one sentence, before anything is imported from it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvconvert.models import OLDEST, TOO_NEW

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1"
NEEDED = "run pip install 'transformers>=5.23,<6'"


def run(code, version, folder):
    """Python with the metadata of another version of transformers, whose package lacks everything."""
    metadata = folder / f"transformers-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    (folder / "transformers.py").write_text("")
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", ["4.57.6", "5.20.0", "6.0.0"])
def test_load_refuses_it(version, tmp_path):
    found = run("from kvconvert import load", version, tmp_path)
    assert found.stderr.splitlines()[-1] == (
        f"kvconvert.errors.UsageError: transformers is {version}, and kvconvert needs another; {NEEDED}."
    )


@pytest.mark.parametrize("command", ["calibrate m -o w", f"eval {GOLDEN}", f"generate {GOLDEN} --prompt x"])
def test_a_command_says_one_sentence(command, tmp_path):
    code = f"sys.argv = ['kvconvert', *{command.split()!r}]; from kvconvert.cli import main; main()"
    found = run(code, "5.20.0", tmp_path)
    assert (found.returncode, found.stderr) == (
        2,
        f"Error: transformers is 5.20.0, and kvconvert needs another; {NEEDED}.\n",
    )


def test_the_range_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    low, high = (".".join(map(str, bound)).removesuffix(".0") for bound in (OLDEST, TOO_NEW))
    assert f"transformers>={low},<{high}" in project["dependencies"]
