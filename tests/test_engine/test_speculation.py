"""Drafts that one pass checks: the tokens are those without them, whatever is accepted."""

import functools
import random
from dataclasses import replace

import pytest
import torch
from tiny.models import tiny_model

from kvconvert.errors import UsageError
from kvconvert.methods import PRESETS, KVScheme
from kvconvert.runtime import Engine, Sampling
from kvconvert.runtime.engine.model_steps import ModelSteps
from kvconvert.runtime.engine.speculation import (
    ASSUMED,
    LEAST_PLAIN,
    RETRIED,
    Draft,
    PromptLookup,
    StepTimes,
    accepted,
    worthwhile,
)
from kvconvert.runtime.hf.generation import adopt

ALWAYS = ("kivi", "oscar-g128", "kitty", "calibquant-1bit", "minikv-pyramid")
# A model without images has no visual tokens.
TEXT = [name for name in PRESETS if "visual" not in name]
SCHEMES = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in TEXT]


def low_bit(scheme, architecture="llama", **options):
    model = tiny_model(architecture, num_hidden_layers=2, gain=3.0, **options)
    adopt(model, [KVScheme.preset(scheme).with_online_rotation()] * 2, {})
    return model


def served(model, requests, **options):
    """Tokens of requests that come one after another, and the Engine."""
    engine = Engine(model, max_batch=3, prompt_chunk=100, **options)
    engine._times.checked = lambda *_: None  # it depends on the machine
    added = []
    for arguments in requests:
        added.append(engine.add(**arguments, stop_token_ids=[]))
        engine.step()
    engine.run()
    return added, engine


def repetitive(vocabulary, length, seed):
    """A prompt in which phrases come again."""
    dice = random.Random(seed)
    phrases = [dice.choices(range(1, vocabulary), k=7) for _ in range(4)]
    return [token for _ in range(length) for token in dice.choice(phrases)][:length]


def some_requests(vocabulary, new=40):
    hot = [Sampling(temperature=0.4, top_k=k, top_p=p, seed=k) for k, p in ((0, 1.0), (8, 0.9))]
    found = []
    for length, sampling in zip((3, 90, 127, 230), (Sampling(), *hot, Sampling()), strict=True):
        prompt, count = repetitive(vocabulary, length, length), new + 5 * length % 60
        found.append({"prompt": prompt, "max_new_tokens": count, "sampling": sampling})
    return found


@functools.cache
def tokens_without_drafts(scheme):
    """What a Llama gives, and no draft may change: computed once for every way to draft."""
    model = low_bit(scheme)
    return [request.tokens for request in served(model, some_requests(model.config.vocab_size, 130))[0]]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("lag", [0, pytest.param(1, id="read late")])
def test_prompt_lookup_changes_no_token_and_checks_drafts(scheme, lag, monkeypatch):
    expected = tokens_without_drafts(scheme)
    model = low_bit(scheme)
    requests = some_requests(model.config.vocab_size, 130)
    prepare = ModelSteps.prepare
    monkeypatch.setattr(ModelSteps, "prepare", lambda s, *args: setattr(s, "lag", lag) or prepare(s, *args))
    found, engine = served(model, requests, prompt_lookup_num_tokens=6)
    assert [r.tokens for r in found] == expected
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.accepted_tokens == sum(request.accepted for request in found)
    assert stats.drafted_tokens == sum(request.drafted for request in found)
    assert stats.generated_tokens == sum(len(r.tokens) for r in found)
    assert stats.pages_reserved == 0
    assert engine._steps.cache.stats().pages == 0


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_windows_and_sink_logits_change_nothing_about_it(architecture):
    model = low_bit("kivi", architecture)
    requests = some_requests(model.config.vocab_size, 60)
    expected, _ = served(model, requests)
    found, engine = served(model, requests, prompt_lookup_num_tokens=6)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("bundle", [True, False])
def test_a_draft_models_tokens_are_accepted_where_they_are_the_models(bundle):
    model = low_bit("kivi")
    assistant = model if bundle else tiny_model("llama", attention="sdpa", num_hidden_layers=2, gain=3.0)
    requests = some_requests(model.config.vocab_size, 130)
    found, engine = served(model, requests, assistant_model=assistant, num_assistant_tokens=4)
    assert [r.tokens for r in found] == tokens_without_drafts("kivi")
    # Tokens that are drawn are drafted by the same random stream; its pages are written a little later.
    assert all(request.accepted > (0.8 if bundle else 0.1) * request.drafted > 0 for request in found)
    assert engine.stats().steps < sum(len(request.tokens) for request in found)


def test_pages_hold_what_they_hold_without_drafts():
    model = low_bit("oscar-g128")
    prompt = repetitive(model.config.vocab_size, 120, 1)
    engines = [Engine(model, max_batch=1), Engine(model, max_batch=1, prompt_lookup_num_tokens=20)]
    kept = []
    for engine in engines:
        request = engine.add(prompt, max_new_tokens=200, stop_token_ids=[])
        while len(request.tokens) < 150:
            engine.step()
        cache = request.prompt_cache or engine._steps.cache
        (sequence,), store = cache.groups[0].sequences, cache.stores()[1]
        pages = [store.key_pages.views([number])[0].buffer.clone() for number in sequence.keys.pages]
        assert pages
        kept.append(pages)
    for plain, drafted in zip(*kept, strict=False):
        assert plain.equal(drafted)


