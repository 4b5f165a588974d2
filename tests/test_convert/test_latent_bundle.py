"""Bundles of models with latent attention (MLA): calibrated, exported, loaded, served."""

import pytest
import torch
from tiny.models import ARCHITECTURES, random_ids

from kvconvert import KVCache, KVScheme, Recipe, calibrate, export, load
from kvconvert.bundle.describe import kv_size
from kvconvert.bundle.reader import open_bundle
from kvconvert.models.configuration import model_cache
from kvconvert.runtime.engine import Engine
from kvconvert.vllm.bundle import ServedBundle

OPTIONS = {"device": "cpu", "progress": False}


def convert(directory, name, preset, method, **changes):
    model = ARCHITECTURES[name].write(directory / "model")
    recipe = Recipe.load(preset, {"weights.method": method} | changes)
    calibrate(str(model), directory / "work", recipe=recipe, samples=2, seq_len=128, **OPTIONS)
    return export(directory / "work", directory / "bundle", **OPTIONS)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return convert(tmp_path_factory.mktemp("latent"), "deepseek_v3", "latent-4bit", "awq")


def test_the_manifest_has_latents_as_keys_and_rope_parts_as_values(bundle):
    opened = open_bundle(bundle)
    scheme = KVScheme.preset("latent-4bit")
    for layer in opened.manifest.layers:
        assert (layer.num_key_value_heads, layer.head_dim, layer.value_head_dim) == (1, 32, 16)
        assert (layer.scheme(), layer.reason) == (scheme, "")
    config = load(bundle, device_map="cpu")[0].config
    wanted = model_cache(config, [scheme] * len(opened.manifest.layers))
    found = kv_size(opened.manifest)
    assert found.bits_per_value == pytest.approx(wanted.bits_per_value(found.context))


def test_a_bundle_generates_what_its_model_does_with_the_scheme(bundle):
    model, _ = load(bundle, device_map="cpu", dtype=torch.float32)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    ids = random_ids(2, 270)
    found = model.generate(ids, **options)
    # 4-bit weights make the up projections, too.
    given = KVCache(model.config, KVScheme.preset("latent-4bit"))
    assert torch.equal(found.sequences, model.generate(ids, past_key_values=given, **options).sequences)
    stats = found.past_key_values.stats()
    assert (stats.other_layers, stats.pages) == (0, 8)
    assert stats.bytes_used < stats.values * 4 / 3  # of float32


def test_an_engine_serves_latents_whose_schemes_vllm_does_not_use(bundle):
    served = ServedBundle(open_bundle(bundle))
    assert served.refusal(torch.bfloat16) is None
    assert len(served.unused_schemes) == len(served.layer_types)
    model, tokenizer = load(bundle, device_map="cpu")
    engine = Engine(model, tokenizer)
    request = engine.add(random_ids(1, 20), max_new_tokens=3, stop_token_ids=[])
    engine.run()
    assert len(request.tokens) == 3


def test_latents_alone_are_something_to_convert(tmp_path):
    found = open_bundle(convert(tmp_path, "glm4_moe_lite", "latent-2bit", "none"))
    assert {layer.scheme() for layer in found.manifest.layers} == {KVScheme.preset("latent-2bit")}


def test_what_calibration_cannot_choose_for_latents_is_said(tmp_path):
    changes = {"kv.value_bits": 8, "kv.calibrate_keys": False}
    found = open_bundle(convert(tmp_path, "glm4_moe_lite", "kivi", "none", **changes))
    for layer in found.manifest.layers:
        assert (layer.scheme().key_bits, layer.scheme().key_clip_ratio) == (2, 1)
        assert layer.reason.endswith("are the scheme's own, for calibration knows no latents")


def test_other_recipes_leave_latents_to_transformers_and_say_so(tmp_path):
    found = open_bundle(convert(tmp_path, "deepseek_v2", "default", "rtn"))
    for layer in found.manifest.layers:
        assert layer.kv is None
        assert "for which there is the preset latent-4bit" in layer.reason
