"""How vLLM's blocks hold a layer's cache; nothing here imports vLLM.

A block is as large as the records of one page of 128 tokens, keys' and values' one after the other, of the layer whose
pages are the largest. Tokens that are
still in full precision live in blocks, too, so that vLLM plans, shares and takes back all of the cache's memory. A
request's row of the block table is

    [sink tokens | page 0 | page 1 | ... | the page being filled | blocks ahead]

Page j has entry `first_page + j` of the row. While it is not quantized its tokens are in entries that later pages will
take, every `stride`-th from there on:

    chunk c of page j  ->  entry  first_page + j + stride * (c + 1)        stride = 1 + ceil(window / 128)

As many consecutive pages as `stride` are in full precision at a time, on one side at least, and these entries differ
for all of them, and from the entries of all of them. So tokens never move, and a page's blocks ahead are free again
when it has been quantized. A token is one record: its keys of all heads, then its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvconvert.cache.format import CacheFormat
from kvconvert.errors import BundleError
from kvconvert.kernels.pages import PAGE_SIZE, page_bytes


class Places(NamedTuple):
    """Where full-precision tokens lie: entries of a request's row, and tokens within those blocks, int64 [n] each."""

    entries: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class BlockLayout:
    """The geometry of a layer's blocks.

    Attributes:
        key_bytes, value_bytes: of a page's records; keys come first.
        block_bytes: of a block, the same in all layers.
        token_bytes: of one full-precision token, keys and values of all heads.
        sink_tokens: first tokens of a sequence that stay in full precision.
        key_window, value_window: newest tokens whose keys, or values, stay in full precision besides the page being
            filled.
    """

    key_bytes: int
    value_bytes: int
    block_bytes: int
    token_bytes: int
    sink_tokens: int
    key_window: int
    value_window: int

    @classmethod
    def of(cls, cache: CacheFormat, dtype: torch.dtype, block_bytes: int | None = None) -> BlockLayout:
        """The geometry of a layer whose full-precision tokens have this dtype; None for blocks of its own pages' size.

        Raises:
            BundleError: a block is smaller than one token in full precision.
        """
        keys, values = cache.pages.keys, cache.pages.values
        token = (keys.heads * keys.head_dim + values.heads * values.head_dim) * dtype.itemsize
        sides = page_bytes(keys, dtype), page_bytes(values, dtype)
        windows = cache.keys.recent_tokens, cache.values.recent_tokens
        layout = cls(*sides, block_bytes or sum(sides), token, cache.sink_tokens, *windows)
        if not layout.tokens_per_block:
            raise BundleError(f"A page of {layout.block_bytes} bytes has no room for one token of {token}.")
        return layout

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
        return 1 + -(-max(self.key_window, self.value_window) // PAGE_SIZE)

    @property
    def half_quantized(self) -> int:
        """1 where pages may have their values still in full precision, 2 where their keys, 0 where neither."""
        return 0 if self.key_window == self.value_window else 1 if self.key_window < self.value_window else 2

    @property
    def first_page(self) -> int:
        """The entry of page 0, behind the sink tokens."""
        return -(-self.sink_tokens // self.tokens_per_block)

    @property
    def blocks_ahead(self) -> int:
        """Entries that a request has besides those of its pages."""
        return self.first_page + self.stride * self.chunks

    def blocks_for(self, tokens: int) -> int:
        """Entries of a request with so many tokens, the one being computed included."""
        return -(-tokens // PAGE_SIZE) + self.blocks_ahead if tokens else 0

    def quantized(self, tokens: int) -> tuple[int, int]:
        """Pages of keys and of values that are quantized once so many tokens are stored."""
        return max(0, tokens - self.key_window) // PAGE_SIZE, max(0, tokens - self.value_window) // PAGE_SIZE

    def places(self, positions: torch.Tensor) -> Places:
        """Where tokens at these positions, int64 [n], lie while their pages are in full precision."""
        pages, within = positions // PAGE_SIZE, positions % PAGE_SIZE
        entries = self.first_page + pages + self.stride * (within // self.tokens_per_block + 1)
        return Places(entries, within % self.tokens_per_block)

    def sinks(self, positions: torch.Tensor) -> Places:
        """Where sink tokens at these positions, int64 [n], lie."""
        return Places(positions // self.tokens_per_block, positions % self.tokens_per_block)