def test_a_request_that_is_cancelled_while_drafts_are_checked_leaves_no_page():
    model = low_bit("kivi")
    engine = Engine(model, kv_memory=2**18, max_batch=2, prompt_lookup_num_tokens=6)
    empty = engine.stats().pages_free
    requests = [engine.add(repetitive(40, 200, n), max_new_tokens=100, stop_token_ids=[]) for n in range(4)]
    for _ in range(5):
        engine.step()
    requests[0].cancel()
    requests[3].cancel()
    engine.run()
    assert [r.finish_reason for r in requests] == ["cancelled", "length", "length", "cancelled"]
    assert engine.stats().pages_free == empty


def test_a_request_whose_draft_fails_ends_and_the_others_go_on():
    model = low_bit("kivi")
    engine = Engine(model, max_batch=2, prompt_lookup_num_tokens=4)
    failing, other = (engine.add(repetitive(40, 60, n), max_new_tokens=20, stop_token_ids=[]) for n in range(2))
    failing.drafter.propose = lambda tokens, most: (_ for _ in ()).throw(IndexError("no position"))
    with pytest.raises(IndexError):
        engine.run()
    assert failing.finish_reason == "error"
    engine.run()
    assert (other.finish_reason, len(other.tokens)) == ("length", 20)
    assert engine._steps.cache.stats().tokens == 0


def test_a_stop_token_within_a_draft_ends_the_request_there():
    model = low_bit("kivi")
    prompt = repetitive(model.config.vocab_size, 90, 5)
    whole = served(model, [{"prompt": prompt, "max_new_tokens": 60}])[0][0].tokens
    engine = Engine(model, assistant_model=model, num_assistant_tokens=8)
    request = engine.add(prompt, max_new_tokens=60, stop_token_ids=[whole[20]])
    engine.run()
    assert request.tokens == whole[: whole.index(whole[20]) + 1]
    assert request.finish_reason == "stop"


def test_lookup_takes_the_latest_continuation_of_the_longest_match():
    lookup = PromptLookup(2)
    assert lookup.propose([1, 2, 3, 9, 2, 4, 1, 2], 3).tokens == [3, 9, 2]
    assert lookup.propose([1, 2, 3, 9, 2, 4, 1, 2, 7, 2], 3).tokens == [7, 2]
    assert lookup.propose([1, 2, 3, 9, 2, 4, 1, 2, 7, 2, 5], 3).tokens == []
    # The latest place has three of the last tokens in front of it, and one before has five.
    tokens = [1, 2, 3, 4, 5, 60, 0, 3, 4, 5, 61, 1, 2, 3, 4, 5]
    assert PromptLookup(3).propose(tokens, 2).tokens == [61, 1]
    assert PromptLookup(5).propose(tokens, 2).tokens == [60, 0]
    assert [accepted([1, 2, 3], draft) for draft in ([], [1], [1, 2], [1, 5], [4, 2])] == [0, 1, 2, 1, 0]


def test_lookup_learns_how_often_its_drafts_are_accepted():
    good, bad, tokens = PromptLookup(8), PromptLookup(8), [5, 6, 7, 8, 9] * 3
    before = good.propose(tokens, 3).chances
    assert 1 > before[0] > before[1] > before[2] > 0
    for _ in range(20):
        good.propose(tokens, 3)
        good.learn(3, 3)
        bad.propose(tokens, 3)
        bad.learn(3, 0)
    assert good.propose(tokens, 3).chances[0] > before[0] > 3 * bad.propose(tokens, 3).chances[0]
    for _ in range(600):
        bad.propose(tokens, 3)
    # It is tried again.
    assert bad.propose(tokens, 3).chances == pytest.approx(before, rel=0.1)


def test_drafts_are_checked_where_more_is_accepted_than_a_check_costs():
    likely, unlikely = Draft([1] * 8, [0.9**n for n in range(1, 9)]), Draft([1] * 8, [0.1**n for n in range(1, 9)])
    nothing, times = Draft([], []), StepTimes()
    assert worthwhile([likely], [1, 3, 8], times) == 8
    assert worthwhile([Draft([1] * 8, [0.8, 0.6, 0.4] + [0.0] * 5)], [1, 3, 8], times) == 3
    assert worthwhile([unlikely], [1, 3, 8], times) == 0
    assert worthwhile([likely, nothing], [1, 3, 8], times) == 8
    assert worthwhile([likely] + [nothing] * 40, [1, 3, 8], times) == 0
    # Every token of a check is computed in every row.
    assert worthwhile([likely] * 40, [1, 3, 8], times) == 3


