"""An Engine, `generate` and a loop of one's own give the same tokens, on many architectures and on trained models."""

import os
from pathlib import Path

import pytest
import torch
from tiny.models import ARCHITECTURES, GREEDY, REFERENCE, low_bit, random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.errors import UnsupportedModelError
from kvconvert.runtime import Engine

REFUSED = {
    "bloom": "bloom models take no position_ids",
    "mpt": "mpt models take no position_ids",
    "falcon": "computes attention by itself",
}
# `generate` counts PaliGemma's positions from 1 and an Engine from 0: the same attention, but other pages.
ONE_BASED = {"paligemma"}
# A sliding window, soft caps, sink logits, a mixture, and text prompts of a vision-language model.
ALWAYS = ("mistral", "gemma2", "gpt_oss", "qwen3_moe", "qwen2_5_vl")
SERVED = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full)
    for name, entry in ARCHITECTURES.items()
    if name not in REFUSED and "mla" not in entry.features and name != "falcon_alibi"
]
SMOLLM2 = os.environ.get("KVCONVERT_SMOLLM2")
BEGINNINGS = (
    "It was a dark night, and the old house",
    "Once upon a time there was",
    "The captain looked at the sea for a long time. " * 12,
    "My dear friend, I have to tell you that",
)


@torch.no_grad()
def looped(model, ids, new):
    """Greedy tokens of a loop around the model, as anyone would write it."""
    cache, tokens = model.new_kv_cache(), []
    logits = model(input_ids=ids, past_key_values=cache).logits
    for place in range(ids.shape[1], ids.shape[1] + new):
        tokens.append(logits[:, -1].argmax(-1))
        # Bamba of transformers 5.24 counts positions from 0 in every pass unless they are given.
        positions = {"position_ids": torch.tensor([[place]])} if model.config.model_type == "bamba" else {}
        logits = model(input_ids=tokens[-1][:, None], past_key_values=cache, **positions).logits
    return torch.cat(tokens).tolist()


def check_agreement(model, prompts, new):
    """Greedy tokens of prompts [1, n]: together in an engine of fewer rows, and each alone."""
    engine = Engine(model, max_batch=2, prompt_chunk=4096)
    requests = [engine.add(ids, max_new_tokens=new, stop_token_ids=[]) for ids in prompts]
    engine.run()
    for ids, request in zip(prompts, requests, strict=True):
        generated = model.generate(ids, max_new_tokens=new, **GREEDY)[0, ids.shape[1] :].tolist()
        assert request.tokens == generated == looped(model, ids, new)


@pytest.mark.quick("gpt_oss")
@pytest.mark.parametrize("name", SERVED)
def test_engine_generate_and_a_loop_agree_on_every_architecture(name):
    lengths = (5, 60, 90) if name in ONE_BASED else (5, 126, 131)
    prompts = [random_ids(1, length, seed=length) for length in lengths]
    check_agreement(low_bit(ARCHITECTURES[name].build(), "kivi"), prompts, 6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_cannot_serve_is_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        Engine(low_bit(ARCHITECTURES[name].build(), "kivi"), max_batch=2)


def written(directory, new, scheme):
    """Check a trained model's continuations of texts."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in BEGINNINGS]
    check_agreement(low_bit(model, scheme), prompts, new)


@pytest.mark.full
@pytest.mark.quick("minikv")
@pytest.mark.parametrize("scheme", ["oscar", "minikv"])
def test_engine_generate_and_a_loop_agree_on_the_reference_model(scheme):
    written(REFERENCE, 6, scheme)


@pytest.mark.full
@pytest.mark.skipif(SMOLLM2 is None, reason="KVCONVERT_SMOLLM2 names no directory with SmolLM2-135M-Instruct")
@pytest.mark.parametrize("scheme", ["oscar", "minikv"])
def test_engine_generate_and_a_loop_agree_on_smollm2(scheme):
    written(Path(SMOLLM2), 40, scheme)
