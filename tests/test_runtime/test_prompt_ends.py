"""Where a prompt ends: read whole or in chunks, the last of one token, it is compressed as one."""

import copy

import pytest
import torch
from tiny.models import GREEDY, random_ids, tiny_model

from kvconvert.methods import KVScheme
from kvconvert.runtime import Engine, KVCache
from kvconvert.runtime.hf.generation import adopt

CHUNK = 32
SCHEMES = ["calibquant-2bit", "minikv"]


def bundle_model(scheme):
    """A tiny model with the attention and the cache of a bundle."""
    model = tiny_model("llama", num_hidden_layers=2, gain=3.0)
    adopt(model, [KVScheme.preset(scheme)] * 2, {})
    return model


def stored(cache):
    """What the cache holds of its first sequence: tokens, spans, and tokens that survived an eviction."""
    sequence = cache.groups[0].sequences[0]
    return cache.stats().tokens, cache.stats().bytes_used, [span.tokens for span in sequence.spans], sequence.kept


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("recording", [False, True], ids=["greedy", "prompt lookup"])
def test_generate_compresses_a_prompt_in_chunks_as_a_whole_one(scheme, recording):
    model, ids = bundle_model(scheme), random_ids(1, 3 * CHUNK + 1)
    options = {"max_new_tokens": 12, "return_dict_in_generate": True} | GREEDY
    options |= {"prompt_lookup_num_tokens": 3} if recording else {}
    whole = model.generate(ids, **options)
    chunked = model.generate(ids, prefill_chunk_size=CHUNK, **options)
    assert chunked.sequences.tolist() == whole.sequences.tolist()
    assert stored(chunked.past_key_values) == stored(whole.past_key_values)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_later_turn_in_chunks_gives_what_it_gives_whole(scheme):
    model, options = bundle_model(scheme), {"max_new_tokens": 8} | GREEDY
    cache = model.new_kv_cache()
    first = model.generate(random_ids(1, 70), past_key_values=cache, **options)
    # Of the new ids, the last token of the first turn is not stored yet.
    more = torch.cat([first, random_ids(1, 2 * CHUNK, seed=4)], 1)
    other = copy.deepcopy(cache)
    expected = model.generate(more, past_key_values=cache, **options)
    got = model.generate(more, past_key_values=other, prefill_chunk_size=CHUNK, **options)
    assert got.tolist() == expected.tolist()
    assert stored(other) == stored(cache)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_engine_reads_a_last_chunk_of_one_token_as_part_of_the_prompt(scheme):
    model, ids = bundle_model(scheme), random_ids(1, 3 * CHUNK + 1)
    expected = model.generate(ids, max_new_tokens=12, **GREEDY)
    engine = Engine(model, max_batch=2, prompt_chunk=CHUNK)
    request = engine.add(ids, max_new_tokens=12, stop_token_ids=[])
    engine.run()
    assert request.tokens == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_a_loop_that_says_where_a_prompt_begins_and_ends(scheme):
    model = tiny_model("llama", "kvconvert", num_hidden_layers=2, gain=3.0)
    ids, mask = random_ids(2, 3 * CHUNK + 1), torch.ones(2, 3 * CHUNK + 4, dtype=torch.long)
    mask[1, :40] = 0  # The second row is left-padded by more than a chunk.

    def run(parts, cache, begin=False):
        if begin:
            cache.begin_prompt()
        read = 0
        for part in ids.split(parts, dim=1):
            read += part.shape[1]
            logits = model(part, attention_mask=mask[:, :read], past_key_values=cache).logits[:, -1:]
        cache.seal()
        found, token = [], logits.argmax(-1)
        for _ in range(3):
            read += 1
            logits = model(token, attention_mask=mask[:, :read], past_key_values=cache).logits
            found, token = [*found, logits], logits.argmax(-1)
        return torch.cat(found, 1)

    caches = [KVCache(model.config, scheme) for _ in range(3)]
    expected = run(ids.shape[1], caches[0])
    torch.testing.assert_close(run(CHUNK, caches[1], begin=True), expected, rtol=1e-4, atol=1e-4)
    assert stored(caches[1]) == stored(caches[0])
    # What counts as decoding without a word about the prompt: a pass of one token.
    run(CHUNK, caches[2])
    assert stored(caches[2]) != stored(caches[0])
    # Sealed, a cache takes single tokens for decoding again.
    assert all(len(group.sequences[0].spans) < 2 for group in caches[1].groups)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_generate_ends_a_prompt_whose_first_part_was_read_before(scheme):
    model, ids, options = bundle_model(scheme), random_ids(1, 2 * CHUNK), {"max_new_tokens": 4} | GREEDY
    caches = [model.new_kv_cache() for _ in range(2)]
    expected = model.generate(ids, past_key_values=caches[0], **options)
    with torch.no_grad():
        caches[1].begin_prompt()
        model(ids[:, :CHUNK], past_key_values=caches[1])
    got = model.generate(ids, past_key_values=caches[1], **options)
    assert got.tolist() == expected.tolist()
    assert stored(caches[1]) == stored(caches[0])
