"""Prompts that begin alike share what was stored of them, and get what they would get alone."""

import random

import pytest
import torch
from fake_model import FakeModel, next_logits
from tiny.models import ARCHITECTURES, low_bit, tiny_model

from kvconvert.errors import UsageError
from kvconvert.methods import PRESETS, KVScheme
from kvconvert.runtime import Engine
from kvconvert.runtime.cache.forward_pass import UnreadFlags
from kvconvert.runtime.engine.model_steps import ModelSteps
from kvconvert.runtime.engine.prefixes import chain
from kvconvert.runtime.hf.generation import adopt

CHUNK = 128
WHOLE = [name for name in PRESETS if PRESETS[name].compresses_prompts()]
ALWAYS = ("oscar-g128", "kitty", "kivi", "default")


def llama(*schemes):
    return low_bit(tiny_model("llama", num_hidden_layers=2, gain=3.0), *schemes)


def engine_of(model, **options):
    return Engine(model, **({"max_batch": 4, "prompt_chunk": CHUNK, "max_batch_tokens": 4 * CHUNK} | options))


def ids_of(length, seed=0, vocabulary=90):
    return random.Random(seed).choices(range(1, vocabulary), k=length)


def logits_of(engine, prompt, new=6):
    """A request's tokens, and the logits that each was chosen from; alone in its passes."""
    seen = []
    forward = engine._steps.forward

    def watched(*arguments):
        logits, failures = forward(*arguments)
        seen.append(logits.clone())
        return logits, failures

    engine._steps.forward = watched
    request = engine.add(prompt, max_new_tokens=new, stop_token_ids=[])
    row = None
    engine.step()
    row = request.row
    engine.run()
    engine._steps.forward = forward
    return request, torch.stack([logits[row] for logits in seen[-new:]])


def check_hit(model, stored, prompt, cached, **options):
    """A prompt gives the same bits after another that begins like it as in an engine that keeps nothing."""
    plain, engine = engine_of(model, prefix_caching=False, **options), engine_of(model, **options)
    expected, expected_logits = logits_of(plain, prompt)
    first, _ = logits_of(engine, stored)
    found, logits = logits_of(engine, prompt)
    assert (expected.cached_tokens, first.cached_tokens, found.cached_tokens) == (0, 0, cached)
    assert found.tokens == expected.tokens
    assert torch.equal(logits, expected_logits)
    assert plain.stats().prefix_pages == 0
    return engine


@pytest.mark.parametrize(
    "scheme", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.full) for n in PRESETS if n not in WHOLE]
)
def test_a_hit_gives_the_logits_of_a_miss_bit_for_bit(scheme):
    common = ids_of(300)
    engine = check_hit(llama(scheme), common + ids_of(50, 1), common + ids_of(41, 2), 2 * CHUNK)
    stats = engine.stats()
    assert (stats.cached_tokens, stats.prompt_tokens) == (256, 350 + 341 - 256)
    assert stats.prefix_pages == 2


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral"])
@pytest.mark.parametrize("lengths", [(300, 40), (520, 130)])
def test_sliding_windows_hold_after_a_hit(name, lengths):
    model = low_bit(ARCHITECTURES[name].build(), "kivi", KVScheme(sink_tokens=5, key_recent_tokens=70))
    common = ids_of(lengths[0])
    cached = lengths[0] // CHUNK * CHUNK
    check_hit(model, common + ids_of(9, 1), common + ids_of(lengths[1], 2), cached)


