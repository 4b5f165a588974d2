"""Masks that transformers' models ask for, as tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.masking_utils import sdpa_mask


def tensor_mask(**arguments: Any) -> Tensor | None:
    """A boolean mask [B, 1, T, n] from the arguments of transformers' mask interface; None is SDPA's own causal mask.

    Models with `use_bidirectional_attention` (PaliGemma) tell SDPA that they are not causal, so None would let every
    token of a prompt see all others, whatever the mask says: theirs is always a tensor.
    """
    if getattr(arguments.get("config"), "use_bidirectional_attention", None) is True:
        arguments["allow_is_causal_skip"] = False
    return sdpa_mask(**arguments)
