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
    assert found.blocks_for(1) == found.first_page + 1
    assert found.blocks_for(PAGE_SIZE) + 1 == found.blocks_for(PAGE_SIZE + 1)
    assert found.blocks_for(0) == 0


def test_a_few_recent_tokens_take_a_few_more_blocks():
    few = layout(key_recent_tokens=20, value_recent_tokens=40)
    assert few.token_blocks == -(-168 // few.tokens_per_block) == layout().token_blocks + 1


def test_a_block_holds_as_many_tokens_as_fit():
    found = layout()
    assert found.tokens_per_block == found.block_bytes // found.token_bytes
    assert found.token_blocks * found.tokens_per_block >= PAGE_SIZE > (found.token_blocks - 1) * found.tokens_per_block


MIXTURES = {
    "two widths": [(2, 2)] * 3 + [(4, 4)],
    "a narrow one": [(1, 1)] + [(2, 2)] * 31,
    "from 1 to 16 bits": [(1, 1), (1, 2), (2, 2), (3, 2), (4, 3), (8, 8), (16, 16)],
    "equal": [(2, 2)] * 4,
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("windows", [{}, {"sink_tokens": 60, "value_recent_tokens": 130}], ids=["", "windows"])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_layers_of_different_widths_share_rows_and_lose_little_to_padding(name, windows, side_by_side):
    caches = [cache(key_bits=key, value_bits=value, **windows) for key, value in MIXTURES[name]]
    found = block_layouts(caches, torch.bfloat16, side_by_side=side_by_side)
    assert len({(layout.sink_blocks, layout.token_blocks) for layout in found}) == 1
    pages = sum(layout.key_bytes + layout.value_bytes for layout in found)
    assert sum(layout.block_bytes for layout in found) <= (1 if side_by_side else 1.03) * pages
    for layout in found:
        assert layout.token_blocks * layout.tokens_per_block >= PAGE_SIZE + layout.recent_tokens
        assert layout.sink_blocks * layout.tokens_per_block >= layout.sink_tokens


def test_tokens_of_layers_side_by_side_take_no_more_than_all_their_bytes():
    caches = [cache(key_bits=k, value_bits=k) for k in (1, 2, 1, 3, 2, 8)]
    found = block_layouts(caches, torch.bfloat16, side_by_side=True)
    space = sum(layout.block_bytes for layout in found)
    assert {layout.tokens_per_block for layout in found} == {space // sum(layout.token_bytes for layout in found)}
    taken = sorted((layout.offset, layout.offset + layout.token_bytes) for layout in found)
    assert [begin for begin, _ in taken] == [0, *(end for _, end in taken[:-1])]
    # As vLLM has their blocks: those of one size next to each other.
    sizes = [layout.block_bytes for layout in sorted(found, key=lambda layout: layout.offset)]
    assert sizes == sorted(sizes)
    apart = block_layouts(caches, torch.bfloat16)
    assert found[0].token_blocks < apart[0].token_blocks
    assert not any(layout.is_shared for layout in apart)


def test_one_narrow_layer_does_not_take_more_blocks_for_the_tokens_of_all():
    narrow, *others = block_layouts([cache(key_bits=k, value_bits=k) for k in (1, *(2,) * 31)], torch.bfloat16)
    assert narrow.block_bytes == others[0].block_bytes > narrow.key_bytes + narrow.value_bytes
    assert narrow.token_blocks == others[0].token_blocks == layout().token_blocks
    # Where it would cost more, blocks are as large as pages.
    for found in block_layouts([cache(key_bits=k, value_bits=k) for k in (1, 1, 2, 2)], torch.bfloat16):
        assert found.block_bytes == found.key_bytes + found.value_bytes
