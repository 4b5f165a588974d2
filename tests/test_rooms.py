"""Who may import whom, and what importing the runtime must not drag in."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"kernels": "kvconvert.kernels", "calibration": "kvconvert.calibration", "runtime": "kvconvert.runtime"}
# Leaf and data-format modules that several rooms may use.
ALLOWED = {
    "kernels": ("kvconvert.kernels", "kvconvert.errors"),
    "calibration": ("kvconvert.calibration", "kvconvert.kernels", "kvconvert.methods", "kvconvert.errors"),
    "runtime": (
        "kvconvert.runtime",
        "kvconvert.kernels",
        "kvconvert.bundle",
        "kvconvert.methods",
        "kvconvert.models",
        "kvconvert.errors",
    ),
    "kvconvert/methods": ("kvconvert.methods", "kvconvert.errors"),
    "kvconvert/bundle": ("kvconvert.bundle", "kvconvert.methods", "kvconvert.errors"),
}


def imports(path: Path) -> set[str]:
    """Full names of everything a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_lies_below_it(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            if name.split(".")[0] == "kvconvert":
                assert any(name == top or name.startswith(top + ".") for top in ALLOWED[room]), f"{path}: {name}"


@pytest.mark.parametrize("room", ["kernels", "kvconvert/bundle"])
def test_kernels_and_bundle_know_nothing_of_transformers(room):
    for path in (ROOT / room).rglob("*.py"):
        assert not {name for name in imports(path) if name.split(".")[0] in ("transformers", "click", "datasets")}, path


def imported_by(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_the_runtime_imports_only_what_production_needs():
    loaded = imported_by("import kvconvert.runtime")
    assert "transformers" in loaded
    assert not loaded & {"click", "datasets", "onnx", "matplotlib", "tqdm.auto"}
    # transformers imports Pillow wherever it is installed; the runtime itself leaves images to processors.
    for path in (ROOT / "runtime").rglob("*.py"):
        assert not {name for name in imports(path) if name.split(".")[0] == "PIL"}, path


def test_kernels_run_without_transformers_and_help_without_torch():
    assert "transformers" not in imported_by("import kvconvert.kernels.decode.reference, kvconvert.kernels.linear")
    assert not imported_by("import kvconvert, kvconvert.cli") & {"torch", "transformers", "datasets"}
    assert "torch" not in imported_by("import kvconvert.methods")


def test_every_package_is_declared_for_installation():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    source = ROOT / project["package-dir"][""]
    found = set()
    for folder, _, files in os.walk(source, followlinks=True):
        if "__init__.py" in files:
            found.add(".".join(Path(folder).relative_to(source).parts))
    assert found == set(project["packages"])
