"""Drafts that one pass checks: the tokens are those without them, whatever is accepted."""

import random

import pytest
import torch
from tiny.models import tiny_model

from kvconvert.errors import UsageError
from kvconvert.methods import PRESETS, KVScheme
from kvconvert.runtime import Engine, Sampling
from kvconvert.runtime.engine.speculation import PromptLookup, accepted
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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompt_lookup_changes_no_token_and_checks_drafts(scheme):
    model = low_bit(scheme)
    requests = some_requests(model.config.vocab_size, 130)
    expected, _ = served(model, requests)
    found, engine = served(model, requests, prompt_lookup_num_tokens=6)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
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
    expected, _ = served(model, requests)
    found, engine = served(model, requests, assistant_model=assistant, num_assistant_tokens=4)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
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
    assert lookup.propose([1, 2, 3, 9, 2, 4, 1, 2], 3) == [3, 9, 2]
    assert lookup.propose([1, 2, 3, 9, 2, 4, 1, 2, 7, 2], 3) == [7, 2]
    assert lookup.propose([1, 2, 3, 9, 2, 4, 1, 2, 7, 2, 5], 3) == []
    assert [accepted([1, 2, 3], draft) for draft in ([], [1], [1, 2], [1, 5], [4, 2])] == [0, 1, 2, 1, 0]


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
