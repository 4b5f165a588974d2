"""The cache's own promises: what it stores, what it costs, what it refuses."""

import copy

import pytest
import torch
from tiny.models import ARCHITECTURES, GREEDY, random_ids, tiny_model
from transformers import DeepseekV3Config, LlamaConfig

from kvconvert import KVCache, KVScheme
from kvconvert.errors import CacheError, NumericError, RecipeError, UnsupportedModelError, UsageError
from kvconvert.runtime.cache.attend import commit
from kvconvert.runtime.cache.compress import end_forward
from kvconvert.runtime.cache.forward_pass import PassTokens

OSCAR = KVScheme(rotate_keys="hadamard", rotate_values="online", token_norm="joint")
REFERENCE_SHAPE = LlamaConfig(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)


def feed(
    cache: KVCache, tokens: int, batch: int = 1, heads: int = 2, dim: int = 64, dtype=torch.bfloat16, seed: int = 0
):
    """Store random tokens the way attention does, without a model around it."""
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.paged_layers():
        start = layer.store.logical
        keys, values = (torch.randn(batch, heads, tokens, dim, generator=generator).to(dtype) for _ in range(2))
        layer.update(keys, values)
        commit(layer.store, PassTokens(torch.arange(start, start + tokens)))
        end_forward(layer.store)


@pytest.mark.parametrize(("preset", "smaller"), [("oscar-paper", 4.5), ("oscar-g128-paper", 6.0)])
def test_2048_tokens_without_residual_shrink_as_promised(preset, smaller):
    cache = KVCache(REFERENCE_SHAPE, preset)
    feed(cache, 2048)
    stats = cache.stats()
    assert stats.residual_tokens == 0
    assert stats.values == 2048 * 2 * 2 * 64 * 2
    assert stats.values * 2 / stats.bytes_used >= smaller


@pytest.mark.parametrize(("key_bits", "value_bits"), [(3, 2), (2, 3), (3, 3), (4, 3)])
def test_complete_pages_of_three_bits_take_what_the_scheme_says(key_bits, value_bits):
    scheme = KVScheme(key_bits=key_bits, value_bits=value_bits, key_group_size=128, value_group_size=64)
    cache = KVCache(REFERENCE_SHAPE, scheme)
    feed(cache, 256)
    assert cache.stats().bits_per_value == (key_bits + value_bits) / 2 + (32 / 128 + 32 / 64) / 2


@pytest.mark.each_value
@pytest.mark.parametrize("preset", ["oscar-paper", "oscar-g128-paper"])
@pytest.mark.parametrize("tokens", [4097, 4223, 4224, 5000, 12_345])
def test_beyond_4096_tokens_little_is_allocated_and_not_used(preset, tokens):
    cache = KVCache(REFERENCE_SHAPE, preset)
    feed(cache, tokens)
    stats = cache.stats()
    assert stats.bytes_used <= stats.bytes_allocated <= 1.15 * stats.bytes_used


def test_slack_stays_small_while_decoding_token_by_token():
    cache = KVCache(REFERENCE_SHAPE, "oscar-g128-paper")
    feed(cache, 4100)
    for step in range(260):
        feed(cache, 1, seed=step)
        stats = cache.stats()
        assert stats.bytes_allocated <= 1.15 * stats.bytes_used, step


def test_reported_bytes_are_those_of_the_tensors():
    cache = KVCache(REFERENCE_SHAPE, "oscar-paper")
    feed(cache, 1000)
    store = cache.layers[0].store
    tensors = [chunk for pool in (store.key_pages, store.value_pages) for chunk in pool._chunks]
    tensors += [buffer.tensor for row in store.rows for buffer in (row.keys, row.values)]
    assert store.bytes_allocated() == sum(t.untyped_storage().nbytes() for t in tensors)


def test_beams_share_pages_and_give_them_back():
    cache = KVCache(REFERENCE_SHAPE, "oscar-paper")
    feed(cache, 300)
    alone = cache.stats()
    cache.batch_repeat_interleave(4)
    assert cache.stats().pages == alone.pages
    feed(cache, 90, batch=4)
    assert cache.stats().pages == alone.pages + 4 * 2
    cache.reorder_cache(torch.tensor([2, 2, 2, 2]))
    assert cache.stats().pages == alone.pages + 2
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.stats().bytes_allocated == 0


