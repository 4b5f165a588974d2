"""A layer's part of vLLM's cache memory as pages and full-precision tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from kvconvert.kernels.blocks import BlockGeometry
from kvconvert.kernels.chunked_prefill import PageReader
from kvconvert.kernels.device import runs_triton
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
from kvconvert.vllm.blocks import BlockLayout

# Tokens in full precision that are gathered from all layers at once in order to be quantized.
WORKSPACE_BYTES = 256 << 20


class LayerBlocks:
    """All blocks of one layer.

    Args:
        format: how the layer stores tokens, with the tensors of the KV plan.
        layout: how they are divided.
        dtype: of full-precision tokens.
        memory: [blocks, ...] of any dtype, `layout.block_bytes` contiguous bytes of each block.

    Attributes:
        words: int16 [blocks, units].
        tokens: [blocks, tokens of a block, numbers of a token] in the tokens' dtype, keys [H, D] before values [H, E].
        flag: what page kernels raise on numbers that cannot be stored.
    """

    def __init__(self, format: LayerFormat, layout: BlockLayout, dtype: torch.dtype, memory: torch.Tensor):
        self.format, self.layout, self.dtype = format, layout, dtype
        self.words = memory.flatten(1).view(torch.int16)
        self.flag = new_flag(memory.device)
        self.tokens = self.tokens_of(self.words)

    @cached_property
    def block_units(self) -> int:
        """Distance from one block to the next in units of 16 bytes."""
        return self.words.stride(0) // 8

    @cached_property
    def geometry(self) -> BlockGeometry:
        """The blocks as `kernels/blocks` knows them."""
        layout = self.layout
        fields = layout.first_page, layout.stride, layout.tokens_per_block, layout.sink_tokens, self.block_units
        return BlockGeometry(*fields, layout.token_bytes // 16, layout.key_bytes // 16)

    def tokens_of(self, words: torch.Tensor) -> torch.Tensor:
        """Full-precision tokens, a view [..., tokens of a block, numbers of a token] of such words as the layer's."""
        numbers, each = self.layout.token_bytes // self.dtype.itemsize, self.layout.tokens_per_block
        return words.view(self.dtype)[..., : each * numbers].unflatten(-1, (each, numbers))

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

    def quantize(self, blocks: torch.Tensor, tokens: torch.Tensor, firsts: list[int], f: PageFormat) -> None:
        """Quantize pages; arguments as for `LayerBatch.quantize`, tokens [H, 128 N, channels]."""
        LayerBatch([self]).quantize(blocks, tokens.unsqueeze(0), firsts, f)

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
    """

    def __init__(self, layers: list[LayerBlocks]):
        self.layers, first = layers, layers[0]
        step = layers[1].words.storage_offset() - first.words.storage_offset() if len(layers) > 1 else 0
        self.words = first.words.as_strided((len(layers), *first.words.shape), (step, *first.words.stride()))

    def quantize_stored(
        self, blocks: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], firsts: list[int], sides: Sequence[bool]
    ) -> None:
        """Quantize pages whose tokens lie in these places; arguments as for `quantize` and `LayerBlocks.read`.

        Args:
            sides: keys (True), values, or both.
        """
        f, layout = self.layers[0].format, self.layers[0].layout
        split = [side.heads * side.head_dim for side in (f.keys, f.values)]
        at_once = max(1, WORKSPACE_BYTES // (len(places[0]) * layout.token_bytes))
        for start in range(0, len(self.layers), at_once):
            part = LayerBatch(self.layers[start : start + at_once])
            # A copy, which may be changed.
            keys, values = self.layers[0].tokens_of(part.words)[:, places[0], places[1]].split(split, -1)
            for is_key in sides:
                tokens, side = (keys, f.keys) if is_key else (values, f.values)
                part.quantize(blocks, tokens.unflatten(-1, (side.heads, -1)).transpose(1, 2), firsts, side)

    def copy(self, origin: tuple[torch.Tensor, torch.Tensor], target: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy full-precision tokens from places to others, blocks and slots int64 [n] each."""
        tokens = self.layers[0].tokens_of(self.words)
        tokens[:, *target] = tokens[:, *origin]

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
        pages = pages_of(first.buffer(records.new_empty(len(self.layers) * count, records.shape[2]), f), f)
        tensors = [layer.format.side(f.is_key)[1] for layer in self.layers]
        if runs_triton(tokens.device):
            quantize_at(self._writes(tokens, pages, firsts, hidden), tokens[0], pages, first.flag, tensors)
        else:
            rooms = [pages.select(slice(page, page + 1)) for page in range(len(pages))]
            for number, (own, side) in enumerate(zip(tokens, tensors, strict=True)):
                into = rooms[number * count : (number + 1) * count]
                quantize_by_reference(own.split(PAGE_SIZE, 1), into, side, firsts, hidden)
        records[:, blocks] = pages.buffer.flatten(1).view(torch.int16).unflatten(0, (len(self.layers), -1))

    def _writes(self, tokens: torch.Tensor, pages: PageTensors, firsts: list[int], hidden: list[int]) -> PageWrites:
        """Where pages' tokens lie and where their records go."""
        shape = len(self.layers), len(firsts)
        layer, page = np.indices(shape)
        distance = layer * tokens.stride(0) + page * (tokens.stride(2) * PAGE_SIZE)
        starts = tokens.data_ptr() + tokens.element_size() * distance
        records = pages.buffer.data_ptr() + np.arange(layer.size).reshape(shape) * pages.buffer[0].nbytes
        return PageWrites(starts, np.full(shape, tokens.stride(1)), records, np.array(firsts), np.array(hidden))


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
        starts = [layer.words.storage_offset() for layer in group]
        even = len({after - before for before, after in pairwise(starts)}) <= 1 and starts == sorted(starts)
        found += [LayerBatch(group)] if even else [LayerBatch([layer]) for layer in group]
    return found
