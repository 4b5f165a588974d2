"""examples/fetch_models.py: llama.cpp's tensors become the transformers model that they were made from."""

import dataclasses
import sys
from types import SimpleNamespace

import fetch_models
import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def tiny_source(name):
    source = fetch_models.MODELS[name]
    config = source.config | TINY | SPECIAL | {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 16}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][4:6]
    return dataclasses.replace(source, config=config)


def stored(source, model):
    """The model's tensors under llama.cpp's names and in its order of rows."""
    names = {name: part for part, name in (fetch_models.NAMES | source.names).items()}
    for others in (source.others, {"token_embd": "nowhere"}):
        names |= {name: part for part, name in others.items()}
    for name, tensor in model.state_dict().items():
        base, _, kind = name.rpartition(".")
        if base == "lm_head":
            continue
        values = tensor.float() + (1 if source.norms_plus_one and "norm" in base else 0)
        part = names.get(base) or names[base.split(".", 3)[3]]
        heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}.get(part)
        if source.interleaved and heads:
            values = values.view(heads, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)
        layer = "" if base in names else f"blk.{base.split('.')[2]}."
        yield SimpleNamespace(name=f"{layer}{part}.{kind}", data=values.numpy(), tensor_type=0)  # F32
    yield SimpleNamespace(name="rope_freqs.weight", data=np.ones(4, np.float32), tensor_type=0)


@pytest.mark.parametrize("name", fetch_models.MODELS)
def test_a_file_becomes_the_model_that_it_was_made_from(name, tmp_path, monkeypatch):
    source = tiny_source(name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**source.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():  # biases and norms are constant at first
        parameter.data = torch.randn_like(parameter) / 4
    monkeypatch.setattr(gguf, "GGUFReader", lambda file: SimpleNamespace(tensors=list(stored(source, model))))
    unused = SimpleNamespace(save_pretrained=lambda path: None)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: unused)
    fetch_models.convert(source, tmp_path / "model.gguf", tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        # Norms with 1 added are rounded to bfloat16 again.
        torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=0.05, atol=0.05)
    assert found.state_dict().keys() == model.state_dict().keys()


def test_another_file_than_the_models_is_refused(tmp_path, monkeypatch):
    source = tiny_source("smollm2")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config), dtype=torch.bfloat16)
    tensors = list(stored(source, model))[:-2]
    monkeypatch.setattr(gguf, "GGUFReader", lambda file: SimpleNamespace(tensors=tensors))
    with pytest.raises(SystemExit, match="holds another model"):
        fetch_models.convert(source, tmp_path / "model.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_help_is_printed_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fetch_models.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        fetch_models.main()
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in fetch_models.MODELS)
    assert list(tmp_path.iterdir()) == []
