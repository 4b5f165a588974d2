"""docs/runtime.md: its examples run, and it describes every public name and every argument."""

import inspect
import re
from pathlib import Path

import pytest
from tiny.checkpoints import save_checkpoint

import kvconvert
from kvconvert.recipes.recipe import Budget

PAGE = (Path(kvconvert.__file__).resolve().parent.parent / "docs" / "runtime.md").read_text(encoding="utf8")
API = PAGE.split("## Python API")[1].split("\n## ")[0]
SECTIONS = dict(re.findall(r"^### (.+?)$(.*?)(?=^### |\Z)", API, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_examples_of_the_page_run(tmp_path, monkeypatch, capsys, every):
    """`make test` leaves out those that measure, which take longest and give nothing to the others."""
    save_checkpoint(
        tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=32, max_position_embeddings=256
    )
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) > len(SECTIONS)
    for example in examples:
        if not every and re.search(r"= (evaluate|bench)\(", example):
            continue
        exec(compile(example, "docs/runtime.md", "exec"), namespace)
    assert "`device` may be cpu or cuda" in capsys.readouterr().out


def test_the_page_has_a_section_for_every_public_name():
    described = {name for title in SECTIONS for name in title.split(" and ")}
    assert described == set(kvconvert.__all__) - {"__version__"}


@pytest.mark.parametrize("name", ["bench", "calibrate", "export", "load", "evaluate"])
def test_every_argument_is_described_and_given_by_keyword_after_the_first_two(name):
    parameters = list(inspect.signature(getattr(kvconvert, name)).parameters.values())
    if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:  # the only record that is given so
        assert parameters.pop().annotation == "Unpack[Budget]"
        parameters += [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in Budget.__annotations__]
    assert not [parameter.name for parameter in parameters if f"`{parameter.name}`" not in SECTIONS[name]]
    assert not [p.name for p in parameters[2:] if p.kind is not p.KEYWORD_ONLY]
