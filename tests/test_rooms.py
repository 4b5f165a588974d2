"""Who may import whom, and what importing the runtime must not drag in."""

import ast
import functools
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from tiny.sources import parsed

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"kernels": "kvconvert.kernels", "calibration": "kvconvert.calibration", "runtime": "kvconvert.runtime"}
EVERY_ROOM = ("kvconvert", *ROOMS)
# Leaf and data-format modules that several rooms may use.
ALLOWED = {
    "kernels": ("kvconvert.kernels", "kvconvert.errors"),
    "kvconvert/io": ("kvconvert.io", "kvconvert.errors"),
    "kvconvert/methods": ("kvconvert.methods", "kvconvert.arguments", "kvconvert.errors"),
    "kvconvert/cache": ("kvconvert.cache", "kvconvert.kernels", "kvconvert.methods", "kvconvert.errors"),
    # Passes describe a layer in the words of its structure.
    "calibration": (
        "kvconvert.calibration",
        "kvconvert.cache",
        "kvconvert.kernels",
        "kvconvert.methods",
        "kvconvert.models.masks",
        "kvconvert.models.structure",
        "kvconvert.errors",
    ),
    "kvconvert/bundle": (
        "kvconvert.bundle",
        "kvconvert.cache",
        "kvconvert.io",
        "kvconvert.methods",
        "kvconvert.arguments",
        "kvconvert.errors",
        "kvconvert.tables",
    ),
    # Sources may hold weights in the layout of bundles.
    "kvconvert/models": (
        "kvconvert.models",
        "kvconvert.cache",
        "kvconvert.io",
        "kvconvert.kernels.quantizer",
        "kvconvert.kernels.linear.awq_format",
        "kvconvert.kernels.packing",
        "kvconvert.methods",
        "kvconvert.arguments",
        "kvconvert.errors",
    ),
    "kvconvert/data": ("kvconvert.data", "kvconvert.io", "kvconvert.models", "kvconvert.arguments", "kvconvert.errors"),
    "runtime": (
        "kvconvert.runtime",
        "kvconvert.cache",
        "kvconvert.kernels",
        "kvconvert.bundle",
        "kvconvert.io",
        "kvconvert.methods",
        "kvconvert.models",
        "kvconvert.arguments",
        "kvconvert.errors",
    ),
    "kvconvert/vllm": (
        "kvconvert.vllm",
        "kvconvert.bundle",
        "kvconvert.cache",
        "kvconvert.kernels",
        "kvconvert.methods",
        "kvconvert.errors",
    ),
    "kvconvert/serve": (
        "kvconvert.serve",
        "kvconvert.runtime",
        "kvconvert.bundle",
        "kvconvert.cache",
        "kvconvert.data",
        "kvconvert.models",
        "kvconvert.errors",
    ),
}