def test_what_checks_take_is_measured_and_tried_again():
    draft, times = Draft([1] * 3, [0.4, 0.2, 0.1]), StepTimes()
    for _ in range(LEAST_PLAIN):
        assert not times.known
        times.plain(1.5e-3)
    assert times.known
    assert worthwhile([draft], [1, 3], times) == 3
    times.checked(3, 1, 1.0)  # once it was something else
    assert worthwhile([draft], [1, 3], times) == 3
    for _ in range(ASSUMED):
        times.checked(3, 1, 2.9e-3)
    assert times.cost(3, 1) == pytest.approx(2.9 / 1.5)
    assert times.cost(1, 1) == pytest.approx(2.9 / 1.5 * 1.31 / 1.33)  # by what others have taken
    assert worthwhile([draft], [1, 3], times) == 0
    for _ in range(RETRIED):
        times.declined()
    assert worthwhile([draft], [1, 3], times) == 3


@pytest.mark.parametrize("check", [1.2, 2.0, 4.0])
@pytest.mark.parametrize("quoted", [0, 10, 200])
def test_drafts_cost_no_time_where_they_gain_none(check, quoted):
    """Steps of simulated times over a text that repeats so many tokens at a time of what came before, then says as many
    that only begin alike.
    """
    dice, lookup, times, seconds = random.Random(0), PromptLookup(8), StepTimes(), 0.0
    text = dice.choices(range(40), k=2000)
    while len(text) < 3000:
        begin = dice.randrange(1500)
        text += text[begin : begin + quoted] + dice.choices(range(40), k=10 + quoted)
    known = text[:2000]
    while len(known) < 3000:
        draft = lookup.propose(known, 16)
        length = worthwhile([draft], [1, 3, 7, 16], times) if draft.tokens and times.known else 0
        if length:
            following = text[len(known) : len(known) + length + 1]
            right = accepted(following, draft.tokens[:length])
            lookup.learn(length, right)
            times.checked(length, 1, check + 0.02 * length)
            seconds += check + 0.02 * length
            known += following[: 1 + right]
        else:
            times.plain(1.0)
            times.declined()
            seconds += 1.0
            known.append(text[len(known)])
    assert 1000 / seconds > {0: 0.97, 10: 0.97, 200: 1.2}[quoted]


def test_an_engine_measures_its_steps_and_stops_drafting_where_checks_are_slow(monkeypatch):
    model = low_bit("kivi")
    prompt = repetitive(model.config.vocab_size, 90, 5)
    drafted = []
    for seconds in (1.2, 30.0):
        engine, now = Engine(model, max_batch=1, prompt_lookup_num_tokens=6), [0.0]

        def timed(step, took, now=now):
            def run(*arguments):
                now[0] += took
                return step(*arguments)

            return run

        engine._steps.forward = timed(engine._steps.forward, 1.0)
        engine._steps.check = timed(engine._steps.check, seconds)
        monkeypatch.setattr("kvconvert.runtime.engine.engine.time.perf_counter", lambda now=now: now[0])
        request = engine.add(prompt, max_new_tokens=80, stop_token_ids=[])
        engine.run()
        assert engine._times.cost(6, 1) == pytest.approx(seconds, rel=0.5)
        drafted.append(request.drafted)
    assert drafted[0] > 2 * drafted[1] > 0


def test_drafts_that_are_never_accepted_are_hardly_checked():
    model = low_bit("kivi")
    engine = Engine(model, max_batch=1, prompt_lookup_num_tokens=6)
    request = engine.add(repetitive(model.config.vocab_size, 90, 5), max_new_tokens=120, stop_token_ids=[])
    lookup = request.drafter.propose
    dice = random.Random(0)

    def wrong(tokens, most):
        draft = lookup(tokens, most)
        return replace(draft, tokens=dice.choices(range(model.config.vocab_size), k=len(draft.tokens)))

    request.drafter.propose = wrong
    engine.run()
    assert len(request.tokens) == 120
    assert request.accepted < 10
    assert 0 < request.drafted < 6 * 25


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens"),
        ({"prompt_lookup_num_tokens": 65}, "prompt_lookup_num_tokens"),
        ({"max_matching_ngram_size": 0}, "max_matching_ngram_size"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens"),
        ({"prompt_lookup_num_tokens": 3, "assistant_model": torch.nn.Identity()}, "exclude"),
    ],
)
def test_what_cannot_be_drafted_is_refused(options, named):
    with pytest.raises(UsageError, match=named):
        Engine(low_bit("kivi"), **options)


def test_prompts_go_on_from_stored_prefixes_with_drafts():
    model = low_bit("oscar-g128")
    shared = repetitive(model.config.vocab_size, 256, 7)
    prompts = [shared + repetitive(model.config.vocab_size, length, length) for length in (20, 90, 150)]
    expected, found = [], []
    for tokens, options in ((expected, {"prefix_caching": False}), (found, {"prompt_lookup_num_tokens": 6})):
        engine = Engine(model, max_batch=2, prompt_chunk=128, **options)
        requests = [engine.add(prompt, max_new_tokens=80, stop_token_ids=[]) for prompt in prompts]
        engine.run()
        tokens += [request.tokens for request in requests]
    assert found == expected
    assert engine.stats().cached_tokens == 2 * 256
    assert engine.stats().accepted_tokens > 0
