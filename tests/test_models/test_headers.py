"""A checkpoint whose headers do not fit its config.json is refused before any weight is read."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.checkpoints import save_checkpoint
from tiny.mixtures import few_and_full, tiny_mixture
from tiny.models import ARCHITECTURES
from tiny.processors import quick_and_full
from tiny.structures import REFUSED_WEIGHTS

from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.pipeline import calibrate
from kvconvert.errors import CheckpointError
from kvconvert.models.source import SourceModel, open_source

WEIGHTS = "model.safetensors"
CPU = torch.device("cpu")


def check(directory, discovers=True):
    source = open_source(str(directory))
    LayerRunner(source, CPU, discovers).check_headers()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("headers") / "model", num_hidden_layers=3, tie_word_embeddings=False)


@pytest.fixture
def model(saved, tmp_path, monkeypatch):
    """A checkpoint to damage, from which no weight may be read."""
    monkeypatch.setattr(SourceModel, "read", lambda *arguments: pytest.fail("weights are read"))
    return shutil.copytree(saved, tmp_path / "model")


def tensors_of(model, **changes):
    """Change the file's tensors; None removes one. Dots are written as two underscores."""
    tensors = load_file(model / WEIGHTS)
    for name, change in changes.items():
        name = name.replace("__", ".")
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change
    save_file(tensors, model / WEIGHTS, {"format": "pt"})


def config_of(model, **changes):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.each_value
@pytest.mark.parametrize("discovers", [True, False], ids=["layers", "no layers"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda model: config_of(model, num_hidden_layers=2), r"layers\.2\..*num_hidden_layers = 2.*dropped"),
        (lambda model: config_of(model, num_hidden_layers=4), r"lacks model\.layers\.3\."),
        (lambda model: tensors_of(model, model__layers__1__mlp__up_proj__weight=None), "lacks .*1.mlp.up_proj.weight"),
        (lambda model: tensors_of(model, model__norm__weight=None), "lacks model.norm.weight"),
        (lambda model: tensors_of(model, lm_head__weight=None), "lacks lm_head.weight"),
        (lambda model: tensors_of(model, model__embed_tokens__weight=torch.ones(9, 64)), r"\[9, 64\] .* \[4096, 64\]"),
        (
            lambda model: tensors_of(model, model__layers__2__self_attn__q_proj__weight=torch.ones(64, 32)),
            r"layers\.2\.self_attn\.q_proj\.weight has shape \[64, 32\] where config\.json expects \[64, 64\]",
        ),
        (lambda model: config_of(model, intermediate_size=256), r"mlp.*has shape .* where config\.json expects"),
        (
            lambda model: tensors_of(model, model__layers__0__self_attn__q_proj__lora_A__weight=torch.ones(4, 64)),
            r"unmerged LoRA adapter; merge it \(PEFT's merge_and_unload\)",
        ),
    ],
    ids=["fewer layers", "more layers", "in a layer", "norm", "head", "shape of embedding", "shape", "config", "LoRA"],
)
def test_headers_that_do_not_fit_are_refused_in_one_sentence(model, damage, said, discovers):
    damage(model)
    with pytest.raises(CheckpointError, match=said) as caught:
        check(model, discovers)
    assert "\n" not in str(caught.value)


def test_calibrate_checks_headers_before_it_begins(model, tmp_path):
    config_of(model, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="would be dropped"):
        calibrate(model, tmp_path / "work", recipe="rtn", samples=1, seq_len=16, progress=False)
    assert not (tmp_path / "work").exists()


def test_what_transformers_tolerates_passes(model):
    check(model)
    tensors_of(model, lm_head__weight=None, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    config_of(model, tie_word_embeddings=True)  # the head is the embedding
    check(model)
    tensors_of(model, extra__tensor=torch.ones(2), model__layers__3__mlp__up_proj__weight=torch.ones(128, 64))
    config_of(model, num_nextn_predict_layers=1)  # a layer for predicting two tokens at once
    check(model)


@pytest.mark.each_value
@pytest.mark.parametrize("discovers", [True, False], ids=["layers", "no layers"])
@pytest.mark.parametrize("family", few_and_full())
def test_experts_are_compared_in_the_form_in_which_they_are_stored(tmp_path, family, discovers):
    tiny_mixture(family).save_pretrained(tmp_path)
    check(tmp_path, discovers)
    tensors = load_file(tmp_path / WEIGHTS)
    name = next(name for name in tensors if re.search(r"layers\.1\..*(experts|input_linear)", name))
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / WEIGHTS, {"format": "pt"})
    if discovers:
        with pytest.raises(CheckpointError, match="lacks"):
            check(tmp_path)


# Falcon computes attention by itself, and is refused before its headers count.
SERVED = [name for name in ARCHITECTURES if name not in ("falcon", "falcon_alibi")]


@pytest.mark.parametrize("name", quick_and_full(SERVED, "llava", "gemma3"))
def test_headers_of_every_architecture_fit(tmp_path, name):
    ARCHITECTURES[name].write(tmp_path)
    check(tmp_path, discovers=False)
    if name not in REFUSED_WEIGHTS:
        check(tmp_path)