def test_diverging_beams_do_not_write_into_each_other():
    model = tiny_model("llama", "kvconvert", num_hidden_layers=1)
    ids = random_ids(1, 140)
    cache = KVCache(model.config, OSCAR)
    model(ids, past_key_values=cache)
    single = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([0, 0]))
    both = model(torch.tensor([[5], [9]]), past_key_values=cache).logits
    alone = model(torch.tensor([[9]]), past_key_values=single).logits
    torch.testing.assert_close(both[1], alone[0], rtol=1e-4, atol=1e-5)  # same sums, another batch size


def test_sink_tokens_and_recent_tokens_stay_in_full_precision():
    scheme = KVScheme(sink_tokens=4, key_recent_tokens=64, value_recent_tokens=64)
    cache = KVCache(REFERENCE_SHAPE, scheme)
    feed(cache, 128 + 63)
    assert cache.stats().pages == 0
    feed(cache, 1)
    assert (cache.stats().pages, cache.stats().residual_tokens) == (2, 4 + 64)
    assert cache.layers[0].store.residual_positions(0).tolist() == [0, 1, 2, 3, *range(128, 192)]


@pytest.mark.quick("7", "400")
@pytest.mark.parametrize("chunk", [1, 7, 400])
def test_a_sliding_layer_drops_pages_that_no_query_can_see(chunk):
    config = {"sliding_window": 150, "num_hidden_layers": 1}
    model = tiny_model("mistral", "eager", **config)
    ids = random_ids(1, 400)
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("kvconvert")
    cache = KVCache(model.config, KVScheme(key_bits=16, value_bits=16))
    got = torch.cat([model(ids[:, s : s + chunk], past_key_values=cache).logits for s in range(0, 400, chunk)], 1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)  # float32 sums in another order
    assert cache.get_seq_length() == 400
    assert cache.stats().tokens <= 150 + 128 + 16


@pytest.mark.parametrize("window", [{"sliding_window": 100}, {"attention_chunk_size": 100}], ids=str)
def test_a_window_that_the_model_passes_over_drops_nothing(window):
    model = tiny_model("llama", "eager", num_hidden_layers=1, **window)
    ids = random_ids(1, 400)
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("kvconvert")
    cache = KVCache(model.config, KVScheme(key_bits=16, value_bits=16))
    got = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(130, 1)], 1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)  # float32 sums in another order
    assert cache.stats().tokens == 400


@pytest.mark.parametrize("bits", [2, 3])
def test_crop_takes_back_recorded_tokens_exactly(bits):
    model = tiny_model("llama", "kvconvert", num_hidden_layers=2)
    ids = random_ids(1, 200)
    scheme = KVScheme(**OSCAR.to_dict() | {"key_bits": bits, "value_bits": bits})
    plain, cropped = KVCache(model.config, scheme), KVCache(model.config, scheme)
    model(ids, past_key_values=plain)
    model(ids, past_key_values=cropped)
    cropped.activate_past_recording()
    model(random_ids(1, 90, seed=5), past_key_values=cropped)  # crosses a page boundary, which recording leaves open
    cropped.crop(-90)
    assert cropped.stats() == plain.stats()
    probe = random_ids(1, 1, seed=6)
    assert torch.equal(model(probe, past_key_values=plain).logits, model(probe, past_key_values=cropped).logits)


def test_a_crop_into_pages_is_refused_and_changes_nothing():
    cache = KVCache(REFERENCE_SHAPE, "oscar-paper")
    feed(cache, 130)
    before = cache.stats()
    with pytest.raises(CacheError, match=r"cannot give back its newest 3 tokens: layer 0 has already quantized"):
        cache.crop(-3)
    assert cache.stats() == before
    cache.crop(-2)
    assert cache.get_seq_length() == 128
    with pytest.raises(CacheError, match="negative number"):
        cache.crop(5)


