"""Steps replayed as CUDA graphs give the tokens of steps that run layer by layer."""

import copy
import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny.key_centers import center_plan
from tiny.models import ARCHITECTURES, GREEDY, random_ids, tiny_model
from tiny.scorers import predicting, scorer_plan
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.methods import KVScheme
from kvconvert.models import CACHE
from kvconvert.runtime import Engine
from kvconvert.runtime.hf.captured import prepare_steps
from kvconvert.runtime.hf.generation import adopt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")

SCHEMES = ["oscar", "oscar-g128", "kivi", "kitty", "calibquant-2bit", "minikv", "predicted"]
MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 90},
    "gemma2": {"sliding_window": 90},
    "gpt_oss": {"sliding_window": 90},
    "qwen3": {},
}


def bundle_like(name: str, scheme: str, center: bool = False, **shape):
    """A tiny model with the cache of a bundle, on the GPU."""
    shape = {"num_hidden_layers": 2, "head_dim": 64} | shape
    model = tiny_model(name, "kvconvert", **shape).to("cuda", torch.bfloat16).requires_grad_(False)
    config = model.config.get_text_config()
    sizes = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    found, plan = predicting() if scheme == "predicted" else KVScheme.preset(scheme).with_online_rotation(), {}
    if center:
        found, plan = replace(found, key_center="calibrated", token_norm="none"), center_plan(*sizes, 1.0)
    if found.predicts:
        plan = scorer_plan(*sizes)
    adopt(model, [found] * sizes[0], plan)
    # Prompts are read in one way: all are packed, none is padded for a recording.
    with torch.no_grad():
        model(random_ids(1, 2).cuda(), past_key_values=model.new_kv_cache())
    model.captured.passes.reason = "steps are compared"
    return model


def both(model, ids: torch.Tensor, **arguments) -> None:
    """Generate with and without replays; the tokens have to agree."""
    arguments = {"max_new_tokens": 150, **GREEDY} | arguments
    eager = model.generate(ids, disable_compile=True, **arguments)
    assert model.captured.replayed == 0
    replayed = model.generate(ids, **arguments)
    assert model.captured.reason is None
    assert model.captured.replayed > 100
    assert replayed.tolist() == eager.tolist()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_method_generates_the_same(scheme):
    both(bundle_like("llama", scheme), random_ids(3, 200).cuda())


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_key_centers_generate_the_same(name):
    model = bundle_like(name, "oscar-g128", center=True, **MODELS[name])
    both(model, random_ids(3, 200).cuda())
    # Another cache with tensors of its own follows the same recordings.
    recorded = model.captured.recorded
    model.generate(random_ids(3, 200).cuda(), max_new_tokens=20, **GREEDY)
    assert model.captured.recorded == recorded


@pytest.mark.parametrize("name", MODELS)
def test_architectures_generate_the_same_with_padding(name):
    ids = random_ids(3, 200).cuda()
    mask = torch.ones_like(ids)
    mask[0, :70] = mask[2, :199] = 0
    both(bundle_like(name, "oscar-g128", **MODELS[name]), ids, attention_mask=mask)


@pytest.mark.parametrize("scheme", ["latent-4bit", "latent-2bit"])
@pytest.mark.parametrize("rank", [128, 512])
def test_latents_generate_the_same(scheme, rank):
    # Without experts, whose sizes transformers' own code reads on the host.
    model = ARCHITECTURES["deepseek_v3"].build("kvconvert", kv_lora_rank=rank, first_k_dense_replace=2)
    model = model.to("cuda", torch.bfloat16).requires_grad_(False)
    adopt(model, [KVScheme.preset(scheme)] * 2, {})
    ids = random_ids(3, 200).cuda()
    mask = torch.ones_like(ids)
    mask[0, :70] = 0
    both(model, ids, attention_mask=mask)
    # Another cache with tensors of its own follows the same recordings.
    recorded, cache = model.captured.recorded, model.new_kv_cache()
    model.generate(ids, past_key_values=cache, max_new_tokens=20, **GREEDY)
    assert (model.captured.recorded, cache.stats().fallbacks) == (recorded, 0)


TRAINED = {
    "reference": str(Path(__file__).resolve().parents[2] / "examples" / "reference-lm"),
    "smollm2": os.environ.get("KVCONVERT_SMOLLM2"),
}
TEXT = "It was a dark night, and the old house stood at the end of the road. Nobody had lived in it for twenty years. "


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["oscar", "minikv"])
@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_agree_replayed_layer_by_layer_and_in_an_engine(name, scheme):
    if TRAINED[name] is None:
        pytest.skip("KVCONVERT_SMOLLM2 names no directory with SmolLM2-135M-Instruct")
    model = AutoModelForCausalLM.from_pretrained(TRAINED[name], dtype=torch.bfloat16, attn_implementation="kvconvert")
    model = model.cuda().eval().requires_grad_(False)
    adopt(model, [KVScheme.preset(scheme).with_online_rotation()] * model.config.num_hidden_layers, {})
    ids = AutoTokenizer.from_pretrained(TRAINED[name])(TEXT * 8, return_tensors="pt").input_ids.cuda()
    both(model, ids)
    expected = model.generate(ids, max_new_tokens=150, **GREEDY)[0, ids.shape[1] :].tolist()
    engine = Engine(model, max_batch=1, prompt_chunk=4096)
    request = engine.add(ids, max_new_tokens=150, stop_token_ids=[])
    engine.run()
    assert request.tokens == expected


