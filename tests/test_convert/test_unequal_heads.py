"""Models whose values have fewer channels than their keys, and whose layers have different numbers of KV heads."""

import pytest
import torch
from tiny.every_type import tiny_config
from tiny.models import GREEDY, random_ids, randomise, write_tokenizer

from kvconvert import Recipe, calibrate, export, load
from kvconvert.bundle.reader import open_bundle
from kvconvert.models.configuration import model_class
from kvconvert.planning.plan import plan
from kvconvert.runtime import Engine
from kvconvert.vllm.bundle import ServedBundle

RECIPES = ("default", "kitty", "calibquant-2bit", "minikv")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mimo")
    config = tiny_config("mimo_v2_flash")
    torch.manual_seed(0)
    model = model_class(config).from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    randomise(model)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def convert(source, directory, recipe):
    calibrate(source, directory / "work", recipe=recipe, samples=2, seq_len=200, progress=False)
    return export(directory / "work", directory / "bundle", progress=False)


@pytest.mark.parametrize(
    "name", [name if name == "default" else pytest.param(name, marks=pytest.mark.full) for name in RECIPES]
)
def test_every_layer_is_quantized_with_its_own_shape_and_served(name, source, tmp_path):
    recipe = Recipe.load(name, {"weights.method": "rtn", "weights.group_size": 16})
    bundle = convert(source, tmp_path, recipe)
    opened = open_bundle(bundle)
    shapes = [(layer.num_key_value_heads, layer.head_dim, layer.value_head_dim) for layer in opened.manifest.layers]
    assert shapes == [(2, 32, 16), (4, 32, 16)] * 2
    assert not any(layer.reason for layer in opened.manifest.layers)
    planned = plan(source, recipe=recipe, probe=False, progress=False)
    assert planned.cache.bits_per_value < 16
    assert not planned.cache.left
    model, _ = load(bundle, dtype=torch.float32)
    prompts = [random_ids(1, length, seed=length) for length in (131, 5)]
    engine = Engine(model, max_batch=2, prompt_chunk=4096)
    requests = [engine.add(ids, max_new_tokens=4, stop_token_ids=[]) for ids in prompts]
    engine.run()
    for ids, request in zip(prompts, requests, strict=True):
        expected = model.generate(ids, max_new_tokens=4, **GREEDY)
        assert request.tokens == expected[0, ids.shape[1] :].tolist()
    refusal = ServedBundle(opened).refusal(torch.bfloat16)
    if name in ("default", "kitty"):
        assert refusal is None
    else:
        assert "which vLLM's blocks cannot hold" in refusal
