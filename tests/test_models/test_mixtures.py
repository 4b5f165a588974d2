"""Mixtures of experts from checkpoint to bundle and back: nothing about an expert is left out, or left unsaid."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.bundle import describe_files
from tiny.checkpoints import REFERENCE, save_text
from tiny.mixtures import MIXTURES, few_and_full, tiny_mixture
from tiny.models import ARCHITECTURES
from tiny.processors import write_processor
from tiny.structures import architecture_of, separated

from kvconvert.bundle.describe import coverage
from kvconvert.bundle.manifest import sealed
from kvconvert.bundle.reader import open_bundle
from kvconvert.calibration.activations import EXPERT_TOKENS, MIN_EXPERT_TOKENS, ActivationRecorder, ActivationStatistics
from kvconvert.calibration.awq_scales import search_scales
from kvconvert.calibration.awq_scaling import apply_scales
from kvconvert.convert.export import export
from kvconvert.convert.pipeline import calibrate
from kvconvert.errors import BundleError, CheckpointError
from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight
from kvconvert.models.structure import LayerStructure
from kvconvert.recipes.recipe import Recipe, WeightsRecipe
from kvconvert.runtime import load

AWQ = Recipe(weights=WeightsRecipe(method="awq", group_size=32))


def separate(model: torch.nn.Module) -> Sequence[LayerStructure]:
    """Take the experts of every layer apart as the pipeline does."""
    architecture = architecture_of(model.config)
    separated(model, architecture)
    return architecture.structures


def observe(
    model: torch.nn.Module, structures: Sequence[LayerStructure], ids: torch.Tensor
) -> list[ActivationStatistics]:
    """What calibration records of every layer."""
    recorders = [ActivationRecorder(structure, *ids.shape, 16) for structure in structures]
    hooks = [recorder.attached(layer) for recorder, layer in zip(recorders, model.model.layers, strict=True)]
    for hook in hooks:
        hook.__enter__()
    model(ids, use_cache=False)
    for hook in hooks:
        hook.__exit__(None, None, None)
    return [recorder.result() for recorder in recorders]


@pytest.mark.quick("gpt_oss")
@pytest.mark.parametrize("model_type", few_and_full())
@torch.no_grad()
def test_scaling_norms_with_experts_and_routers_preserves_logits(model_type):
    model, ids = tiny_mixture(model_type), torch.randint(0, 4096, (2, 24), generator=torch.manual_seed(1))
    changed = copy.deepcopy(model)
    structures = separate(changed)
    assert any(structure.experts is not None for structure in structures)
    for layer, structure, observed in zip(
        changed.model.layers, structures, observe(changed, structures, ids), strict=True
    ):
        scalings, _ = search_scales(layer, structure, observed, 3, 16)
        # Whatever the search found: scales far from 1 on every norm.
        scalings = [
            dataclasses.replace(s, producer_scale=s.producer_scale * 1.5, reader_scale=s.reader_scale * 1.5)
            for s in scalings
        ]
        kept = [layer.get_submodule(name) for name in structure.unquantized if not name.endswith("statics")]
        routers = [module.weight.clone() for module in kept]
        apply_scales(layer, structure, scalings, torch.float32)
        assert not any(torch.equal(module.weight, weight) for module, weight in zip(kept, routers, strict=True))
    expected, found = model(ids).logits, changed(ids).logits
    # As for dense models; float32 rounding gives about 1e-6.
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@torch.no_grad()
def test_an_expert_that_saw_few_tokens_is_shown_those_of_the_layer():
    model = tiny_mixture("mixtral", num_hidden_layers=1, num_local_experts=8)
    router = model.model.layers[0].mlp.gate.weight
    router[2:] -= 1  # experts 0 and 1 are chosen for everything
    model.model.layers[0].post_attention_layernorm.weight.fill_(1)
    model.model.embed_tokens.weight.abs_()
    ids = torch.randint(0, 4096, (5, 40), generator=torch.manual_seed(1))
    structures = separate(model)
    observed = observe(model, structures, ids)[0]
    assert sum(observed.routed) == 2 * ids.numel()
    neglected = [number for number, count in enumerate(observed.routed) if count < MIN_EXPERT_TOKENS]
    assert 0 in observed.routed
    assert 0 < len(neglected) < 8
    experts = structures[0].experts
    for number in range(8):
        gate, _, down = experts.linears(number)
        seen = ids.numel() if number in neglected else observed.routed[number]
        assert observed.tokens[down].shape == (min(seen, EXPERT_TOKENS), 96)
        assert observed.mean_abs[down].any()
        assert observed.second_moment[gate].isfinite().all()
    shared = observed.second_moment["mlp.gate"]
    torch.testing.assert_close(observed.second_moment[experts.linears(neglected[0])[0]], shared)


def checkpoint(directory: Path, model_type: str) -> Path:
    tiny_mixture(model_type).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(REFERENCE / name, directory / name)
    return directory


def convert(place: Path, model_type: str, recipe: Recipe = AWQ) -> Path:
    source = checkpoint(place / "source", model_type)
    text = save_text(place)
    calibrate(str(source), place / "work", recipe=recipe, data=text, samples=2, seq_len=24, progress=False)
    return export(place / "work", place / "bundle", progress=False)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return convert(tmp_path_factory.mktemp("mixtral"), "mixtral")


@torch.no_grad()
def assert_round_trip(bundle: Path, source: torch.nn.Module) -> None:
    """The loaded model computes what the source does with the bundle's dequantized weights."""
    manifest = open_bundle(bundle).manifest
    stored = load_file(bundle / "model.safetensors")
    loaded, _ = load(bundle, dtype=torch.float32)
    separate(source)
    parameters = dict(source.named_parameters())
    for module in manifest.modules:
        name = module.stored_name or module.name
        if module.method != "kept":
            packed = AwqWeight(*(stored[f"{name}.{part}"] for part in AwqWeight._fields))
            parameters.pop(f"{module.name}.weight").copy_(dequantize_weight(packed, torch.float32))
            assert isinstance(loaded.get_submodule(module.name), QuantizedLinear), module.name
        for part in ("weight", "bias"):
            if f"{name}.{part}" in stored and f"{module.name}.{part}" in parameters:
                parameters.pop(f"{module.name}.{part}").copy_(stored[f"{name}.{part}"])
    assert not [name for name in parameters if "experts" in name]
    ids = torch.randint(0, 4096, (2, 30), generator=torch.manual_seed(1))
    torch.testing.assert_close(
        loaded(ids, use_cache=False).logits, source(ids, use_cache=False).logits, rtol=1e-3, atol=1e-3
    )


