"""Where pages and full-precision tokens lie in a request's blocks."""

from __future__ import annotations

import pytest
import torch

from kvconvert.cache.format import CacheFormat
from kvconvert.errors import BundleError
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.vllm.blocks import BlockLayout


def layout(block_bytes: int | None = None, **fields: int) -> BlockLayout:
    cache = CacheFormat.of(KVScheme(key_bits=2, value_bits=2, **fields), heads=2, key_dim=64)
    return BlockLayout.of(cache, torch.bfloat16, block_bytes)


WINDOWS = [(0, 0), (0, 128), (130, 0), (20, 300), (256, 256)]


@pytest.mark.parametrize(("key_window", "value_window"), WINDOWS)
@pytest.mark.parametrize("sinks", [0, 4, 60])
def test_no_token_lies_where_another_or_a_page_does(sinks, key_window, value_window):
    found = layout(sink_tokens=sinks, key_recent_tokens=key_window, value_recent_tokens=value_window)
    for tokens in range(1, 1200):
        # While the newest token is stored, pages count as quantized that all before it have completed.
        quantized = found.quantized(tokens - 1)
        exact = found.places(torch.arange(min(quantized) * PAGE_SIZE, tokens))
        places = list(zip(*(part.tolist() for part in exact), strict=True))
        kept = found.sinks(torch.arange(min(sinks, tokens)))
        places += zip(*(part.tolist() for part in kept), strict=True)
        assert len(set(places)) == len(places)
        pages = {found.first_page + page for page in range(max(quantized))}
        assert not pages & {entry for entry, _ in places}
        assert max(pages | {entry for entry, _ in places}) < found.blocks_for(tokens)
        assert all(slot < found.tokens_per_block for _, slot in places)


def test_a_token_stays_where_it_is_until_its_page_is_quantized_and_a_page_does_not_move():
    found = layout(sink_tokens=4)
    assert found.places(torch.tensor([5])) == found.places(torch.tensor([5]))
    assert found.blocks_for(1) == found.first_page + 1 + found.chunks
    assert found.blocks_for(PAGE_SIZE) + 1 == found.blocks_for(PAGE_SIZE + 1)
    assert found.blocks_for(0) == 0


def test_a_block_holds_as_many_tokens_as_fit_and_a_larger_block_more():
    found = layout()
    assert found.tokens_per_block == found.block_bytes // found.token_bytes
    assert found.chunks * found.tokens_per_block >= PAGE_SIZE > (found.chunks - 1) * found.tokens_per_block
    wider = layout(block_bytes=2 * found.block_bytes)
    assert wider.tokens_per_block >= 2 * found.tokens_per_block
    assert (wider.key_bytes, wider.value_bytes) == (found.key_bytes, found.value_bytes)


def test_a_block_that_holds_no_token_is_refused():
    with pytest.raises(BundleError, match="has no room for one token of 512"):
        layout(block_bytes=500)
