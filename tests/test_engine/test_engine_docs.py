"""The Engine in docs/runtime.md: its example runs, and it describes every argument and every method."""

import inspect
import re
from pathlib import Path

import pytest

from kvconvert.runtime import Engine, load

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "runtime.md").read_text(encoding="utf8")
PAGE = PAGE.split("## Serving many requests")[1].split("\n## ")[0]


@pytest.mark.parametrize("function", [Engine.__init__, Engine.add])
def test_every_argument_is_described(function):
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    assert not [name for name in names if f"`{name}`" not in PAGE]


def test_every_method_is_described():
    methods = [name for name in vars(Engine) if not name.startswith("_")]
    assert not [name for name in methods if f"`{name}(" not in PAGE]


def test_the_example_runs(converted, capsys):
    bundle = converted / "bundle"
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    model, tokenizer = load(bundle)
    names: dict[str, object] = {"model": model, "tokenizer": tokenizer}
    exec(compile(example, "docs/runtime.md", "exec"), names)
    assert names["story"].text in capsys.readouterr().out
    assert names["other"].finish_reason in ("length", "stop")
