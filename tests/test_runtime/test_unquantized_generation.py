"""With unquantized pages, every way of generating equals transformers' eager attention and DynamicCache, token for
token.
"""

import copy

import pytest
import torch
from tiny.models import GREEDY, random_ids, tiny_model
from transformers.cache_utils import DynamicCache

from kvconvert import KVCache, KVScheme

UNQUANTIZED = KVScheme(key_bits=16, value_bits=16)
ROTATED = KVScheme(key_bits=16, value_bits=16, rotate_keys="hadamard", rotate_values="online", sink_tokens=5)
ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 6},
    "gpt_oss": {"sliding_window": 6},
}
WAYS = ["greedy", "left_padding", "beams", "chunked_prefill", "second_turn", "prompt_lookup", "return_sequences"]


@pytest.fixture(scope="module")
def model(request):
    return tiny_model(
        request.param, gain=2.0 if request.param.startswith("gemma") else 4.0, **ARCHITECTURES[request.param]
    )


def generate(model, way: str, make_cache):
    ids = random_ids(2, 17)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded = ids * mask
    if way == "greedy":
        return model.generate(ids, max_new_tokens=12, past_key_values=make_cache(), **GREEDY)
    if way == "left_padding":
        return model.generate(padded, attention_mask=mask, max_new_tokens=12, past_key_values=make_cache(), **GREEDY)
    if way == "beams":
        return model.generate(
            padded, attention_mask=mask, max_new_tokens=8, num_beams=3, past_key_values=make_cache(), **GREEDY
        )
    if way == "chunked_prefill":
        return model.generate(
            padded, attention_mask=mask, max_new_tokens=8, prefill_chunk_size=4, past_key_values=make_cache(), **GREEDY
        )
    if way == "second_turn":
        cache = make_cache()
        first = model.generate(padded, attention_mask=mask, max_new_tokens=5, past_key_values=cache, **GREEDY)
        ids = torch.cat([first, ids[:, :6]], 1)
        mask = torch.cat([mask, torch.ones(2, 11, dtype=torch.long)], 1)
        mask[1, 22:24] = 0  # padding in the middle of row 1: its new text is shorter
        return model.generate(ids, attention_mask=mask, max_new_tokens=6, past_key_values=cache, **GREEDY)
    if way == "prompt_lookup":
        ids = torch.cat([ids[:1, :6]] * 3, 1)
        return model.generate(
            ids, max_new_tokens=12, prompt_lookup_num_tokens=3, past_key_values=make_cache(), **GREEDY
        )
    return model.generate(
        ids[:1], max_new_tokens=6, num_beams=4, num_return_sequences=2, past_key_values=make_cache(), **GREEDY
    )


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ARCHITECTURES, indirect=True)
def test_every_way_of_generating_equals_eager_attention(model, way):
    model.set_attn_implementation("eager")
    expected = generate(model, way, lambda: DynamicCache(config=model.config))
    model.set_attn_implementation("kvconvert")
    scheme = UNQUANTIZED if WAYS.index(way) % 2 else ROTATED
    assert generate(model, way, lambda: KVCache(model.config, scheme)).tolist() == expected.tolist()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_without_a_kvconvert_cache_the_attention_function_is_ordinary_attention(architecture):
    model = tiny_model(architecture, gain=2.0, **ARCHITECTURES[architecture])
    ids = random_ids(2, 17)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=9, **GREEDY)
    model.set_attn_implementation("kvconvert")
    got = model(ids, attention_mask=mask, use_cache=False).logits
    # float32 sums in another order
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    # transformers makes its own DynamicCache, sliding layers included
    assert model.generate(ids, attention_mask=mask, max_new_tokens=9, **GREEDY).tolist() == generated.tolist()


def test_assisted_decoding_equals_plain_decoding():
    model, assistant = tiny_model("llama"), tiny_model("llama", num_hidden_layers=4)
    ids = random_ids(1, 24)
    expected = model.generate(ids, max_new_tokens=16, **GREEDY)
    model.set_attn_implementation("kvconvert")
    got = model.generate(
        ids, max_new_tokens=16, assistant_model=assistant, past_key_values=KVCache(model.config, ROTATED), **GREEDY
    )
    assert got.tolist() == expected.tolist()


def test_new_tokens_alone_with_a_mask_over_everything_continue_a_conversation():
    model = tiny_model("llama", "kvconvert")
    ids, more = random_ids(1, 20), random_ids(1, 6, seed=2)
    cache = KVCache(model.config, ROTATED)
    first = model.generate(ids, max_new_tokens=5, past_key_values=cache, **GREEDY)
    everything = torch.cat([first, more], 1)
    whole = model.generate(everything, max_new_tokens=4, past_key_values=copy.deepcopy(cache), **GREEDY)
    pending = torch.cat([first[:, cache.get_seq_length() :], more], 1)
    part = model.generate(
        pending, attention_mask=torch.ones_like(everything), max_new_tokens=4, past_key_values=cache, **GREEDY
    )
    assert part[:, -4:].tolist() == whole[:, -4:].tolist()
