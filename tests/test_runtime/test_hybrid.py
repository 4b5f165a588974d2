"""Layers with attention and a recurrent state side by side (Falcon-H1) do what other layers do."""

import pytest
import torch
from tiny.models import ARCHITECTURES, GREEDY, random_ids
from transformers import AutoConfig
from transformers.cache_utils import DynamicCache

from kvconvert import KVCache, KVScheme
from kvconvert.errors import CacheError, UnsupportedModelError
from kvconvert.runtime.hf.layer import HybridLayer

EXACT = KVScheme(key_bits=16, value_bits=16, rotate_keys="hadamard", rotate_values="online", sink_tokens=5)


@pytest.fixture(scope="module")
def model():
    return ARCHITECTURES["falcon_h1"].build()


def both(model, run):
    """What `run` gives with transformers' own cache, and through pages."""
    model.set_attn_implementation("eager")
    expected = run(DynamicCache(config=model.config))
    model.set_attn_implementation("kvconvert")
    return expected, run(KVCache(model.config, EXACT))


def test_every_layer_has_pages_and_a_state(model):
    cache = KVCache(model.config, EXACT)
    assert all(type(layer) is HybridLayer for layer in cache.layers)
    model.set_attn_implementation("kvconvert")
    model.generate(random_ids(1, 140), max_new_tokens=3, past_key_values=cache, **GREEDY)
    assert (cache.stats().pages, cache.stats().other_layers) == (2, 0)
    assert all(layer.recurrent_states[0].abs().sum() > 0 for layer in cache.layers)


def test_beams_permute_pages_and_states_alike(model):
    ids = random_ids(2, 140)
    settings = {"max_new_tokens": 10, "num_beams": 3, "num_return_sequences": 2}
    expected, found = both(model, lambda cache: model.generate(ids, past_key_values=cache, **settings, **GREEDY))
    assert found.tolist() == expected.tolist()


def test_a_forgotten_prompt_leaves_no_trace(model):
    model.set_attn_implementation("kvconvert")
    cache = KVCache(model.config, EXACT)
    run = lambda: model.generate(random_ids(1, 30), max_new_tokens=5, past_key_values=cache, **GREEDY)  # noqa: E731
    first = run()
    cache.reset()
    assert run().tolist() == first.tolist()


def test_states_that_cannot_be_put_back_are_not_cropped(model):
    model.set_attn_implementation("kvconvert")
    cache = KVCache(model.config, EXACT)
    model(random_ids(1, 20), past_key_values=cache)
    assert not cache.is_croppable


def test_offloading_is_refused_as_for_every_layer_with_pages(model):
    with pytest.raises(CacheError, match="Offloading"):
        KVCache(model.config, EXACT).layers[0].offload()


def test_a_model_without_keys_and_values_is_refused_by_name():
    from transformers import MambaConfig

    with pytest.raises(UnsupportedModelError, match="No layer of this mamba model"):
        KVCache(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64), "kivi")


def test_a_model_that_takes_no_cache_but_its_own_is_refused_by_name():
    config = AutoConfig.for_model("minimax", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UnsupportedModelError, match="minimax takes no cache but its own class"):
        KVCache(config, "kivi")


def test_padding_reaches_neither_pages_nor_states(model):
    ids, mask = random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :9] = 0
    expected, found = both(
        model, lambda cache: model.generate(ids, attention_mask=mask, max_new_tokens=8, past_key_values=cache, **GREEDY)
    )
    assert found.tolist() == expected.tolist()
