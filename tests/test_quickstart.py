"""The README's quickstart, run again: its commands work, its figures are the README's within the stated tolerance."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_quickstarts_output_is_the_readmes():
    command = [sys.executable, "examples/quickstart.py", "--check", "README.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Greedy continuation" in done.stdout
