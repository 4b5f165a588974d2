"""How vLLM's blocks hold a layer's cache, and a layer's part of the memory as pages and full-precision tokens; nothing
here imports vLLM.

A layer's block is as large as the records of one page of 128 tokens, keys' and values' one after the other. Tokens that
are still in full precision live in blocks, too, so that vLLM plans, shares and takes back all of the cache's memory. A
request's row of the block table is the same for all layers, whatever the sizes of their blocks:

    [sink tokens | full-precision tokens | page 0 | page 1 | ...]

Page j has entry `first_page + j` of the row, where it is quantized as soon as it is complete. Token p is in slot p
modulo the number of slots of the blocks before, which is at least the number of tokens that are in full precision at a
time: those of a page, the recent ones, and drafts, which may be taken back. So tokens never move. A token is one
record: its keys of all heads, then its values.

A block has as many slots as its bytes hold tokens. Where all layers' blocks with one number are side by side in memory,
each layer has a part of every slot, and the slots of a block are what all layers' bytes hold together. Where each
layer's blocks are apart, the layer with the smallest ones decides how many blocks the tokens of all take, so that those
may be a little larger than their pages (`block_layouts`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from kvconvert.kernels.blocks import BlockGeometry
from kvconvert.kernels.chunked_prefill import PageReader
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.page_formats import page_bytes
from kvconvert.kernels.pages import (
    PAGE_SIZE,
    LayerFormat,
    PageAddresses,
    PageFormat,
    PageTensors,
    PageWrites,
    quantize_at,
    quantize_by_reference,
)
from kvconvert.kernels.pages.records import pages_of, static_offsets
from kvconvert.kernels.quantizer import new_flag

# Share of the cache that may be lost to blocks that are larger than their pages.
MOST_PADDING = 0.03
# Pages of the request for which blocks of tokens and larger blocks are weighed against each other.
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
        space_bytes: bytes in which full-precision tokens lie: the layer's block, or the blocks of all layers that lie
            side by side.
        slot_bytes: size of a slot, which holds the same token of every layer that shares that space.
        offset: where the layer's part of a slot begins.
        sink_blocks, token_blocks: entries of sink tokens and of other full-precision tokens; the same in all layers.
    """

    key_bytes: int
    value_bytes: int
    block_bytes: int
    token_bytes: int
    sink_tokens: int
    key_window: int
    value_window: int
    drafts: int
    space_bytes: int
    slot_bytes: int
    offset: int = field(default=0, compare=False)
    sink_blocks: int = 0
    token_blocks: int = 0

    @classmethod
    def of(cls, format: LayerFormat, dtype: torch.dtype, drafts: int = 0) -> BlockLayout:
        """The geometry of a layer alone, whose full-precision tokens have this dtype."""
        keys, values = format.keys, format.values
        token = (keys.heads * keys.head_dim + values.heads * values.head_dim) * dtype.itemsize
        sides = page_bytes(keys, dtype.itemsize), page_bytes(values, dtype.itemsize)
        windows, size = (format.key_window, format.value_window), sum(sides)
        layout = cls(*sides, size, token, format.sink_tokens, *windows, drafts, size, token)
        return layout.beside([layout])

    def resized(self, block_bytes: int) -> BlockLayout:
        """This layout with blocks of another size, apart from other layers'."""
        return replace(self, block_bytes=block_bytes, space_bytes=block_bytes)

    def beside(self, layouts: Sequence[BlockLayout]) -> BlockLayout:
        """This layout with the rows that it shares with others, itself among them."""
        sinks = max(-(-layout.sink_tokens // layout.tokens_per_block) for layout in layouts)
        tokens = max(-(-(PAGE_SIZE + layout.recent_tokens) // layout.tokens_per_block) for layout in layouts)
        return replace(self, sink_blocks=sinks, token_blocks=tokens)

    @property
    def is_shared(self) -> bool:
        """Whether slots are those of several layers."""
        return self.slot_bytes > self.token_bytes

    @property
    def tokens_per_block(self) -> int:
        """Full-precision tokens that a block holds."""
        return min(PAGE_SIZE, self.space_bytes // self.slot_bytes)

    @property
    def recent_tokens(self) -> int:
        """Newest tokens that stay in full precision besides the page being filled."""
        return max(self.key_window, self.value_window) + self.drafts

    @property
    def first_page(self) -> int:
        """The entry of page 0."""
        return self.sink_blocks + self.token_blocks

    def blocks_for(self, tokens: int) -> int:
        """Entries of a request with so many tokens, the one being computed included."""
        return -(-tokens // PAGE_SIZE) + self.first_page if tokens else 0

    def quantized(self, tokens: int, recent: bool = True) -> tuple[int, int]:
        """Number of key pages and value pages that are read quantized when `tokens` tokens are stored.

        Args:
            tokens: stored.
            recent: whether recent tokens are read in full precision; else those of incomplete pages alone.
        """
        keys, values = self.quantized_pages(np.array(tokens), np.array(recent))
        return int(keys), int(values)

    def quantized_pages(self, tokens: np.ndarray, recent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`quantized` of many requests."""
        windows = self.key_window, self.value_window
        keys, values = (np.maximum(tokens - recent * window, 0) // PAGE_SIZE for window in windows)
        return keys, values

    def completes(self, tokens: int) -> bool:
        """Whether the last of `tokens` stored tokens makes a key or value page be read quantized."""
        return tokens > 0 and self.quantized(tokens) != self.quantized(tokens - 1)

    def places(self, positions: torch.Tensor) -> Places:
        """Where tokens at these positions, int64 [n], lie while their pages are in full precision."""
        block, slot = self._slots(positions % (self.token_blocks * self.tokens_per_block))
        return Places(self.sink_blocks + block, slot)

    def sinks(self, positions: torch.Tensor) -> Places:
        """Where sink tokens at these positions, int64 [n], lie."""
        return self._slots(positions)

    def _slots(self, numbers: torch.Tensor) -> Places:
        return Places(numbers // self.tokens_per_block, numbers % self.tokens_per_block)


def block_layouts(
    formats: Sequence[LayerFormat],
    dtype: torch.dtype,
    *,
    side_by_side: bool = False,
    equal: bool = False,
    drafts: int = 0,
) -> list[BlockLayout]:
    """The layouts of layers whose requests have the same rows.

    Args:
        formats: those of the layers.
        dtype: of full-precision tokens.
        side_by_side: let all layers' blocks with one number lie side by side in memory where their sizes differ. Else
            they are apart, and of all layouts that pad little these are those with the smallest cache.
        equal: give all blocks one size, whole bytes for each token, however much is padded.
        drafts: newest tokens of a request that may be taken back.
    """
    exact = [BlockLayout.of(format, dtype, drafts) for format in formats]
    pages = sum(layout.block_bytes for layout in exact)
    if equal:
        largest = max((layout.block_bytes for layout in exact), default=0)
        return _with_rows([layout.resized(-(-largest // PAGE_SIZE) * PAGE_SIZE) for layout in exact])
    sizes = list(dict.fromkeys(layout.block_bytes for layout in exact))
    if side_by_side and len(sizes) > 1:
        slot = sum(layout.token_bytes for layout in exact)
        own = [replace(layout, space_bytes=pages, slot_bytes=slot) for layout in exact]
        # vLLM has layers with blocks of one size next to each other. In the same order among tokens, those that are
        # equally far apart are so on both.
        offset = 0
        for number in sorted(range(len(own)), key=lambda number: sizes.index(own[number].block_bytes)):
            own[number] = replace(own[number], offset=offset)
            offset += own[number].token_bytes
        return _with_rows(own)
    found: list[tuple[int, list[BlockLayout]]] = []
    for smallest in sorted(sizes):
        own = _with_rows([layout.resized(max(smallest, layout.block_bytes)) for layout in exact])
        taken = sum(layout.block_bytes for layout in own)
        if taken <= (1 + MOST_PADDING) * pages:
            found.append((taken * (TYPICAL_PAGES + own[0].first_page), own))
    return min(found, key=lambda one: one[0], default=(0, []))[1]


def _with_rows(layouts: list[BlockLayout]) -> list[BlockLayout]:
    return [layout.beside(layouts) for layout in layouts]


# Tokens in full precision that are gathered from all layers at once in order to be quantized.
WORKSPACE_BYTES = 256 << 20


class LayerBlocks:
    """All blocks of one layer.

    Args:
        format: how the layer stores tokens, with the tensors of the KV plan.
        layout: how they are divided.
        dtype: of full-precision tokens.
        memory: [blocks, ...] of any dtype, `layout.block_bytes` contiguous bytes of each block. Where slots are those
            of several layers, a view of an allocation that begins with block 0 of all these.

    Attributes:
        words: int16 [blocks, units].
        tokens: [blocks, tokens of a block, numbers of a token] in the tokens' dtype, keys [H, D] before values [H, E].
            Kernels count the places of tokens from its first element.
        flag: what page kernels raise on numbers that cannot be stored.
    """

    def __init__(self, format: LayerFormat, layout: BlockLayout, dtype: torch.dtype, memory: torch.Tensor):
        self.format, self.layout, self.dtype = format, layout, dtype
        self.words = memory.flatten(1).view(torch.int16)
        self.flag = new_flag(memory.device)
        words, block = self.words.view(dtype), self.words.stride(0) * 2 // dtype.itemsize
        start = words.storage_offset()
        if layout.is_shared:
            start += layout.offset // dtype.itemsize - start % block
        numbers, slot = (size // dtype.itemsize for size in (layout.token_bytes, layout.slot_bytes))
        shape = len(words), layout.tokens_per_block, numbers
        self.tokens = words.as_strided(shape, (block, slot, 1), start)

    @cached_property
    def block_units(self) -> int:
        """Distance from one block to the next in units of 16 bytes."""
        return self.words.stride(0) // 8

    @cached_property
    def geometry(self) -> BlockGeometry:
        """The blocks as `kernels/blocks` knows them."""
        layout = self.layout
        fields = layout.sink_blocks, layout.token_blocks, layout.tokens_per_block, layout.sink_tokens
        return BlockGeometry(*fields, self.block_units, layout.slot_bytes // 16, layout.key_bytes // 16)

    def write(self, blocks: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store full-precision keys [n, H, D] and values [n, H, E] in these places, int64 [n] each."""
        self.tokens[blocks, slots] = torch.cat([keys.flatten(1), values.flatten(1)], 1)

    def read(self, blocks: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Full-precision keys [..., H, n, D] and values [..., H, n, E] of places int64 [..., n], contiguous."""
        f = self.format
        split = [f.keys.heads * f.keys.head_dim, f.values.heads * f.values.head_dim]
        keys, values = self.tokens[blocks, slots].split(split, -1)
        sides = ((keys, f.keys.heads), (values, f.values.heads))
        keys, values = (side.unflatten(-1, (heads, -1)).transpose(-3, -2).contiguous() for side, heads in sides)
        return keys, values

    @cached_property
    def static_scales(self) -> torch.Tensor | None:
        """Where scale and zero point of keys and of values lie, where they are the layer's: int64 [1, 4] distances from
        `words` in units of 16 bytes.
        """
        offsets = static_offsets(self.format, self.words)
        return None if offsets is None else torch.tensor([offsets], device=self.words.device)

    def source(self, blocks: torch.Tensor, f: PageFormat) -> PageReader | PageAddresses:
        """The pages of one side in these blocks, int64 [N], as `chunk_attention` takes them."""
        tensors = self.format.side(f.is_key)[1]
        if not runs_triton(self.words.device):
            return PageReader(lambda part: self.pages(blocks[part], f), f, tensors)
        offsets, scales = blocks * self.block_units, None
        if not f.is_key:
            offsets += self.layout.key_bytes // 16
        if f.static:
            scales = self.static_scales[0, :2] if f.is_key else self.static_scales[0, 2:]
        return PageAddresses(f, self.words, offsets, scales, tensors.boosted)

    def pages(self, blocks: torch.Tensor, f: PageFormat) -> PageTensors:
        """A copy of the pages of one side in these blocks, int64 [N]."""
        return pages_of(self.buffer(self.records(self.words, f)[blocks], f), f)

    def records(self, words: torch.Tensor, f: PageFormat) -> torch.Tensor:
        """Every block's record of one side, a view int16 [..., units] of such words as the layer's."""
        keys, values = self.layout.key_bytes // 2, self.layout.value_bytes // 2
        return words[..., :keys] if f.is_key else words[..., keys : keys + values]

    def buffer(self, records: torch.Tensor, f: PageFormat) -> torch.Tensor:
        """Records int16 [N, units] as `pages_of` takes them."""
        if f.bits < 16:
            return records
        return records.view(self.dtype).unflatten(1, (f.heads, f.page_size, f.head_dim))


class LayerBatch:
    """Layers whose pages one launch writes, and whose blocks are equally far apart; any one layer alone is such.

    Args:
        layers: in order.

    Attributes:
        words: int16 [layers, blocks, units].
        tokens: [layers, blocks, tokens of a block, numbers of a token].
    """

    def __init__(self, layers: list[LayerBlocks]):
        self.layers = layers
        self.words, self.tokens = (
            _stacked([getattr(layer, name) for layer in layers[:2]], len(layers)) for name in ("words", "tokens")
        )

    def quantize_stored(
        self, blocks: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], firsts: list[int]
    ) -> None:
        """Quantize pages whose tokens lie in these places; arguments as for `quantize` and `LayerBlocks.read`."""
        f, layout = self.layers[0].format, self.layers[0].layout
        split = [side.heads * side.head_dim for side in (f.keys, f.values)]
        at_once = max(1, WORKSPACE_BYTES // (len(places[0]) * layout.token_bytes))
        for start in range(0, len(self.layers), at_once):
            part = LayerBatch(self.layers[start : start + at_once])
            # A copy, which may be changed.
            keys, values = part.tokens[:, places[0], places[1]].split(split, -1)
            for tokens, side in ((keys, f.keys), (values, f.values)):
                part.quantize(blocks, tokens.unflatten(-1, (side.heads, -1)).transpose(1, 2), firsts, side)

    def copy(self, origin: tuple[torch.Tensor, torch.Tensor], target: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy full-precision tokens from places to others, blocks and slots int64 [n] each."""
        self.tokens[:, *target] = self.tokens[:, *origin]

    def quantize(self, blocks: torch.Tensor, tokens: torch.Tensor, firsts: list[int], f: PageFormat) -> None:
        """Quantize pages.

        Args:
            blocks: int64 [N], where they go.
            tokens: [layers, H, 128 N, channels] of keys or values, page after page, which this may change; channels are
                side by side, heads and tokens at multiples of 8 numbers.
            firsts: position of each page's first token.
            f: of the side, in all layers.
        """
        first, count = self.layers[0], len(blocks)
        hidden = [0 if position else first.layout.sink_tokens for position in firsts]
        records = first.records(self.words, f)
        new = first.buffer(records.new_empty(len(self.layers) * count, records.shape[2]), f)
        tensors = [layer.format.side(f.is_key)[1] for layer in self.layers]
        if runs_triton(tokens.device):
            quantize_at(self._writes(tokens, new, firsts, hidden), tokens[0], new, f, first.flag, tensors)
        else:
            for own, into, side in zip(tokens, new.split(count), tensors, strict=True):
                quantize_by_reference(own.split(PAGE_SIZE, 1), [into], f, side, firsts, hidden)
        records[:, blocks] = new.flatten(1).view(torch.int16).unflatten(0, (len(self.layers), -1))

    def _writes(self, tokens: torch.Tensor, new: torch.Tensor, firsts: list[int], hidden: list[int]) -> PageWrites:
        """Where pages' tokens lie and where their records go."""
        shape = len(self.layers), len(firsts)
        layer, page = np.indices(shape)
        distance = layer * tokens.stride(0) + page * (tokens.stride(2) * PAGE_SIZE)
        starts = tokens.data_ptr() + tokens.element_size() * distance
        records = new.data_ptr() + np.arange(layer.size).reshape(shape) * new[0].nbytes
        return PageWrites(starts, np.full(shape, tokens.stride(1)), records, np.array(firsts), np.array(hidden))


def _stacked(first: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """`count` tensors that are equally far apart as one, of which these are the first two, or the only one."""
    tensor, step = first[0], first[-1].storage_offset() - first[0].storage_offset()
    return tensor.as_strided((count, *tensor.shape), (step, *tensor.stride()))


def alike(layers: Sequence[LayerBlocks]) -> list[LayerBatch]:
    """All layers, divided into those that are alike and equally far apart in one allocation."""
    groups: dict[Hashable, list[LayerBlocks]] = {}
    for number, layer in enumerate(layers):
        format = layer.format
        own = None if format.shares_launches else number
        key = format.kind, own, layer.layout, layer.words.untyped_storage().data_ptr()
        groups.setdefault(key, []).append(layer)
    found = []
    for group in groups.values():
        starts = [(layer.words.storage_offset(), layer.tokens.storage_offset()) for layer in group]
        steps = {(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(starts)}
        even = len(steps) <= 1 and starts == sorted(starts)
        found += [LayerBatch(group)] if even else [LayerBatch([layer]) for layer in group]
    return found
