"""Modules that ask the cache for what each sequence has of its own: indexers for keys, attention for its length.

Indexers choose the tokens that sparse attention attends to, over what this cache keeps of their keys.

transformers' modules of this kind give a layer of the cache their new keys, get those of all tokens, and score them.
Here a sequence's keys are counted from its own first token, whatever stands beside it, and what was chosen is counted
alike (`kernels/attention.py`): an indexer gets a mask of these columns in the place of the model's. In a packed
pass (`runtime/hf/packed.py`) it runs once for each of the caches.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvconvert.models.configuration import INDEX_UPDATES
from kvconvert.runtime.hf.fused_modules import ATTENTION
from kvconvert.runtime.hf.handles import MaskHandle
from kvconvert.runtime.hf.layer import IndexedLayer
from kvconvert.runtime.hf.packed import PackedCache
from kvconvert.runtime.hf.states import Part, names_in


def choose_by_sequence(model: nn.Module) -> None:
    """Let all indexers of a model run over this cache's layers."""
    for module in model.modules():
        if names_in(module) & {*INDEX_UPDATES} and "forward" not in module.__dict__:
            module.forward = types.MethodType(_forward, module)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """What is chosen for tokens [B, T]: numbers [B, T, k], or [B, heads, T, k]."""
    every = (*args, *kwargs.values())
    cache = next((value for value in every if isinstance(value, Cache)), None)
    if not isinstance(cache, PackedCache):
        return _chosen(self, cache, args, kwargs)
    states = next(value for value in every if isinstance(value, Tensor))
    found: list[tuple[slice, Tensor]] = []
    for segment in cache.segments:
        if segment.error is None:
            take = Part(segment.cache, segment.tokens, segment.rows, states.shape[1])
            try:
                chosen = _chosen(self, segment.cache, *take.all(args, kwargs))
                # [rows, (heads,) length, k] to [tokens, (heads,) k]
                found.append((segment.tokens, chosen.movedim(-2, 1).flatten(0, 1)))
            except Exception as error:
                cache.fail(segment, error)
    most = max(part.shape[-1] for _, part in found)
    first = found[0][1]
    output = first.new_full((states.shape[1], *first.shape[1:-1], most), -1)
    for tokens, part in found:
        output[tokens, ..., : part.shape[-1]] = part
    return output.movedim(0, -2)[None]


def _chosen(module: nn.Module, cache: Cache | None, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The module's own forward, with masks that it can read, for the rows that hold a sequence."""
    own, layer = type(module).forward, None if cache is None else cache.layers[module.layer_idx]
    if not isinstance(layer, IndexedLayer):

        def whole(value: Any) -> Any:
            return value.materialise(allow_causal_skip=False)[:, 0] if isinstance(value, MaskHandle) else value

        return own(module, *map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
    sequences = layer.store.group.sequences
    # Where there is none, one is computed for nothing.
    rows = [row for row, sequence in enumerate(sequences) if sequence.occupied] or [0]
    layer.rows = rows

    def part(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(part, value))
        if isinstance(value, MaskHandle):
            return _visible(layer, value)
        some = isinstance(value, Tensor) and value.shape[0] == len(sequences) > len(rows)
        return value[rows] if some else value

    try:
        found = own(module, *map(part, args), **{name: part(value) for name, value in kwargs.items()})
    finally:
        layer.rows = None
    if len(rows) == len(sequences):
        return found
    every = found.new_full((len(sequences), *found.shape[1:]), -1)
    every[rows] = found
    return every


def _visible(layer: IndexedLayer, mask: MaskHandle) -> Tensor:
    """bool [B, T, n] for the rows that are read: which of the indexer's keys, with the new ones, each token may attend
    to.
    """
    length, device = mask.shape[1], mask.device
    before = torch.tensor([layer.index.count(row) for row in layer.rows], device=device)
    columns = torch.arange(int(before.max()) + length, device=device)
    visible = columns <= before[:, None, None] + torch.arange(length, device=device)[:, None]
    padding = mask.arguments["attention_mask"]
    if padding is not None and padding.shape == (len(layer.rows), len(columns)):
        visible &= padding.to(device).bool()[:, None]
    return visible


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