@functools.cache
def imports(path: Path) -> set[str]:
    """Full names of everything a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
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


@pytest.mark.parametrize("room", ["kernels", "kvconvert/bundle", "kvconvert/cache", "kvconvert/vllm", "runtime/cache"])
def test_kernels_bundle_and_cache_know_nothing_of_transformers(room):
    for path in (ROOT / room).rglob("*.py"):
        names = imports(path)
        assert not {name for name in names if name.split(".")[0] in ("transformers", "click", "datasets")}, path
        assert not {name for name in names if name.startswith("kvconvert.runtime.hf")}, path


@pytest.mark.parametrize("room", EVERY_ROOM)
def test_no_file_is_read_or_written_in_the_locales_encoding(room):
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            on_path = isinstance(node.func, ast.Attribute) and name in ("read_text", "write_text")
            opened = isinstance(node.func, ast.Name) and name == "open"
            mode = "".join(str(value.value) for value in node.args[1:2] if isinstance(value, ast.Constant))
            piped = isinstance(named.get("text"), ast.Constant) and name in ("Popen", "run", "check_output")
            if on_path or piped or (opened and "b" not in mode):
                assert "encoding" in named, f"{path}, line {node.lineno}"


def modules(rooms: Iterable[str] = EVERY_ROOM) -> dict[str, Path]:
    """Every file of the rooms under its module's name, `kvconvert.a.b` for a/b.py and a/b/__init__.py."""
    found = {}
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT / room).with_suffix("").parts
            found[".".join([ROOMS.get(room, room), *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return found


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node, and nodes that lead to themselves."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1 or node in edges[node]:
                found.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def edges_between(names: Iterable[str]) -> dict[str, set[str]]:
    """Which of these modules import which others of them."""
    files = modules()
    edges: dict[str, set[str]] = {}
    for name in names:
        # A name that is imported from a package is a file of it, or else something that its __init__ defines.
        targets = {found if found in files else found.rpartition(".")[0] for found in imports(files[name])}
        edges[name] = {target for target in targets if target in files}
    return edges


def test_no_two_files_import_each_other_directly_or_round_a_ring():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not circles(edges_between(modules()))


def test_no_two_rooms_import_each_other_directly_or_round_a_ring():
    """A room is a folder of the package, or a file beside them; two leaves of models are read by calibration."""

    def room(name: str) -> str:
        return (
            name if name in ("kvconvert.models.structure", "kvconvert.models.masks") else ".".join(name.split(".")[:2])
        )

    edges: dict[str, set[str]] = {}
    for name, targets in edges_between(name for name in modules() if name != "kvconvert").items():
        edges.setdefault(room(name), set()).update(room(target) for target in targets - {"kvconvert"})
    edges = {name: targets - {name} for name, targets in edges.items()}
    assert edges["kvconvert.convert"] & {"kvconvert.auto", "kvconvert.bundle"}
    assert not circles(edges)


def test_vllm_is_imported_by_its_plugin_alone_and_there_by_the_files_that_vllm_loads():
    importing = {name for name, path in modules().items() if "vllm" in {found.split(".")[0] for found in imports(path)}}
    assert importing == {f"kvconvert.vllm.{name}" for name in ("backend", "passes", "plugin", "weights")}


def test_triton_is_imported_by_the_kernels_alone_and_these_by_their_operations_dispatch():
    for name, path in modules().items():
        if ".triton" in name:
            continue
        # kernels/OPERATION/__init__.py, or the operation of one file
        is_dispatch = path.parent.parent == ROOT / "kernels" and path.name == "__init__.py"
        is_dispatch |= path == ROOT / "kernels" / "select.py"
        for found in imports(path):
            assert found.split(".")[0] != "triton", f"{path}: {found}"
            assert ".triton" not in found or is_dispatch, f"{path}: {found}"


# What must not be there after each of these statements, made one after the other by a fresh interpreter. What the
# command line imports is held by tests/test_first_hour.py.
STATEMENTS = {
    "import kvconvert; dir(kvconvert)": {"torch", "transformers", "datasets", "click", "pydantic", "numpy"},
    "import kvconvert.methods": {"torch"},
    "import torch, triton": {"transformers"},
    "import kvconvert.kernels.attention, kvconvert.kernels.linear": {"transformers"},
    "import kvconvert.vllm.bundle": {"transformers"},
    "import transformers.generation.utils, transformers.modeling_utils": {"kvconvert.runtime"},
    "from transformers import AutoModelForCausalLM, AutoTokenizer, AwqConfig": {"kvconvert.runtime"},
    "import kvconvert.runtime": {"click", "datasets", "onnx", "matplotlib", "starlette", "uvicorn"},
}


def imported():
    """The modules that there are after each statement."""
    code = "import sys\n" + "\n".join(f"{statement}; print(*sys.modules)" for statement in STATEMENTS)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_nothing_is_imported_that_is_not_needed():
    modules = imported()
    for (statement, unwanted), loaded in zip(STATEMENTS.items(), modules, strict=True):
        assert not loaded & unwanted, statement
    loaded = modules[-1]
    # transformers imports Pillow wherever it is installed; the runtime itself leaves images to processors.
    for path in (ROOT / "runtime").rglob("*.py"):
        assert not {name for name in imports(path) if name.split(".")[0] == "PIL"}, path
    unwanted = ("kvconvert.convert", "kvconvert.calibration", "kvconvert.runtime.engine")
    assert not [name for name in loaded if name.startswith(unwanted)]


def test_an_installed_package_holds_every_file():
    """Packages are found, for which a folder needs an __init__.py; other files have to match a declared pattern."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["tool"]["setuptools"]
    declared = {
        Path(*package.split("."), pattern)
        for package, patterns in tools["package-data"].items()
        for pattern in patterns
    }
    source = ROOT / tools["packages"]["find"]["where"][0]
    # An installation writes beside the package.
    for folder, _, names in os.walk(source / "kvconvert", followlinks=True):
        where = Path(folder).relative_to(source)
        for name in names:
            if name.endswith(".py"):
                assert (Path(folder) / "__init__.py").is_file(), where
            elif not name.endswith(".pyc"):
                assert any((where / name).match(str(pattern)) for pattern in declared), where / name


def test_a_checkout_without_symbolic_links_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "setup.py").write_bytes((ROOT / "setup.py").read_bytes())
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "kvconvert").write_text("../kvconvert")
    found = subprocess.run([sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.startswith("This checkout has no symbolic links, which src/kvconvert is;")


def test_every_function_that_is_launched_can_be_noted():
    """So that it can be compiled before: `kernels/launches/triton.py` has made a kernel of it."""
    kernels, launched = set(), set()
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                made = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
                kernels |= {node.name for name in made if isinstance(name, ast.Name) and name.id == "kernel"}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched |= {node.func.value.id} if isinstance(node.func.value, ast.Name) else set()
    launched = {name for name in launched if name.endswith("_kernel")}
    assert len(launched) > 20
    assert launched == kernels
