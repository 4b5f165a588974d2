"""Full-precision buffers: where they are, how large, and what a forward pass writes into them."""

import logging

import pytest
import torch
from tiny.models import GREEDY, random_ids, tiny_model

from kvconvert import KVCache, KVScheme
from kvconvert.kernels import decode, device
from kvconvert.runtime.cache.attend import commit
from kvconvert.runtime.cache.forward_pass import PassTokens
from kvconvert.runtime.cache.pool import BUFFER_GROWTH, CPU_GROWTH, GPU_GROWTH, BufferGrowth, TokenBuffer, remove_tokens

SCHEME = KVScheme(sink_tokens=4, key_recent_tokens=8, value_recent_tokens=8)


def filled(tokens: int, growth: BufferGrowth) -> tuple[TokenBuffer, torch.Tensor]:
    buffer, numbers = TokenBuffer(torch.empty(2, 0, 4), growth), torch.randn(2, tokens, 4)
    buffer.reserve(tokens, 0)
    buffer.tensor[:, :tokens] = numbers
    return buffer, numbers


@pytest.mark.parametrize("tokens", [5, 16, 130, 300])
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (2, 4), (0, 0), (3, 5)])
@pytest.mark.parametrize("growth", [CPU_GROWTH, GPU_GROWTH], ids=["cpu", "gpu"])
def test_what_is_left_stays_in_order_whether_or_not_the_buffer_moves(tokens, start, stop, growth):
    buffer, numbers = filled(tokens, growth)
    stop = max(stop, tokens - 3) if tokens > 16 and stop else stop
    buffer.remove([(start, stop)], tokens)
    expected = torch.cat([numbers[:, :start], numbers[:, stop:]], 1)
    left = expected.shape[1]
    assert torch.equal(buffer.tokens(0, left), expected)
    assert buffer.tensor.shape[1] <= -(-left // growth.step) * growth.step + growth.spare
    first = min(1, left)
    buffer.truncate(first)
    assert torch.equal(buffer.tokens(0, first), expected[:, :1])
    buffer.reserve(first + 200, first)
    assert torch.equal(buffer.tokens(0, first), expected[:, :1])
    assert buffer.tensor.shape[1] >= first + 200
    assert (buffer.address, buffer.head_stride) == (buffer.tensor.data_ptr(), buffer.tensor.stride(0))


def test_tokens_of_many_buffers_are_removed_at_once_as_they_are_one_by_one():
    # nothing moves up, less than was removed, more than that (which overlaps), and a buffer that shrinks
    parts = [(160, 32, 160), (288, 32, 160), (300, 4, 132), (700, 4, 516)]
    torch.manual_seed(0)
    together = [filled(tokens, GPU_GROWTH)[0] for tokens, _, _ in parts]
    one_by_one = [side.copy() for side in together]
    remove_tokens([(side, start, stop, used) for side, (used, start, stop) in zip(together, parts, strict=True)])
    for side, other, (used, start, stop) in zip(together, one_by_one, parts, strict=True):
        other.remove([(start, stop)], used)
        left = used - (stop - start)
        assert torch.equal(side.tokens(0, left), other.tokens(0, left))
        assert side.tensor.shape == other.tensor.shape


def test_on_a_gpu_addresses_outlast_flushes(monkeypatch):
    monkeypatch.setitem(BUFFER_GROWTH, "cpu", GPU_GROWTH)
    model = tiny_model("llama", "kvconvert", num_hidden_layers=1)
    cache = KVCache(model.config, SCHEME)
    model(random_ids(2, 200), past_key_values=cache)
    addresses = set()
    for _ in range(300):
        model(random_ids(2, 1), past_key_values=cache)
        addresses.add(cache.layers[0].store.rows[1].keys.address)
    assert cache.layers[0].store.flushes > 8
    assert len(addresses) <= 2


def test_generation_is_the_same_with_a_gpu_s_buffers(monkeypatch):
    model, ids = tiny_model("llama", "kvconvert"), random_ids(2, 250)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0

    def generate(cache):
        return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=40, **GREEDY)

    plain = generate(KVCache(model.config, SCHEME))
    monkeypatch.setitem(BUFFER_GROWTH, "cpu", GPU_GROWTH)
    assert torch.equal(generate(KVCache(model.config, SCHEME)), plain)


def test_rows_get_room_for_their_real_tokens_only_and_count_them_at_once():
    model = tiny_model("llama", "kvconvert")
    cache = KVCache(model.config, SCHEME)
    store = cache.layers[0].store
    keys, values = torch.randn(3, 2, 6, 16), torch.randn(3, 2, 6, 16)
    store.allocate(keys, values)
    store.park(keys, values)
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
    commit(store, PassTokens(torch.arange(6), real))
    assert [tuple(destination) for destination in store.forward_pass.destinations] == [
        (0, [(2, 4)], 0, 0),
        (1, [(0, 2), (3, 2)], 0, 0),
    ]
    assert [s.keys.buffered for s in store.sequences] == [4, 4, 0]
    for row, kept in ((0, [2, 3, 4, 5]), (1, [0, 1, 3, 4])):
        assert torch.equal(store.rows[row].keys.tokens(0, 4), keys[row][:, kept])
        assert torch.equal(store.rows[row].values.tokens(0, 4), values[row][:, kept])
    assert store.rows[2].keys.tensor.shape[1] == 0


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
