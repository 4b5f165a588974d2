"""Selection by reconstruction (KVzip): a prompt is read twice, and KV heads keep different numbers of its tokens."""

from dataclasses import replace

import pytest
import torch
from tiny.models import GREEDY, random_ids, tiny_model
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kvconvert import KVCache, KVScheme
from kvconvert.calibration import kvzip
from kvconvert.calibration.kvzip import FittedScorer, KVzipPass, fit_scorer
from kvconvert.calibration.protocol import LayerJob
from kvconvert.errors import CacheError, NumericError, RecipeError, UnsupportedModelError, UsageError
from kvconvert.fidelity.scoring import Decoder, Work, compare, estimate_seconds, generate_greedily
from kvconvert.kernels.select import TokenScorer, expected_pages, share_pages, token_features
from kvconvert.methods.kvzip import SCORE_QUANTILES, scorer_shapes
from kvconvert.models.configuration import model_cache
from kvconvert.runtime import Engine, seal_prompt
from kvconvert.runtime.cache.reconstruct import PART
from kvconvert.runtime.hf.generation import adopt
from kvconvert.runtime.hf.rehearsal import read_chunks

EXACT = KVScheme(
    key_bits=16, value_bits=16, sink_tokens=4, heavy_ratio=0.4, recent_ratio=0.02, selection="reconstruction"
)
QUANTIZED = replace(
    EXACT, key_bits=3, value_bits=2, rotate_keys="hadamard", rotate_values="online", token_norm="per_head"
)
HEADS, LAYERS, TOKENS = 2, 2, 700  # a part and the beginning of another


def tiny():
    model = tiny_model("llama", "kvconvert", num_hidden_layers=LAYERS, gain=8.0, max_position_embeddings=4096)
    with torch.no_grad():  # lest all heads keep as many tokens
        model.model.layers[0].self_attn.k_proj.weight[:16] *= 0.1
    return model


@pytest.fixture(scope="module")
def llama():
    return tiny()


def read(model, scheme, ids, **arguments):
    """A cache after a sealed prompt."""
    cache = KVCache(model.config, scheme)
    cache.begin_prompt()
    with torch.no_grad():
        model(ids, past_key_values=cache, **arguments)
    seal_prompt(model, cache, ids)
    return cache


def kept(cache):
    """Which tokens every KV head of every layer keeps."""
    return [[row.kept[0].tolist() for row in store.rows] for store in cache.stores()]


def scores_by_eager_attention(model, ids, sinks=4):
    """The prompt and its repetition in one pass under one mask: float [layers * KV heads, n]."""
    n = ids.shape[1]
    again = torch.arange(sinks, n)
    part = (again - sinks) // PART
    mask = torch.zeros(n + len(again), n + len(again), dtype=torch.bool)
    mask[:n, :n] = torch.ones(n, n, dtype=torch.bool).tril()
    same = part[:, None] == part[None]
    mask[n:, :sinks] = True
    mask[n:, sinks:n] = same
    mask[n:, n:] = same & (again[:, None] >= again[None])
    first = sinks + part * PART
    size = torch.minimum(torch.tensor(PART), n - first)
    positions = torch.cat([torch.arange(n), again + size])
    bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None]
    model.set_attn_implementation("eager")
    output = model(
        torch.cat([ids, ids[:, sinks:]], 1),
        attention_mask=bias,
        position_ids=positions[None],
        output_attentions=True,
        use_cache=False,
    )
    model.set_attn_implementation("kvconvert")
    found = torch.full((LAYERS * HEADS, n), torch.inf)
    weights = torch.stack([layer[0].unflatten(0, (HEADS, -1)) for layer in output.attentions]).flatten(0, 1)
    found[:, sinks:] = (weights[:, :, n:, sinks:n] * same).amax((1, 2))
    return found


