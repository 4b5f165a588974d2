"""Widths of weights for an average that a recipe states: what is stored, what is measured, what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from tiny.llama import write_tiny_llama
from tiny.models import ARCHITECTURES
from transformers import AutoModelForCausalLM

from kvconvert import Recipe, calibrate, export
from kvconvert.auto import WEIGHTS_NAME, read_kept
from kvconvert.auto.model import SimulatedModel
from kvconvert.bundle.describe import manifest_text
from kvconvert.bundle.reader import open_bundle
from kvconvert.convert.checks import fitted_weights
from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import MissingError, RecipeError, UsageError
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.runtime import load

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


KEPT = '[weights]\nmethod = "awq"\ngroup_size = 16\nkept_share = 0.1\n[kv]\npreset = "none"\n'


def stored_bits(work):
    """Bits of every Linear of a working directory's layers; None where it is kept."""
    layers = (WorkDir.open(work).layer_record(index) for index in range(WorkDir.open(work).state.num_layers))
    return {
        m.name: m.bits if m.method != "kept" else None for layer in layers for m in layer.modules if "proj" in m.name
    }


@pytest.fixture(scope="module")
def kept(source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("kept")
    calibrate(source, directory / "work", recipe=recipe(directory, KEPT), **OPTIONS)
    return directory / "work"


def test_linears_that_lose_most_are_kept_within_the_bytes_that_are_allowed(source, kept, tmp_path):
    bundle = export(kept, tmp_path / "kept", progress=False)
    without = recipe(tmp_path, KEPT.replace("kept_share = 0.1\n", ""))
    calibrate(source, tmp_path / "work", recipe=without, **OPTIONS)
    plain = export(tmp_path / "work", tmp_path / "plain", progress=False)
    sizes = [sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in (plain, bundle)]
    assert sizes[0] < sizes[1] <= 1.1 * sizes[0]
    names = {name for name, bits in stored_bits(kept).items() if bits is None}
    assert {*WorkDir.open(kept).measurement("kept")["linears"]} == names
    settings = json.loads((bundle / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["bits"]) == ("awq", 4)
    unconverted = settings["modules_to_not_convert"]
    linears = [name for name, bits in stored_bits(kept).items() if any(name.startswith(other) for other in unconverted)]
    assert {*linears} == names
    assert not any(name.endswith((".0", ".1")) for name in unconverted)


def test_kept_weights_are_the_sources_and_generate(source, kept, tmp_path):
    bundle = export(kept, tmp_path / "bundle", progress=False)
    model, _ = load(bundle, device_map="cpu")
    original = AutoModelForCausalLM.from_pretrained(source)
    names = [name for name, bits in stored_bits(kept).items() if bits is None]
    for name in names:
        if name.endswith(("o_proj", "down_proj")):  # nothing is folded into these
            assert torch.equal(model.get_submodule(name).weight.float(), original.get_submodule(name).weight.float())
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False).shape == (1, 5)


def test_an_interrupted_calibration_keeps_the_same(source, kept, tmp_path, monkeypatch):
    calls = []

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return divergence(self, *arguments)

    divergence = SimulatedModel.divergence
    monkeypatch.setattr(SimulatedModel, "divergence", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(source, tmp_path / "work", recipe=recipe(tmp_path, KEPT), **OPTIONS)
    monkeypatch.setattr(SimulatedModel, "divergence", divergence)
    calibrate(source, tmp_path / "work", recipe=recipe(tmp_path, KEPT), **OPTIONS)
    assert stored_bits(tmp_path / "work") == stored_bits(kept)


@pytest.mark.parametrize("method", ["awq", "awq+gptq"])
@pytest.mark.parametrize("kept", ["qkv", "o", "gate up", "down"])
def test_a_rule_of_16_bits_keeps_linears(method, kept, source, tmp_path):
    names = list(kept) if kept == "qkv" else kept.split()
    rules = "".join(f'[[weights.modules]]\nmatch = "*.{name}_proj"\nbits = 16\n' for name in names)
    text = f'[weights]\nmethod = "{method}"\ngroup_size = 16\n{rules}[kv]\npreset = "kivi"\n'
    calibrate(source, tmp_path / "work", recipe=recipe(tmp_path, text), **OPTIONS)
    found = {name for name, bits in stored_bits(tmp_path / "work").items() if bits is None}
    assert {name.rpartition(".")[2] for name in found} == {f"{name}_proj" for name in names}
    assert len(found) == 2 * len(names)
    stored, original = WorkDir.open(tmp_path / "work").layer_tensors(1), AutoModelForCausalLM.from_pretrained(source)
    if kept == "down":  # corrected for what is quantized before it, where GPTQ corrects
        name = "model.layers.1.mlp.down_proj.weight"
        own, exact = stored[name].float(), original.get_parameter(name).float()
        assert torch.equal(own, exact) == (method == "awq")
        assert (own - exact).norm() < 0.3 * exact.norm()


@pytest.mark.parametrize(
    ("hidden_size", "method", "share"),
    [(640, "auto", 0.1), (1536, "auto", 0.1), (2048, "auto", 0.0), (640, "awq", None), (640, "none", None)],
)
def test_small_models_keep_some_linears_by_default(hidden_size, method, share):
    architecture = SimpleNamespace(experts=None, linears=(), writers={})
    runner = SimpleNamespace(
        num_layers=1,
        config=SimpleNamespace(hidden_size=hidden_size),
        structure=lambda index: architecture,
        layer_name=str,
        model=SimpleNamespace(get_submodule=lambda name: None),
    )
    assert fitted_weights(runner, WeightsRecipe(method=method)).kept_share == share
    wide = WeightsRecipe(method="awq+gptq", bits=8)
    assert fitted_weights(runner, wide).kept_share is None


def test_kept_linears_beside_other_widths_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="kept_share beside widths that are not all 4 bits"):
        recipe(tmp_path, KEPT.replace("kept_share", "bits = 8\nkept_share"))


def test_a_damaged_list_of_kept_linears_is_one_sentence(tmp_path):
    store = SimpleNamespace(path=tmp_path, measurement=lambda name: {"linears": [1]})
    with pytest.raises(MissingError, match="cannot be read"):
        read_kept(store)


def test_routed_experts_have_one_width(tmp_path):
    model = ARCHITECTURES["mixtral"].write(tmp_path / "model")
    text = '[weights]\nmethod = "awq"\ngroup_size = 16\n[[weights.modules]]\nmatch = "*.experts.*"\nbits = 16\n'
    with pytest.raises(RecipeError, match="keeps routed experts at 16 bits, which have to have one width"):
        calibrate(model, tmp_path / "work", recipe=recipe(tmp_path, text), **OPTIONS)
    with pytest.raises(RecipeError, match="kept_share is for dense models"):
        calibrate(model, tmp_path / "work", recipe=recipe(tmp_path, KEPT), **OPTIONS)
