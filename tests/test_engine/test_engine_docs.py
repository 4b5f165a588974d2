"""docs/engine.md: its example runs, and it describes every argument and every method."""

import inspect
import re
from pathlib import Path

import pytest
from tiny.llama import write_tiny_bundle

from kvconvert.runtime import Engine

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "engine.md").read_text(encoding="utf8")


@pytest.mark.parametrize("function", [Engine.__init__, Engine.add])
def test_every_argument_is_described(function):
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    assert not [name for name in names if f"| `{name}` |" not in PAGE]


def test_every_method_is_described():
    methods = [name for name in vars(Engine) if not name.startswith("_")]
    assert not [name for name in methods if f"| `{name}(" not in PAGE]


def test_the_example_runs(tmp_path, capsys):
    bundle = write_tiny_bundle(tmp_path)
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"bundle": bundle}
    exec(compile(example, "docs/engine.md", "exec"), names)
    assert names["story"].text in capsys.readouterr().out
    assert names["other"].finish_reason in ("length", "stop")
