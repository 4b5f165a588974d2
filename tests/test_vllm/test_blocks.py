"""Where pages and full-precision tokens lie in a request's blocks."""

from __future__ import annotations

import pytest
import torch

from kvconvert.cache import layer_format
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.vllm.blocks import BlockLayout, block_layouts


def cache(**fields: int) -> LayerFormat:
    return layer_format(KVScheme(**{"key_bits": 2, "value_bits": 2} | fields), heads=2, key_dim=64)


def layout(**fields: int) -> BlockLayout:
    return BlockLayout.of(cache(**fields), torch.bfloat16)


WINDOWS = [(0, 0), (16, 16), (0, 128), (130, 0), (20, 300), (256, 256), (127, 383)]


@pytest.mark.each_value
@pytest.mark.parametrize(("key_window", "value_window"), WINDOWS)
@pytest.mark.parametrize("sinks", [0, 4, 60])
@pytest.mark.parametrize("drafts", [0, 5])
def test_no_token_lies_where_another_or_a_page_does(sinks, key_window, value_window, drafts):
    fields = {"sink_tokens": sinks, "key_recent_tokens": key_window, "value_recent_tokens": value_window}
    found = BlockLayout.of(cache(**fields), torch.bfloat16, drafts)
    for tokens in range(1, 1200):
        # While the newest token is stored, pages are read as quantized that all before it have completed, of drafts all
        # before the first; others are quantized besides as soon as they are complete.
        quantized = found.quantized(max(0, tokens - 1 - drafts))
        exact = found.places(torch.arange(min(quantized) * PAGE_SIZE, tokens))
        places = list(zip(*(part.tolist() for part in exact), strict=True))
        kept = found.sinks(torch.arange(min(sinks, tokens)))
        places += zip(*(part.tolist() for part in kept), strict=True)
        assert len(set(places)) == len(places)
        pages = {found.first_page + page for page in range(tokens // PAGE_SIZE)}
        assert not pages & {entry for entry, _ in places}
        assert max(pages | {entry for entry, _ in places}) < found.blocks_for(tokens)
        assert all(slot < found.tokens_per_block for _, slot in places)


def test_a_token_stays_where_it_is_until_its_page_is_quantized_and_a_page_does_not_move():
    found = layout(sink_tokens=4)
    assert found.places(torch.tensor([5])) == found.places(torch.tensor([5]))
    assert found.blocks_for(1) == found.first_page + 1 + found.chunks
    assert found.blocks_for(PAGE_SIZE) + 1 == found.blocks_for(PAGE_SIZE + 1)
    assert found.blocks_for(0) == 0


def test_a_few_recent_tokens_take_a_few_more_blocks():
    few = layout(key_recent_tokens=16, value_recent_tokens=16)
    assert few.blocks_ahead == layout().blocks_ahead + few.early_chunks - 1
    assert few.early_chunks * few.tokens_per_block >= 16 > (few.early_chunks - 1) * few.tokens_per_block


def test_a_block_holds_as_many_tokens_as_fit():
    found = layout()
    assert found.tokens_per_block == found.block_bytes // found.token_bytes
    assert found.chunks * found.tokens_per_block >= PAGE_SIZE > (found.chunks - 1) * found.tokens_per_block


MIXTURES = {
    "two widths": [(2, 2)] * 3 + [(4, 4)],
    "a narrow one": [(1, 1)] + [(2, 2)] * 31,
    "from 1 to 16 bits": [(1, 1), (1, 2), (2, 2), (3, 2), (4, 3), (8, 8), (16, 16)],
    "equal": [(2, 2)] * 4,
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("windows", [{}, {"sink_tokens": 60, "value_recent_tokens": 130}], ids=["", "windows"])
def test_layers_of_different_widths_share_rows_and_lose_little_to_padding(name, windows):
    caches = [cache(key_bits=key, value_bits=value, **windows) for key, value in MIXTURES[name]]
    found = block_layouts(caches, torch.bfloat16)
    assert len({(layout.first_page, layout.stride, layout.blocks_ahead) for layout in found}) == 1
    pages = sum(layout.key_bytes + layout.value_bytes for layout in found)
    assert sum(layout.block_bytes for layout in found) <= 1.03 * pages
    for layout in found:
        # Blocks of full-precision tokens end where the rows of the request do.
        last = layout.places(torch.tensor([700])).entries.max()
        assert last < layout.blocks_for(701)
        assert -(-layout.sink_tokens // layout.tokens_per_block) <= layout.first_page


def test_one_narrow_layer_does_not_take_more_blocks_for_the_tokens_of_all():
    narrow, *others = block_layouts([cache(key_bits=k, value_bits=k) for k in (1, *(2,) * 31)], torch.bfloat16)
    assert narrow.block_bytes == others[0].block_bytes > narrow.key_bytes + narrow.value_bytes
    assert narrow.blocks_ahead == others[0].blocks_ahead == layout().blocks_ahead
    # Where it would cost more, blocks are as large as pages.
    for found in block_layouts([cache(key_bits=k, value_bits=k) for k in (1, 1, 2, 2)], torch.bfloat16):
        assert found.block_bytes == found.key_bytes + found.value_bytes
