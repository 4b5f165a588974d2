"""Packed passes of the Engine on real models: prompts and decoding rows in one pass do not change each other."""

import random
from functools import partial

import pytest
import torch
from tiny.models import ARCHITECTURES, GREEDY, low_bit, tiny_model

from kvconvert.errors import CacheError, NumericError
from kvconvert.methods import PRESETS
from kvconvert.runtime import Engine
from kvconvert.runtime.cache.compress import raise_pages
from kvconvert.runtime.cache.forward_pass import UnreadFlags
from kvconvert.runtime.engine.model_steps import ModelSteps, PromptChunk
from kvconvert.runtime.hf import packed

LENGTHS = (1, 2, 127, 128, 129, 300)
CHUNK = 130
ALWAYS = ("oscar-g128", "kitty", "calibquant-1bit", "calibquant-2bit-visual", "minikv-pyramid")


def prompts_of(vocabulary, lengths, seed=0):
    dice = random.Random(seed)
    return [dice.choices(range(1, vocabulary), k=length) for length in lengths]


def alone(model, prompt, new):
    """What `generate` gives for the same chunks."""
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=new, prefill_chunk_size=CHUNK, **GREEDY)[0, len(prompt) :].tolist()


@torch.no_grad()
def looped(model, prompt, new):
    """The same from a loop, whose prompts may have placeholders of images where there are none."""
    cache, tokens, read = model.new_kv_cache(), [], 0
    cache.begin_prompt()
    while len(tokens) < new:
        ids = torch.tensor([prompt[read : read + CHUNK] or tokens[-1:]])
        positions = torch.arange(read, read + ids.shape[1])[None]
        logits = model(input_ids=ids, position_ids=positions, past_key_values=cache).logits
        read += ids.shape[1]
        if read == len(prompt):
            cache.seal()
        if read >= len(prompt):
            tokens.append(logits[0, -1].argmax().item())
    return tokens


def check_company(model, lengths, new, alone=alone, placeholder=None):
    """Requests that join in the middle of others and leave at other times give what they give alone."""
    engine, widths = Engine(model, max_batch=5, prompt_chunk=CHUNK, max_batch_tokens=2 * CHUNK), []
    resize = engine._steps._resize
    engine._steps._resize = lambda width: widths.append(width) or resize(width)
    prompts = prompts_of(model.config.get_text_config(decoder=True).vocab_size, lengths)
    if placeholder is not None:
        prompts = [[placeholder if 20 <= n < 60 or n > 140 else i for n, i in enumerate(ids)] for ids in prompts]
    requests = []
    for number, prompt in enumerate(prompts + prompts[::-1]):
        requests.append(engine.add(prompt, max_new_tokens=new + 3 * (number % 3), stop_token_ids=[]))
        if number in (1, 6, 9):
            engine.step()
        if number == 7:
            # One of which chunks were read, and one that decodes, if there are such ones.
            for state in ("prompt", "running"):
                found = [r for r in requests if r.state == state and (r.prompt_read or r.tokens)]
                if found:
                    found[-1].cancel()
    engine.run()
    # What is left of them goes on in the first rows.
    requests += [
        engine.add(ids, max_new_tokens=new + 9 * (n > 2), stop_token_ids=[]) for n, ids in enumerate(prompts[:5])
    ]
    engine.run()
    assert {*widths} == {1, 2, 4, 5}
    assert widths[-8:] == [*[2] * 7, 1]
    cancelled = [request for request in requests if request.finish_reason == "cancelled"]
    assert 1 <= len(cancelled) <= 2
    expected = {tuple(prompt): alone(model, prompt, new + 9) for prompt in prompts}
    for request in requests:
        assert request.tokens == expected[tuple(request.prompt)][: len(request.tokens)]
        assert request in cancelled or len(request.tokens) == request.max_new_tokens
    assert engine.stats().pages_reserved == 0
    assert engine._steps.cache.stats().pages == 0


