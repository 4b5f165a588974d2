"""Prompts with images in an Engine: each is read by a pass of its own and then decoded with all others."""

import pytest
import torch
from test_packed import low_bit
from tiny.models import ARCHITECTURES, GREEDY, random_ids
from tiny.processors import LOADABLE, quick_and_full

from kvconvert.errors import UsageError
from kvconvert.runtime import Engine, Sampling

NEW = 12


def prompts(model, architecture, lengths, seed=1):
    """Inputs of a prompt of each length, the even ones with images."""
    made = []
    for number, length in enumerate(lengths):
        inputs = architecture.inputs(1, length, seed + number, pieces=(2, 0)[number % 2])
        made.append({name: x for name, x in inputs.items() if name != "attention_mask"})
    return made


def add(engine, inputs, **options):
    extras = {name: x for name, x in inputs.items() if name != "input_ids"}
    options = {"max_new_tokens": NEW, "stop_token_ids": []} | options
    return engine.add(inputs["input_ids"], extras=extras or None, **options)


def generated(model, inputs, new=NEW):
    ids = inputs["input_ids"]
    return model.generate(**inputs, max_new_tokens=new, **GREEDY)[0, ids.shape[1] :].tolist()


@pytest.mark.quick("qwen2_5_vl")
@pytest.mark.parametrize("name", quick_and_full(LOADABLE, "llava", "qwen2_5_vl", "gemma3", "qwen3_vl"))
def test_prompts_with_images_give_what_generate_gives_whoever_else_is_served(name):
    architecture = ARCHITECTURES[name]
    model = low_bit(architecture.build(), "kivi")
    inputs = prompts(model, architecture, (60, 131, 200, 40, 128))
    engine = Engine(model, max_batch=3, prompt_chunk=128)
    requests = []
    for each in inputs:
        requests.append(add(engine, each))
        engine.step()
    engine.run()
    for each, request in zip(inputs, requests, strict=True):
        assert request.finish_reason == "length"
        if "pixel_values" in each or len(request.prompt) <= 128:
            assert request.tokens == generated(model, each)
    other = {**inputs[0], "pixel_values": 1 - inputs[0]["pixel_values"]}
    assert generated(model, other) != requests[0].tokens  # the images matter
    stats = engine.stats()
    assert (stats.running, stats.pages_reserved, stats.failed) == (0, 0, 0)
    assert stats.prompt_tokens == 60 + 131 + 200 + 40 + 128
    assert all(request.inputs is None for request in requests)


@pytest.mark.parametrize("scheme", ["calibquant-2bit-visual", "calibquant-2bit"])
def test_schemes_of_image_tokens_find_them(scheme):
    architecture = ARCHITECTURES["qwen2_5_vl"]
    model = low_bit(architecture.build(), scheme)
    inputs = prompts(model, architecture, (60, 50, 150))
    engine = Engine(model, max_batch=3)
    requests = [add(engine, each) for each in inputs]
    engine.run()
    assert [request.tokens for request in requests] == [generated(model, each) for each in inputs]


def test_equal_ids_with_other_images_share_nothing():
    architecture = ARCHITECTURES["llava"]
    model = low_bit(architecture.build(), "kivi")
    one, _, two = prompts(model, architecture, (300, 20, 300))
    two["input_ids"] = one["input_ids"]
    engine = Engine(model, max_batch=2, prompt_chunk=128, prefix_caching=True)
    for inputs in (one, two, one):
        request = add(engine, inputs)
        engine.run()
        assert request.tokens == generated(model, inputs)
        assert request.cached_tokens == 0
    assert engine.stats().prefix_pages == 0


def test_a_prompt_with_images_has_to_fit_in_one_pass_and_to_its_tensors():
    architecture = ARCHITECTURES["qwen2_5_vl"]
    model = low_bit(architecture.build(), "kivi")
    (inputs,) = prompts(model, architecture, (60,))
    small = Engine(model, prompt_chunk=32, max_batch_tokens=59)
    with pytest.raises(UsageError, match="one pass, of at most 59 tokens, and this one has 60"):
        add(small, inputs)
    engine = Engine(model)
    with pytest.raises(UsageError, match="do not belong to the prompt"):
        add(engine, {**inputs, "mm_token_type_ids": inputs["mm_token_type_ids"][:, :30]})


def test_tensors_that_a_model_cannot_read_end_their_own_request():
    architecture = ARCHITECTURES["llava"]
    model = low_bit(architecture.build(), "kivi")
    good, text, bad = prompts(model, architecture, (60, 40, 60))
    bad["pixel_values"] = bad["pixel_values"][:1]  # of two images
    engine = Engine(model, max_batch=4)
    running = [add(engine, good), add(engine, text)]
    engine.step()
    lost = add(engine, bad)
    also = add(engine, good)
    with pytest.raises(ValueError, match="mage"):
        engine.run()
    engine.run()
    assert (lost.finish_reason, lost.tokens) == ("error", [])
    assert [r.tokens for r in (*running, also)] == [generated(model, i) for i in (good, text, good)]
    assert engine.stats().pages_reserved == 0


def test_a_pass_that_fails_beside_one_with_images_leaves_that_one(monkeypatch):
    architecture = ARCHITECTURES["llava"]
    model = low_bit(architecture.build(), "kivi")
    good, text = prompts(model, architecture, (60, 40))
    engine = Engine(model, max_batch=4)
    other = add(engine, text)
    request = add(engine, good)
    packed = engine._steps._packed
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("lost")
        return packed(*arguments)

    monkeypatch.setattr(engine._steps, "_packed", failing)
    with pytest.raises(RuntimeError, match="lost"):
        engine.run()
    engine.run()
    assert other.finish_reason == "error"
    assert request.tokens == generated(model, good)


def test_what_ends_before_it_was_read_leaves_nothing():
    architecture = ARCHITECTURES["llava"]
    model = low_bit(architecture.build(), "kivi")
    (inputs,) = prompts(model, architecture, (60,))
    engine = Engine(model, max_batch=1)
    waiting = [add(engine, inputs, sampling=Sampling(temperature=1.0, seed=n)) for n in range(3)]
    waiting[2].cancel()
    engine.step()
    waiting[0].cancel()
    engine.run()
    assert [request.finish_reason for request in waiting] == ["cancelled", "length", "cancelled"]
    assert all(request.inputs is None for request in waiting)
    assert engine.stats().pages_reserved == 0
    ids = random_ids(1, 20)
    again = engine.add(ids, max_new_tokens=4, stop_token_ids=[])
    engine.run()
    assert torch.equal(torch.tensor([again.tokens]), torch.tensor([generated(model, {"input_ids": ids}, 4)]))
