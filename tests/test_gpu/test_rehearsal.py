"""What an Engine and `generate` launch is in the list that their rehearsal makes."""

from contextlib import nullcontext

import pytest
import torch
from engine_models import llama_8b, packed_model
from tiny.models import GREEDY, random_ids

from kvconvert.kernels.device import GPU, imagined
from kvconvert.kernels.launches import record_specializations
from kvconvert.methods import KVScheme
from kvconvert.methods.kvzip import scorer_shapes
from kvconvert.runtime import Engine, Sampling
from kvconvert.runtime.cache.steps import PlannedStep
from kvconvert.runtime.engine import model_steps
from kvconvert.runtime.engine.model_steps import rehearse_engine
from kvconvert.runtime.hf.captured import CapturedSteps
from kvconvert.runtime.hf.fuse import fuse
from kvconvert.runtime.hf.rehearsal import rehearse

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def small_model(scheme, device, **heads):
    scheme = KVScheme.preset(scheme).with_online_rotation()
    return packed_model(llama_8b(**SHAPE, **(HEADS | heads)), [scheme], device)


def predicting_model(device):
    """A model whose cache keeps what networks predict; these give all tokens the same score."""
    share = {"heavy_ratio": 0.5, "recent_ratio": 0.02, "selection": "predicted"}
    model = packed_model(
        llama_8b(**SHAPE, **HEADS), [KVScheme(key_group_size=128, value_group_size=32, **share)], device
    )
    model.kv_plan = {f"layers.0.{name}": torch.zeros(shape) for name, shape in scorer_shapes(2, 32, 32).items()}
    return model


def unlisted(launched, listed):
    return "\n".join(str(launch) for launch in launched if launch not in listed)


OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in ("kivi", "kitty", "calibquant-2bit", "minikv")]


@pytest.mark.parametrize("scheme", ["oscar-g128", "predicted", *OTHERS])
@torch.no_grad()
def test_an_engine_launches_what_was_rehearsed(device, scheme):
    """Without a GPU, by the launches alone that would be made on one."""
    makes = device.type == "cuda"
    with nullcontext() if makes else imagined(GPU((9, 0), 132)), nullcontext() if makes else record_specializations():
        model = predicting_model(device) if scheme == "predicted" else small_model(scheme, device)
        engine = Engine(model, max_batch=3, prompt_chunk=128, max_batch_tokens=256)
        with record_specializations() as listed:
            rehearse_engine(model)
        hot = Sampling(temperature=1.0, top_p=0.9, seed=3)
        with record_specializations(makes=makes) as launched:
            for number, length in enumerate((1, 130, 2)):
                sampling, ids = Sampling() if number % 2 else hot, random_ids(1, length, seed=length) % 64
                engine.add(ids, max_new_tokens=2, sampling=sampling, stop_token_ids=[])
                engine.step()
            engine.run()
    # On a GPU most of it was recorded before.
    assert len(launched) > (0 if makes else 10)
    assert not unlisted(launched, listed)


# Half a minute for each under the interpreter; what an Engine launches is checked above.
@pytest.mark.full
@pytest.mark.parametrize("scheme", ["oscar-g128", "kivi", "kitty", "calibquant-2bit", "minikv"])
def test_generate_launches_what_was_rehearsed(device, scheme):
    model = small_model(scheme, device)
    with record_specializations() as listed:
        rehearse(model)
    ids, before = 1 + random_ids(2, 40).to(device) % 63, model.prompts.packed
    left = torch.ones_like(ids)
    left[0, :7] = 0
    middle = torch.ones_like(ids)
    middle[0, 7] = 0
    with record_specializations(makes=True) as launched:
        for mask in (None, left, middle):
            model.generate(ids, attention_mask=mask, max_new_tokens=2, **GREEDY)
    assert model.prompts.packed - before >= 2 * (scheme != "minikv")
    assert len(launched) > 5
    assert not unlisted(launched, listed)


def test_a_scheme_that_reads_prompts_again_is_rehearsed(device):
    share = {"heavy_ratio": 0.5, "recent_ratio": 0.02, "selection": "reconstruction"}
    scheme = KVScheme(key_group_size=128, value_group_size=32, **share)
    model = packed_model(llama_8b(**SHAPE, **HEADS), [scheme], device)
    with record_specializations() as listed:
        rehearse(model)
    assert len(listed) > 10
    assert not model.prompts.packed


