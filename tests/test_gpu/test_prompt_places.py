"""Passes whose prompts' states lie in places of fixed addresses give what others give."""

import functools

import pytest
import torch
from tiny.families import FAMILIES
from tiny.models import ARCHITECTURES, random_ids

from kvconvert.kernels.convolution import chunks_of, ends_of, owners_of
from kvconvert.methods import KVScheme
from kvconvert.models import CACHE
from kvconvert.runtime import Engine
from kvconvert.runtime.cache.prompt_pass import TableCapacity
from kvconvert.runtime.hf.captured_passes import PromptPlaces
from kvconvert.runtime.hf.generation import adopt

PADDED = 128
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
HEADS |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}


@functools.cache
def hybrid(device):
    """Its passes are tried once, which takes a third of the time of these tests."""
    model = (ARCHITECTURES | FAMILIES)["qwen3_5_text"].build(**HEADS).to(device, torch.float16)
    adopt(model, [KVScheme.preset("kivi")] * model.config.num_hidden_layers, {})
    return model


@torch.no_grad()
def read(model, batch, parts, rows, tokens=None, places=None):
    """Logits of a pass over the newest tokens of rows and parts of prompts: pairs of a cache, ids, and a position."""
    cache = batch.packed([(prompt, len(ids)) for prompt, ids, _ in parts], rows=bool(rows))
    ids = [token for token, _ in rows] + [token for _, own, _ in parts for token in own]
    positions = [place for _, place in rows] + [begin + i for _, own, begin in parts for i in range(len(own))]
    with cache.planned(tokens and TableCapacity.of(tokens), places):
        assert (cache.placed is not None) == (places is not None)
        given = torch.tensor([ids, positions], device=model.device)
        if places is not None:
            given = torch.nn.functional.pad(given, (0, tokens - len(ids)))
        with cache.launches():
            output = model(input_ids=given[:1], position_ids=given[1:], use_cache=True, **{CACHE: cache})
    return output.logits[0, : len(ids)]


def test_prompts_whose_states_are_placed_give_what_others_give(device):
    model, found = hybrid(device), []
    first, long, short = (random_ids(1, n, seed=n)[0].tolist() for n in (5, 75, 97))
    for placed in (False, True):
        batch = model.new_kv_cache()
        batch.open_rows(3)
        joined, one, other = (batch.beside() for _ in range(3))
        for prompt in (joined, one, other):
            prompt.begin_prompt()
        logits = [read(model, batch, [(joined, first, 0)], [])]
        places = PromptPlaces(joined, TableCapacity.of(512)) if placed else None
        joined.seal()
        batch.join(1, joined)
        for step, (begin, middle) in enumerate([(0, 0), (70, 33)]):
            ends = [(70, 33), (70, 97)][step]
            parts = [(one, long[begin : ends[0]], begin), (other, short[middle : ends[1]], middle)]
            rows = [(0, 0), (7 + step, 40 + step), (0, 0)]
            passed = read(model, batch, [part for part in parts if part[1]], rows, PADDED if placed else None, places)
            logits += [passed[1:2], passed[3:]]
        caches = [one, other]
        states = [t for cache in caches for x in cache.state_layers().values() for t in x.tensors().values()]
        states += [t[1] for layer in batch.state_layers().values() for t in layer.tensors().values()]
        found.append((logits, [state.float() for state in states]))
    for without, with_places in zip(*found, strict=True):
        for expected, own in zip(without, with_places, strict=True):
            assert (own - expected).abs().max() <= 0.02 * expected.abs().max()


def test_sequences_are_divided_into_chunks_and_what_is_left_lies_behind_the_last_one():
    lengths = [65, 0, 64, 3]
    assert ends_of(lengths).tolist() == [0, 65, 65, 129, 132]
    assert owners_of(lengths).tolist() == [0] * 65 + [2] * 64 + [3] * 3
    assert chunks_of(lengths).tolist() == [[0, 0], [0, 1], [2, 0], [3, 0]]
    assert chunks_of(lengths, 6).tolist() == [[0, 0], [0, 1], [2, 0], [3, 0], [3, 1], [3, 2]]
    assert chunks_of([64, 0], 3).tolist() == [[0, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize("rows", [1, 3])
def test_the_tokens_of_a_pass_and_its_padding_have_places(device, rows):
    model = hybrid(device)
    batch = model.new_kv_cache()
    batch.open_rows(rows)
    prompt = batch.beside()
    prompt.begin_prompt()
    read(model, batch, [(prompt, [5] * 9, 0)], [])
    places, room = PromptPlaces(prompt, TableCapacity.of(512)), TableCapacity.of(PADDED)
    places.put([prompt], [70], rows, room)
    count = PADDED - rows
    assert places.sequences.ends.tolist() == [0, *[70] * room.sequences, count]
    assert places.sequences.owners.tolist() == [0] * 70 + [room.sequences] * (count - 70)
    index, layer = next(iter(places.layers.items()))
    stored = prompt.state_layers()[index].tensors()
    for name, tensor in layer.tensors().items():
        assert torch.equal(tensor[:1], stored[name])
        assert not tensor[-1].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_recorded_passes_of_hybrids_give_what_launches_give():
    pytest.importorskip("fla", reason="without flash-linear-attention these passes are not recorded")
    model = hybrid(torch.device("cuda"))
    prompts = [random_ids(1, n, seed=n)[0].tolist() for n in (5, 130, 300, 131, 700, 64) * 3]
    found = []
    for recorded in (True, False):
        engine = Engine(model, max_batch=8, prompt_chunk=128, max_batch_tokens=512)
        passes = model.captured.passes
        passes.reason = None if recorded else "recordings are compared with launches"
        before, requests = passes.replayed, []
        for prompt in prompts:
            requests.append(engine.add(prompt, max_new_tokens=20, stop_token_ids=[]))
            engine.step()
        engine.run()
        assert (passes.replayed > before + 5) == recorded
        found.append([request.tokens for request in requests])
    same = [a == b for recorded, launched in zip(*found, strict=True) for a, b in zip(recorded, launched, strict=True)]
    assert sum(same) > 0.95 * len(same)
