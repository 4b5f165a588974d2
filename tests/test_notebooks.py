"""The notebooks of examples/: they run from top to bottom, and show what a run of theirs wrote.

`make baselines` runs them and keeps their output.
"""

import ast
import json
import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_was_run_in_order_and_shows_it_in_few_bytes(name):
    file = EXAMPLES / name
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert file.stat().st_size < 300_000
    for cell in cells:
        ast.parse("\n".join(line for line in cell.source.splitlines() if not line.startswith("!")))


@pytest.mark.full
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path, monkeypatch, pytestconfig):
    shutil.copytree(EXAMPLES / "reference-lm", tmp_path / "reference-lm")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    NotebookClient(notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert any(output.get("text") for cell in code(notebook) for output in cell.outputs)
    if name == "choosing_a_recipe.ipynb":  # it compares caches, of bundles whose weights are the source's
        manifests = [json.loads(file.read_text()) for file in tmp_path.glob("*/*/bundle/kvconvert.json")]
        assert [manifest["transforms"] for manifest in manifests] == [[]] * 3
    if pytestconfig.getoption("--update-baselines"):
        for cell in code(notebook):
            cell.metadata.pop("execution", None)  # when it was run
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]  # progress
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, EXAMPLES / name)
