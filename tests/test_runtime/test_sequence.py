"""Full-precision buffers: where they are, how large, and what a forward pass writes into them."""

import logging

import pytest
import torch
from tiny.models import GREEDY, random_ids, tiny_model

from kvconvert.kernels import decode, device
from kvconvert.methods import KVScheme
from kvconvert.runtime import KVCache
from kvconvert.runtime.cache.append import make_room
from kvconvert.runtime.cache.sequence import GPU_STEP, KVSide, remove_tokens
from kvconvert.runtime.hf.handles import Chunk

SCHEME = KVScheme(sink_tokens=4, key_recent_tokens=8, value_recent_tokens=8)


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Buffers grow and shrink as they do on a GPU."""
    monkeypatch.setattr(KVSide, "step", GPU_STEP)
    monkeypatch.setattr(KVSide, "spare", GPU_STEP)


def filled(tokens: int) -> tuple[KVSide, torch.Tensor]:
    side, numbers = KVSide(torch.empty(2, 0, 4)), torch.randn(2, tokens, 4)
    first = side.extend(tokens)
    side.buffer[:, first : first + tokens] = numbers
    return side, numbers


@pytest.mark.parametrize("tokens", [5, 16, 130, 300])
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (2, 4), (0, 0), (3, 5)])
@pytest.mark.parametrize("step", [(16, 0), (128, 128)])
def test_what_is_left_stays_in_order_whether_or_not_the_buffer_moves(monkeypatch, tokens, start, stop, step):
    monkeypatch.setattr(KVSide, "step", step[0])
    monkeypatch.setattr(KVSide, "spare", step[1])
    side, numbers = filled(tokens)
    stop = max(stop, tokens - 3) if tokens > 16 and stop else stop
    side.remove([(start, stop)])
    expected = torch.cat([numbers[:, :start], numbers[:, stop:]], 1)
    assert torch.equal(side.tokens(0, side.dense), expected)
    assert side.buffer.shape[1] <= -(-side.dense // step[0]) * step[0] + step[1]
    side.truncate(min(1, side.dense))
    assert torch.equal(side.tokens(0, side.dense), expected[:, :1])
    more = torch.randn(2, 200, 4)
    first = side.extend(200)
    side.buffer[:, first:] = 0
    side.buffer[:, first : first + 200] = more
    assert torch.equal(side.tokens(0, side.dense), torch.cat([expected[:, :1], more], 1))


def test_tokens_of_many_buffers_are_removed_at_once_as_they_are_one_by_one(like_a_gpu):
    # nothing moves up, less than was removed, more than that (which overlaps), and a buffer that shrinks
    parts = [(160, 32, 160), (288, 32, 160), (300, 4, 132), (700, 4, 516)]
    torch.manual_seed(0)
    together = [filled(tokens)[0] for tokens, _, _ in parts]
    one_by_one = [side.copy() for side in together]
    remove_tokens([(side, start, stop) for side, (_, start, stop) in zip(together, parts, strict=True)])
    for side, other, (_, start, stop) in zip(together, one_by_one, parts, strict=True):
        other.remove([(start, stop)])
        assert side.dense == other.dense
        assert torch.equal(side.tokens(0, side.dense), other.tokens(0, other.dense))
        assert side.buffer.shape == other.buffer.shape


def test_on_a_gpu_addresses_outlast_flushes(like_a_gpu):
    model = tiny_model("llama", "kvconvert")
    cache = KVCache(model.config, SCHEME)
    model(random_ids(2, 200), past_key_values=cache)
    addresses = set()
    for _ in range(300):
        model(random_ids(2, 1), past_key_values=cache)
        addresses.add(cache.layers[0].sequences[1].keys.buffer.data_ptr())
    assert cache.layers[0].flushes > 8
    assert len(addresses) <= 2


def test_generation_is_the_same_with_a_gpu_s_buffers(monkeypatch):
    model, ids = tiny_model("llama", "kvconvert"), random_ids(2, 250)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0

    def generate():
        cache = KVCache(model.config, SCHEME)
        return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=40, **GREEDY)

    plain = generate()
    monkeypatch.setattr(KVSide, "step", GPU_STEP)
    monkeypatch.setattr(KVSide, "spare", GPU_STEP)
    assert torch.equal(generate(), plain)


def test_rows_get_room_for_their_real_tokens_only_and_count_them_at_once():
    model = tiny_model("llama", "kvconvert")
    cache = KVCache(model.config, SCHEME)
    layer = cache.layers[0]
    keys, values = torch.randn(3, 2, 6, 16), torch.randn(3, 2, 6, 16)
    layer.lazy_initialization(keys, values)
    layer.logical = 6
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
    destinations = make_room(layer, Chunk(torch.arange(6), real, None), 0, 6, decoding=False)
    assert [(d.row, d.runs, d.first_key, d.first_value) for d in destinations] == [
        (0, [(2, 4)], 0, 0),
        (1, [(0, 2), (3, 2)], 0, 0),
    ]
    assert [s.keys.dense for s in layer.sequences] == [4, 4, 0]
    for destination in destinations:
        destination.write(keys, values)
    for row, kept in ((0, [2, 3, 4, 5]), (1, [0, 1, 3, 4])):
        assert torch.equal(layer.sequences[row].keys.tokens(0, 4), keys[row][:, kept])
        assert torch.equal(layer.sequences[row].values.tokens(0, 4), values[row][:, kept])


def test_calls_that_a_kernel_was_meant_to_serve_are_counted_and_named_once(monkeypatch, caplog):
    model, ids = tiny_model("llama", "kvconvert"), random_ids(1, 20)
    plain = KVCache(model.config, SCHEME)
    model.generate(ids, past_key_values=plain, max_new_tokens=5, **GREEDY)
    assert plain.stats().fallbacks == 0
    monkeypatch.setattr(decode, "runs_triton", lambda where: True)
    monkeypatch.setattr(decode, "unsupported", lambda *layer: "this test says so")
    monkeypatch.setattr(device, "fallbacks", type(device.fallbacks)())
    cache = KVCache(model.config, SCHEME)
    with caplog.at_level(logging.WARNING, "kvconvert"):
        model.generate(ids, past_key_values=cache, max_new_tokens=5, **GREEDY)
    # four single-token steps in each of four layers; the prompt is attended to in full precision
    assert cache.stats().fallbacks == 16
    assert len([r for r in caplog.records if "slower reference path" in r.message]) == 1
