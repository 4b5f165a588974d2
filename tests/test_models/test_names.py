"""Tensors have two names, the checkpoint's and the loaded model's, and no tensor is lost between them."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.models import ARCHITECTURES
from tiny.processors import quick_and_full

from kvconvert.bundle.manifest import ModuleCoverage, WeightsInfo, quantization_config
from kvconvert.errors import CheckpointError
from kvconvert.models.configuration import model_class
from kvconvert.models.source import open_source
from kvconvert.models.weight_files import TensorNames

MULTIMODAL = [name for name, entry in ARCHITECTURES.items() if entry.multimodal]


def opened(directory):
    """A checkpoint asked by its model's names, and the model on the meta device."""
    source = open_source(str(directory))
    with torch.device("meta"):
        model = model_class(source.config).from_config(source.config)
    return source.named_as(model), model


@pytest.mark.parametrize("name", quick_and_full(MULTIMODAL, "llava_next", "qwen2_vl", "mistral3"))
def test_every_tensor_of_a_checkpoint_gets_its_name_in_the_loaded_model(name, tmp_path):
    entry = ARCHITECTURES[name]
    source, model = opened(entry.write(tmp_path))
    built = entry.build().state_dict()
    tied = {"lm_head.weight"} & (built.keys() - source.tensor_names.stored.keys())
    assert source.tensor_names.stored.keys() == built.keys() - tied == model.state_dict().keys() - tied
    layer = next(key for key in built if key.endswith("layers.1.self_attn.q_proj.weight"))
    assert torch.equal(source.read([layer])[layer], built[layer])


def test_older_names_of_llava_are_those_of_the_checkpoint_for_new_tensors_too(tmp_path):
    source, _ = opened(ARCHITECTURES["llava"].write(tmp_path))
    names = source.tensor_names
    assert names.of_tensor("model.language_model.layers.1.mlp.up_proj.qweight") == (
        "language_model.model.layers.1.mlp.up_proj.qweight"
    )
    assert names.of_tensor("lm_head.weight") == "language_model.lm_head.weight"
    assert names.of_module("model.vision_tower") == "vision_tower"
    assert names.of_module("model.language_model.layers.1.mlp.experts.3.gate_proj") == (
        "language_model.model.layers.1.mlp.experts.3.gate_proj"
    )


def test_names_that_loading_keeps_stay_what_they_are(tmp_path):
    source, _ = opened(ARCHITECTURES["llama"].write(tmp_path))
    assert all(name == stored for name, stored in source.tensor_names.stored.items())
    assert source.tensor_names.of_tensor("model.layers.0.mlp.up_proj.scales") == "model.layers.0.mlp.up_proj.scales"


def test_two_tensors_of_one_name_are_refused(tmp_path):
    ARCHITECTURES["llava"].write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.language_model.norm.weight"] = tensors["language_model.model.norm.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"one tensor, model\.language_model\.norm\.weight"):
        opened(tmp_path)


def test_a_tensor_that_loading_merges_keeps_the_name_of_its_own_module(tmp_path):
    model = ARCHITECTURES["mixtral"].build()
    stored = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    assert TensorNames.of(model, [stored]).stored == {"model.layers.0.mlp.experts.3.w1.weight": stored}


def test_engines_read_towers_by_their_outermost_module_in_both_namings():
    kept = {"method": "kept", "kind": "linear"}
    modules = [
        ModuleCoverage(name="model.vision_tower.layers.0.fc1", stored_name="vision_tower.layers.0.fc1", **kept),
        ModuleCoverage(name="model.vision_tower.layers.0.fc2", stored_name="vision_tower.layers.0.fc2", **kept),
        ModuleCoverage(name="lm_head", stored_name="language_model.lm_head", **kept),
        ModuleCoverage(name="model.language_model.layers.0.mlp.router", **kept),
        ModuleCoverage(
            name="model.language_model.layers.0.mlp.up_proj",
            stored_name="language_model.model.layers.0.mlp.up_proj",
            method="awq",
        ),
    ]
    weights = WeightsInfo(method="awq", bits=4, group_size=16, bytes=1, parameters=1, bits_per_weight=8)
    assert sorted(quantization_config(weights, modules)["modules_to_not_convert"]) == [
        "language_model.lm_head",
        "lm_head",
        "model.language_model.layers.0.mlp.router",
        "model.vision_tower",
        "vision_tower",
    ]


def test_a_model_that_sees_is_built_as_one_and_its_text_model_as_text():
    entry = ARCHITECTURES["gemma3"]
    assert model_class(entry.config()).__name__ == "AutoModelForImageTextToText"
    assert model_class(ARCHITECTURES["gemma3_text"].config()).__name__ == "AutoModelForCausalLM"
