"""Many requests through one Engine, with cancellations and stored prefixes: each gets what it gets alone."""

import argparse
import inspect
import random
from pathlib import Path

import pytest
import torch
from tiny.models import GREEDY, low_bit
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.runtime import Engine

REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "reference-lm"
CHUNK, NEW, ROWS = 128, 20, 6
LAYERS = 2
# Bytes for 15 pages of each layer.
MEMORY = 270_000


def trained(scheme):
    """The first layers of a trained model, which repeat themselves, with a bundle's cache, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32, num_hidden_layers=LAYERS)
    model.eval().requires_grad_(False)
    return low_bit(model, scheme), AutoTokenizer.from_pretrained(REFERENCE)


def prompts_of(tokenizer, dice, count):
    """Prompts of which most begin with one of a few texts of one or two chunks."""
    text = [id for line in inspect.getsource(argparse).splitlines()[:400] for id in tokenizer(line).input_ids]
    shared = [text[begin : begin + CHUNK * (1 + n % 2)] for n, begin in enumerate(range(0, 6000, 1000))]
    found = []
    for number in range(count):
        begin = dice.randrange(len(text) - 300)
        own = text[begin : begin + dice.choice((1, 7, 40, 127, 150))]
        found.append((dice.choice(shared) if number % 4 else []) + own)
    return found


def alone(model, prompt):
    """What `generate` gives, read in the same chunks."""
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=NEW, prefill_chunk_size=CHUNK, **GREEDY)[0, len(prompt) :].tolist()


def addresses(engine):
    """Of all pages."""
    cache = engine._steps.cache
    storages = [side for store in cache.stores() for side in (store.key_pages, store.value_pages)]
    return [run.data_ptr() for side in storages for run in side.runs(range(engine._steps.pages))]


@pytest.mark.parametrize(
    ("scheme", "count"),
    [
        ("oscar-g128", 40),
        pytest.param("oscar-g128", 2000, marks=pytest.mark.full),
        pytest.param("kivi", 500, marks=pytest.mark.full),
    ],
)
def test_requests_of_all_kinds_get_what_they_get_alone_and_leave_nothing(scheme, count):
    dice = random.Random(count)
    model, tokenizer = trained(scheme)
    prompts = prompts_of(tokenizer, dice, 12 + count // 20)
    engine = Engine(model, kv_memory=MEMORY, max_batch=ROWS, prompt_chunk=CHUNK)
    before, requests = addresses(engine), []
    while len(requests) < count or engine.stats().waiting or engine.stats().running:
        # Bursts, and pauses in which the engine runs empty.
        if len(requests) < count and (dice.random() < 0.3 or not engine.stats().running):
            for _ in range(dice.randint(1, 6)):
                arguments = {"max_new_tokens": dice.randint(1, NEW), "stop_token_ids": []}
                requests.append(engine.add(dice.choice(prompts), **arguments))
        open_ones = [request for request in requests[-40:] if not request.finished]
        if open_ones and dice.random() < 0.08:
            dice.choice(open_ones).cancel()
        engine.step()
        stats = engine.stats()
        assert stats.pages_reserved <= engine._steps.pages
    stats = engine.stats()
    assert stats.finished + stats.cancelled == len(requests)
    assert stats.cancelled > count // 50
    assert stats.cached_tokens > 30 * count
    assert stats.prefixes_evicted > 0
    # Nothing is left but the prefixes, in every layer.
    assert stats.pages_reserved == 0
    assert stats.prefix_pages + stats.pages_free == engine._steps.pages
    assert engine._steps.cache.stats().pages == LAYERS * stats.prefix_pages
    assert addresses(engine) == before
    expected = {tuple(prompt): alone(model, prompt) for prompt in prompts}
    for request in requests:
        own = expected[tuple(request.prompt)][: request.max_new_tokens]
        assert request.tokens == (own if request.finish_reason == "length" else own[: len(request.tokens)])
