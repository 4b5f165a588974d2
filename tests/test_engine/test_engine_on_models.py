"""The Engine on a real model and its low-bit cache."""

import pytest
import torch
from tiny.models import GREEDY, low_bit, random_ids, tiny_model

from kvconvert.errors import UsageError
from kvconvert.methods import KVScheme
from kvconvert.runtime import Engine
from kvconvert.runtime.hf.generation import adopt

SCHEMES = ("kivi", "minikv")
SCHEMES += tuple(pytest.param(name, marks=pytest.mark.full) for name in ("oscar", "kitty", "calibquant-2bit"))
MEMORY = 2**18


def bundle_model(scheme, architecture="llama"):
    """A tiny model with the attention and the cache of a bundle."""
    return low_bit(tiny_model(architecture, num_hidden_layers=2, gain=3.0), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_requests_in_company_give_what_generate_gives_alone(scheme):
    model = bundle_model(scheme)
    engine = Engine(model, max_batch=3, prompt_chunk=4096)
    # The second and the fourth complete a page while they decode.
    prompts = [random_ids(1, length, seed=length) for length in (5, 127, 128, 240, 300)]
    requests = []
    for number, ids in enumerate(prompts):
        requests.append(engine.add(ids, max_new_tokens=(12, 40)[number % 2], stop_token_ids=[]))
        engine.step()
    engine.run()
    for ids, request in zip(prompts, requests, strict=True):
        expected = model.generate(ids, max_new_tokens=request.max_new_tokens, **GREEDY)
        assert request.tokens == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompts_in_chunks_give_what_generate_gives_for_the_same_chunks(scheme):
    model = bundle_model(scheme)
    engine = Engine(model, max_batch=2, prompt_chunk=100)
    prompts = [random_ids(1, length, seed=length) for length in (100, 101, 300)]
    requests = [engine.add(ids, max_new_tokens=10, stop_token_ids=[]) for ids in prompts]
    engine.run()
    for ids, request in zip(prompts, requests, strict=True):
        expected = model.generate(ids, max_new_tokens=10, prefill_chunk_size=100, **GREEDY)
        assert request.tokens == expected[0, ids.shape[1] :].tolist()


def test_what_a_processor_makes_of_images_is_refused_by_a_model_of_text():
    engine = Engine(bundle_model("kivi"), max_batch=1)
    with pytest.raises(UsageError, match="`extras` has pixel_values, and this model takes none of them"):
        engine.add([1, 2], extras={"pixel_values": torch.zeros(1)})


def test_a_short_cache_makes_requests_wait_and_none_fails():
    model = bundle_model("kivi")
    engine = Engine(model, kv_memory=MEMORY, max_batch=64)
    pages = engine.stats().pages_free
    requests = [engine.add(random_ids(1, 250, seed=n), max_new_tokens=20, stop_token_ids=[]) for n in range(pages)]
    assert sum(request.state == "waiting" for request in requests) > 0
    engine.run()
    assert all(len(request.tokens) == 20 for request in requests)
    assert engine.stats().pages_free == pages


def test_text_streams_and_ends_before_a_stop_string():
    from pathlib import Path

    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = Path(__file__).resolve().parents[2] / "examples" / "reference-lm"
    tokenizer = AutoTokenizer.from_pretrained(reference)
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    adopt(model, [KVScheme.preset("kivi")] * model.config.num_hidden_layers, {})
    engine = Engine(model, tokenizer, max_batch=2)
    ids = tokenizer("It was a dark night, and the old house", return_tensors="pt").input_ids
    free = engine.add(ids, max_new_tokens=24)
    whole = "".join(event.text for event in engine.stream(free))
    assert whole == free.text == tokenizer.decode(free.tokens)
    word = whole.split()[4]
    stopped = engine.add(ids, max_new_tokens=24, stop=[word])
    shown = "".join(event.text for event in engine.stream(stopped))
    assert shown == stopped.text == whole[: whole.index(word)]
    assert stopped.finish_reason == "stop"
