"""Widths of weights for an average that a recipe states: what is stored, what is measured, what is refused."""

import json

import pytest
import torch
from tiny.llama import write_tiny_llama

from kvconvert import Recipe, calibrate, export
from kvconvert.auto import WEIGHTS_NAME
from kvconvert.bundle.describe import manifest_text
from kvconvert.bundle.reader import open_bundle
from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import RecipeError, UsageError

AVERAGE = 4.5
WEIGHTS = f'[weights]\nmethod = "rtn"\ngroup_size = 16\naverage_bits = {AVERAGE}\n[kv]\npreset = "none"\n'
OPTIONS = {"samples": 2, "seq_len": 64, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def little_text():
    """Divergences of few tokens are enough to choose by."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvconvert.auto.weight_widths.LENGTH", 128)
        patch.setattr("kvconvert.auto.weight_widths.TOKENS", 256)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    return write_tiny_llama(tmp_path_factory.mktemp("source"))


def recipe(directory, text=WEIGHTS):
    (directory / "mine.toml").write_text(text)
    return Recipe.load(str(directory / "mine.toml"))


@pytest.fixture(scope="module")
def work(source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("search")
    calibrate(source, directory / "work", recipe=recipe(directory), **OPTIONS)
    return directory / "work"


def test_the_bundle_takes_what_was_allowed_and_says_what_was_measured(work, tmp_path):
    manifest = open_bundle(export(work, tmp_path / "bundle", progress=False)).manifest
    found = manifest.weight_allocation
    stored = {module.name: module.bits for module in manifest.modules if module.method != "kept"}
    assert stored == {name: unit.bits for unit in found.units for name in unit.linears}
    assert manifest.weights.quantized_bits_per_weight == pytest.approx(found.bits_per_weight)
    assert AVERAGE - 0.5 < found.bits_per_weight <= AVERAGE
    # One more bit for any unit would not fit, or had been worth nothing.
    assert len(set(stored.values())) > 1
    for unit in found.units:
        assert unit.kl["2"] > unit.kl["4"] >= unit.kl["8"] >= 0
    assert found.predicted_kl == pytest.approx(sum(unit.kl[str(unit.bits)] for unit in found.units), rel=1e-4)
    assert "4.5 allowed" in manifest_text(manifest)


def test_linears_of_one_input_have_one_width(work):
    units = WorkDir.open(work).measurement(WEIGHTS_NAME)["units"]
    inputs = [sorted(name.rpartition(".")[2] for name in unit["linears"]) for unit in units if unit["layer"] == 0]
    assert inputs == [["k_proj", "q_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_what_was_measured_is_not_measured_again(source, work, tmp_path, monkeypatch):
    for name in ("weights-00000", WEIGHTS_NAME):
        assert WorkDir.open(work).measurement(name)
    monkeypatch.setattr("kvconvert.convert.pipeline.SimulatedModel", None)
    calibrate(source, work, recipe=recipe(tmp_path), **OPTIONS)


def test_the_option_is_the_recipes_key(source, work, tmp_path):
    plain = recipe(tmp_path, WEIGHTS.replace(f"average_bits = {AVERAGE}\n", ""))
    found = calibrate(source, tmp_path / "work", recipe=plain, weight_bits=AVERAGE, **OPTIONS)
    ours, theirs = (json.loads(json.dumps(WorkDir.open(w).measurement(WEIGHTS_NAME))) for w in (found.path, work))
    assert ours == theirs


def test_what_cannot_be_is_refused_before_anything_is_computed(source, tmp_path):
    for bits in (1.5, 11):
        with pytest.raises(UsageError, match=rf"`weight_bits` is {bits}.* can take 3\.125 to 9\.5 bits on average"):
            calibrate(source, tmp_path / "work", recipe=recipe(tmp_path), weight_bits=bits, **OPTIONS)
    with pytest.raises(RecipeError, match="average_bits, which chooses every width, beside stated ones"):
        recipe(tmp_path, WEIGHTS + '[[weights.modules]]\nmatch = "*.q_proj"\nbits = 8\n')
    with pytest.raises(RecipeError, match='average_bits beside method = "none"'):
        recipe(tmp_path, WEIGHTS.replace("rtn", "none").replace('preset = "none"', 'preset = "oscar"'))
    assert not (tmp_path / "work").exists()
