"""Pages of a whole batch, quantized in one launch where they lie."""

import pytest
import torch
from transformers import LlamaConfig

from kvconvert import KVCache, KVScheme
from kvconvert.errors import CacheError, NumericError
from kvconvert.kernels import device as dispatch
from kvconvert.kernels.attention import Scoring
from kvconvert.runtime.cache import attend as attending
from kvconvert.runtime.cache import compress
from kvconvert.runtime.cache.attend import attend, commit
from kvconvert.runtime.cache.compress import end_forward
from kvconvert.runtime.cache.forward_pass import PassTokens

CONFIG = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
OSCAR = KVScheme(token_norm="joint", sink_tokens=3, key_recent_tokens=9, value_recent_tokens=9)
KITTY = KVScheme(boost_fraction=0.25, key_recent_tokens=128, value_recent_tokens=128, key_group_size=128)
ONE_BIT = KVScheme(key_bits=1, value_bits=1, key_group_size=128)
MIXED = KVScheme(key_bits=16, value_bits=4)


def fed(
    scheme: KVScheme,
    where: torch.device,
    tokens: list[int],
    real: torch.Tensor | None = None,
    rows: int = 3,
    dtype: torch.dtype = torch.bfloat16,
) -> KVCache:
    """A cache that stored random tokens, forward pass by forward pass."""
    cache, generator = KVCache(CONFIG, scheme), torch.Generator().manual_seed(0)
    layer = cache.layers[0]
    for n in tokens:
        start = layer.store.logical
        keys, values = (torch.randn(rows, 2, n, 32, generator=generator).to(where, dtype) for _ in range(2))
        layer.update(keys, values)
        mask = None if real is None else real[:, : start + n].to(where)
        commit(layer.store, PassTokens(torch.arange(start, start + n, device=where), mask, None))
        end_forward(layer.store)
        let_flags_arrive(where)
    return cache


