"""A layer with attention and a recurrent state: pages for the one, transformers' own cache for the other.

Falcon-H1 and Zamba run attention and Mamba on the same input and use one cache layer for both.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvconvert.runtime.cache.store import LayerStore
from kvconvert.runtime.hf.layer import PagedLayer


class HybridLayer(LinearAttentionLayer, PagedLayer):
    """`PagedLayer` with the convolution and recurrent states of transformers' linear-attention layers.

    Args:
        store: what the layer stores of keys and values.
        number_of_states: states of each kind that the layer's mixer keeps.
    """

    is_compileable = False

    def __init__(self, store: LayerStore, number_of_states: int = 1):
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        PagedLayer.__init__(self, store)

    def lazy_initialization(self, *args: torch.Tensor, **kwargs: Any) -> None:
        """transformers passes keys and values by position, states by name."""
        (PagedLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Keep the newest tokens uncompressed, and states as transformers needs them for a crop."""
        LinearAttentionLayer.activate_past_recording(self)
        PagedLayer.activate_past_recording(self)

    def reset(self) -> None:
        """Drop everything stored."""
        LinearAttentionLayer.reset(self)
        PagedLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences of `beam_idx`, in its order."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        PagedLayer.reorder_cache(self, beam_idx)

    @property
    def is_croppable(self) -> bool:
        """Recurrent states cannot be restored."""
        return LinearAttentionLayer.is_croppable.fget(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, where the states allow it."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        PagedLayer.crop(self, tokens_to_remove)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def offload(self) -> None:
        """Refused, as for every layer with pages."""
        PagedLayer.offload(self)

    prefetch = offload
