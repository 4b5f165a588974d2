"""Shared by all tests; its place also makes `tests` importable, so that every test finds the package `tiny`.

Figures of slow tests are kept in tests/baselines, one JSON file per test file, and compared with what is measured:
`make baselines` measures them anew and writes them, and the difference is reviewed like any other.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
BASELINES = TESTS / "baselines"
# Characters of a text.
LONG_TEXT = 50_000
# The scripts are tested too, and they are not installed. Last, so that none hides a package.
sys.path += [str(TESTS.parent / folder) for folder in ("benchmarks", "examples")]
# While modules are imported and tests collected nothing becomes garbage, and searching takes a tenth of their time.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-baselines", action="store_true", help="write measured figures to tests/baselines")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `each_value`, keep as few cells as have every value of each parameter, and mark the others full:
    the i-th cell has the i-th value of each, counted around. Of a test marked `quick`, keep the cells whose names hold
    one of the mark's words.

    Raises:
        pytest.UsageError: a word of `quick` is in no name, though all cells were collected.
    """
    grids: dict[str, list[tuple[pytest.Item, list[tuple[int, ...]]]]] = {}
    words: dict[tuple[str, str], bool] = {}
    for item in items:
        if mark := item.get_closest_marker("quick"):
            held = {word: word in item.callspec.id for word in mark.args}
            if not any(held.values()):
                item.add_marker(pytest.mark.full)
            for word, found in held.items():
                test = item.nodeid.partition("[")[0], word
                words[test] = words.get(test, False) or found
        if item.get_closest_marker("each_value"):
            # One set of names for each `parametrize`, whose values are the same objects in all cells.
            names = [
                mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
                for mark in item.iter_markers("parametrize")
            ]
            values = [tuple(id(item.callspec.params[name]) for name in together) for together in names]
            grids.setdefault(item.nodeid.partition("[")[0], []).append((item, values))
    whole = not (config.getoption("lf") or any("::" in argument for argument in config.args))
    if whole and not all(words.values()):
        missing = [test for test, found in words.items() if not found]
        raise pytest.UsageError(f"No cell's name holds this word of `quick`: {missing}")
    for cells in grids.values():
        columns = [list(dict.fromkeys(column)) for column in zip(*(values for _, values in cells), strict=True)]
        longest = max(len(column) for column in columns)
        kept = [[column[i % len(column)] for column in columns] for i in range(longest)]
        for item, values in cells:
            if values not in kept:
                item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Leave what was imported out of the garbage collector's searches, a twentieth of the time of all tests."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # without which bindings complain of what they leak


@dataclass(frozen=True)
class Baseline:
    """Stored figures of one test file: by case, then by name.

    Attributes:
        file: where they are stored.
        update: write what is measured instead of comparing it.
    """

    file: Path
    update: bool

    def cases(self) -> dict[str, dict[str, float]]:
        """Everything stored."""
        return json.loads(self.file.read_text(encoding="utf8")) if self.file.exists() else {}

    def check(self, case: str, measured: Mapping[str, float], tolerance: Mapping[str, float]) -> None:
        """Compare a case's figures with the stored ones, or store them.

        Args:
            case: its name in the file.
            measured: figures by name.
            tolerance: relative difference allowed, by the same names.
        """
        cases = self.cases()
        if self.update:
            cases[case] = {name: float(f"{value:.6g}") for name, value in measured.items()}
            self.file.parent.mkdir(exist_ok=True)
            self.file.write_text(json.dumps(dict(sorted(cases.items())), indent=1) + "\n", encoding="utf8")
            return
        assert case in cases, f"{self.file.name} has no figures of {case}; run `make baselines`"
        expected = {name: pytest.approx(value, rel=tolerance[name]) for name, value in cases[case].items()}
        assert dict(measured) == expected, f"{case}: if the change is wanted, run `make baselines`"


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Leave written files to the system's cache: only a power cut tells the difference, and every conversion waits for
    its disk some thirty times. That files are synced, and when, is seen where `kvconvert.io.disk` is observed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_configuration_is_written_out_for_a_log() -> Iterator[None]:
    """Leave out the JSON text of a configuration that transformers makes for its log of each one that it reads."""
    from transformers import GenerationConfig, PretrainedConfig

    with pytest.MonkeyPatch.context() as patch:
        for kind in (GenerationConfig, PretrainedConfig):
            patch.setattr(kind, "__repr__", object.__repr__)
        yield


@pytest.fixture(scope="session", autouse=True)
def long_texts_are_tokenized_once() -> Iterator[None]:
    """Keep the ids of long texts: hundreds of conversions of tiny models read those that ship, half a second each."""
    from kvconvert.data import text

    encode, known = text._encode, {}

    def remembered(written: str, tokenizer: Any) -> list[int]:
        made = getattr(tokenizer, "backend_tokenizer", None)
        if len(written) < LONG_TEXT or made is None:
            return encode(written, tokenizer)
        key = hash(written), hash(made.to_str()), type(tokenizer)
        if key not in known:
            known[key] = encode(written, tokenizer)
        return list(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_encode", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def processors_are_tried_once() -> Iterator[None]:
    """Keep which files make a processor that takes little: each load tries pictures in a fork, half a second's work."""
    from kvconvert.models import processors

    encoders_of, why_refused, asked, fine = processors._encoders, processors.why_refused, [], set()

    def untried(processor: Any, directory: Path) -> list[Any]:
        asked[:] = [tuple((path.name, path.read_bytes()) for path in sorted(directory.glob("*.j*")))]
        return [] if asked[0] in fine else encoders_of(processor, directory)

    def remembered(encoders: list[Any]) -> str | None:
        files = asked.pop() if asked else None
        reason = why_refused(encoders) if encoders else None
        if files is not None and reason is None:
            fine.add(files)
        return reason

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, "_encoders", untried)
        patch.setattr(processors, "why_refused", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def layers_are_discovered_once() -> Iterator[None]:
    """Keep what conversions find out about layers of one configuration, a fifth of the time of a tiny one; tests of
    discovery itself call it without this.
    """
    from kvconvert.convert import discovery, layer_runner

    discover, structure_of, known = layer_runner.discover, discovery._structure, {}

    def remembered(model: Any, name: str, *arguments: Any) -> Any:
        config = re.sub(r'"_name_or_path": "[^"]*"', "", model.config.to_json_string(use_diff=False))
        key = type(model), name, repr(model), config
        if key not in known:
            known[key] = structure_of(model, name, *arguments)
        return known[key]

    def discovered(model: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(discovery, "_structure", remembered)
            return discover(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_runner, "discover", discovered)
        yield


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama (`model`), `recipe.toml`, its calibration (`work`) and `bundle`, only to be read."""
    from tiny.llama import write_tiny_bundle

    return write_tiny_bundle(tmp_path_factory.mktemp("converted")).parent


@pytest.fixture(scope="session")
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter in half the time."""
    from tiny import interpreter

    with interpreter.quick_interpreter():
        yield


@pytest.fixture(scope="module")
def baseline(request: pytest.FixtureRequest) -> Baseline:
    """The stored figures of the test file that asks: tests/baselines/presets.json for test_presets.py."""
    name = request.path.stem.removeprefix("test_")
    return Baseline(BASELINES / f"{name}.json", request.config.getoption("--update-baselines"))
