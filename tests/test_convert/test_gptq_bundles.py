"""GPTQ through calibrate, resume and export: stored codes, manifest, card, and experts without tokens."""

import shutil

import pytest
import torch
from calibrations import contents, run
from tiny.checkpoints import REFERENCE, save_text
from tiny.llama import write_tiny_llama
from tiny.mixtures import tiny_mixture
from transformers import AutoModelForCausalLM

from kvconvert import Recipe, export, load
from kvconvert.bundle.reader import open_bundle
from kvconvert.calibration.activations import MIN_EXPERT_TOKENS
from kvconvert.calibration.gptq import SEARCH_STRIDE, Mismatch
from kvconvert.calibration.hessians import HessianRecorder
from kvconvert.calibration.keys import QueryMoments
from kvconvert.convert.workdir import WorkDir
from kvconvert.methods import PRESETS
from kvconvert.methods.awq import WeightsRecipe


@pytest.fixture(autouse=True)
def one_of_three_sequences_is_of_random_tokens(monkeypatch):
    monkeypatch.setattr("kvconvert.data.text.RANDOM_SHARE", 3)


def recipe(method: str) -> Recipe:
    return Recipe(weights=WeightsRecipe(method=method, group_size=16), kv=None)


@pytest.mark.quick("awq+gptq")
@pytest.mark.parametrize("method", ["gptq", "awq+gptq"])
def test_a_bundle_stores_the_compensated_codes(tmp_path, method):
    model, text = write_tiny_llama(tmp_path / "model"), save_text(tmp_path)
    work = run(model, tmp_path / "work", text, recipe(method))
    bundle = export(work.path, tmp_path / "bundle", progress=False)
    manifest = open_bundle(bundle).manifest
    assert {m.method for m in manifest.modules if m.bits} == {method}
    assert (manifest.weights.method, "gptq" in manifest.transforms) == (method, True)
    assert ("awq_scale" in manifest.transforms) == (method == "awq+gptq")
    assert "GPTQ" in (bundle / "README.md").read_text()
    losses = manifest.layers[0].statistics["gptq"]["compensation"]
    assert sum(loss["loss_after"] for loss in losses.values()) < sum(loss["loss_before"] for loss in losses.values())
    converted, _ = load(bundle, dtype=torch.float32)
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        difference = (converted(ids).logits - source(ids).logits).abs().max()
    assert 0 < difference < 0.5 * source(ids).logits.abs().max()


def test_a_run_that_stopped_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    model, text = write_tiny_llama(tmp_path / "model"), save_text(tmp_path)
    whole = run(model, tmp_path / "whole", text, recipe("gptq"))
    commit = WorkDir.commit_layer

    def stop(self, index, *rest):
        if index == 1:
            raise KeyboardInterrupt
        commit(self, index, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(WorkDir, "commit_layer", stop)
        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path / "stopped", text, recipe("gptq"))
    resumed = run(model, tmp_path / "stopped", text, recipe("gptq"))
    assert contents(resumed.path) == contents(whole.path)


@pytest.mark.quick("1")
@pytest.mark.parametrize("layer", [0, 1])
def test_a_damaged_layer_is_computed_again_from_those_that_are_stored(tmp_path, layer):
    """What layers before it left of their inputs is gone: it is run again through the source's and the stored ones."""
    model, text = write_tiny_llama(tmp_path / "model"), save_text(tmp_path)
    work = run(model, tmp_path / "work", text, recipe("awq+gptq"))
    before = contents(work.path)
    file = work.path / "layers" / f"{layer:05d}.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    run(model, tmp_path / "work", text, recipe("awq+gptq"))
    assert contents(work.path) == before


def test_weights_alone_are_corrected_on_random_tokens(tmp_path, monkeypatch):
    """The cache's calibration sees the others."""
    seen = {"corrected": set(), "searched": set()}
    moments, hessian, update = Mismatch.moments, HessianRecorder.of, QueryMoments.update
    lengths = []

    def count(self):
        seen["corrected"].add(self.tokens)
        return moments(self)

    def searched(self, point, *args, **options):
        seen["searched"].add(self.tokens[point])
        return hessian(self, point, *args, **options)

    def asked(self, queries, heads):
        lengths.append(queries.shape[0] * queries.shape[2])
        update(self, queries, heads)

    monkeypatch.setattr(Mismatch, "moments", count)
    monkeypatch.setattr(HessianRecorder, "of", searched)
    monkeypatch.setattr(QueryMoments, "update", asked)
    model, text = write_tiny_llama(tmp_path / "model"), save_text(tmp_path)
    both = recipe("awq+gptq").model_copy(update={"kv": PRESETS["oscar"]})
    work = run(model, tmp_path / "work", text, both)
    assert seen == {"corrected": {3 * 24}, "searched": {3 * 24 // SEARCH_STRIDE}}
    assert set(lengths) == {2 * 24}
    assert work.state.data.source.endswith(", 1 of them random tokens")


def test_an_expert_without_enough_tokens_is_rounded_and_says_so(tmp_path):
    model = tmp_path / "model"
    tiny_mixture("mixtral").save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(REFERENCE / name, model / name)
    work = run(model, tmp_path / "work", save_text(tmp_path), recipe("gptq"), samples=2, seq_len=24)
    record = work.layer_record(0)
    rounded = {m.name.split(".layers.0.")[1] for m in record.modules if "rounded to nearest" in m.reason}
    compensated = set(record.statistics["gptq"]["compensation"])
    assert rounded
    assert all(f"fewer than {MIN_EXPERT_TOKENS}" in m.reason for m in record.modules if "nearest" in m.reason)
    assert not rounded & compensated
    assert {m.name.split(".layers.0.")[1] for m in record.modules if m.bits} == rounded | compensated
