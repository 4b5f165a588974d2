"""Checkpoints in forms that are read elsewhere: matrices under the other name that shares them, settings of quantized
weights in a file of their own, and any locale.
"""

import json
import locale
import os
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import forked
from tiny.llama import write_recipe, write_tiny_llama
from tiny.packed import GROUP, write_packed
from transformers import AutoModelForCausalLM

from kvconvert import calibrate, export, load
from kvconvert.console import Console
from kvconvert.errors import CheckpointError
from kvconvert.models.source import open_source

WEIGHTS = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def rename(model: Path, old: str, new: str, keep: bool = False) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors[new] = tensors[old].clone() if keep else tensors.pop(old)
    save_file(tensors, model / WEIGHTS, {"format": "pt"})


def test_a_tied_model_may_hold_its_head_alone(tmp_path):
    model, ids = write_tiny_llama(tmp_path / "model", tied=True), torch.arange(5, 40)[None]
    rename(model, EMBEDDING, HEAD)
    source = open_source(str(model))
    assert EMBEDDING in source.tensors
    assert HEAD not in source.tensors
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits
    assert torch.equal(source.load(torch.float32)(ids).logits, expected)
    calibrate(model, tmp_path / "work", recipe="kv-only", samples=2, seq_len=16, progress=False)
    bundle = export(tmp_path / "work", tmp_path / "bundle", progress=False)
    # Other programs look for the embedding, not for the head.
    names = {name for file in bundle.glob("*.safetensors") for name in load_file(file)}
    assert EMBEDDING in names
    assert HEAD not in names
    loaded, _ = load(bundle, dtype=torch.float32)
    found = loaded(ids, past_key_values=loaded.new_kv_cache()).logits
    assert torch.allclose(found, expected, atol=1e-4)


def test_both_names_or_an_untied_head_are_read_as_they_are(tmp_path):
    model = write_tiny_llama(tmp_path / "both", tied=True)
    rename(model, EMBEDDING, HEAD, keep=True)
    assert not open_source(str(model)).encoded
    untied = write_tiny_llama(tmp_path / "untied")
    rename(untied, EMBEDDING, "other.weight")
    assert not open_source(str(untied)).encoded


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}),
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": GROUP, "desc_act": False, "damp_percent": 0.01}),
    ],
)
def test_settings_of_quantized_weights_may_have_a_file_of_their_own(kind, name, settings, tmp_path):
    expected = write_packed(tmp_path, kind)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quant_config.json.*says how they are"):
        open_source(str(tmp_path))
    (tmp_path / name).write_text(json.dumps(settings))
    ids = torch.arange(5, 40)[None]
    source = open_source(str(tmp_path))
    assert source.stored_as.lower().startswith(kind)
    assert torch.allclose(source.load(torch.float32)(ids).logits, expected(ids).logits, atol=1e-4)
    for wrong in ("{", "[1]"):
        (tmp_path / name).write_text(wrong)
        with pytest.raises(CheckpointError, match=name):
            open_source(str(tmp_path))


def convert(folder):
    """Convert the folder's model and answer a prompt; files and what is printed stay in the folder."""
    with (folder / "said").open("w", encoding="utf8") as said, redirect_stdout(said):
        options = {"recipe": str(folder / "recipe.toml"), "data": str(folder / "text.txt"), "progress": False}
        calibrate(folder / "model", folder / "work", samples=2, seq_len=16, **options)
        bundle = export(folder / "work", folder / "bundle", progress=False)
        Console(bundle, 2, "cpu").complete("na\xefve \u65e5", raw=True)


def convert_in_ascii(folder):
    os.environ["LC_ALL"] = locale.setlocale(locale.LC_ALL, "C")
    with open(os.devnull) as stream:
        assert "UTF" not in stream.encoding.upper(), "run the tests without PYTHONUTF8"
    convert(folder)


def test_the_locale_changes_nothing(tmp_path):
    """In a process whose locale is ASCII the same is made as in this one."""
    torch.set_num_threads(1)
    model = write_tiny_llama(tmp_path / "model", tied=True)
    (model / "README.md").write_text("---\nlicense: mit\nlanguage: [fr]\n---\nModèle à nous, 日本\n", encoding="utf8")
    write_recipe(tmp_path / "recipe.toml")
    (tmp_path / "text.txt").write_text("Où est le château ? 日本へ。 It was a dark night.\n" * 20, encoding="utf8")
    made = []
    for name in ("here", "ascii"):
        folder = tmp_path / name
        folder.mkdir()
        for part in ("model", "recipe.toml", "text.txt"):
            (folder / part).symlink_to(tmp_path / part)
        if name == "here":
            convert(folder)
        else:
            assert forked.wait(forked.start(lambda folder=folder: convert_in_ascii(folder))) == 0
        files = [folder / "said", *(file for file in (folder / "bundle").iterdir() if file.is_file())]
        made.append({file.name: file.read_bytes() for file in files})
    assert made[0] == made[1]
    assert made[0]["said"]