def test_beams_and_several_return_sequences():
    both(bundle_like("llama", "oscar"), random_ids(2, 140).cuda(), num_beams=3)
    model = bundle_like("llama", "oscar")
    torch.manual_seed(0)
    expected = model.generate(
        random_ids(1, 140).cuda(), do_sample=True, num_return_sequences=4, max_new_tokens=150, disable_compile=True
    )
    torch.manual_seed(0)
    got = model.generate(random_ids(1, 140).cuda(), do_sample=True, num_return_sequences=4, max_new_tokens=150)
    assert got.tolist() == expected.tolist()
    assert model.captured.replayed > 100


def test_a_second_turn_and_a_loop_of_ones_own():
    model = bundle_like("llama", "oscar")
    answers = []
    for captures in (False, True):
        cache = model.new_kv_cache()
        arguments = {"past_key_values": cache, "disable_compile": not captures, **GREEDY}
        first = model.generate(random_ids(1, 130).cuda(), max_new_tokens=140, **arguments)
        more = torch.cat([first, random_ids(1, 30, seed=3).cuda()], 1)
        second = model.generate(more, max_new_tokens=20, **arguments)
        token = second[:, -1:]
        with torch.no_grad():
            for _ in range(20):
                token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
                second = torch.cat([second, token], 1)
        answers.append(second.tolist())
    assert answers[0] == answers[1]
    assert model.captured.replayed > 150


@pytest.mark.parametrize("scheme", ["oscar-g128", "kitty", "minikv", "predicted"])
def test_steps_are_recorded_before_the_first_token_is_due(scheme):
    model = bundle_like("llama", scheme)
    ids = random_ids(3, 300).cuda()
    mask = torch.ones_like(ids)
    mask[0, :70] = mask[2, :290] = 0
    eager = model.generate(ids, attention_mask=mask, max_new_tokens=150, disable_compile=True, **GREEDY)
    assert prepare_steps(model, mask.sum(1).tolist(), 449) > 0
    recorded = model.captured.recorded
    replayed = model.generate(ids, attention_mask=mask, max_new_tokens=150, **GREEDY)
    assert model.captured.recorded == recorded
    assert replayed.tolist() == eager.tolist()


@pytest.mark.parametrize("scheme", ["oscar-g128", "kitty"])
def test_one_recording_with_the_most_room_serves_steps_of_all_lengths(scheme):
    model = bundle_like("llama", scheme)
    assert prepare_steps(model, [1], 1, most_room=True) == 1
    ids, answers = random_ids(1, 900).cuda(), []
    for replays in (False, True):
        cache = model.new_kv_cache()
        cache.replays = replays
        cache.expect_whole_prompt()
        with torch.no_grad():
            model(ids[:, :600], past_key_values=cache)
            steps = [model(ids[:, n : n + 1], past_key_values=cache).logits[:, -1].float() for n in range(600, 900)]
        answers.append(torch.cat(steps))
    # Parts are merged in another order.
    assert (answers[0] - answers[1]).norm() < 0.02 * answers[0].norm()
    assert model.captured.recorded == 1
    assert model.captured.replayed >= 300


def test_two_caches_take_turns():
    model = bundle_like("llama", "calibquant-2bit")
    prompts = [random_ids(1, n, seed=n).cuda() for n in (140, 90)]
    alone = [
        model.generate(ids, max_new_tokens=40, disable_compile=True, **GREEDY)[0, -40:].tolist() for ids in prompts
    ]
    caches, tokens, got = [model.new_kv_cache() for _ in prompts], [], [[], []]
    with torch.no_grad():
        for ids, cache in zip(prompts, caches, strict=True):
            cache.expect_whole_prompt()
            tokens.append(model(ids, past_key_values=cache).logits[:, -1:].argmax(-1))
        for _ in range(40):
            for row, cache in enumerate(caches):
                got[row].append(int(tokens[row]))
                tokens[row] = model(tokens[row], past_key_values=cache).logits[:, -1:].argmax(-1)
    assert got == alone
    assert model.captured.replayed > 60


def test_a_forward_pass_that_counts_positions_on_the_host_runs_layer_by_layer(caplog):
    model = bundle_like("llama", "oscar")
    inner = model.captured.forward

    def counting(**arguments):
        output = inner(**arguments)
        output.logits = output.logits + 10 * torch.nn.functional.one_hot(
            torch.tensor(arguments[CACHE].get_seq_length() % 100, device="cuda"), output.logits.shape[-1]
        )
        return output

    model.captured.forward = counting
    model.generate(random_ids(1, 40).cuda(), max_new_tokens=5, **GREEDY)
    assert "positions that are counted on the host" in model.captured.reason or "captur" in model.captured.reason
    assert model.captured.replayed == 0
    assert "without CUDA graphs" in caplog.text


def test_addresses_stay_and_nothing_is_allocated_over_a_thousand_steps():
    model = bundle_like("llama", "oscar-g128")
    cache, ids = model.new_kv_cache(kv_memory=1 << 22), random_ids(1, 300).cuda()
    with torch.no_grad():
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        for _ in range(400):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        gc.collect()
        buffers = {row.keys.address for store in cache.stores() for row in store.rows}
        graphs = model.captured.recorded
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
        for _ in range(1000):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == before
    assert {row.keys.address for store in cache.stores() for row in store.rows} == buffers
    assert model.captured.recorded == graphs
    assert cache.get_seq_length() == 1700


def test_a_copied_model_records_steps_of_its_own():
    model = bundle_like("llama", "oscar")
    ids = random_ids(1, 40).cuda()
    expected = model.generate(ids, max_new_tokens=20, **GREEDY)
    other = copy.deepcopy(model)
    assert other.generate(ids, max_new_tokens=20, **GREEDY).tolist() == expected.tolist()
    assert other.captured.recorded
    assert other.captured is not model.captured