def test_kept_is_what_the_repetition_attends_to_most(llama):
    ids = random_ids(1, TOKENS)
    cache = read(llama, EXACT, ids)
    scores = scores_by_eager_attention(llama, ids)
    recent = round(0.02 * TOKENS)
    scores[:, -recent:] = torch.inf
    pages = share_pages(scores, LAYERS * int(0.42 * TOKENS * HEADS / 128), 128)
    expected = [row.topk(128 * count).indices.sort().values.tolist() for row, count in zip(scores, pages, strict=True)]
    found = [tokens for rows in kept(cache) for tokens in rows]
    assert [len(tokens) for tokens in found] == [128 * count for count in pages]
    assert len(set(pages)) > 1, "heads that keep alike show nothing"
    for tokens, wanted in zip(found, expected, strict=True):
        # Two sums of floats may swap two tokens that are nearly equal.
        assert len({*tokens} & {*wanted}) >= len(wanted) - 1


KEPT = {}  # layer index to bool [query heads, prompt]: what steps may see of the prompt


def masked_eager(module, query, key, value, attention_mask, scaling, **kwargs):
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).transpose(2, 3) * scaling + attention_mask[..., : key.shape[2]]
    if query.shape[2] < TOKENS and module.layer_idx in KEPT:
        seen = KEPT[module.layer_idx]
        scores[0, :, :, : seen.shape[1]].masked_fill_(~seen[:, None], float("-inf"))
    return (scores.softmax(-1) @ value.repeat_interleave(repeats, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register("kept_by_head_for_tests", masked_eager)
AttentionMaskInterface.register("kept_by_head_for_tests", eager_mask)


def test_what_follows_attends_to_what_each_head_keeps_and_to_nothing_else(llama):
    ids, cue, steps = random_ids(1, TOKENS), random_ids(1, 150, seed=5), random_ids(1, 3, seed=6)
    cache = read(llama, EXACT, ids)
    for index, rows in enumerate(kept(cache)):
        seen = torch.zeros(HEADS, TOKENS, dtype=torch.bool)
        for head, tokens in enumerate(rows):
            seen[head, tokens] = True
        KEPT[index] = seen.repeat_interleave(2, 0)
    parts = [cue, *steps.split(1, 1)]  # the cue completes another page of every head
    with torch.no_grad():
        got = [llama(part, past_key_values=cache).logits for part in parts]
        llama.set_attn_implementation("kept_by_head_for_tests")
        plain = DynamicCache()
        llama(ids, past_key_values=plain)
        expected = [llama(part, past_key_values=plain).logits for part in parts]
        llama.set_attn_implementation("kvconvert")
    KEPT.clear()
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


def test_rows_of_a_padded_batch_keep_what_they_keep_alone(llama):
    rows = [random_ids(1, n, seed=n)[0] for n in (TOKENS, 300, 90)]
    ids = torch.stack([torch.cat([torch.zeros(TOKENS - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([torch.cat([torch.zeros(TOKENS - len(row)), torch.ones(len(row))]) for row in rows]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = read(llama, EXACT, ids, attention_mask=mask, position_ids=positions)
    for index, row in enumerate(rows):
        alone = read(llama, EXACT, row[None])
        for one, other in zip(together.stores(), alone.stores(), strict=True):
            for head in range(HEADS):
                batched, single = one.rows[HEADS * index + head].kept, other.rows[head].kept
                if len(row) == 90:  # not a page
                    assert batched is single is None
                else:
                    assert (batched - (TOKENS - len(row))).tolist() == single.tolist()


def test_a_bundles_model_reads_prompts_twice_by_itself():
    model, ids = tiny(), random_ids(1, TOKENS)
    cache, expected = read(model, QUANTIZED, ids), []
    step = ids[:, -1:]
    with torch.no_grad():
        step = model(ids, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        for _ in range(6):
            expected.append(int(step))
            step = model(step, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
    adopt(model, [QUANTIZED] * LAYERS, {})
    for arguments in ({}, {"prefill_chunk_size": 256}):
        out = model.generate(ids, max_new_tokens=6, **arguments, **GREEDY)
        assert out[0, TOKENS:].tolist() == expected
    beams = model.generate(ids, max_new_tokens=6, num_beams=3, return_dict_in_generate=True, **GREEDY)
    assert beams.sequences.shape == (1, TOKENS + 6)
    # Three beams hold one prompt's pages, shared by reference.
    own = cache.stats()
    assert beams.past_key_values.stats().bytes_used < 2 * own.bytes_used
    assert own.residual_tokens == 4 + 6


def test_passes_that_compile_kernels_ahead_read_prompts_twice_too():
    model = tiny()
    adopt(model, [QUANTIZED] * LAYERS, {})
    with torch.no_grad():
        read_chunks(model, (1, 3, 300), model.new_kv_cache())


def test_eval_seals_what_it_reads(llama):
    decoder, ids = Decoder(llama, lambda: KVCache(llama.config, QUANTIZED)), random_ids(2, 300)
    assert estimate_seconds([decoder], ids, [Work(1, 10, 2)]) > 0
    assert generate_greedily(decoder, ids, random_ids(2, 5, seed=7), 3, chunk=128).shape == (2, 3)
    found = compare(Decoder.plain(llama), {"bundle": decoder}, ids, prefill=200)["bundle"]
    assert 0 < float(found.kl.mean()) < float("inf")


@pytest.mark.parametrize("tokens", [3, 128, 129, 300, 700, 1024])
def test_bytes_are_those_of_a_cache_after_a_prompt(llama, tokens):
    cache = read(llama, QUANTIZED, random_ids(1, tokens))
    sizes = model_cache(llama.config, [QUANTIZED] * LAYERS)
    # Full precision is float32 here.
    layers = tuple(replace(layer, number_bytes=4) for layer in sizes.layers)
    assert cache.stats().bytes_used == replace(sizes, layers=layers).exact_bytes(tokens)


def test_a_prompt_that_was_read_once_is_not_sealed(llama):
    for end in (lambda cache: cache.seal(), lambda cache: llama(random_ids(1, 1), past_key_values=cache)):
        cache = KVCache(llama.config, EXACT)
        llama(random_ids(1, 300), past_key_values=cache)
        with pytest.raises(CacheError, match=r"call kvconvert\.runtime\.seal_prompt"):
            end(cache)
    with pytest.raises(UsageError, match="1 row of 200 tokens, and the cache holds 1 of 301"):
        seal_prompt(llama, cache, random_ids(1, 200))


def test_a_second_prompt_is_kept_whole(llama):
    cache = read(llama, QUANTIZED, random_ids(1, 300))
    before = cache.stats().tokens
    ids = torch.cat([random_ids(1, 300), random_ids(1, 200, seed=3)], 1)
    llama(ids[:, 300:], past_key_values=cache)
    seal_prompt(llama, cache, ids)
    assert cache.stats().tokens == before + 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heavy_ratio": None, "recent_ratio": None}, "are not set"),
        ({"allocation": "pyramid"}, "shares one budget"),
        ({"key_bits": 2, "key_rounding": "error_feedback"}, "without matrices"),
        ({"key_recent_tokens": 128}, "key_recent_tokens"),
        ({"key_bits": 2, "boost_fraction": 0.25, "boost_select": "calibrated"}, "without tables"),
    ],
)
def test_what_heads_apart_do_not_have_is_refused(changes, message):
    with pytest.raises(RecipeError, match=message):
        KVScheme(**EXACT.to_dict() | changes)


def test_what_cannot_be_read_again_is_refused(llama):
    with pytest.raises(UsageError, match="kv_memory"):
        KVCache(llama.config, EXACT, kv_memory=1 << 20)
    with pytest.raises(RecipeError, match="one scheme for all layers"):
        KVCache(llama.config, [EXACT, replace(EXACT, heavy_ratio=0.2)])
    with pytest.raises(RecipeError, match="leaves layers out"):
        KVCache(llama.config, [EXACT, None])
    sliding = tiny_model("mistral", "kvconvert", num_hidden_layers=2, sliding_window=90)
    with pytest.raises(UnsupportedModelError, match="sliding_attention"):
        KVCache(sliding.config, EXACT)
    cache = read(llama, EXACT, random_ids(1, 300))
    with pytest.raises(CacheError, match="Assisted decoding"):
        cache.crop(-1)
    with pytest.raises(CacheError, match="generate in batches"):
        KVCache(llama.config, EXACT).open_rows(2)


def test_the_other_ways_that_refusals_name_are_open(llama):
    sliding = tiny_model("mistral", "kvconvert", num_hidden_layers=2, sliding_window=90)
    ids, options = random_ids(2, 300), {"max_new_tokens": 3, "pad_token_id": 0, **GREEDY}
    with pytest.raises(UnsupportedModelError, match='choose selection = "attention"'):
        KVCache(sliding.config, EXACT)
    cache = KVCache(sliding.config, replace(EXACT, selection="attention"))
    assert sliding.generate(ids, past_key_values=cache, **options).shape == (2, 303)
    with pytest.raises(CacheError, match="generate in batches instead"):
        KVCache(llama.config, EXACT).open_rows(2)
    model = tiny()
    adopt(model, [EXACT] * LAYERS, {})
    with pytest.raises(UnsupportedModelError, match="serve this llama model: sequences cannot join a cache"):
        Engine(model, max_batch=1)
    found = model.generate(ids, **options)
    assert found.shape == (2, 303)
    with pytest.raises(CacheError, match="generate without an assistant model or prompt lookup"):
        model.generate(ids[:1], prompt_lookup_num_tokens=2, **options)
    assert torch.equal(model.generate(ids, **options), found)


def test_an_engine_refuses_it():
    model = tiny_model("llama", "kvconvert", num_hidden_layers=LAYERS)
    adopt(model, [EXACT] * LAYERS, {})
    with pytest.raises(UnsupportedModelError, match="prompts are read twice"):
        Engine(model)


def scorers():
    """A random network for each layer, for values that are not rotated."""
    generator = torch.Generator().manual_seed(1)
    shapes = [shape for name, shape in scorer_shapes(HEADS, 16, 16).items() if name != "scorer_quantiles"]
    return [TokenScorer(*(0.1 * torch.randn(shape, generator=generator) for shape in shapes)) for _ in range(LAYERS)]


def quantiles(layer):
    """Those of scores that are spread otherwise in each head."""
    return torch.linspace(2, -2, SCORE_QUANTILES) * torch.arange(1, HEADS + 1)[:, None] - layer


def plan_for(scheme):
    """The networks as a bundle with this scheme holds them."""
    plan = {}
    for index, scorer in enumerate(scorers()):
        job = LayerJob(
            index, "", None, scheme, None, None, heads=HEADS, key_dim=16, value_dim=16,
            scorer=FittedScorer(scorer, 1.0, quantiles(index)),
        )  # fmt: skip
        plan |= {f"layers.{index}.{name}": tensor for name, tensor in KVzipPass(job).result().plan.items()}
    return plan


PREDICTED = replace(EXACT, selection="predicted")


@pytest.mark.parametrize(
    "changes", [{}, {"rotate_keys": "hadamard", "rotate_values": "online"}], ids=["plain", "rotated"]
)
def test_predicted_scores_follow_from_keys_and_values(llama, changes):
    ids, scheme, plain = random_ids(1, TOKENS), replace(PREDICTED, **changes), DynamicCache()
    cache = KVCache(llama.config, scheme, plan=plan_for(scheme))
    cache.begin_prompt()
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        llama.set_attn_implementation("eager")
        llama(ids, past_key_values=plain)
        llama.set_attn_implementation("kvconvert")
    cache.seal()
    found = [
        scorer.scores(layer.keys[0], layer.values[0]) for scorer, layer in zip(scorers(), plain.layers, strict=True)
    ]
    scores = torch.cat(found)
    scores[:, : EXACT.sink_tokens] = scores[:, -round(0.02 * TOKENS) :] = torch.inf
    every = torch.cat([quantiles(layer) for layer in range(LAYERS)]).numpy()
    pages = expected_pages(every, LAYERS * int(0.42 * TOKENS * HEADS / 128), TOKENS, 4 + round(0.02 * TOKENS), 128)
    assert len({*pages}) > 1
    expected = [row.topk(128 * count).indices.sort().values.tolist() for row, count in zip(scores, pages, strict=True)]
    rows = [tokens for layer in kept(cache) for tokens in layer]
    for tokens, wanted in zip(rows, expected, strict=True):
        assert len(tokens) == len(wanted)
        assert len({*tokens} & {*wanted}) >= len(wanted) - 2  # rounding may swap tokens that are nearly equal


def test_a_prompt_whose_scores_are_predicted_is_read_once():
    model, ids, passes = tiny(), random_ids(1, TOKENS), []
    scheme = replace(QUANTIZED, selection="predicted")
    adopt(model, [scheme] * LAYERS, plan_for(scheme))
    model.model.layers[0].register_forward_pre_hook(lambda module, args: passes.append(args[0].shape[1]))
    out = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, **GREEDY)
    assert sum(passes) < 2 * TOKENS
    assert out.past_key_values.stats().bits_per_value < 6


def test_networks_are_needed_of_a_plan(llama):
    cache = KVCache(llama.config, PREDICTED)
    with pytest.raises(RecipeError, match='selection = "predicted" needs scorer_hidden_weight'):
        llama(random_ids(1, 300), past_key_values=cache)
    plan = plan_for(PREDICTED)
    name = next(name for name in plan if name.endswith("scorer_bias"))
    cache = KVCache(llama.config, PREDICTED, plan=plan | {name: plan[name] * torch.nan})
    with pytest.raises(RecipeError, match="scorer_bias of the KV plan is not finite"):
        llama(random_ids(1, 300), past_key_values=cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: None, "needs scorer_quantiles of shape .* found none"),
        (lambda tensor: tensor[:, :-1], "needs scorer_quantiles of shape .* found"),
        (lambda tensor: tensor * torch.nan, "scorer_quantiles of the KV plan is not finite"),
    ],
    ids=["missing", "misshapen", "not finite"],
)
def test_quantiles_of_later_layers_are_checked_before_the_first_one_shares_by_them(llama, change, message):
    plan, name = plan_for(PREDICTED), f"layers.{LAYERS - 1}.scorer_quantiles"
    plan[name] = change(plan[name])
    cache = KVCache(llama.config, PREDICTED, plan={key: tensor for key, tensor in plan.items() if tensor is not None})
    cache.expect_whole_prompt()
    with pytest.raises(RecipeError, match=message):
        llama(random_ids(1, TOKENS), past_key_values=cache)


def test_refusals_count_sequences_and_not_heads(llama, tmp_path):
    cache = KVCache(llama.config, PREDICTED, plan=plan_for(PREDICTED))
    cache.begin_prompt()
    llama(random_ids(1, 300), past_key_values=cache)
    with pytest.raises(CacheError, match="holds 1 sequence and layer 0 was given 2"):
        llama(random_ids(2, 1), past_key_values=cache)
    cache.seal()
    with pytest.raises(CacheError, match="compresses whole prompts"):
        cache.save(tmp_path / "session.safetensors")


@pytest.mark.parametrize(("name", "value"), [("scorer_bias", 1e38), ("scorer_weight", 1e30), ("scorer_weight", -1e30)])
def test_predicted_scores_beyond_all_numbers_leave_sinks_and_newest_tokens_kept(llama, name, value):
    ids, plan = random_ids(1, TOKENS), plan_for(PREDICTED)
    cache = KVCache(llama.config, PREDICTED, plan=plan | {key: t + value for key, t in plan.items() if name in key})
    cache.begin_prompt()
    llama(ids, past_key_values=cache)
    cache.seal()
    for tokens in (tokens for layer in kept(cache) for tokens in layer if tokens):
        assert {*tokens} >= {*range(EXACT.sink_tokens), TOKENS - 1}


def test_of_more_newest_tokens_than_whole_pages_hold_the_newest_are_kept(llama):
    scheme = replace(PREDICTED, heavy_ratio=0.0, recent_ratio=1.0)
    cache = KVCache(llama.config, scheme, plan=plan_for(scheme))
    cache.begin_prompt()
    llama(random_ids(1, 200), past_key_values=cache)
    cache.seal()
    sinks = [*range(EXACT.sink_tokens)]
    assert kept(cache) == [[[*sinks, *range(72 + len(sinks), 200)]] * HEADS] * LAYERS


def test_predicted_scores_that_are_no_numbers_are_refused(llama):
    plan = plan_for(PREDICTED)
    plan |= {key: t + 3e38 for key, t in plan.items() if "hidden_weight" in key}
    plan |= {
        key: torch.full_like(t, 3e38) * (-1) ** torch.arange(256)
        for key, t in plan.items()
        if key.endswith("scorer_weight")
    }
    cache = KVCache(llama.config, PREDICTED, plan=plan)
    cache.begin_prompt()
    llama(random_ids(1, TOKENS), past_key_values=cache)
    cache.seal()
    with pytest.raises(NumericError, match="scores tokens of this prompt by NaN"):
        llama(random_ids(1, 1), past_key_values=cache)


def test_a_prompt_whose_scores_are_predicted_is_sealed_by_the_first_step(llama):
    ids, caches = random_ids(1, TOKENS), []
    for seal in (True, False):
        caches.append(KVCache(llama.config, PREDICTED, plan=plan_for(PREDICTED)))
        llama(ids, past_key_values=caches[-1])
        if seal:
            caches[-1].seal()
        llama(random_ids(1, 1), past_key_values=caches[-1])
    assert kept(caches[0]) == kept(caches[1])


def test_networks_learn_scores_that_keys_and_values_tell(monkeypatch):
    monkeypatch.setattr(kvzip, "STEPS", 150)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 3000, 8, generator=generator) for _ in range(2))
    keys[1] *= 30
    norm = keys[0].unflatten(1, (2, 4)).norm(dim=1)[:, 0]
    scores = torch.sigmoid(values[..., :2].sum(-1) + norm - 6).T
    fit = fit_scorer(token_features(keys, values), scores, 500)
    assert fit.explained > 0.9
    own = fit.scorer.scores(keys, values)[:, -500:].log().T
    torch.testing.assert_close(own, scores[-500:].log(), atol=1.5, rtol=0)
    unrelated = fit_scorer(token_features(keys, values), scores[torch.randperm(3000, generator=generator)], 500)
    assert unrelated.explained < 0.1


@pytest.mark.quick("256")
@pytest.mark.parametrize("prompt_chunk", [2048, 256])
def test_an_engine_serves_what_is_predicted(prompt_chunk):
    model, scheme = tiny(), replace(QUANTIZED, selection="predicted")
    adopt(model, [scheme] * LAYERS, plan_for(scheme))
    prompts = [random_ids(1, n, seed=n) for n in (TOKENS, 300, 90, 513)]
    alone = [model.generate(ids, max_new_tokens=7, **GREEDY)[0, ids.shape[1] :].tolist() for ids in prompts]
    engine = Engine(model, max_batch=2, prompt_chunk=prompt_chunk)
    requests = [engine.add(ids[0].tolist(), max_new_tokens=7) for ids in prompts]
    engine.run()
    assert [list(request.tokens) for request in requests] == alone
