"""Tensors that loading makes of a few others, by transformers' conversions, are read as the model has them."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.every_type import tiny_config
from tiny.models import randomise
from transformers import AutoModelForCausalLM

from kvconvert.models.configuration import model_class
from kvconvert.models.source import open_source


@pytest.mark.parametrize(
    ("name", "made", "of"),
    [
        ("olmo_hybrid", "model.layers.0.linear_attn.conv1d.weight", 3),
        ("sarvam_moe", "model.layers.0.self_attn.k_proj.weight", 1),
        ("step3p7", "model.language_model.layers.1.mlp.experts.gate_up_proj", 2),
    ],
)
def test_layers_are_read_as_the_model_has_them(name, made, of, tmp_path):
    config = tiny_config(name)
    model = model_class(config).from_config(config, dtype=torch.float32).requires_grad_(False)
    randomise(model)
    model.save_pretrained(tmp_path)
    inside = "model.language_model.layers." if "language_model" in made else "model.layers."
    source = open_source(str(tmp_path)).named_as(model)
    stored = {own for name, own in source.tensor_names.stored.items() if name.startswith(inside)}
    source = source.arranged(model, inside)
    names = source.tensor_names
    assert len(names.made[names.stored[made]]) == of
    state, read = model.state_dict(), source.read(inside)
    assert made in read
    for own, tensor in read.items():
        if own in state:
            torch.testing.assert_close(tensor, state[own], msg=own)
    # What is copied without being read is copied as it is stored.
    assert stored == {part for own in names.stored.values() for part in names.made.get(own, (own,))} & stored


def test_what_is_not_complete_is_refused(tmp_path):
    config = tiny_config("olmo_hybrid")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.linear_attn.k_conv1d.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_source(str(tmp_path)).named_as(model)
    assert [entry.target for entry in source.tensor_names.rearranged if not entry.is_complete] == [
        "model.layers.0.linear_attn.conv1d.weight"
    ]
    arranged = source.arranged(model, "model.layers.")
    assert "model.layers.0.linear_attn.conv1d.weight" not in arranged.tensors
