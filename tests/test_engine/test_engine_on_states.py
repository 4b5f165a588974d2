"""The Engine on models whose layers keep states, latents or keys of indexers, attend in chunks, or share keys."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny.families import FAMILIES, MIXED, SPARSE
from tiny.models import ARCHITECTURES, GREEDY, random_ids

from kvconvert.errors import CacheError, UnsupportedModelError, UsageError
from kvconvert.kernels.launches import record_specializations
from kvconvert.methods import KVScheme
from kvconvert.runtime import Engine, KVCache
from kvconvert.runtime.cache import session
from kvconvert.runtime.hf import states
from kvconvert.runtime.hf.generation import adopt
from kvconvert.runtime.hf.layer import StateLayer
from kvconvert.runtime.hf.states import state_modules

EXACT = KVScheme(key_bits=16, value_bits=16, sink_tokens=5)
NAMES = ["qwen3_5_text", "falcon_h1", "jamba", "deepseek_v3", "gemma4_text_shared", "llama4_text"]
MORE = ["qwen3_next", "lfm2", "bamba", "granitemoehybrid", "deepseek_v2", "glm4_moe_lite", "gemma3n_text"]
EVERY = [*NAMES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
QUANTIZED = [("qwen3_5_text", "kivi"), ("deepseek_v3", "latent-4bit"), ("glm_moe_dsa", "latent-4bit")]
QUANTIZED += [("minimax_m3_vl_text", "kivi"), ("falcon_h1", "kivi"), ("jamba", "kivi")]
QUICK = ("deepseek_v32", "minimax_m3_vl_text")
CHUNK = 128
EVERY += [pytest.param(name, marks=pytest.mark.full) for name in MIXED]
EVERY += [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SPARSE]


def bundle_model(name, scheme=EXACT, **overrides):
    """A tiny model with the attention and the cache of a bundle."""
    model = (ARCHITECTURES | FAMILIES)[name].build(**overrides)
    adopt(model, [scheme] * model.config.get_text_config(decoder=True).num_hidden_layers, {})
    return model


def answers(engine, prompts, new=(3, 7)):
    """Tokens of requests that come one a step."""
    requests = []
    for number, ids in enumerate(prompts):
        requests.append(engine.add(ids, max_new_tokens=new[number % len(new)], stop_token_ids=[]))
        engine.step()
    engine.run()
    return [request.tokens for request in requests]


def alone(model, prompts, new=(3, 7), **options):
    """The same from `generate`."""
    return [
        model.generate(ids, max_new_tokens=new[i % len(new)], **GREEDY, **options)[0, ids.shape[1] :].tolist()
        for i, ids in enumerate(prompts)
    ]


@pytest.mark.quick("qwen3_5_text", "gemma4_text_shared", "deepseek_v32")
@pytest.mark.parametrize("name", EVERY)
def test_requests_in_company_give_what_generate_gives_alone(name):
    model = bundle_model(name)
    prompts = [random_ids(1, length, seed=length) for length in (5, 127, 128, 131, 300)]
    # The last prompt again, whose first chunks are known by then.
    prompts.append(prompts[-1])
    engine = Engine(model, max_batch=3, prompt_chunk=CHUNK)
    assert answers(engine, prompts) == alone(model, prompts)
    assert engine.stats().cached_tokens == 2 * CHUNK


@pytest.mark.quick("glm_moe_dsa", "qwen3_5_text")
@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "glm_moe_dsa"])
def test_states_and_keys_of_indexers_move_with_their_sequences_to_lower_rows(name):
    model = bundle_model(name)
    prompts = [random_ids(1, length, seed=length) for length in (5, 127, 9)]
    new, engine = (3, 6, 20), Engine(model, max_batch=3, prompt_chunk=CHUNK)
    assert answers(engine, prompts, new) == alone(model, prompts, new)
    assert engine._steps.cache.groups[0].rows == 1


def test_queries_are_scaled_by_the_position_in_their_own_sequence():
    model = bundle_model("llama4_text", floor_scale=30, attn_scale=2.0)
    prompts = [random_ids(1, length, seed=length) for length in (131, 5, 40, 300)]
    engine = Engine(model, max_batch=2, prompt_chunk=CHUNK)
    assert answers(engine, prompts) == alone(model, prompts)


@pytest.mark.quick("deepseek_v3", "minimax_m3_vl_text")
@pytest.mark.parametrize(("name", "scheme"), QUANTIZED)
def test_quantized_pages_are_those_of_generate(name, scheme):
    model = bundle_model(name, KVScheme.preset(scheme))
    prompts = [random_ids(1, length, seed=length) for length in (131, 5, 300)]
    engine = Engine(model, max_batch=2, prompt_chunk=4096)
    assert answers(engine, prompts) == alone(model, prompts)


@pytest.mark.quick("qwen3_5_text")
@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "glm_moe_dsa"])
def test_a_saved_sequence_goes_on_with_its_states(name, tmp_path):
    model = bundle_model(name)
    ids, file = random_ids(1, 200, seed=4), tmp_path / "session.safetensors"
    cache = model.new_kv_cache()
    expected = model.generate(ids, max_new_tokens=30, **GREEDY)
    first = model.generate(ids, max_new_tokens=10, past_key_values=cache, **GREEDY)
    cache.save(file)
    loaded = KVCache.load(file, model)
    assert model.generate(first, max_new_tokens=20, past_key_values=loaded, **GREEDY).tolist() == expected.tolist()


def test_a_model_of_latents_that_kept_its_own_cache_is_refused_with_the_recipe_that_it_needs():
    with pytest.raises(UnsupportedModelError, match="such as latent-4bit"):
        Engine((ARCHITECTURES | FAMILIES)["deepseek_v3"].build())


def test_a_session_without_its_states_is_refused(tmp_path):
    model, file = bundle_model("qwen3_5_text"), tmp_path / "session.safetensors"
    cache = model.new_kv_cache()
    model.generate(random_ids(1, 20), max_new_tokens=2, past_key_values=cache, **GREEDY)
    session.save(file, cache.groups, cache.fingerprint, {})
    with pytest.raises(CacheError, match="its layers are not those of this cache"):
        KVCache.load(file, model)


@pytest.mark.parametrize(("name", "continues"), [("jamba", False), ("falcon_h1", True), ("qwen3_5_text", True)])
def test_a_prompt_in_chunks_is_read_from_the_stored_state_on(name, continues):
    model, ids = bundle_model(name), random_ids(1, 61, seed=2)
    expected = model(ids).logits[:, -1]
    cache = model.new_kv_cache()
    for part in ids.split(20, 1):
        logits = model(part, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert {module.continues for module in state_modules(model)} == {continues}


def test_a_prompt_that_fails_changes_no_other_request(monkeypatch):
    model = bundle_model("qwen3_5_text")
    mixer = type(state_modules(model)[0])
    forward = mixer.forward

    def failing(self, hidden_states, *args, **kwargs):
        if hidden_states.shape[1] == 7:
            raise RuntimeError("no memory")
        return forward(self, hidden_states, *args, **kwargs)

    others = [random_ids(1, length, seed=length) for length in (30, 40)]
    expected = alone(model, others)
    monkeypatch.setattr(mixer, "forward", failing)
    engine = Engine(model, max_batch=3)
    requests = [engine.add(ids, max_new_tokens=n, stop_token_ids=[]) for ids, n in zip(others, (3, 7), strict=True)]
    failed = engine.add(random_ids(1, 7), max_new_tokens=4)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.run()
    engine.run()
    assert failed.finish_reason == "error"
    assert [request.tokens for request in requests] == expected


def test_states_of_stored_prefixes_count_as_pages():
    model = bundle_model("qwen3_5_text")
    engine = Engine(model, max_batch=2, prompt_chunk=CHUNK)
    answers(engine, [random_ids(1, 300)], new=(2,))
    cache = model.new_kv_cache()
    model(random_ids(1, 5), past_key_values=cache)
    of_states = sum(t.nbytes for layer in cache.state_layers().values() for t in layer.tensors().values())
    page = sum(side.page_bytes for store in cache.stores() for side in (store.key_pages, store.value_pages))
    assert engine.stats().prefix_pages == 2 + 2 * -(-of_states // page)


@pytest.mark.quick("qwen3_5_text", "lfm2")
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2"])
def test_prompts_of_a_pass_are_read_by_one_run_of_a_module(name, monkeypatch):
    model, read = bundle_model(name), []
    convolve = states.convolve
    monkeypatch.setattr(states, "convolve", lambda *a: read.append(a[4].lengths) or convolve(*a))
    prompts = [random_ids(1, length, seed=length) for length in (5, 40, 131)]
    expected = alone(model, prompts, new=(8,))
    engine = Engine(model, max_batch=4, prompt_chunk=CHUNK)
    requests = [engine.add(ids, max_new_tokens=8, stop_token_ids=[]) for ids in prompts]
    engine.run()
    assert [request.tokens for request in requests] == expected
    assert [5, 40, 128] in read
    assert {module.keeps_apart for module in state_modules(model)} == {True}


def test_no_trial_is_made_while_kernels_are_only_listed():
    model = bundle_model("qwen3_5_text")
    module, cache = state_modules(model)[0], model.new_kv_cache()
    with record_specializations():
        for part in random_ids(1, 20).split(10, 1):
            model(part, past_key_values=cache)
    assert "continues" not in module.__dict__


@pytest.mark.quick("qwen3_5_text")
@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "jamba", "falcon_h1"])
def test_states_of_12_bits_change_logits_by_next_to_nothing(name):
    # Mamba's update of one token changes the states that a cache gives it, and does not say so.
    ids, found = random_ids(1, 30, seed=3), []
    for bits in (16, 12):
        model = bundle_model(name, replace(EXACT, state_bits=bits))
        cache = model.new_kv_cache()
        logits = [model(ids[:, :20], past_key_values=cache, use_cache=True).logits[:, -1]]
        for token in range(20, 30):
            logits.append(model(ids[:, token : token + 1], past_key_values=cache, use_cache=True).logits[:, -1])
        found.append(torch.stack(logits))
        packed = {state.dtype for layer in cache.state_layers().values() for state in layer.tensors().values()}
        assert (torch.uint8 in packed) == (bits == 12)
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert 0 < error < 1e-3


def test_a_cache_of_a_model_that_is_not_a_bundles_keeps_states_as_they_are():
    model = (ARCHITECTURES | FAMILIES)["bamba"].build()
    cache = KVCache(model.config, "kivi")
    model.set_attn_implementation("kvconvert")
    model(random_ids(1, 20), past_key_values=cache, use_cache=True)
    kept = [state.dtype for layer in cache.state_layers().values() for state in layer.tensors().values()]
    assert kept
    assert torch.uint8 not in kept


def test_a_prompt_alone_is_read_as_prompts_in_company_are(monkeypatch):
    model, read = bundle_model("qwen3_5_text"), []
    expected = alone(model, prompts := [random_ids(1, 140)], new=(3,))
    convolve = states.convolve
    monkeypatch.setattr(states, "convolve", lambda *a: read.append(a[4].lengths) or convolve(*a))
    # What has kernels; those that the module's own functions would launch are not called for a prompt.
    monkeypatch.setattr(states, "devices", SimpleNamespace(unsupported=lambda device: None))
    monkeypatch.setattr(states, "_steps_equal", lambda *_: False)
    engine = Engine(model, max_batch=2, prompt_chunk=CHUNK)
    assert answers(engine, prompts, new=(3,)) == expected
    assert [lengths for lengths in read if lengths in ([CHUNK], [140 - CHUNK])]


def test_rows_that_come_back_lie_where_they_were():
    layer = StateLayer(state_bits=12)
    layer.hold({"conv.0": torch.randn(6, 4, 3), "recurrent.0": torch.randn(6, 2, 4, 8)})
    before, numbers = layer.tensors(), {name: tensor.clone() for name, tensor in layer.tensors().items()}
    layer.resize(2)
    assert {len(tensor) for tensor in layer.tensors().values()} == {2}
    layer.resize(6)
    for name, tensor in layer.tensors().items():
        assert tensor.data_ptr() == before[name].data_ptr()
        assert tensor.equal(numbers[name])
    layer.resize(9)
    for name, tensor in layer.tensors().items():
        assert len(tensor) == 9
        assert tensor[:6].equal(numbers[name])


@pytest.mark.quick("qwen3_5_text", "kimi_linear")
@pytest.mark.parametrize(
    ("name", "scheme"),
    [("qwen3_5_text", "kivi"), ("kimi_linear", "latent-4bit"), ("falcon_h1", "kivi"), ("lfm2", "kivi")],
)
def test_states_of_all_rows_have_their_room_in_the_memory(name, scheme):
    model, rows, memory = bundle_model(name, KVScheme.preset(scheme)), 3, 10**6
    engine = Engine(model, max_batch=rows, kv_memory=memory)
    steps, states = engine._steps, engine.stats().state_bytes
    requests = [engine.add(random_ids(1, 130), max_new_tokens=4) for _ in range(rows)]
    engine.run()
    assert all(request.finish_reason == "length" for request in requests)
    held = [tensor for layer in steps.cache.state_layers().values() for tensor in layer.tensors().values()]
    assert states == sum(tensor.nbytes for tensor in held) > 0
    page = sum(side.page_bytes for store in steps.cache.stores() for side in (store.key_pages, store.value_pages))
    assert memory - page <= states + steps.pages * page <= memory
    with pytest.raises(UsageError, match="recurrent states of 3 sequences"):
        Engine(model, max_batch=rows, kv_memory=states)
