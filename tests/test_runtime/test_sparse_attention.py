"""Attention to tokens that an indexer chooses, over the cache's pages, is that of transformers' own cache."""

import pytest
import torch
from tiny.families import SPARSE
from tiny.models import GREEDY, random_ids
from transformers import DynamicCache

from kvconvert import KVCache, KVScheme
from kvconvert.errors import CacheError, UnsupportedModelError
from kvconvert.kernels.attention import Choice
from kvconvert.models import CACHE
from kvconvert.models.configuration import model_cache
from kvconvert.runtime.cache.indexer import IndexerKeys
from kvconvert.runtime.hf.generation import adopt

EXACT = KVScheme(key_bits=16, value_bits=16, sink_tokens=5)
QUICK = ("glm_moe_dsa", "minimax_m3_vl_text")
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SPARSE]
# Sums of float32 in other orders.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def adopted(model, scheme=EXACT):
    adopt(model, [scheme] * model.config.num_hidden_layers, {})
    return model


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_logits_and_tokens_are_those_of_transformers_cache(name):
    model, ids = SPARSE[name].build(), random_ids(1, 200, seed=3)
    cache = DynamicCache(config=model.config)
    expected = [model(part, **{CACHE: cache}).logits for part in ids.split([150, 49, 1], 1)]
    tokens = model.generate(ids, max_new_tokens=12, **GREEDY)
    adopted(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits[:, :150], expected[0], **CLOSE)
    cache = model.new_kv_cache()
    for part, logits in zip(ids.split([150, 49, 1], 1), expected, strict=True):
        torch.testing.assert_close(model(part, **{CACHE: cache}).logits, logits, **CLOSE)
    assert model.generate(ids, max_new_tokens=12, **GREEDY).tolist() == tokens.tolist()


@pytest.mark.quick("glm_moe_dsa")
@pytest.mark.parametrize("name", [name for name in SPARSE if not name.startswith("minimax")][:2])
def test_padded_rows_and_beams_give_the_same(name):
    model, ids = SPARSE[name].build(), random_ids(2, 150, seed=5)
    mask = torch.ones_like(ids)
    ids[1, :30] = mask[1, :30] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, **GREEDY}
    expected = [model.generate(ids, **options, **more).tolist() for more in ({}, {"num_beams": 2})]
    adopted(model)
    assert [model.generate(ids, **options, **more).tolist() for more in ({}, {"num_beams": 2})] == expected


def test_drafts_are_taken_back():
    model, ids = adopted(SPARSE["glm_moe_dsa"].build()), random_ids(1, 40, seed=1).repeat(1, 4)
    expected = model.generate(ids, max_new_tokens=30, **GREEDY)
    assert model.generate(ids, max_new_tokens=30, prompt_lookup_num_tokens=3, **GREEDY).tolist() == expected.tolist()


@torch.no_grad()
def test_keys_at_8_bits_choose_the_same_tokens_but_for_a_few():
    model, ids, agreement = SPARSE["deepseek_v32"].build(), random_ids(1, 400, seed=2), []
    adopted(model)
    keys, chosen = [], {}
    for layer, block in enumerate(model.model.layers):
        indexer = block.self_attn.indexer
        indexer.register_forward_hook(lambda *args, layer=layer: chosen.setdefault(layer, []).append(args[-1]))
    # One pass stores keys in the model's dtype, and another one, of the same latents, at 8 bits.
    for bits in (16, 8):
        cache = model.new_kv_cache()
        for layer in cache.layers:
            layer.index = IndexerKeys(bits)
        model(ids, **{CACHE: cache})
        keys.append(cache.layers[0].index)
    exact, rounded = chosen[0]
    for query in range(200, 400):
        both = {*exact[0, query].tolist()} & {*rounded[0, query].tolist()}
        agreement.append(len(both) / exact.shape[-1])
    assert 0.97 < sum(agreement) / len(agreement) < 1
    assert keys[1].bytes_used < 0.3 * keys[0].bytes_used
    assert {layer.index.bits for layer in KVCache(model.config, "latent-4bit").layers} == {8}


@pytest.mark.parametrize(("name", "scheme"), [("glm_moe_dsa", "latent-4bit"), ("minimax_m3_vl_text", "kivi")])
def test_sizes_are_those_of_the_tensors(name, scheme):
    model = SPARSE[name].build()
    adopted(model, KVScheme.preset(scheme))
    cache = model.new_kv_cache()
    model(random_ids(1, 300), **{CACHE: cache})
    planned = model_cache(model.config, cache.schemes, torch.float32)
    stats = cache.stats()
    assert (stats.bytes_used, stats.values) == (planned.exact_bytes(300), planned.numbers(300))


def test_a_choice_as_a_mask():
    choice = Choice(torch.tensor([[[[0, -1], [2, 0]]]]), block=2)
    assert choice.of_row(0, torch.tensor([0, 1]), torch.arange(6)).int().tolist() == [
        [[1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1]]
    ]
    assert choice.mask(None, 4, 2).shape == (1, 1, 2, 2)
    assert [choice.is_all_of(tokens) for tokens in (4, 5)] == [True, False]


def test_what_is_not_served_is_refused():
    model = SPARSE["deepseek_v32"].build(attention="kvconvert")
    with pytest.raises(CacheError, match="The indexer of layer 0 takes masks that this cache does not have; use"):
        model(random_ids(1, 8), **{CACHE: KVCache(model.config, "latent-4bit")})
    with pytest.raises(UnsupportedModelError, match="an indexer chooses tokens among all, and this scheme"):
        KVCache(SPARSE["minimax_m3_vl_text"].config(), "minikv")
