"""Stored prefixes and sessions where kernels follow tables: what is shared or loaded is what was stored."""

import random

import pytest
import torch
from tiny.models import GREEDY, random_ids, tiny_model

from kvconvert.methods import KVScheme
from kvconvert.runtime import Engine, KVCache
from kvconvert.runtime.hf.generation import adopt

CHUNK = 128
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FULL = pytest.mark.full


def low_bit(scheme, device, dtype=torch.float32, layers=1):
    model = tiny_model("llama", num_hidden_layers=layers, gain=3.0, head_dim=64, num_key_value_heads=2)
    adopt(model.to(device, dtype), [KVScheme.preset(scheme).with_online_rotation()] * layers, {})
    return model


def engine_of(model, **options):
    return Engine(model, **({"max_batch": 3, "prompt_chunk": CHUNK, "max_batch_tokens": 4 * CHUNK} | options))


def answered(engine, prompt, new):
    """A request alone, and the logits of its first token."""
    seen, forward = [], engine._steps.forward

    def watched(*arguments):
        found = forward(*arguments)
        seen.append(found[0].clone())
        return found

    engine._steps.forward = watched
    request = engine.add(prompt, max_new_tokens=new, stop_token_ids=[])
    engine.step()
    row = request.row
    engine.run()
    engine._steps.forward = forward
    return request, torch.stack([logits[row] for logits in seen[-new:]])


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        pytest.param("kitty", torch.float32, marks=FULL),  # two minutes under the interpreter
        pytest.param("kitty", torch.bfloat16, marks=NO_GPU),
        pytest.param("oscar-g128", torch.bfloat16, marks=NO_GPU),
        pytest.param("kivi", torch.float16, marks=NO_GPU),
        pytest.param("default", torch.bfloat16, marks=NO_GPU),
    ],
)
def test_a_hit_gives_the_logits_of_a_miss_bit_for_bit(device, scheme, dtype):
    on_gpu = device.type == "cuda"
    model, dice, common = low_bit(scheme, device, dtype, 2 if on_gpu else 1), random.Random(0), random_ids(1, 300)[0]
    common, new = common.tolist(), 200 if on_gpu else 2
    prompts = [common + dice.choices(range(1, 90), k=count) for count in (20, 33)]
    expected, logits = answered(engine_of(model, prefix_caching=False), prompts[1], new)
    engine = engine_of(model)
    answered(engine, prompts[0], 3)
    found, found_logits = answered(engine, prompts[1], new)
    assert (expected.cached_tokens, found.cached_tokens) == (0, 256)
    assert torch.equal(found_logits, logits)
    assert found.tokens == expected.tokens


@NO_GPU
@pytest.mark.parametrize("scheme", ["oscar-g128", "kitty"])
def test_a_soak_of_shared_prompts_leaves_no_page_behind(scheme):
    model, dice = low_bit(scheme, "cuda", torch.bfloat16, 2), random.Random(1)
    page = engine_of(model, kv_memory=10**6)._steps.pages
    engine = engine_of(model, kv_memory=10**6 * 16 // page)
    beginnings = [random_ids(1, length, seed=length)[0].tolist() for length in (130, 270, 420, 600)]
    asked = []
    for number in range(200):
        own = dice.choices(range(1, 90), k=dice.randrange(1, 150))
        prompt = dice.choice(beginnings)[: dice.choice((128, 200, 390, 600))] + own
        asked.append(engine.add(prompt, max_new_tokens=dice.randrange(1, 40), stop_token_ids=[]))
        for _ in range(dice.randrange(4)):
            engine.step()
        if number % 6 == 0:
            dice.choice(asked).cancel()
    engine.run()
    assert all(r.finish_reason == "cancelled" or len(r.tokens) == r.max_new_tokens for r in asked)
    stats = engine.stats()
    assert stats.cached_tokens > 5000
    assert (stats.pages_reserved, stats.failed) == (0, 0)
    engine._prefixes.clear()
    groups = engine._steps.cache.groups
    assert {numbers.used for group in groups for numbers in (group.key_numbers, group.value_numbers)} == {0}


@NO_GPU
@pytest.mark.parametrize("scheme", ["oscar-g128", "kitty", "kivi"])
def test_a_loaded_session_generates_the_same_tokens(tmp_path, scheme):
    model = low_bit(scheme, "cuda", torch.bfloat16, 2)
    ids = random_ids(1, 700).cuda()
    kept = model.new_kv_cache()
    turn = model.generate(ids, past_key_values=kept, max_new_tokens=30, **GREEDY)
    kept.save(tmp_path / "session")
    loaded = KVCache.load(tmp_path / "session", model)
    expected = model.generate(turn, past_key_values=kept, max_new_tokens=300, **GREEDY)
    assert model.generate(turn, past_key_values=loaded, max_new_tokens=300, **GREEDY).tolist() == expected.tolist()
    assert loaded.stats().pages == kept.stats().pages
