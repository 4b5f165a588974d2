"""A layer that attends and carries a recurrent state: pages for the one, transformers' own cache for the other.

Falcon-H1 and Zamba run attention and Mamba on the same input and call one cache layer for both.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvconvert.runtime.hf.layer import PagedLayer


class HybridLayer(LinearAttentionLayer, PagedLayer):
    """`PagedLayer` with the convolution and recurrent states of transformers' linear-attention layers.

    Args:
        number_of_states: states of each kind that the layer's mixer keeps.
        args, kwargs: of `PagedLayer`.
    """

    is_compileable = False

    def __init__(self, *args: Any, number_of_states: int = 1, **kwargs: Any):
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        PagedLayer.__init__(self, *args, **kwargs)

    def lazy_initialization(self, *args: torch.Tensor, **kwargs: Any) -> None:
        """Keys and values come by position, states by name."""
        (PagedLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionLayer.reset(self)
        PagedLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences of `beam_idx`, in its order."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        PagedLayer.reorder_cache(self, beam_idx)

    @property
    def is_croppable(self) -> bool:
        """Recurrent states cannot be put back."""
        return LinearAttentionLayer.is_croppable.fget(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest columns, where the states allow it."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        PagedLayer.crop(self, tokens_to_remove)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def offload(self) -> None:
        """Refused, as for every layer with pages."""
        PagedLayer.offload(self)

    prefetch = offload