def test_a_preallocated_cache_runs_out_of_pages_by_name():
    page = (
        128 * (2 * 2 * 64 * 2 // 8) + 16 * 128 + 16 * 128 + 256
    )  # codes, key and value metadata, norms of `oscar` at G = 32
    cache = KVCache(REFERENCE_SHAPE, "oscar-paper", kv_memory=2 * 3 * page)
    feed(cache, 3 * 128)
    store = cache.layers[0].store
    assert store.key_pages.bytes_allocated + store.value_pages.bytes_allocated == 3 * page
    with pytest.raises(CacheError, match=r"layer 0 of the KV cache is out of pages: 3 of 3 are in use.*kv_memory"):
        feed(cache, 128)


def test_memory_for_less_than_a_page_in_every_layer_is_refused_when_the_cache_is_made():
    page = KVCache(REFERENCE_SHAPE, "oscar-paper", kv_memory=10**6)
    feed(page, 128)
    least = sum(s.page_bytes for layer in page.layers for s in (layer.store.key_pages, layer.store.value_pages))
    with pytest.raises(UsageError, match=f"1,000 bytes are not enough for one page.*at least {least:,} bytes"):
        KVCache(REFERENCE_SHAPE, "oscar-paper", kv_memory=1000)
    with pytest.raises(UsageError, match="not enough"):
        KVCache(REFERENCE_SHAPE, "oscar-paper", kv_memory=least - 1)
    feed(KVCache(REFERENCE_SHAPE, "oscar-paper", kv_memory=least), 128)


@pytest.mark.parametrize("memory", [2**50, 2**63 - 1])
def test_more_memory_than_there_is_is_one_sentence(memory):
    with pytest.raises(UsageError, match=r"`kv_memory` cannot be allocated, .*; give less"):
        feed(KVCache(REFERENCE_SHAPE, "oscar-paper", kv_memory=memory), 128)


@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "Layer 1, KV head 1"), (float("inf"), "Layer 1, KV head 1"), (3e38, "Layer 1")]
)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_numbers_that_cannot_be_stored_name_layer_and_head(value, what, part):
    cache = KVCache(REFERENCE_SHAPE, KVScheme())
    for index, layer in enumerate(cache.layers):
        keys, values = torch.randn(1, 2, 128, 64), torch.randn(1, 2, 128, 64)
        if index == 1:
            (keys if part == "keys" else values)[0, 1, 40, 3] = value
        layer.update(keys, values)
        commit(layer.store, PassTokens(torch.arange(128)))
        if index == 0:
            end_forward(layer.store)
        else:
            with pytest.raises(NumericError, match=what):
                end_forward(layer.store)


def test_a_token_of_zeros_comes_back_as_zeros():
    cache = KVCache(REFERENCE_SHAPE, "oscar-paper")
    layer = cache.layers[0]
    keys, values = torch.randn(1, 2, 128, 64), torch.randn(1, 2, 128, 64)
    keys[:, :, 17] = 0
    for each in cache.layers:
        each.update(keys, values)
        commit(each.store, PassTokens(torch.arange(128)))
        end_forward(each.store)
    pages = layer.store.key_pages.read(layer.store.sequences[0].keys.pages)
    assert pages.norm[0, 0, 17] == 0
    assert torch.isfinite(pages.scale).all()


def test_a_copied_cache_goes_its_own_way():
    model = tiny_model("llama", "kvconvert", num_hidden_layers=2)
    cache = KVCache(model.config, "oscar")
    prefix = random_ids(1, 140)
    model(prefix, past_key_values=cache)
    saved = copy.deepcopy(cache)
    first = model.generate(
        torch.cat([prefix, random_ids(1, 4, seed=3)], 1), max_new_tokens=5, past_key_values=cache, **GREEDY
    )
    again = model.generate(
        torch.cat([prefix, random_ids(1, 4, seed=3)], 1), max_new_tokens=5, past_key_values=saved, **GREEDY
    )
    assert first.tolist() == again.tolist()


