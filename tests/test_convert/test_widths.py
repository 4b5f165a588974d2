"""Bundles whose Linears have different widths: from the recipe to the loaded model."""

import json

import pytest
import torch
from tiny.bundle import refusal, reseal
from tiny.llama import write_tiny_llama
from transformers import AutoModelForCausalLM

from kvconvert.bundle.manifest import OWN_VERSION
from kvconvert.bundle.reader import open_bundle
from kvconvert.convert.export import export
from kvconvert.convert.pipeline import calibrate
from kvconvert.errors import RecipeError
from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.kernels.linear.awq_format import dequantize_weight, fake_quantize_weight
from kvconvert.recipes.recipe import Recipe
from kvconvert.runtime import load

RECIPE = """
[weights]
method = "{method}"
bits = 3
group_size = 16
[[weights.modules]]
match = "*.down_proj"
bits = 8
[[weights.modules]]
index = [1]
bits = 2
[[weights.modules]]
match = "*.1.self_attn.[qk]_proj"
bits = 4
[kv]
preset = "none"
"""


def converted(source, folder, method):
    (folder / "mixed.toml").write_text(RECIPE.format(method=method))
    recipe = Recipe.load(str(folder / "mixed.toml"))
    work = calibrate(source, folder / "work", recipe=recipe, samples=1, seq_len=16, progress=False)
    return export(work.path, folder / "bundle", progress=False)


def expected_bits(name):
    layer, linear = name.split(".")[2], name.rpartition(".")[2]
    if layer == "1":
        return 4 if linear in ("q_proj", "k_proj") else 2
    return 8 if linear == "down_proj" else 3


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("source") / "tiny-llama")


@pytest.fixture(scope="module")
def bundle(source, tmp_path_factory):
    return converted(source, tmp_path_factory.mktemp("mixed"), "rtn")


def test_the_last_rule_that_applies_gives_a_linear_its_width(bundle):
    manifest = open_bundle(bundle).manifest
    quantized = [module for module in manifest.modules if module.method != "kept"]
    assert {module.name: module.bits for module in quantized} == {
        module.name: expected_bits(module.name) for module in quantized
    }
    assert manifest.weights.bits is None
    bits = sum(expected_bits(m.name) * m.in_features * m.out_features for m in quantized)
    grids = sum((expected_bits(m.name) + 16) * m.in_features * m.out_features / 16 for m in quantized)
    assert manifest.weights.quantized_bytes == (bits + grids) / 8
    assert {*manifest.conventions["weights"]["fields"]} == {"2", "3", "4", "8"}
    config = json.loads((bundle / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "awq",
        "version": OWN_VERSION,
        "weights": "rtn",
        "bits": [2, 3, 4, 8],
        "group_size": 16,
        "modules_to_not_convert": ["lm_head"],
        "kvconvert": {"format_version": 1},
    }
    card = (bundle / "README.md").read_text()
    assert "2, 3, 4 and 8 bits" in card
    assert "AWQ checkpoint" not in card


def test_the_loaded_model_computes_with_weights_rounded_to_those_widths(source, bundle):
    model, _ = load(bundle, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, linear in original.named_modules():
        if isinstance(linear, torch.nn.Linear) and name != "lm_head":
            linear.weight.data = fake_quantize_weight(linear.weight.data, expected_bits(name), 16)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)


def test_awq_searches_each_linear_at_its_own_width(source, tmp_path):
    model, _ = load(converted(source, tmp_path, "awq"), dtype=torch.float32)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert {name: module.bits for name, module in linears.items()} == {name: expected_bits(name) for name in linears}
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()
        # The 8-bit Linear of a layer that scaling has not touched in its outputs.
        down = "model.layers.0.mlp.down_proj"
        found = dequantize_weight(linears[down].awq_weight())
        scale = (found * original.get_submodule(down).weight).sum(0) / original.get_submodule(down).weight.square().sum(
            0
        )
        assert ((found / scale - original.get_submodule(down).weight).abs().max()) < 0.02 * found.abs().max()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"match": "*.gate", "bits": 8}, ["*.gate", "matches no Linear", "model.layers.0."]),
        ({"index": [0, 2], "bits": 8}, ["layer 2", "layers 0 to 1"]),
    ],
)
def test_a_rule_that_means_nothing_is_refused_before_any_work(source, tmp_path, rule, words):
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in rule.items())
    (tmp_path / "r.toml").write_text(f"[weights]\ngroup_size = 16\n[[weights.modules]]\n{text}\n")
    with pytest.raises(RecipeError) as caught:
        calibrate(source, tmp_path / "work", recipe=Recipe.load(str(tmp_path / "r.toml")), samples=1, progress=False)
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "work").exists()


def test_a_width_that_the_tensors_do_not_have_is_refused(bundle, tmp_path):
    import shutil

    fields = json.loads((bundle / "kvconvert.json").read_text())
    for bits, words in ((2, "U8 [32, 8]"), (4, "I32 [32, 4]"), (6, "2, 3, 4 or 8 bits")):
        copied = shutil.copytree(bundle, tmp_path / str(bits))
        modules = json.loads(json.dumps(fields["modules"]))
        next(m for m in modules if m["name"].endswith("0.self_attn.q_proj"))["bits"] = bits
        reseal(copied, modules=modules)
        assert words in refusal(copied)
    copied = shutil.copytree(bundle, tmp_path / "common")
    reseal(copied, weights=fields["weights"] | {"bits": 4})
    assert "weights.bits" in refusal(copied)
