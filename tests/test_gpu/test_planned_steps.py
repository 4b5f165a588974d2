"""Steps that are planned before any layer runs give what steps give that are planned as layers come."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tiny.key_centers import center_plan
from tiny.models import ARCHITECTURES, GREEDY, random_ids, tiny_model
from tiny.scorers import predicting, scorer_plan

from kvconvert import KVCache, KVScheme
from kvconvert.kernels import device as dispatch
from kvconvert.models import CACHE, CACHE_NAMES
from kvconvert.runtime.cache import compress
from kvconvert.runtime.cache.steps import PlannedStep, can_plan_steps
from kvconvert.runtime.hf.captured import _read_short_prompt, _set_dummy_lengths

SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SCHEMES = {
    "oscar": KVScheme(rotate_keys="hadamard", rotate_values="online", token_norm="joint", sink_tokens=3),
    "values stay longer": KVScheme(value_recent_tokens=140, key_group_size=128, sink_tokens=5),
    "spans with tau": replace(KVScheme.preset("calibquant-2bit"), sink_tokens=2, tau2=0.5),
    "eviction": replace(KVScheme.preset("minikv"), key_group_size=32),
    "key centers": KVScheme(key_center="calibrated", rotate_keys="hadamard", sink_tokens=3),
}


@contextmanager
def steps_of(model, plan: bool):
    """Within the context prompts take the CPU's paths, and single tokens the kernels: as layers come, or with `plan`
    through `PlannedStep`; the second step is launched twice, as one is that is recorded.
    """
    forward, steps = model.forward, []

    def planned(input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        cache = next(kwargs.pop(name) for name in CACHE_NAMES if name in kwargs)
        arguments = {"input_ids": input_ids, CACHE: cache, "position_ids": position_ids}
        if input_ids.shape[1] > 1:
            with dispatch.interpreted(False):
                return forward(**arguments, attention_mask=attention_mask, **kwargs)
        if not plan or not can_plan_steps(cache.groups):
            return forward(**arguments, attention_mask=attention_mask, **kwargs)
        step = PlannedStep(cache.groups)
        counts = [tables.clamped_rows.clone() for tables in step.tables]
        for _ in range(2 if len(steps) == 1 else 1):
            for tables, count in zip(step.tables, counts, strict=True):
                tables.clamped_rows.copy_(count)
            with step.launches():
                output = forward(**arguments)
        step.finish()
        steps.append(step.key())
        return output

    model.forward = planned
    try:
        yield steps
    finally:
        model.forward = forward


@pytest.mark.parametrize(
    ("name", "window"),
    [
        *(pytest.param(name, None, marks=pytest.mark.full) for name in SCHEMES),
        pytest.param("values stay longer", 90, marks=pytest.mark.full),
        pytest.param("key centers", 90, marks=pytest.mark.full),
    ],
)
def test_planned_steps_give_the_same_tokens_and_store_the_same(device, name, window):
    shape = SHAPE | ({"sliding_window": window} if window else {})
    model = tiny_model("mistral" if window else "llama", "kvconvert", **shape).to(device)
    check_planned_steps(model, SCHEMES[name], center_plan(2, 1, 16))


def test_planned_steps_of_heads_that_keep_parts_of_a_prompt_give_the_same(device):
    model = tiny_model("llama", "kvconvert", **SHAPE | {"num_key_value_heads": 2}).to(device)
    check_planned_steps(model, predicting(), scorer_plan(2, 2, 16))


@pytest.mark.full
def test_planned_steps_over_latents_give_the_same(device):
    # There is no kernel over latents in float32.
    model = ARCHITECTURES["deepseek_v3"].build("kvconvert").to(device, torch.float16)
    check_planned_steps(model, KVScheme.preset("latent-4bit"), {})


def check_planned_steps(model, scheme, plan):
    """Generate with and without planned steps; tokens and what is stored have to agree."""
    device = model.device
    # The second row's page is complete after its second step.
    tokens = 128 + scheme.sink_tokens + min(scheme.key_recent_tokens, scheme.value_recent_tokens) - 2
    ids = random_ids(2, tokens + 4).to(device)
    mask = torch.ones_like(ids)
    mask[0, :29] = mask[1, :4] = 0
    caches = [KVCache(model.config, scheme, plan=plan) for _ in range(2)]
    arguments = {"attention_mask": mask, "max_new_tokens": 4, **GREEDY}
    with torch.no_grad():
        with steps_of(model, plan=False):
            expected = model.generate(ids, past_key_values=caches[0], **arguments)
        with steps_of(model, plan=True) as steps:
            got = model.generate(ids, past_key_values=caches[1], **arguments)
    assert len(steps) == 3
    assert got.tolist() == expected.tolist()
    assert caches[0].stats() == caches[1].stats()
    # On a GPU prompts in float32 attend to stored tokens on the reference path.
    assert device.type == "cuda" or caches[0].stats().fallbacks == 0
    for mine, theirs in zip(caches[1].stores(), caches[0].stores(), strict=True):
        assert mine.sequences == theirs.sequences
        assert mine.group.registry.clamped_rows(mine) == theirs.group.registry.clamped_rows(theirs)
        for row, other, sequence in zip(mine.rows, theirs.rows, mine.sequences, strict=True):
            n = sequence.keys.buffered
            assert torch.equal(row.keys.tokens(0, n), other.keys.tokens(0, n))


def test_pages_of_all_layers_are_written_in_one_launch(device, monkeypatch):
    model = tiny_model("llama", "kvconvert", **SHAPE).to(device)
    cache = KVCache(model.config, KVScheme())
    calls = []
    write = compress.quantize_at
    monkeypatch.setattr(
        compress, "quantize_at", lambda writes, *rest: calls.append(len(writes.records)) or write(writes, *rest)
    )
    with torch.no_grad(), steps_of(model, plan=True):
        model(random_ids(1, 127).to(device), past_key_values=cache)
        model(random_ids(1, 1).to(device), past_key_values=cache)
    # keys, then values, of two layers
    assert calls == [2, 2]
    assert cache.stats().pages == 2


@pytest.mark.parametrize(("window", "recent"), [(None, 0), (None, 140), (300, 0)])
def test_a_short_cache_that_pretends_leads_to_the_recording_of_a_long_one(device, window, recent):
    shape = SHAPE | ({"sliding_window": window} if window else {})
    model = tiny_model("mistral" if window else "llama", "kvconvert", **shape).to(device)
    scheme = KVScheme(sink_tokens=4, value_recent_tokens=recent)
    tokens, padding = [1000, 660], 340
    long, short = (KVCache(model.config, scheme) for _ in range(2))
    short.share_tables(long.groups[0].registry)
    ids, mask = random_ids(2, 1000).to(device), torch.ones(2, 1000, dtype=torch.int64, device=device)
    mask[1, :padding] = 0
    with torch.no_grad(), dispatch.interpreted(False):
        model(ids, attention_mask=mask, past_key_values=long)
        states = _read_short_prompt(model, short, tokens)
    found = []
    for cache, pretends in ((long, False), (short, True)):
        if pretends:
            _set_dummy_lengths(*states[0], tokens, 1000)
        step = PlannedStep(cache.groups)
        step.tables[0].asked.update((7, 64))
        found.append((step.key(), [plan.segments for plan in step.tables[0].plans]))
        step.abandon()
    if window:
        # How many pages have left a window depends on each token, so that the work may differ by a page's.
        assert found[0][0][0][0] == found[1][0][0][0]
    else:
        assert found[0] == found[1]
