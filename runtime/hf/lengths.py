"""Attention that asks its cache for the position of new tokens, in passes over tokens of several sequences.

Llama 4 scales queries by their position, which it takes to be how many tokens the cache holds. In a packed pass each
token has one of its own, so that a layer of it answers with what is to be added to a token's number in the pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from kvconvert.runtime.hf.fused_modules import ATTENTION
from kvconvert.runtime.hf.packed import PackedCache
from kvconvert.runtime.hf.states import names_in


def asks_length(module: nn.Module) -> bool:
    """Whether a module is attention that asks for the length of the cache."""
    return names_in(module) >= {"get_seq_length", ATTENTION}


def tell_positions(model: nn.Module) -> None:
    """Let all of these know the positions of a packed pass's tokens, which the layers around them are given."""
    for name, module in model.named_modules():
        if asks_length(module):
            around, index = model.get_submodule(name.rpartition(".")[0]), module.layer_idx
            around.register_forward_pre_hook(functools.partial(_tell, index), with_kwargs=True)


def _tell(index: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if isinstance(cache, PackedCache):
        positions = kwargs["position_ids"][0]
        cache.layers[index].length = positions - torch.arange(len(positions), device=positions.device)
