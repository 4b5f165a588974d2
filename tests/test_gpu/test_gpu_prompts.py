"""Prompts of `generate` where kernels run: packed they give what they give layer by layer."""

import functools
from contextlib import nullcontext

import pytest
import torch
from test_gpu_packed import CASES, SHAPE, low_bit
from tiny.models import random_ids, tiny_model
from tiny.scorers import predicting, scorer_plan

from kvconvert.errors import CacheError
from kvconvert.methods import KVScheme
from kvconvert.runtime.hf import packed
from kvconvert.runtime.hf.captured import prepare_steps

LENGTH = 140


def masks(device):
    left = torch.ones(2, LENGTH, dtype=torch.int64, device=device)
    left[0, :37] = 0
    right = torch.ones_like(left)
    right[1, -30:] = 0
    return {"no padding": None, "left": left, "right": right}


def read(model, ids, mask, *, packs=True, cache=None, **options):
    """Logits of a prompt and its cache; whether it was packed."""
    cache = model.new_kv_cache() if cache is None else cache
    before = model.prompts.packed
    with torch.no_grad(), nullcontext() if packs else model.prompts.layer_by_layer():
        output = model(ids, attention_mask=mask, past_key_values=cache, **options)
    assert output.past_key_values is cache
    return output.logits.float(), cache, model.prompts.packed > before


@functools.cache
def taught(name, device):
    """A model that knows the shapes of its tokens."""
    model, *arguments = CASES[name]()
    model = low_bit(model, arguments[0], device, *arguments[1:])
    read(model, random_ids(1, 2).to(device), None, packs=False)
    return model


def near(found, expected):
    return bool(((found - expected).norm(dim=-1) < 3e-2 * expected.norm(dim=-1)).all())


@pytest.mark.full
@pytest.mark.parametrize("padding", ["no padding", "left", "right"])
@pytest.mark.parametrize("name", CASES)
def test_a_packed_prompt_gives_what_it_gives_layer_by_layer(device, name, padding):
    model, mask = taught(name, device), masks(device)[padding]
    ids, token = random_ids(2, LENGTH, seed=5).to(device), random_ids(2, 1, seed=6).to(device)
    places = torch.tensor([LENGTH - 40], device=device) if padding == "right" else 1
    expected, apart, was_packed = read(model, ids, mask, packs=False, logits_to_keep=places)
    assert not was_packed
    found, cache, was_packed = read(model, ids, mask, logits_to_keep=places)
    assert was_packed
    assert found.shape == expected.shape
    assert near(found, expected)
    for side in (apart, cache):
        side.seal()
    assert [group.sequences for group in cache.groups] == [group.sequences for group in apart.groups]
    mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
    steps = [read(model, token, mask, packs=False, cache=one)[0] for one in (cache, apart)]
    assert near(*steps)


