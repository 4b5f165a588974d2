"""A layer's part of vLLM's cache memory as pages and full-precision tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.history import PageReader
from kvconvert.kernels.pages import (
    PAGE_SIZE,
    ChannelScales,
    KeyFormat,
    KeyPages,
    LayerFormat,
    PageAddresses,
    PageWrites,
    ValueFormat,
    ValuePages,
    add_centers,
    quantize_at,
    quantize_by_reference,
)
from kvconvert.kernels.pages.records import pages_of
from kvconvert.kernels.quantizer import new_flag
from kvconvert.kernels.rotate import Rotations
from kvconvert.vllm.blocks import BlockLayout


@dataclass(frozen=True)
class LayerCache:
    """How one attention layer's cache is stored.

    Attributes:
        format: of its pages, with the tensors of the KV plan.
        rotations: what is rotated at run time.
        layout: of its blocks.
        dtype: of full-precision tokens.
    """

    format: LayerFormat
    rotations: Rotations
    layout: BlockLayout
    dtype: torch.dtype


class LayerBlocks:
    """All blocks of one layer.

    Args:
        cache: how they are used.
        memory: [blocks, ...] of any dtype, `layout.block_bytes` contiguous bytes of each block.

    Attributes:
        words: int16 [blocks, units].
        tokens: [blocks, tokens of a block, numbers of a token] in the tokens' dtype, keys [H, D] before values [H, E].
        flag: what page kernels raise on numbers that cannot be stored.
    """

    def __init__(self, cache: LayerCache, memory: torch.Tensor):
        self.cache, layout = cache, cache.layout
        self.words = memory.flatten(1).view(torch.int16)
        self.flag = new_flag(memory.device)
        numbers, each = layout.token_bytes // cache.dtype.itemsize, layout.tokens_per_block
        self.tokens = self.words.view(cache.dtype)[:, : each * numbers].unflatten(1, (each, numbers))

    @cached_property
    def block_units(self) -> int:
        """Distance from one block to the next in units of 16 bytes."""
        return self.words.stride(0) // 8

    def write(self, blocks: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store full-precision keys [n, H, D] and values [n, H, E] in these places, int64 [n] each."""
        self.tokens[blocks, slots] = torch.cat([keys.flatten(1), values.flatten(1)], 1)

    def read(self, blocks: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Full-precision keys [..., H, n, D] and values [..., H, n, E] of places int64 [..., n], contiguous."""
        f = self.cache.format
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
        format = self.cache.format
        if format.static_keys is None and format.static_values is None:
            return None
        offsets = [*self._distances(format.static_keys), *self._distances(format.static_values)]
        return torch.tensor([offsets], device=self.words.device)

    def _distances(self, scales: ChannelScales | None) -> list[int]:
        return [0, 0] if scales is None else [(part.data_ptr() - self.words.data_ptr()) // 16 for part in scales]

    def source(self, blocks: torch.Tensor, f: KeyFormat | ValueFormat) -> PageReader | PageAddresses:
        """The pages of one side in these blocks, int64 [N], as `history_attention` takes them."""
        format, is_key = self.cache.format, isinstance(f, KeyFormat)
        channels = format.boosted if is_key else None
        if not runs_triton(self.words.device):
            static = format.static_keys if is_key else format.static_values
            return PageReader(lambda part: self.pages(blocks[part], f), f, channels, static)
        offsets, scales = blocks * self.block_units, None
        if not is_key:
            offsets += self.cache.layout.key_bytes // 16
        if f.static:
            scales = self.static_scales[0, :2] if is_key else self.static_scales[0, 2:]
        return PageAddresses(f, self.words, offsets, scales, channels)

    def pages(self, blocks: torch.Tensor, f: KeyFormat | ValueFormat) -> KeyPages | ValuePages:
        """A copy of the pages of one side in these blocks, int64 [N]."""
        return pages_of(self._buffer(self._records(f)[blocks], f), f)

    def quantize(
        self, blocks: torch.Tensor, tokens: torch.Tensor, firsts: list[int], f: KeyFormat | ValueFormat
    ) -> None:
        """Quantize pages.

        Args:
            blocks: int64 [N], where they go.
            tokens: [H, 128 N, channels] of keys or values, page after page, contiguous, which this may change.
            firsts: position of each page's first token.
            f: of the side.
        """
        format, is_key = self.cache.format, isinstance(f, KeyFormat)
        if is_key and format.key_center is not None:
            for page, first in enumerate(firsts):
                part = tokens[:, page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
                add_centers(part, first, PAGE_SIZE, format.key_center, sign=-1)
        records = self._records(f)
        whole = pages_of(self._buffer(records.new_empty(len(blocks), records.shape[1]), f), f)
        channels, static = (format.boosted, format.static_keys) if is_key else (None, format.static_values)
        feedback = format.key_feedback if is_key else None
        hidden = [0 if first else self.cache.layout.sink_tokens for first in firsts]
        if runs_triton(tokens.device):
            quantize_at(_writes(tokens, whole, feedback, hidden), tokens, whole, self.flag, channels, static)
        else:
            pages = tokens.split(PAGE_SIZE, 1)
            rooms = [whole.select(slice(page, page + 1)) for page in range(len(pages))]
            quantize_by_reference(pages, rooms, channels, static, feedback, hidden)
        records[blocks] = whole.buffer.flatten(1).view(torch.int16)

    def _records(self, f: KeyFormat | ValueFormat) -> torch.Tensor:
        """Every block's record of one side, int16 [blocks, units]."""
        keys, values = self.cache.layout.key_bytes // 2, self.cache.layout.value_bytes // 2
        return self.words[:, :keys] if isinstance(f, KeyFormat) else self.words[:, keys : keys + values]

    def _buffer(self, records: torch.Tensor, f: KeyFormat | ValueFormat) -> torch.Tensor:
        """Records int16 [N, units] as `pages_of` takes them."""
        if f.bits < 16:
            return records
        return records.view(self.cache.dtype).unflatten(1, (f.heads, f.page_size, f.head_dim))


def _writes(
    tokens: torch.Tensor, pages: KeyPages | ValuePages, feedback: torch.Tensor | None, hidden: list[int]
) -> PageWrites:
    """Where tokens [H, 128 N, channels] lie, contiguous, and where the records of their pages go; `hidden` tokens of
    each page are sink tokens.
    """
    number = np.arange(len(pages))
    page, record = tokens.stride(1) * PAGE_SIZE * tokens.element_size(), pages.buffer[0].nbytes
    return PageWrites(
        tokens.data_ptr() + number * page,
        np.full(len(pages), tokens.stride(0)),
        pages.buffer.data_ptr() + number * record,
        None if feedback is None else np.full(len(pages), feedback.data_ptr()),
        hidden=np.array(hidden),
    )