def test_a_mixtral_bundle_has_the_names_of_awq_checkpoints_and_loads_back(mixtral):
    manifest = open_bundle(mixtral).manifest
    stem = "model.layers.1.block_sparse_moe.experts.3"
    for role, shape in (("w1", [64, 12]), ("w3", [64, 12]), ("w2", [96, 8])):
        assert manifest.tensors[f"{stem}.{role}.qweight"].shape == shape
    config = json.loads((mixtral / "config.json").read_text())["quantization_config"]
    assert {"model.layers.0.block_sparse_moe.gate", "lm_head"} <= set(config["modules_to_not_convert"])
    assert manifest.tensors["model.layers.0.block_sparse_moe.gate.weight"].shape == [4, 64]
    assert_round_trip(mixtral, tiny_mixture("mixtral"))


@pytest.mark.full
@pytest.mark.parametrize("model_type", [name for name in MIXTURES if name != "mixtral"])
def test_every_mixture_loads_back(model_type, tmp_path):
    assert_round_trip(convert(tmp_path, model_type), tiny_mixture(model_type))


@pytest.mark.full
def test_a_vision_language_mixture_loads_back(tmp_path):
    entry = ARCHITECTURES["qwen3_vl_moe"]
    write_processor(entry.write(tmp_path / "source"), "qwen3_vl_moe")
    calibrate(
        str(tmp_path / "source"),
        tmp_path / "work",
        recipe=AWQ,
        data=save_text(tmp_path),
        samples=2,
        seq_len=48,
        progress=False,
    )
    assert_round_trip(export(tmp_path / "work", tmp_path / "bundle", progress=False), entry.build())


def test_the_coverage_of_hundreds_of_experts_is_a_few_lines(mixtral):
    manifest = open_bundle(mixtral).manifest
    rows = {(name, method): int(count) for name, count, method, _ in coverage(manifest).rows}
    quantized = {name: count for (name, method), count in rows.items() if method != "kept" and "experts" in name}
    assert quantized.keys() == {f"model.layers.*.mlp.experts.*.{role}" for role in ("w1", "w3", "w2")}
    assert len(coverage(manifest).rows) < 20
    few = [module for module in manifest.modules if f"fewer than {MIN_EXPERT_TOKENS}" in module.reason]
    counts = [count for layer in manifest.layers for count in layer.statistics["awq"]["tokens_per_expert"]]
    assert len(few) == 3 * sum(count < MIN_EXPERT_TOKENS for count in counts) > 0


def test_an_expert_missing_from_a_bundle_is_refused_by_name(mixtral, tmp_path):
    broken = shutil.copytree(mixtral, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.scales"
    del tensors[name]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((broken / "kvconvert.json").read_text())
    files = describe_files(broken, ["model.safetensors"])
    manifest["files"] |= {file: info.model_dump() for file, info in files.items()}
    (broken / "kvconvert.json").write_bytes(sealed(manifest))
    with pytest.raises(BundleError, match=rf"tensor {re.escape(name)} should be present, found missing"):
        load(broken)


def test_an_expert_missing_from_a_checkpoint_is_refused_by_name(tmp_path):
    source = checkpoint(tmp_path / "source", "qwen3_moe")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"):
        calibrate(
            str(source), tmp_path / "work", recipe=AWQ, data=save_text(tmp_path), samples=2, seq_len=16, progress=False
        )


@pytest.mark.parametrize("model_type", ["gpt_oss"])
def test_a_recipe_that_keeps_weights_keeps_the_sources_own_form_of_experts(model_type, tmp_path):
    bundle = convert(tmp_path, model_type, Recipe(weights=WeightsRecipe(method="none")))
    stored, source = load_file(bundle / "model.safetensors"), load_file(tmp_path / "source" / "model.safetensors")
    experts = {name for name in source if ".experts." in name}
    assert experts == {name for name in stored if ".experts." in name}
    assert all(torch.equal(stored[name], source[name]) for name in experts)
    kept = [module for module in open_bundle(bundle).manifest.modules if module.name.endswith("mlp.experts")]
    assert [(module.method, module.reason) for module in kept] == [("kept", "the recipe keeps weights")] * 2
    model, _ = load(bundle, dtype=torch.float32)
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj, source["model.layers.1.mlp.experts.down_proj"])


def test_the_docs_state_the_threshold_and_every_mixture():
    root = Path(__file__).parents[2]
    words = " ".join((root / "docs" / "models.md").read_text().split())
    assert f"fewer than {MIN_EXPERT_TOKENS} calibration tokens" in words
    assert set(MIXTURES) <= set(re.findall(r"`(\w+)`", words))