@pytest.mark.parametrize("padding", ["no padding", pytest.param("left", marks=pytest.mark.full)])
def test_a_packed_prompt_of_which_heads_keep_parts_gives_what_it_gives_layer_by_layer(device, padding):
    model = low_bit(tiny_model("llama", **SHAPE), predicting(), device, scorer_plan(2, 2, 16))
    mask = masks(device)[padding]
    ids, tokens = random_ids(2, LENGTH, seed=5).to(device), random_ids(2, 2, seed=6).to(device)
    read(model, ids[:, :2], None, packs=False)
    found = []
    for packs in (True, False):
        cache = model.new_kv_cache()
        cache.expect_whole_prompt()
        logits, _, was_packed = read(model, ids, mask, packs=packs, cache=cache, logits_to_keep=1)
        assert was_packed == packs
        assert cache.get_seq_length() == LENGTH
        longer = mask
        for token in tokens.split(1, 1):
            longer = None if longer is None else torch.nn.functional.pad(longer, (0, 1), value=1)
            logits = torch.cat([logits, read(model, token, longer, packs=False, cache=cache)[0]], 1)
        found.append((logits, [group.sequences for group in cache.groups], cache.stats()))
    assert near(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert {sequence.kept for group in found[0][1] for sequence in group} == {128}
    assert found[0][2].bytes_used == found[1][2].bytes_used


@pytest.mark.full
@pytest.mark.parametrize("name", ["oscar", "windows and soft caps"])
def test_a_second_prompt_reads_what_the_cache_has(device, name):
    model, mask = taught(name, device), masks(device)["left"]
    ids, more = random_ids(2, LENGTH, seed=5).to(device), random_ids(2, 50, seed=6).to(device)
    longer = torch.nn.functional.pad(mask, (0, 50), value=1)
    found = []
    for packs in (True, False):
        _, cache, _ = read(model, ids, mask, packs=packs, logits_to_keep=1)
        logits, cache, was_packed = read(model, more, longer, packs=packs, cache=cache)
        assert was_packed == packs
        found.append(logits)
    assert found[0].shape == (2, 50, model.config.vocab_size)
    assert near(*found)


def test_logits_are_those_of_the_wanted_positions(device):
    model = taught("oscar", device)
    ids, mask = random_ids(2, 20).to(device), torch.ones(2, 20, dtype=torch.int64, device=device)
    mask[1, :5] = 0
    whole = read(model, ids, mask)[0]
    assert near(whole[mask.bool()], read(model, ids, mask, packs=False)[0][mask.bool()])
    assert whole.shape == (2, 20, model.config.vocab_size)
    places = torch.tensor([3, 19, 8], device=device)
    for wanted, expected in ((2, whole[:, -2:]), (places, whole[:, places])):
        found, _, was_packed = read(model, ids, mask, logits_to_keep=wanted)
        assert was_packed
        real = mask.bool()[:, -2:] if isinstance(wanted, int) else mask.bool()
        real = mask.bool()[:, places] if isinstance(wanted, torch.Tensor) else real
        assert near(found[real], expected[real])


@pytest.mark.full
def test_a_mask_that_is_not_the_window_is_attended_to_with_its_padding(device, monkeypatch):
    model, mask = taught("oscar", device), masks(device)["left"]
    ids = random_ids(2, LENGTH, seed=5).to(device)
    expected = read(model, ids, mask, logits_to_keep=1)[0]
    monkeypatch.setattr(packed, "shows_window", lambda function, window: False)
    found, _, was_packed = read(model, ids, mask, logits_to_keep=1)
    assert was_packed
    assert near(found, expected)


def test_what_cannot_be_packed_goes_layer_by_layer(device):
    model, ids = taught("oscar", device), random_ids(1, 6).to(device)
    single = SHAPE | {"num_hidden_layers": 1}
    broken = torch.ones_like(ids)
    broken[0, 3] = 0
    one = model.new_kv_cache()
    embeddings = model.get_input_embeddings()(ids)
    assert not read(model, ids, broken)[2]  # padding in the middle
    assert not read(model, ids, None, packs=False)[2]
    assert not read(model, ids, None, output_hidden_states=True)[2]
    assert not read(model, None, None, inputs_embeds=embeddings)[2]
    one.activate_past_recording()
    assert not read(model, ids, None, cache=one)[2]
    assert not read(low_bit(tiny_model("llama", **single), KVScheme.preset("kivi"), device), ids, None)[2]
    minikv = low_bit(tiny_model("llama", **single), KVScheme.preset("minikv"), device)
    read(minikv, ids, None)
    assert not read(minikv, ids, None)[2]


def test_a_mask_that_differs_for_stored_positions_is_refused_before_anything_is_stored(device):
    model, ids = taught("oscar", device), random_ids(2, 6).to(device)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    cache = read(model, ids, mask)[1]
    other = torch.ones(2, 12, dtype=torch.int64, device=device)
    other[1, 0] = 0
    with pytest.raises(CacheError, match="differs for positions"):
        read(model, ids, other, cache=cache)
    other[1, 0], other[0, 0] = 1, 0
    assert read(model, ids, other, cache=cache)[2]


def test_a_cache_whose_prompt_was_interrupted_says_so(device, monkeypatch):
    def interrupted(*args, **options):
        raise RuntimeError("out of memory")

    model, ids = taught("oscar", device), random_ids(1, 6).to(device)
    cache = model.new_kv_cache()
    with monkeypatch.context() as patch:
        patch.setattr(packed.PackedLayer, "attend", interrupted)
        with pytest.raises(RuntimeError, match="out of memory"):
            read(model, ids, None, cache=cache)
    with pytest.raises(CacheError, match="cannot be used further: out of memory"):
        read(model, ids, None, cache=cache)
    cache.reset()
    assert read(model, ids, None, cache=cache)[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", ["oscar", "spans", "windows and soft caps", "centers"])
def test_recorded_prompts_give_what_launches_give(name):
    device = torch.device("cuda")
    model = taught.__wrapped__(name, device)  # with no recordings of other tests
    prepare_steps(model, [1, 1], 2)
    for padding, mask in masks(device).items():
        ids = random_ids(2, LENGTH, seed=len(padding)).to(device)
        expected = read(model, ids, mask, packs=False, logits_to_keep=1)[0]
        for _ in range(4):
            found, _, was_packed = read(model, ids, mask, logits_to_keep=1)
            assert was_packed
            assert near(found[:1], expected[:1]) if padding == "right" else near(found, expected)
    passes = model.captured.passes
    assert passes.reason is None
    # 280 tokens with and without the padding on the right of 30, and 243.
    assert passes.recorded == 2
    assert passes.replayed == 3 * 4 - 2 * 2