@pytest.mark.quick("kitty", "minikv-pyramid")
@pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in PRESETS]
)
def test_prompts_and_decoding_rows_in_one_pass_give_what_each_gives_alone(scheme):
    if PRESETS[scheme].modality == "all":
        check_company(low_bit(tiny_model("llama", num_hidden_layers=2, gain=3.0), scheme), LENGTHS, 4)
    else:
        model = low_bit(ARCHITECTURES["qwen2_5_vl"].build(), scheme)
        check_company(model, LENGTHS, 4, looped, model.config.image_token_id)


@pytest.mark.quick("gpt_oss")
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_sliding_windows_soft_caps_and_sink_logits_hold_in_a_packed_pass(name):
    check_company(low_bit(ARCHITECTURES[name].build(), "kivi"), LENGTHS, 6)


@pytest.mark.each_value
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("failing", ["rows", "prompt"])
def test_a_cache_that_fails_within_a_pass_leaves_the_others_and_later_requests_as_they_are(monkeypatch, failing, layer):
    model = low_bit(tiny_model("llama", num_hidden_layers=2, gain=3.0), "kivi")
    engine = Engine(model, max_batch=4, prompt_chunk=CHUNK)
    first, second, third, *later = prompts_of(model.config.vocab_size, (129, 5, 200, 140, 20, 300))
    rows = [engine.add(prompt, max_new_tokens=20, stop_token_ids=[]) for prompt in (first, second)]
    engine.step()
    prompt = engine.add(third, max_new_tokens=10, stop_token_ids=[])
    own = engine._steps.cache

    def attend(store, *arguments, after=packed.store_and_attend):
        if store.index == layer and (store is own.layers[layer].store) == (failing == "rows"):
            raise NumericError("not a number")
        return after(store, *arguments)

    monkeypatch.setattr(packed, "store_and_attend", attend)
    with pytest.raises(NumericError):
        engine.step()
    monkeypatch.undo()
    lost = rows if failing == "rows" else [prompt]
    assert [request.finish_reason for request in (*rows, prompt) if request.finished] == ["error"] * len(lost)
    others = [request for request in (*rows, prompt) if request not in lost]
    others += [engine.add(ids, max_new_tokens=10, stop_token_ids=[]) for ids in later]
    engine.run()
    for request in others:
        assert request.tokens == alone(model, request.prompt, request.max_new_tokens)
    assert own.stats().pages == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_that_turns_out_to_be_lost_after_it_joined_ends_alone(lag, monkeypatch):
    model = low_bit(tiny_model("llama", num_hidden_layers=2, gain=3.0), "kivi")
    engine = Engine(model, max_batch=4, prompt_chunk=128)
    engine._steps.lag, join, joined = lag, engine._steps.join, []

    def lose_the_second(*arguments):
        joined.append(join(*arguments))
        return joined[-1] if len(joined) != 2 else lambda: (_ for _ in ()).throw(NumericError("cannot store"))

    monkeypatch.setattr(engine._steps, "join", lose_the_second)
    prompts = prompts_of(model.config.vocab_size, (100, 290, 290, 300))
    requests = [engine.add(ids, max_new_tokens=5, stop_token_ids=[]) for ids in prompts]
    with pytest.raises(NumericError, match="cannot store"):
        engine.run()
    engine.run()
    assert [request.finish_reason for request in requests] == ["length", "error", "length", "length"]
    for request in (requests[0], *requests[2:]):
        assert request.tokens == alone(model, request.prompt, 5)
    stored = engine._steps.cache
    assert engine.stats().prefix_pages == stored.groups[0].key_numbers.used


def test_what_kernels_could_not_store_of_a_prompt_is_told_after_it_has_joined():
    steps = ModelSteps(low_bit(tiny_model("llama", num_hidden_layers=2), "kivi"), 2, None)
    prompt, none = steps.new_prompt(), torch.zeros(2, dtype=torch.int64)
    steps.forward(none, none, False, [PromptChunk(0, prompt, [5] * 300, 0, last=True)])
    (group,) = prompt.groups
    group.stores[0].flag = torch.ones(1, dtype=torch.int32)
    raises = partial(raise_pages, [store for store in group.stores for _ in range(2)])
    group.unread_flags.append(UnreadFlags.of(torch.ones(1, dtype=torch.int32), [raises]))
    raise_if_lost = steps.join(0, prompt)
    for _ in range(2):
        with pytest.raises(NumericError, match="Layer 0"):
            raise_if_lost()
    assert not group.unread_flags
    assert all(store.flag is None for store in group.stores)
    assert steps.cache.groups[0].error is None


