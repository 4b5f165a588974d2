"""Published checkpoints hold more than the language model: towers and layers for drafts stay as they are."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.every_type import tiny_config
from tiny.models import randomise, write_tokenizer

from kvconvert.bundle.reader import open_bundle
from kvconvert.convert.export import export
from kvconvert.convert.pipeline import calibrate
from kvconvert.models.configuration import model_class
from kvconvert.recipes.recipe import Recipe, WeightsRecipe
from kvconvert.runtime import load

TEXT = " ".join(f"The miller walked {number} miles to town." for number in range(40))
# Tensors for predicting further tokens, as published beside the model's own.
DRAFTS = {
    "qwen3_5": ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"),
    "exaone4_5": ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"),
}


@pytest.mark.parametrize(
    "model_type", [name if name == "qwen3_5" else pytest.param(name, marks=pytest.mark.full) for name in DRAFTS]
)
def test_towers_and_layers_for_drafts_are_kept_and_listed(model_type, tmp_path):
    source = tmp_path / "source"
    config = tiny_config(model_type)
    torch.manual_seed(0)
    model = model_class(config).from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    randomise(model)
    model.save_pretrained(source)
    write_tokenizer(source)
    tensors = load_file(source / "model.safetensors")
    extra = {name: torch.randn(64, 64) for name in DRAFTS[model_type]}
    save_file(tensors | extra, source / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "text.txt").write_text(TEXT)
    calibrate(
        source, tmp_path / "work", recipe=Recipe(weights=WeightsRecipe(method="awq", group_size=16)),
        data=tmp_path / "text.txt", samples=2, seq_len=24, progress=False,
    )  # fmt: skip
    bundle = export(tmp_path / "work", tmp_path / "bundle", progress=False)
    stored = load_file(bundle / "model.safetensors")
    untouched = extra.keys() | {name for name in tensors if "visual" in name or "vision" in name}
    assert len(untouched) > len(extra)
    assert all(torch.equal(stored[name], (tensors | extra)[name]) for name in untouched)
    listed = {module.prefix: module for module in open_bundle(bundle).manifest.modules}
    for name in untouched:
        module = listed[name.rpartition(".")[0]]
        assert module.method == "kept"
        assert module.reason
    named = open_bundle(bundle).config["quantization_config"]["modules_to_not_convert"]
    assert all(any(name.startswith(f"{part}.") for part in named) for name in untouched)
    quantized = [name for name, module in listed.items() if module.method == "awq"]
    assert quantized
    assert all("language_model" in name for name in quantized)
    loaded, _ = load(bundle, dtype=torch.float32)
    assert loaded.generate(torch.arange(5, 15)[None], max_new_tokens=3, do_sample=False).shape[1] > 10