def test_schemes_that_do_not_fit_the_model_are_refused():
    folded = KVScheme.preset("oscar")
    with pytest.raises(
        RecipeError, match=r"layer 0 says that the model.s weights carry the rotation.*with_online_rotation"
    ):
        KVCache(REFERENCE_SHAPE, folded)
    assert KVCache(REFERENCE_SHAPE, "oscar").schemes[0].rotate_values == "online"
    with pytest.raises(RecipeError, match="A model of 2 layers was given a list of 3 KV schemes"):
        KVCache(REFERENCE_SHAPE, [OSCAR] * 3)
    with pytest.raises(RecipeError, match="preset 'oscr' is not available"):
        KVCache(REFERENCE_SHAPE, "oscr")
    narrow = KVCache(REFERENCE_SHAPE, KVScheme(key_bits=1, value_bits=1))
    with pytest.raises(RecipeError, match="multiple of 16; this model has 24"):
        feed(narrow, 4, dim=24)
    with pytest.raises(UnsupportedModelError, match="MLA"):
        KVCache(DeepseekV3Config(), "kivi")


def test_a_cache_beside_another_takes_what_that_one_has_of_the_plan_on_the_device():
    feedback = torch.eye(64).repeat(2, 1, 1)
    plan = {f"layers.{index}.key_feedback": feedback for index in range(REFERENCE_SHAPE.num_hidden_layers)}
    cache = KVCache(REFERENCE_SHAPE, KVScheme(key_rounding="error_feedback", rotate_values="online"), plan=plan)
    cache.open_rows(2)
    first = cache.beside()
    feed(first, 5)
    cache.join(1, first)
    second = cache.beside()
    feed(second, 5)
    for mine, theirs in zip(second.stores(), cache.stores(), strict=True):
        assert mine.format.key_tensors.feedback is theirs.format.key_tensors.feedback is not None


def test_one_layer_may_stay_unquantized_beside_others():
    model = tiny_model("llama", "kvconvert", num_hidden_layers=2)
    cache = KVCache(model.config, [None, KVScheme()])
    model(random_ids(1, 128), past_key_values=cache)
    assert cache.layers[0].store.key_pages.page_bytes == 128 * 2 * 16 * 4
    assert cache.layers[1].store.key_pages.page_bytes < 128 * 2 * 16


def test_a_cache_quantizes_nothing_twice():
    model = tiny_model("llama", "kvconvert", num_hidden_layers=1)
    cache = KVCache(model.config, "oscar")
    model(random_ids(1, 260), past_key_values=cache)
    before = {name: tensor.clone() for name, tensor in cache.layers[0].store.key_pages.read([0, 1]).tensors()}
    for step in range(140):
        model(random_ids(1, 1, seed=step), past_key_values=cache)
    assert cache.stats().pages == 3
    for name, tensor in cache.layers[0].store.key_pages.read([0, 1]).tensors():
        assert torch.equal(tensor, before[name]), name


def test_pages_kept_for_later_layers_of_a_pass_are_written_when_the_prompt_is_sealed():
    model = ARCHITECTURES["gemma4_text_shared"].build("kvconvert")
    ids = random_ids(1, 301)
    logits = []
    for sealed in (False, True):
        cache = KVCache(model.config, "kivi")
        with torch.no_grad():
            model(ids[:, :300], past_key_values=cache)
            assert cache.stats().pages == 0
            if sealed:
                cache.seal()
                assert cache.stats().pages
                assert cache.stats().residual_tokens < 300
            logits.append(model(ids[:, 300:], past_key_values=cache).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("scheme", ["kivi", "kitty", "minikv"])
def test_few_tokens_are_compressed_at_the_end_of_a_pass_and_store_what_many_do(scheme, monkeypatch):
    model = tiny_model("llama", "kvconvert", num_hidden_layers=2)
    ids, stored = random_ids(1, 400), []
    for few in (0, 2048):
        monkeypatch.setattr("kvconvert.runtime.cache.compress.FEW_TOKENS", few)
        cache = KVCache(model.config, scheme)
        flushed = []

        def update(*given, after=cache.layers[1].update, first=cache.layers[0].store, flushed=flushed, **named):
            flushed.append(first.flushes)
            return after(*given, **named)

        cache.layers[1].update = update
        model(ids, past_key_values=cache)
        cache.seal()
        stored.append([(s.bytes_used(), s.residual(0)[0]) for s in cache.stores()])
        assert (flushed[0] > 0) == (few == 0 and scheme != "minikv")
    for (before, keys), (after, others) in zip(*stored, strict=True):
        assert before == after
        assert keys.equal(others)
