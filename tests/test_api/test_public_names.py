"""What `from kvconvert import ...` gives, to Python and to whatever reads the code without running it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvconvert

ROOT = Path(kvconvert.__file__).resolve().parent.parent
NAMES = ("KVCache", "KVScheme", "Recipe", "bench", "calibrate", "evaluate", "export", "load")


def test_every_public_name_is_there_and_listed():
    for name in NAMES:
        assert getattr(kvconvert, name).__doc__
    assert {*NAMES, "KvconvertError", "__version__"} == set(kvconvert.__all__) == set(dir(kvconvert))


def test_ctrl_c_is_provided_for_before_anything_is_imported_that_takes_long():
    # Until then it is a traceback. Python itself has imported os; `signal` may be interrupted.
    code = (
        "import sys; old = {*sys.modules}; import kvconvert.io.interrupts\n"
        "print(*sorted({*sys.modules} - old - {'__future__'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert found == ["kvconvert", "kvconvert.io", "kvconvert.io.interrupts", "kvconvert.version"]


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'convert_everything'"):
        _ = kvconvert.convert_everything


def test_type_checkers_and_python_find_each_name_in_the_same_module():
    tree = ast.parse(Path(kvconvert.__file__).read_text(encoding="utf8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    stated = {alias.name: line.module for line in block.body for alias in line.names}
    assert stated == kvconvert._HOMES


def test_every_file_of_the_package_is_found_without_running_an_import_hook():
    # An editable install puts src/ on sys.path and nothing else: a type checker walks these folders.
    source = ROOT / "src"
    assert [path.name for path in source.iterdir() if path.suffix != ".egg-info"] == ["kvconvert"]
    walked = {
        (Path(folder) / file).resolve(): Path(folder).relative_to(source) / file
        for folder, _, files in os.walk(source / "kvconvert", followlinks=True)
        for file in files
        if file.endswith(".py")
    }
    rooms = ("kvconvert", "kernels", "calibration", "runtime")
    assert set(walked) == {path for room in rooms for path in (ROOT / room).rglob("*.py")}
    assert walked[ROOT / "kernels" / "__init__.py"] == Path("kvconvert/kernels/__init__.py")
    assert (source / "kvconvert" / "py.typed").is_file()


def test_the_repository_root_is_not_where_kvconvert_comes_from():
    # Hugging Face's package `kernels`, which transformers imports, would be hidden by the room of that name.
    code = "import importlib.util; spec = importlib.util.find_spec('kernels'); print(spec and spec.origin)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    assert found == "None" or not Path(found).is_relative_to(ROOT / "kernels")
