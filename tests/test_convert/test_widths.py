"""Bundles whose Linears have different widths: from the recipe to the loaded model.

The group size "auto" fits the shapes that models come in.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from tiny.bundle import refusal, reseal
from tiny.llama import write_tiny_llama
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvconvert import Recipe, calibrate, export, load
from kvconvert.bundle.manifest import OWN_VERSION
from kvconvert.bundle.reader import open_bundle
from kvconvert.convert.checks import fitted_weights
from kvconvert.convert.discovery import discover
from kvconvert.convert.layer_runner import build_without_weights
from kvconvert.errors import RecipeError
from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.kernels.linear.awq_format import dequantize_weight, fake_quantize_weight
from kvconvert.methods.awq import WeightsRecipe

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


# hidden, intermediate (of experts where they are routed), query heads, KV heads, head size, and the group size.
SHAPES = {
    "SmolLM2-135M": (576, 1536, 9, 3, 64, 32),
    "Gemma-3-270M": (640, 2048, 4, 1, 256, 32),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64, 32),
    "SmolLM2-360M": (960, 2560, 15, 5, 64, 32),
    "Gemma-3-1B": (1152, 6912, 4, 1, 256, 32),
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 128, 32),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, 64),
    "Qwen3-30B-A3B": (2048, 768, 32, 4, 128, 64),
    "Qwen1.5-MoE-A2.7B": (2048, 1408, 16, 16, 128, 64),
    "Gemma-2-2B": (2304, 9216, 8, 4, 256, 64),
    "MiniCPM-2B": (2304, 5760, 36, 36, 64, 64),
    "Phi-2": (2560, 10240, 32, 32, 80, 64),
    "gpt-oss-20b": (2880, 2880, 64, 8, 64, 64),
    "Llama-3.2-3B": (3072, 8192, 24, 8, 128, 64),
    "Gemma-7B": (3072, 24576, 16, 16, 256, 64),
    "Qwen2.5-7B": (3584, 18944, 28, 4, 128, 128),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, 128),
    "GLM-4-9B": (4096, 13696, 32, 2, 128, 128),
    "Falcon-7B": (4544, 18176, 71, 1, 64, 64),
    "Mistral-Nemo-12B": (5120, 14336, 32, 8, 128, 128),
    "Llama-2-13B": (5120, 13824, 40, 40, 128, 128),
    "Gemma-3-27B": (5376, 21504, 32, 16, 128, 128),
}


@cache
def structure():
    """Of a Llama layer, whatever its size."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return discover(build_without_weights(LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes))).structures[0]


def runner_of(hidden, intermediate, heads, kv_heads, head_dim):
    """A one-layer Llama of this shape on the meta device, as much of a runner as the check reads."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return SimpleNamespace(
        model=model,
        config=config,
        num_layers=1,
        structure=lambda index: structure(),
        layer_name=lambda index: f"model.layers.{index}",
    )


@pytest.mark.parametrize("name", SHAPES)
def test_auto_fits_common_shapes(name):
    *shape, expected = SHAPES[name]
    assert fitted_weights(runner_of(*shape), WeightsRecipe()).group_size == expected


def test_auto_weights_are_compensated_but_for_mixtures_of_experts():
    runner = runner_of(*SHAPES["SmolLM2-135M"][:5])
    assert fitted_weights(runner, WeightsRecipe()).method == "awq+gptq"
    assert fitted_weights(runner, WeightsRecipe(method="rtn")).method == "rtn"
    plain, number = runner.structure, iter(range(2))
    # A mixture's first layers may be dense.
    runner.structure = lambda index: replace(plain(0), experts=object() if next(number, 0) else None)
    runner.num_layers = 2
    assert fitted_weights(runner, WeightsRecipe()).method == "awq"


def test_a_stated_group_size_that_does_not_fit_is_refused_with_one_that_does():
    with pytest.raises(RecipeError, match=r"128 does not divide the 576 inputs.*set group_size = 64"):
        fitted_weights(runner_of(*SHAPES["SmolLM2-135M"][:5]), WeightsRecipe(group_size=128))