def test_keys_that_cannot_be_stored_end_their_own_request_alone():
    model = low_bit(tiny_model("llama", num_hidden_layers=2, gain=3.0), "kivi")
    poison = 3
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = Engine(model, max_batch=4, prompt_chunk=CHUNK)
    prompts = [[i for i in ids if i != poison] for ids in prompts_of(model.config.vocab_size, (100, 290, 290))]
    requests = [engine.add(ids, max_new_tokens=5, stop_token_ids=[]) for ids in prompts]
    poisoned = engine.add([*prompts[1][:20], poison, *prompts[1][:250]], max_new_tokens=5)
    with pytest.raises(NumericError, match="cannot store"):
        engine.run()
    engine.run()
    assert poisoned.finish_reason == "error"
    for request in requests:
        assert request.tokens == alone(model, request.prompt, 5)
    assert engine._steps.cache.stats().pages == 0


def test_the_pass_that_takes_the_memory_of_the_longest_one_leaves_no_trace():
    model = low_bit(tiny_model("llama", num_hidden_layers=2), "oscar-g128")
    steps = ModelSteps(model, 3, 1 << 20)
    chunks, forward = [], steps.forward

    def noted(ids, positions, decodes, parts):
        chunks.append(parts)
        return forward(ids, positions, decodes, parts)

    steps.forward = noted
    free = steps.cache.free_pages()
    for tokens, lengths in ((700, [140] * 3), (300, [100] * 3), (280, [140] * 2), (1, [1])):
        logits = steps._read_prompts(140, tokens)
        assert logits.shape[0] == len(lengths)
        assert [len(chunk.ids) for chunk in chunks.pop()] == lengths
        assert steps.cache.free_pages() == free
        assert not any(sequence.occupied for group in steps.cache.groups for sequence in group.sequences)


def test_memory_for_pages_is_taken_once():
    steps = ModelSteps(low_bit(tiny_model("llama"), "oscar-g128"), 5, 1 << 20)
    before = [side for store in steps.cache.stores() for side in (store.key_pages, store.value_pages)]
    steps._read_prompts(140, 300)
    after = [side for store in steps.cache.stores() for side in (store.key_pages, store.value_pages)]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(side.numbers.capacity == steps.pages for side in after)


def test_a_row_with_a_sequence_is_not_left_out():
    steps = ModelSteps(low_bit(tiny_model("llama"), "oscar-g128"), 5, None)
    none, prompt = torch.zeros(5, dtype=torch.int64), steps.new_prompt()
    steps.forward(none, none, False, [PromptChunk(4, prompt, [5, 6], 0, last=True)])
    steps.join(4, prompt)
    assert len(steps.forward(none, none, True, [])[0]) == 5
    with pytest.raises(CacheError, match="cannot have 3 rows, as one beyond them holds a sequence"):
        steps.cache.resize_rows(3)
    steps.leave(4)
    assert len(steps.forward(none, none, True, [])[0]) == 1


def test_a_pass_knows_which_of_its_tokens_are_a_sequences():
    """The rows that none has joined are computed as well, and a recording is not judged by them."""
    steps = ModelSteps(low_bit(tiny_model("llama"), "oscar-g128"), 3, None)
    none, prompt, other = torch.zeros(3, dtype=torch.int64), steps.new_prompt(), steps.new_prompt()
    steps.forward(none, none, False, [PromptChunk(1, prompt, [5, 6], 0, last=True)])
    steps.join(1, prompt)
    tokens = torch.tensor([0, 1, 2, 3, 4])
    assert steps.cache.packed([(other, 2)], rows=True).are_stored(tokens).tolist() == [False, True, False, True, True]
    assert steps.cache.packed([(other, 5)], rows=False).are_stored(tokens).all()