def test_groups_with_windows_of_their_own_and_key_centers_hold_after_a_hit():
    model = tiny_model("llama", num_hidden_layers=3, gain=3.0)
    schemes = [
        KVScheme(sink_tokens=3, key_recent_tokens=200, value_recent_tokens=10),
        KVScheme(boost_fraction=0.25, sink_tokens=32, value_recent_tokens=128),
        KVScheme(key_center="calibrated", sink_tokens=4, token_norm="joint"),
    ]
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    half = torch.arange(dim // 2)
    torch.manual_seed(0)
    plan = {
        "layers.2.key_mean": torch.randn(heads, dim),
        "layers.2.rope_frequencies": 10_000.0 ** (-half / len(half)),
        "layers.2.rope_pairs": torch.stack([half, half + len(half)], 1).to(torch.int16),
    }
    adopt(model, schemes, plan)
    common = ids_of(400)
    check_hit(model, common, common + ids_of(200, 3), 3 * CHUNK)


def test_the_last_token_is_always_read_and_chunks_may_be_longer_than_a_page():
    model, prompt = llama("kivi"), ids_of(768)
    check_hit(model, prompt, prompt, 512, prompt_chunk=256, max_batch_tokens=256)
    check_hit(model, prompt, prompt + ids_of(3, 1), 768, prompt_chunk=256, max_batch_tokens=256)


def test_prompts_that_differ_early_share_nothing():
    prompt = ids_of(400)
    other = [*prompt[:100], prompt[100] % 89 + 1, *prompt[101:]]
    check_hit(llama("kivi"), prompt, other, 0)
    root = b"model"
    assert chain(prompt, CHUNK, root)[:1] != chain(other, CHUNK, root)[:1]
    assert len(chain(prompt, CHUNK, root)) == 3
    assert set(chain(prompt, CHUNK, root)).isdisjoint(chain(prompt, CHUNK, b"another model"))


@pytest.mark.parametrize("late", [False, pytest.param(True, id="told late")])
def test_prompts_that_come_together_are_read_once(late, monkeypatch):
    """Those that begin alike wait for the first one's chunks, and a later difference parts them."""
    if late:  # as on a GPU, which says with the tokens of a pass whether its pages could be written
        monkeypatch.setattr(ModelSteps, "prepare", lambda steps, *_: setattr(steps, "lag", 1))
        arrived = UnreadFlags.arrived
        monkeypatch.setattr(UnreadFlags, "arrived", lambda self, wait: wait and arrived(self, wait))
    model, common = llama("oscar-g128"), ids_of(400)
    prompts = [common + ids_of(20 + n, n) for n in range(1, 5)]
    plain, engine = engine_of(model, prefix_caching=False), engine_of(model)
    expected = []
    for prompt in prompts:
        request = plain.add(prompt, max_new_tokens=8, stop_token_ids=[])
        plain.run()
        expected.append(request.tokens)
    requests = [engine.add(prompt, max_new_tokens=8, stop_token_ids=[]) for prompt in prompts]
    engine.run()
    assert [request.tokens for request in requests] == expected
    assert [request.cached_tokens for request in requests] == [0, 384, 384, 384]
    assert engine.stats().prefix_pages == 3


def of_pages(engine):
    """Pages that are in use in each group and side of an engine's cache."""
    groups = engine._steps.cache.groups
    return {numbers.used for group in groups for numbers in (group.key_numbers, group.value_numbers)}


def test_the_least_recently_used_prefixes_make_room():
    model = llama("kivi")
    page = engine_of(model, kv_memory=10**6)._steps.pages
    engine = engine_of(model, kv_memory=10**6 * 8 // page)
    assert engine._steps.pages == 8
    first, second, third = (ids_of(300, seed) for seed in range(3))

    def read(prompt):
        request = engine.add(prompt, max_new_tokens=20, stop_token_ids=[])
        engine.run()
        assert engine.stats().pages_reserved == 0
        return request.cached_tokens

    assert [read(first), read(second), read(first)] == [0, 0, 256]
    assert (engine.stats().prefix_pages, engine.stats().prefixes_evicted) == (4, 0)
    # Eight pages hold these four and three more, and one of the seven is the second's last.
    assert read(ids_of(700, 5)) == 0
    assert engine.stats().prefixes_evicted == 2
    assert [read(first), read(second)] == [256, 0]
    # A prompt of all pages takes everything.
    assert read(ids_of(1000, 4)) == 0
    assert engine.stats().prefix_pages <= 7
    assert read(third) == 0
    engine._prefixes.clear()
    assert of_pages(engine) == {0}


def test_requests_that_share_pages_need_them_once():
    """Three requests of four pages each, three of which they share, run side by side in a cache of seven."""
    model, common = llama("kivi"), ids_of(400)
    page = engine_of(model, kv_memory=10**6)._steps.pages
    engine = engine_of(model, kv_memory=10**6 * 7 // page)
    prompts = [common + ids_of(20, seed) for seed in range(1, 4)]
    requests = [engine.add(prompt, max_new_tokens=60, stop_token_ids=[]) for prompt in prompts]
    most = 0
    while not all(request.finished for request in requests):
        engine.step()
        most = max(most, engine.stats().running)
        assert engine.stats().pages_reserved <= 7
    assert most == 3
    assert [len(request.tokens) for request in requests] == [60] * 3


def test_what_cannot_share_is_refused_by_name_or_left_out():
    for name in WHOLE[:3]:
        if PRESETS[name].modality != "all":
            continue
        model = llama(name)
        with pytest.raises(UsageError, match="`prefix_caching` is not possible: a layer's scheme compresses prompts"):
            engine_of(model, prefix_caching=True)
        engine = engine_of(model)
        for _ in range(2):
            request = engine.add(ids_of(300), max_new_tokens=2)
            engine.run()
            assert request.cached_tokens == 0
    with pytest.raises(UsageError, match="`prompt_chunk` is 100 and has to be a multiple of a page's 128"):
        engine_of(llama("kivi"), prompt_chunk=100, prefix_caching=True)


@pytest.mark.parametrize(("count", "lag"), [(60, 1), pytest.param(2000, 0, marks=pytest.mark.full)])
def test_a_long_soak_changes_no_tokens_and_counts_every_page(count, lag):
    """A fake model's tokens are a hash of everything before them, so that none may be lost, repeated or another's."""
    dice, model = random.Random(f"{count} {lag}"), FakeModel()
    engine = Engine(model, kv_memory=24, max_batch=5, prompt_chunk=128, max_batch_tokens=384)
    engine._steps.lag, pool = lag, model.pool
    beginnings = [ids_of(length, length) for length in (128, 256, 300, 640, 1000)]
    asked = []
    while len(asked) < count or engine.stats().running or engine.stats().waiting:
        if len(asked) < count and dice.random() < 0.6:
            beginning = dice.choice(beginnings)[: dice.choice((64, 128, 270, 512, 1000))]
            prompt = beginning + ids_of(dice.randrange(1, 200), len(asked))
            asked.append(engine.add(prompt, max_new_tokens=dice.randrange(1, 40), stop_token_ids=[]))
        if asked and dice.random() < 0.05:
            dice.choice(asked[-20:]).cancel()
        engine.step()
        stats = engine.stats()
        # What requests hold and what prefixes hold, each page once, is within what is reserved and kept.
        assert pool.used <= stats.prefix_pages + engine._scheduler.pages_reserved
        assert stats.prefix_pages + engine._scheduler.pages_reserved <= 24
        assert stats.pages_reserved <= 24, "room was promised twice"
    engine.run()
    for request in asked:
        assert request.tokens == continued(request.prompt, len(request.tokens))
        assert request.finish_reason == "cancelled" or len(request.tokens) == request.max_new_tokens
    stats = engine.stats()
    assert stats.cached_tokens > 50 * count
    assert stats.prefixes_evicted > count // 10
    assert stats.finished + stats.cancelled == count
    assert pool.used == stats.prefix_pages
    assert stats.pages_reserved == 0
    engine._prefixes.clear()
    assert pool.used == 0


def continued(prompt, new):
    """What the fake model gives after a prompt."""
    sequence = list(prompt)
    for _ in range(new):
        sequence.append(int(next_logits(sequence).argmax()))
    return sequence[len(prompt) :]


def test_sink_tokens_are_copied_once_for_all_chunks_of_a_prompt():
    engine = engine_of(llama("kivi", KVScheme(sink_tokens=3, value_recent_tokens=128)))
    engine.add(ids_of(400), max_new_tokens=2)
    engine.run()
    first, *_, last = (prefix.snapshot.tokens for prefix in engine._prefixes._stored.values())
    assert all(a is b for a, b in zip(first[0][0], last[0][0], strict=True))
    keys, values = zip(first[1][0], last[1][0], strict=True)
    assert keys[0] is keys[1]
    assert values[0] is not values[1]
    assert values[1].shape[1] == 131