def let_flags_arrive(device: torch.device) -> None:
    """Wait for what a flush has found: the next pass looks at it, and passes over what has not come yet."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def test_what_the_kernels_do_not_take_is_quantized_all_the_same(device, monkeypatch):
    monkeypatch.setattr(compress, "quantize_at", pytest.fail)
    layer = fed(OSCAR, device, [140], rows=1, dtype=torch.float64).layers[0]
    with dispatch.interpreted(False):
        expected = fed(OSCAR, torch.device("cpu"), [140], rows=1, dtype=torch.float64).layers[0]
    found = layer.store.key_pages.read((0,)).buffer
    assert torch.equal(found.cpu(), expected.store.key_pages.read((0,)).buffer)
    assert (layer.store.flushes, layer.store.fallbacks, expected.store.fallbacks) == (2, 2, 0)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(OSCAR, id="oscar", marks=pytest.mark.full),
        pytest.param(KITTY, id="kitty"),
        pytest.param(ONE_BIT, id="1 bit", marks=pytest.mark.full),
        pytest.param(MIXED, id="16 and 4 bits"),
    ],
)
def test_a_batch_stores_what_the_reference_stores(device, scheme):
    real = torch.ones(3, 600, dtype=torch.bool)
    real[1, :20] = real[2, :150] = False
    tokens = [150, 1, 120]
    got = fed(scheme, device, tokens, real).layers[0]
    with dispatch.interpreted(False):
        want = fed(scheme, torch.device("cpu"), tokens, real).layers[0]
    assert got.store.flushes == want.store.flushes > 0
    assert got.store.fallbacks == 0
    assert got.store.sequences == want.store.sequences
    for sequence, mine, theirs in zip(got.store.sequences, got.store.rows, want.store.rows, strict=True):
        for side, buffer, other, pages, their_pages in (
            (sequence.keys, mine.keys, theirs.keys, got.store.key_pages, want.store.key_pages),
            (sequence.values, mine.values, theirs.values, got.store.value_pages, want.store.value_pages),
        ):
            assert torch.equal(buffer.tokens(0, side.buffered).cpu(), other.tokens(0, side.buffered))
            if not side.pages:
                continue
            expected = their_pages.read(side.pages)
            for name, tensor in pages.read(side.pages).tensors():
                # sums in another order: a value on the edge between two codes may fall either way
                assert (tensor.cpu() == getattr(expected, name)).float().mean() > 0.999, name


def test_what_cannot_be_stored_is_named_and_the_cache_refuses_to_go_on(device):
    cache = fed(OSCAR, device, [127], rows=2)
    layer = cache.layers[0]
    keys, values = torch.randn(2, 2, 10, 32).to(device), torch.randn(2, 2, 10, 32).to(device)
    values[1, 1, 0, 5] = float("inf")
    layer.update(keys.bfloat16(), values.bfloat16())
    commit(layer.store, PassTokens(torch.arange(127, 137, device=device), None, None))
    end_forward(layer.store)
    let_flags_arrive(device)
    with pytest.raises(NumericError, match="Layer 0, KV head 1: the cache cannot store"):
        layer.update(keys.bfloat16(), keys.bfloat16())
    with pytest.raises(CacheError, match="cannot be used further: Layer 0, KV head 1: the cache cannot store"):
        layer.update(keys.bfloat16(), keys.bfloat16())
    cache.reset()
    assert layer.store.group.value_numbers.used == 0
    layer.update(keys.bfloat16(), keys.bfloat16())


def test_a_fallback_names_the_layer_whose_numbers_cannot_be_stored(device):
    # Heads of 12 channels, which the kernels do not serve; a single token completes the pages of both layers.
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 12}
    cache = KVCache(LlamaConfig(**shape), KVScheme(key_bits=8, value_bits=8, rotate_keys="none", rotate_values="none"))
    for start, n in ((0, 127), (127, 1)):
        for index, layer in enumerate(cache.layers):
            keys = torch.randn(1, 2, n, 12, device=device)
            keys[0, 1, -1, 3] = float("inf") if index and n == 1 else 1.0
            layer.update(keys, torch.randn(1, 2, n, 12, device=device))
            commit(layer.store, PassTokens(torch.arange(start, start + n, device=device)))
            if index and n == 1:
                with pytest.raises(NumericError, match=r"^Layer 1, KV head 1: the cache cannot store"):
                    end_forward(layer.store)
            else:
                end_forward(layer.store)


def test_flags_are_read_by_the_pass_after_a_flush(device, monkeypatch):
    reads = []
    read = compress.raise_if_flagged
    monkeypatch.setattr(compress, "raise_if_flagged", lambda *given: reads.append(1) or read(*given))
    cache = fed(ONE_BIT, device, [127, 1, 127, 1], rows=1)
    assert cache.layers[0].store.flushes == 2 * 2
    assert len(reads) == 1
    cache.stats()
    assert len(reads) == 2


@pytest.mark.parametrize("rotate_keys", ["hadamard", pytest.param("none", marks=pytest.mark.full)])
def test_tokens_of_all_rows_are_stored_and_queries_rotated_in_one_launch(device, monkeypatch, rotate_keys):
    calls = []
    launch = attending.rotate_and_append
    monkeypatch.setattr(attending, "rotate_and_append", lambda *given: calls.append(1) or launch(*given))
    # values stay longer than keys, so that they lie elsewhere in their buffers
    scheme = KVScheme(rotate_keys=rotate_keys, rotate_values="online", value_recent_tokens=128, sink_tokens=2)
    real = torch.ones(3, 600, dtype=torch.bool)
    real[1, :30] = False
    stored, sequences = [], []
    for one_launch in (True, False):
        generator = torch.Generator().manual_seed(0)
        layer = KVCache(CONFIG, scheme).layers[0]
        outputs = []
        for n in (140, 1, 1):
            start = layer.store.logical
            new = [torch.randn(3, heads, n, 32, generator=generator).bfloat16().to(device) for heads in (2, 2, 2)]
            columns = torch.arange(start, start + n, device=device)
            chunk = PassTokens(columns, real[:, : start + n].to(device), None)
            # The prompt, whose pages are the same both times, would take the interpreter long.
            with dispatch.interpreted(device.type == "cpu" and n == 1):
                layer.update(*new[:2])
                rotated = commit(layer.store, chunk, new[2] if one_launch else None)
                assert (rotated is not None) >= (one_launch and n == 1)
                queries = new[2] if rotated is None else rotated
                if n == 1:
                    outputs.append(attend(layer.store, queries, chunk, Scoring(0.2), rotated=rotated is not None))
                end_forward(layer.store)
        stored.append((layer.store.rows, outputs))
        sequences.append(layer.store.sequences)
    assert len(calls) == 2
    assert sequences[0] == sequences[1]
    for sequence, mine, theirs in zip(sequences[0], *(rows for rows, _ in stored), strict=True):
        for side, buffer, other in (
            (sequence.keys, mine.keys, theirs.keys),
            (sequence.values, mine.values, theirs.values),
        ):
            assert torch.equal(buffer.tokens(0, side.buffered), other.tokens(0, side.buffered))
    for got, expected in zip(*(outputs for _, outputs in stored), strict=True):
        assert torch.equal(got, expected)
