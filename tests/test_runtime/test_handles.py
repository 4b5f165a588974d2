"""What travels through a model as a handle, and what models may not do with it."""

import copy

import pytest
import torch
from tiny.models import random_ids, tiny_model

from kvconvert import KVCache, KVScheme
from kvconvert.errors import CacheError
from kvconvert.runtime.hf.attention import mask_function

UNQUANTIZED = KVScheme(key_bits=16, value_bits=16)


def test_keys_that_reach_another_attention_are_an_error_that_says_what_to_call():
    model = tiny_model("llama", "sdpa")
    with pytest.raises(CacheError, match=r'layer 0.*set_attn_implementation\("kvconvert"\)'):
        model(random_ids(1, 5), past_key_values=KVCache(model.config, UNQUANTIZED))
    model.set_attn_implementation("eager")
    with pytest.raises(CacheError, match=r'set_attn_implementation\("kvconvert"\)'):
        model(random_ids(1, 5), past_key_values=KVCache(model.config, UNQUANTIZED))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_hidden_layers", 1, "1 layer in the cache, 4 in the model"),
        ("num_key_value_heads", 1, "KV heads of layer 0: 1 in the cache, 2 in the model"),
        ("head_dim", 32, "key channels of layer 0: 32 in the cache"),
    ],
)
def test_a_cache_of_another_model_is_refused(field, value, said):
    model = tiny_model("llama", "kvconvert")
    other = copy.deepcopy(model.config)
    setattr(other, field, value)
    with pytest.raises(CacheError, match=f"made for another model.*{said}"):
        model(random_ids(1, 5), past_key_values=KVCache(other, UNQUANTIZED))


def test_a_mask_that_differs_for_stored_positions_is_an_error():
    model = tiny_model("llama", "kvconvert")
    ids, mask = random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    cache = KVCache(model.config, UNQUANTIZED)
    model(ids, attention_mask=mask, past_key_values=cache)
    changed = torch.ones(2, 9, dtype=torch.long)
    changed[1, 3] = 0
    with pytest.raises(CacheError, match="differs for positions that layer 0"):
        model(ids[:, :1], attention_mask=changed, past_key_values=cache)


def test_forgetting_earlier_padding_is_an_error():
    model = tiny_model("llama", "kvconvert")
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    cache = KVCache(model.config, UNQUANTIZED)
    model(random_ids(2, 8), attention_mask=mask, past_key_values=cache)
    with pytest.raises(CacheError, match="differs for positions"):
        model(random_ids(2, 1), past_key_values=cache)


def test_a_mask_over_the_new_tokens_only_is_an_error():
    model = tiny_model("llama", "kvconvert")
    cache = KVCache(model.config, UNQUANTIZED)
    model(random_ids(1, 8), past_key_values=cache)
    with pytest.raises(CacheError, match="has 2 columns and layer 0 of the cache needs 10"):
        model(random_ids(1, 2), attention_mask=torch.ones(1, 2, dtype=torch.long), past_key_values=cache)


def test_four_dimensional_masks_and_other_batches_are_refused():
    model = tiny_model("llama", "kvconvert")
    with pytest.raises(CacheError, match="4-D masks"):
        model(
            random_ids(1, 4),
            attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool),
            past_key_values=KVCache(model.config, UNQUANTIZED),
        )
    cache = KVCache(model.config, UNQUANTIZED)
    model(random_ids(1, 4), past_key_values=cache)
    with pytest.raises(CacheError, match=r"holds 1 sequence and layer 0 was given 2"):
        model(random_ids(2, 1), past_key_values=cache)


def test_a_sliced_mask_stands_for_its_slice():
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[0, :3] = False
    whole = mask_function(2, 8, 8, attention_mask=padding)
    expected = whole.materialise(allow_causal_skip=True)
    assert torch.equal(whole[:, :, -2:].materialise(allow_causal_skip=True), expected[:, :, -2:])
    assert whole[:, :, -2:].chunk(torch.device("cpu"), 2).query_positions.tolist() == [6, 7]
