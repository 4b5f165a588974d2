"""How vLLM's blocks hold a layer's cache; nothing here imports vLLM.

A layer's block is as large as the records of one page of 128 tokens, keys' and values' one after the other. Tokens that
are still in full precision live in blocks, too, so that vLLM plans, shares and takes back all of the cache's memory. A
request's row of the block table is the same for all layers, whatever the sizes of their blocks:

    [sink tokens | page 0 | page 1 | ... | the page being filled | blocks ahead]

Page j has entry `first_page + j` of the row. While it is not quantized its tokens are in entries that later pages will
take, every `stride`-th from there on:

    chunk c of page j  ->  entry  first_page + j + stride * (c + 1)        stride = 1 + ceil((window + drafts) / 128)

As many consecutive pages as `stride` are in full precision at a time, on one side at least, and these entries differ
for all of them, and from the entries of all of them. So tokens never move, and a page's blocks ahead are free again
when it has been quantized. With drafts, the tokens that may be taken back stay in full precision as if they were in a
window. A token is one record: its keys of all heads, then its values.

The layer with the smallest blocks needs the most of them for its full-precision tokens, and all layers have as many. So
the smallest blocks may be a little larger than their pages (`block_layouts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from kvconvert.kernels.page_formats import LayerFormat, page_bytes
from kvconvert.kernels.pages import PAGE_SIZE

# Share of the cache that may be lost to blocks that are larger than their pages.
MOST_PADDING = 0.03
# Pages of the request for which blocks ahead and larger blocks are weighed against each other.
TYPICAL_PAGES = 64


class Places(NamedTuple):
    """Where full-precision tokens lie: entries of a request's row, and tokens within those blocks, int64 [n] each."""

    entries: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class BlockLayout:
    """The geometry of a layer's blocks.

    Attributes:
        key_bytes, value_bytes: of a page's records; keys come first.
        block_bytes: of a block.
        token_bytes: of one full-precision token, keys and values of all heads.
        sink_tokens: first tokens of a sequence that stay in full precision.
        key_window, value_window: newest tokens whose keys, or values, stay in full precision besides the page being
            filled.
        drafts: newest tokens that may be taken back.
        first_page: the entry of page 0, behind the sink tokens; the same in all layers.
        blocks_ahead: entries that a request has besides those of its pages; the same in all layers.
    """

    key_bytes: int
    value_bytes: int
    block_bytes: int
    token_bytes: int
    sink_tokens: int
    key_window: int
    value_window: int
    drafts: int = 0
    first_page: int = 0
    blocks_ahead: int = 0

    @classmethod
    def of(cls, format: LayerFormat, dtype: torch.dtype, drafts: int = 0) -> BlockLayout:
        """The geometry of a layer alone, whose full-precision tokens have this dtype."""
        keys, values = format.keys, format.values
        token = (keys.heads * keys.head_dim + values.heads * values.head_dim) * dtype.itemsize
        sides = page_bytes(keys, dtype.itemsize), page_bytes(values, dtype.itemsize)
        windows = format.key_window, format.value_window
        layout = cls(*sides, sum(sides), token, format.sink_tokens, *windows, drafts)
        return layout.beside([layout])

    def beside(self, layouts: Sequence[BlockLayout]) -> BlockLayout:
        """This layout with the rows that it shares with others, itself among them."""
        first = max(-(-layout.sink_tokens // layout.tokens_per_block) for layout in layouts)
        ahead = max(layout.stride * layout.chunks for layout in layouts)
        return replace(self, first_page=first, blocks_ahead=first + ahead)

    @property
    def tokens_per_block(self) -> int:
        """Full-precision tokens that a block holds."""
        return min(PAGE_SIZE, self.block_bytes // self.token_bytes)

    @property
    def chunks(self) -> int:
        """Blocks that a page takes in full precision."""
        return -(-PAGE_SIZE // self.tokens_per_block)

    @property
    def stride(self) -> int:
        """Distance between a page's blocks ahead: as many pages are in full precision at a time."""
        return 1 + -(-(max(self.key_window, self.value_window) + self.drafts) // PAGE_SIZE)

    def blocks_for(self, tokens: int) -> int:
        """Entries of a request with so many tokens, the one being computed included."""
        return -(-tokens // PAGE_SIZE) + self.blocks_ahead if tokens else 0

    def quantized(self, tokens: int) -> tuple[int, int]:
        """Pages of keys and of values that are quantized once so many tokens are stored."""
        return max(0, tokens - self.key_window) // PAGE_SIZE, max(0, tokens - self.value_window) // PAGE_SIZE

    def quantized_pages(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`quantized` of many requests."""
        keys, values = (np.maximum(tokens - n, 0) // PAGE_SIZE for n in (self.key_window, self.value_window))
        return keys, values

    def completes(self, tokens: int) -> bool:
        """Whether the last of so many stored tokens completes a page on either side."""
        return tokens > 0 and self.quantized(tokens) != self.quantized(tokens - 1)

    def places(self, positions: torch.Tensor) -> Places:
        """Where tokens at these positions, int64 [n], lie while their pages are in full precision."""
        pages, within = positions // PAGE_SIZE, positions % PAGE_SIZE
        entries = self.first_page + pages + self.stride * (within // self.tokens_per_block + 1)
        return Places(entries, within % self.tokens_per_block)

    def sinks(self, positions: torch.Tensor) -> Places:
        """Where sink tokens at these positions, int64 [n], lie."""
        return Places(positions // self.tokens_per_block, positions % self.tokens_per_block)


def block_layouts(
    formats: Sequence[LayerFormat], dtype: torch.dtype, equal: bool = False, drafts: int = 0
) -> list[BlockLayout]:
    """The layouts of layers whose requests have the same rows: of all that pad little, those with the smallest cache.

    Args:
        formats: those of the layers.
        dtype: of full-precision tokens.
        equal: give all blocks one size, whole bytes for each token, however much is padded.
        drafts: newest tokens of a request that may be taken back.
    """
    exact = [BlockLayout.of(format, dtype, drafts) for format in formats]
    if equal:
        largest = max((layout.block_bytes for layout in exact), default=0)
        own = [replace(layout, block_bytes=-(-largest // PAGE_SIZE) * PAGE_SIZE) for layout in exact]
        return [layout.beside(own) for layout in own]
    pages = sum(layout.block_bytes for layout in exact)
    found: list[tuple[int, list[BlockLayout]]] = []
    for smallest in sorted({layout.block_bytes for layout in exact}):
        own = [replace(layout, block_bytes=max(smallest, layout.block_bytes)) for layout in exact]
        own = [layout.beside(own) for layout in own]
        taken = sum(layout.block_bytes for layout in own)
        if taken <= (1 + MOST_PADDING) * pages:
            found.append((taken * (TYPICAL_PAGES + own[0].blocks_ahead), own))
    return min(found, key=lambda one: one[0], default=(0, []))[1]