def serve(engine):
    for length in (1, 2, 30, 127, 128, 500, 900, 3000):
        for seed, new in enumerate((1, 7, 140)):
            sampling = Sampling(temperature=1.0, top_p=0.9, seed=seed) if seed else Sampling()
            engine.add([5] * length, max_new_tokens=new, sampling=sampling, stop_token_ids=[])
            engine.step()
    engine.run()
    # Alone, while all other rows are free.
    for length in (20, 600, 2700):
        engine.add([5] * length, max_new_tokens=2, stop_token_ids=[])
        engine.run()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("scheme", ["oscar-g128", "kivi", "minikv", "predicted"])
def test_while_an_engine_serves_no_kernel_is_compiled_or_read_and_no_step_recorded(scheme):
    from triton import knobs

    predicts, device = scheme == "predicted", torch.device("cuda")
    model = predicting_model(device) if predicts else small_model(scheme, device)
    # More rows than short steps have.
    engine = Engine(model, kv_memory=None if predicts else 1 << 27, max_batch=20, prompt_chunk=256)
    recorded, asked = model.captured.recorded, []
    knobs.compilation.listener = lambda **what: asked.append(what["metadata"]["name"])
    with record_specializations() as listed:
        rehearse_engine(model)
    try:
        with record_specializations(makes=True) as launched:
            serve(engine)
    finally:
        knobs.compilation.listener = None
    assert not unlisted(launched, listed)
    assert not asked
    # Steps of what compresses prompts as a whole are recorded for short ones alone.
    assert scheme in ("minikv", "predicted") or model.captured.recorded == recorded
    assert model.captured.passes.reason is None
    assert model.captured.passes.recorded > 0 or scheme == "minikv"


@pytest.mark.parametrize("scheme", ["default", *OTHERS[:2], pytest.param("oscar-g128", marks=pytest.mark.full)])
def test_steps_are_recorded_for_all_lengths_before_the_first_request(monkeypatch, scheme):
    """By the keys of steps alone: no launch is made."""
    keys, launch = [], CapturedSteps._launch

    def noting(self, planned, *arguments):
        output = launch(self, planned, *arguments)
        # As a recording is kept: once it is known how work is divided.
        keys.append(planned.key())
        return output

    monkeypatch.setattr(CapturedSteps, "_launch", noting)
    monkeypatch.setattr(model_steps, "FEW_ROWS", 4)
    with torch.no_grad(), imagined(GPU((9, 0), 132)), record_specializations():
        model = small_model(scheme, torch.device("cpu"))
        engine = Engine(model, kv_memory=1 << 26, max_batch=8, prompt_chunk=256)
        model.captured.registry.least_entries.update({4: 2048, 8: 2048})
        engine._steps.prepare_steps(1 << 20, 1 << 18)
        prepared = set(keys)
        keys.clear()
        serve(engine)
    assert len(set(keys)) > 3
    assert not set(keys) - prepared


@pytest.mark.parametrize("scheme", ["oscar-g128", *OTHERS, pytest.param("default", marks=pytest.mark.full)])
def test_an_engine_of_many_rows_launches_what_was_rehearsed_with_few(scheme):
    """So that `kvconvert warm` compiles all that an Engine is made of."""
    model = small_model(scheme, torch.device("cpu"), num_attention_heads=16, num_key_value_heads=8)
    fuse(model)
    with torch.no_grad(), imagined(GPU((9, 0), 132)):
        with record_specializations() as listed:
            rehearse_engine(model)
        with record_specializations() as launched:
            steps = model_steps.ModelSteps(model, 64, 1 << 22)
            for width in steps._widths:
                steps._prepare_steps(width, steps.pages * 128, steps.pages * 128)
            steps._read_prompts(256, 1024)
    assert len(launched) > 10
    assert not unlisted(launched, listed)


def test_a_step_that_nothing_fits_takes_what_was_recorded_with_the_most_room():
    with torch.no_grad(), imagined(GPU((9, 0), 132)), record_specializations():
        model = small_model("oscar-g128", torch.device("cpu"))
        cache, one = model.new_kv_cache(), torch.zeros(1, 1, dtype=torch.int64)
        model(torch.zeros(1, 300, dtype=torch.int64), past_key_values=cache)
        model(one, past_key_values=cache)  # which tells the tables how work is divided
        planned, captured = PlannedStep(cache.groups), model.captured
        own = planned.key()
        assert captured._recorded(planned, ()) is None
        assert not planned.max_capacity
        planned.max_capacity = True
        captured._recordings[(planned.key(),)] = "any work"
        planned.max_capacity = False
        assert captured._recorded(planned, ()) == "any work"
        assert planned.max_capacity
        planned.max_capacity = False
        captured._recordings[(own,)] = "this work"
        assert captured._recorded(planned, ()) == "this work"
        assert not planned.max_capacity
