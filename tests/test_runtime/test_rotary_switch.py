"""Phi-3's long context: beyond a length its keys are turned by other factors, and nobody is given another cache."""

import pytest
import torch
from tiny.models import ARCHITECTURES, GREEDY, random_ids
from transformers.cache_utils import DynamicCache

from kvconvert.errors import CacheError, UsageError
from kvconvert.methods import KVScheme
from kvconvert.runtime import Engine, KVCache
from kvconvert.runtime.hf.generation import adopt

SWITCH = 40
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": SWITCH,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.5, 4.0, 10.0, 25.0],
}
EXACT = KVScheme(key_bits=16, value_bits=16)


def long_model(attention="eager"):
    settings = {"rope_parameters": ROPE, "original_max_position_embeddings": SWITCH}
    return ARCHITECTURES["phi3"].build(attention, **settings)


def generated(model, ids, cache=None):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        past_key_values=cache,
        return_dict_in_generate=True,
        **GREEDY,
    )


def expected(ids):
    model = long_model()
    return generated(model, ids, DynamicCache(config=model.config)).sequences


def test_a_prompt_beyond_the_switch_is_stored_in_the_cache_that_was_given():
    ids = random_ids(1, SWITCH + 15)
    model = long_model("kvconvert")
    cache = KVCache(model.config, EXACT)
    found = generated(model, ids, cache)
    assert found.past_key_values is cache
    assert cache.get_seq_length() == SWITCH + 15 + 8 - 1
    assert torch.equal(found.sequences, expected(ids))


def test_a_sequence_that_grows_beyond_the_switch_is_refused_not_continued_in_full_precision():
    ids = random_ids(1, SWITCH - 4)
    model = long_model("kvconvert")
    with pytest.raises(CacheError, match=f"other factors beyond {SWITCH} tokens"):
        generated(model, ids, KVCache(model.config, EXACT))
    short = random_ids(1, SWITCH - 8)
    assert torch.equal(generated(model, short, KVCache(model.config, EXACT)).sequences, expected(short))


def test_a_bundle_reads_such_a_sequence_again_with_a_cache_of_its_own():
    ids = random_ids(1, SWITCH - 4)
    model = long_model()
    adopt(model, [EXACT] * 2, {})
    found = generated(model, ids)
    assert isinstance(found.past_key_values, KVCache)
    assert torch.equal(found.sequences, expected(ids))


def test_an_engine_serves_sequences_up_to_the_switch():
    model = long_model()
    adopt(model, [EXACT] * 2, {})
    engine = Engine(model, max_batch=2)
    with pytest.raises(UsageError, match=f"and 1 new one at most do not fit the {SWITCH:,} positions"):
        engine.add([5] * SWITCH, max_new_tokens=1)
