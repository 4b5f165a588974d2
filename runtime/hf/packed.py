"""One forward pass over the new tokens of several caches, one after another in a batch of one row.

Whatever treats each token by itself (norms, Linears, rotary positions) runs once for all of them; attention goes to
each cache apart, which stores and compresses its tokens as if it were alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from kvconvert.errors import CacheError
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.runtime.cache.attend import store_and_attend
from kvconvert.runtime.cache.forward_pass import Chunk
from kvconvert.runtime.hf.handles import KeyHandle, MaskHandle
from kvconvert.runtime.hf.layer import PagedLayer


@dataclass(eq=False)
class Segment:
    """The tokens of one cache in a packed pass.

    Attributes:
        cache: where they are stored, a `KVCache`.
        rows: of the cache; each has equally many of the tokens, one row after the other.
        tokens: which of the pass they are.
        error: what the cache failed with, after which the rest of the pass passes it over; None while it has not.
    """

    cache: Any
    rows: int
    tokens: slice
    error: Exception | None = None

    @property
    def length(self) -> int:
        """New tokens of each row."""
        return (self.tokens.stop - self.tokens.start) // self.rows

    def split(self, states: Tensor) -> Tensor:
        """The segment's part of [1, heads, N, channels]: a view [rows, heads, length, channels]."""
        return states[0, :, self.tokens].unflatten(1, (self.rows, self.length)).transpose(0, 1)


class PackedLayer(CacheLayerMixin):
    """One layer of a `PackedCache`.

    Args:
        segments: of the pass.
        index: the layer's number in the model.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, segments: list[Segment], index: int):
        super().__init__()
        self.segments, self.index = segments, index
        self.layers: list[PagedLayer] = [segment.cache.layers[index] for segment in segments]
        self.is_sliding = self.layers[0].is_sliding
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Park new keys [1, H, N, D] and values [1, H, N, E], each cache's own.

        Raises:
            Exception: what the last cache failed with, if none is left.
        """
        self.value_dim = value_states.shape[-1]
        for segment, layer in zip(self.segments, self.layers, strict=True):
            if segment.error is None:
                try:
                    layer.update(segment.split(key_states), segment.split(value_states), *args, **kwargs)
                except Exception as error:
                    self._fail(segment, error)
        return KeyHandle.wrap(key_states, self), value_states

    def attend(
        self,
        queries: Tensor,
        mask: MaskHandle,
        scaling: float,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries [1, Hq, N, D], each over what its own cache stores: [1, N, Hq, E].

        Raises:
            Exception: what the last cache failed with, if none is left.
        """
        outputs = []
        for segment, layer in zip(self.segments, self.layers, strict=True):
            if segment.error is None:
                try:
                    chunk = _chunk(mask, segment, layer.store.forward_pass.start, queries.device)
                    arguments = segment.split(queries), chunk, scaling, softcap, sink_logits, False
                    output = store_and_attend(layer.store, *arguments)
                    outputs.append(output.transpose(1, 2).flatten(0, 1))
                    continue
                except Exception as error:
                    self._fail(segment, error)
            outputs.append(queries.new_zeros(segment.rows * segment.length, queries.shape[1], self.value_dim))
        output = torch.cat(outputs)[None]
        return hadamard_transform(output, inverse=True) if self.layers[0].store.rotations.values else output

    def _fail(self, segment: Segment, error: Exception) -> None:
        """Go on without a segment, unless it is the last one."""
        segment.error = error
        if all(segment.error is not None for segment in self.segments):
            raise error

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Left to the caches' own layers."""

    def get_seq_length(self) -> int:
        """0: positions are given to the model, and each cache knows its own."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The new tokens alone."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class PackedCache(Cache):
    """Several caches of one model in one forward pass, whose input is a batch of one row.

    A cache that fails does not keep the others from going on: its error is kept, and its tokens' outputs are
    meaningless. What the model raises outside of the caches concerns all of them.

    Args:
        parts: each `KVCache` and its number of new tokens, in the order in which the model's input has them; of a cache
            with several sequences one's after the other's, equally many of each.

    Attributes:
        segments: of the pass.
        placeholders: see `KVCache`.
    """

    def __init__(self, parts: Sequence[tuple[Any, int]]):
        self.segments: list[Segment] = []
        begin = 0
        for cache, count in parts:
            self.segments.append(Segment(cache, max(1, cache.groups[0].rows), slice(begin, begin + count)))
            begin += count
        for place, segment in enumerate(self.segments):
            for group in segment.cache.groups:
                group.place = place
                group.tokens_beside = begin - (segment.tokens.stop - segment.tokens.start)
        first = self.segments[0].cache
        self.placeholders = first.placeholders
        super().__init__(layers=[PackedLayer(self.segments, index) for index in range(len(first.layers))])

    def set_modality_mask(self, tokens: Tensor | None, modality: str) -> None:
        """`KVCache.set_modality_mask` of each cache, from that of all new tokens, bool [1, N]."""
        for segment in self.segments:
            own = None if tokens is None else tokens[0, segment.tokens].unflatten(0, (segment.rows, segment.length))
            segment.cache.set_modality_mask(own, modality)


def _chunk(mask: MaskHandle, segment: Segment, start: int, device: torch.device) -> Chunk:
    """A segment's new tokens, from position `start` on; one object for all layers that share the mask."""
    key = (segment, str(device))
    if key not in mask.cached:
        padding, function = mask.arguments["attention_mask"], mask.arguments["mask_function"]
        if padding is not None and not bool(padding.all()):
            raise CacheError("A packed pass has no padding, and the attention mask has zeros; pass none.")
        positions = torch.arange(start, start + segment.length, device=device)
        mask.cached[key] = Chunk(positions, None, None if function is causal_mask_function else function)
    return mask.cached[key]
