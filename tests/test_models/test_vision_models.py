"""Vision-language models are calibrated as they compute, only their language part changes, and bundles load back."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny.models import ARCHITECTURES, GREEDY
from tiny.processors import LOADABLE, quick_and_full, write_processor, write_vision_model
from tiny.structures import architecture_of
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForImageTextToText, ProcessorMixin

from kvconvert.bundle.reader import open_bundle
from kvconvert.convert.export import export
from kvconvert.convert.input_capture import CalibrationInputs
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.pipeline import calibrate
from kvconvert.convert.workdir import WorkDir
from kvconvert.data.drawings import draw
from kvconvert.data.samples import load_samples
from kvconvert.errors import UnsupportedModelError
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight
from kvconvert.models.processors import ImagePrompts
from kvconvert.models.source import open_source
from kvconvert.runtime import load

RECIPE = '[weights]\nmethod = "{}"\nbits = 4\ngroup_size = 32\n[kv]\npreset = "oscar"\n'
SOURCE_NAMES = "language_model.model.layers.1.mlp.up_proj"


def convert(directory, name, method="awq", recipe=None, **options):
    """A bundle of a tiny model, calibrated on drawings unless said otherwise."""
    ARCHITECTURES[name].write(directory / "model")
    if name in LOADABLE:
        write_processor(directory / "model", name)
    if recipe is None:
        recipe = directory / "recipe.toml"
        recipe.write_text(RECIPE.format(method))
    options = {"samples": 2, "seq_len": 128, "progress": False} | options
    calibrate(str(directory / "model"), directory / "work", recipe=recipe, **options)
    return export(directory / "work", directory / "bundle", progress=False)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return convert(tmp_path_factory.mktemp("llava"), "llava")


@pytest.mark.quick("qwen3_vl")
@pytest.mark.parametrize("name", quick_and_full(LOADABLE, "llava_onevision", "qwen3_vl", "gemma3"))
@torch.no_grad()
def test_calibration_sees_what_the_model_computes(name, tmp_path):
    source = open_source(str(write_vision_model(tmp_path, name)))
    data = load_samples(source, None, 2, 96, seed=0)
    model = ARCHITECTURES[name].build()
    expected = []
    runner = LayerRunner(source, torch.device("cpu"))
    for layer in model.get_submodule(runner.architecture.layers):
        layer.register_forward_pre_hook(lambda module, arguments: expected.append(arguments[0]))
    for ids, extra in zip(data.ids, data.extras, strict=True):
        model(input_ids=ids[None], **extra)
    runner.begin(CalibrationInputs(data.ids, data.extras, data.visual))
    states = torch.cat(list(runner.first_input()))
    for index in range(runner.num_layers):
        torch.testing.assert_close(states, torch.cat(expected[index :: runner.num_layers]), rtol=1e-4, atol=1e-4)
        layer, _ = runner.layer(index)
        states = torch.cat([output for *_, output in runner.forward(layer, InMemory(states), index)])


class InMemory:
    """Hidden states that are not on disk."""

    def __init__(self, states):
        self.states, self.shape, self.first = states, states.shape, 0

    def read(self, start, stop):
        return self.states[start:stop]


def test_only_the_language_part_is_quantized_and_the_rest_is_listed(llava):
    bundle = open_bundle(llava)
    modules = {module.name: module for module in bundle.manifest.modules}
    quantized = {name for name, module in modules.items() if module.method == "awq"}
    assert len(quantized) == 14
    assert all(name.startswith("model.language_model.layers.") for name in quantized)
    built = ARCHITECTURES["llava"].build()
    linears = {name for name, module in built.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linears <= modules.keys()
    tower = [module for name, module in modules.items() if "vision_tower" in name or "projector" in name]
    assert len(tower) > 10
    assert {module.reason for module in tower} == {"outside the language model, which alone is quantized"}
    assert bundle.manifest.data.images > 2


def test_the_bundle_keeps_the_checkpoints_names_and_tells_engines_what_is_not_converted(llava):
    bundle = open_bundle(llava)
    assert f"{SOURCE_NAMES}.qweight" in bundle.manifest.tensors
    assert not any(name.startswith("model.") for name in bundle.manifest.tensors)
    module = next(m for m in bundle.manifest.modules if m.stored_name == SOURCE_NAMES)
    assert module.name == "model.language_model.layers.1.mlp.up_proj"
    listed = json.loads((llava / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"vision_tower", "multi_modal_projector", "language_model.lm_head"} <= set(listed)


def test_the_tower_is_bit_for_bit_the_sources(llava):
    model, _ = load(llava, dtype=torch.float32)
    built = ARCHITECTURES["llava"].build().state_dict()
    loaded = model.state_dict()
    outside = [name for name in built if "language_model.layers" not in name]
    assert len(outside) > 40
    assert all(torch.equal(loaded[name], built[name]) for name in outside)


def unpacked(bundle, model):
    """A full-precision model with a bundle's weights, put in place by the manifest's names alone."""
    opened = open_bundle(bundle)
    tensors = {}
    for file in set(opened.weight_files.values()):
        tensors |= load_file(file)
    for module in opened.manifest.modules:
        target = model.get_submodule(module.name)
        if module.method == "awq":
            parts = AwqWeight(*(tensors[f"{module.prefix}.{part}"] for part in AwqWeight._fields))
            target.weight.copy_(dequantize_weight(parts))
        for part in ("weight", "bias"):
            if f"{module.prefix}.{part}" in tensors:
                getattr(target, part).copy_(tensors[f"{module.prefix}.{part}"])
    return model


@pytest.mark.parametrize("name", quick_and_full(["qwen3_vl", "internvl", "smolvlm"], "internvl"))
@torch.no_grad()
def test_bundles_load_back_as_what_they_hold(name, tmp_path):
    bundle = convert(tmp_path, name)
    model, _ = load(bundle, dtype=torch.float32)
    entry = ARCHITECTURES[name]
    source, inputs = entry.build(), entry.inputs()
    expected = unpacked(bundle, entry.build())(**inputs).logits
    torch.testing.assert_close(model(**inputs, use_cache=False).logits, expected, rtol=1e-3, atol=1e-3)
    original = source(**inputs).logits
    # Four bits cost random weights much, but not nearly as much as a scale or a rotation that is not undone.
    assert torch.nn.functional.cosine_similarity(expected.flatten(), original.flatten(), dim=0) > 0.75


def rows_of_images(processor, config, counts):
    """A left-padded batch of prompts with so many drawings each, and what its images become."""
    prompts = ImagePrompts(processor, config)
    encoded = []
    for row, count in enumerate(counts):
        images = [Image.fromarray(draw(5, 10 * row + index).image) for index in range(count)]
        text = "".join(f"Here is {prompts.image} number {index}." for index in range(count))
        text += " What is it?" * (40 + row)  # longer than a page of 128 tokens
        encoded.append(prompts.encode(text, images))
    width = max(inputs["input_ids"].shape[1] for inputs in encoded)
    batch = {}
    for key in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
        rows = [inputs[key] for inputs in encoded if key in inputs]
        if rows:
            batch[key] = torch.cat([pad(value, (width - value.shape[1], 0)) for value in rows])
    for key in ("pixel_values", "image_grid_thw"):
        values = [inputs[key] for inputs in encoded if key in inputs]
        if values:
            batch[key] = torch.cat(values)
    return encoded, batch


@pytest.mark.quick("several")
@pytest.mark.parametrize("name", quick_and_full(["llava", "qwen2_5_vl", "gemma3"], "qwen2_5_vl"))
@pytest.mark.parametrize("counts", [(2, 0, 1, 3), (0, 0)], ids=["several", "none"])
def test_generation_through_pages_equals_full_precision_for_any_number_of_images(name, counts, tmp_path):
    (tmp_path / "recipe.toml").write_text(
        '[weights]\nmethod = "none"\n[kv]\nkey_bits = 8\nvalue_bits = 8\nkey_recent_tokens = 0\n'
        "value_recent_tokens = 0\nsink_tokens = 0\n"
    )
    bundle = convert(tmp_path, name, recipe=tmp_path / "recipe.toml")
    model, processor = load(bundle, dtype=torch.float32, verify="headers")
    assert isinstance(processor, ProcessorMixin)
    alone, batch = rows_of_images(processor, model.config, counts)
    source = ARCHITECTURES[name].build()
    expected = source.generate(**batch, max_new_tokens=6, **GREEDY)
    cache = model.new_kv_cache()
    got = model.generate(**batch, past_key_values=cache, max_new_tokens=6, **GREEDY)
    assert got.tolist() == expected.tolist()
    assert cache.stats().pages >= len(counts)
    for row, inputs in enumerate(alone):
        assert model.generate(**inputs, max_new_tokens=6, **GREEDY)[0, -6:].tolist() == got[row, -6:].tolist()


@pytest.mark.full
def test_a_killed_calibration_goes_on_with_its_images_to_the_same_bytes(tmp_path, monkeypatch):
    # Qwen3-VL: each sample has positions of its own, and image features are added between the layers.
    for part in ("whole", "killed"):
        (tmp_path / part).mkdir()
    whole = convert(tmp_path / "whole", "qwen3_vl")
    commit = WorkDir.commit_layer

    def kill(self, index, *arguments):
        if index == 1:
            raise KeyboardInterrupt
        commit(self, index, *arguments)

    monkeypatch.setattr(WorkDir, "commit_layer", kill)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "killed", "qwen3_vl")
    monkeypatch.undo()
    resumed = convert(tmp_path / "killed", "qwen3_vl")
    for name in ("model.safetensors", "kvconvert/plan.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_from_pretrained_loads_a_bundle_too(llava):
    model = AutoModelForImageTextToText.from_pretrained(llava)
    assert type(model).__name__ == "LlavaForConditionalGeneration"


def test_idefics3_has_its_layers_where_smolvlm_has_them():
    config = AutoConfig.for_model("idefics3", text_config=ARCHITECTURES["smolvlm"].settings["text_config"])
    assert architecture_of(config).layers == "model.text_model.layers"


def test_a_language_model_that_computes_attention_by_itself_is_refused_by_name():
    config = AutoConfig.for_model("llava", text_config={"model_type": "falcon"})
    config.architectures = ["LlavaForConditionalGeneration"]
    with pytest.raises(UnsupportedModelError, match="llava"):
        architecture_of(config)
