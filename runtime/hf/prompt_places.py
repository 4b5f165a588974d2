"""States of prompts where recorded passes find them.

A recorded pass (`runtime/hf/captured_passes.py`) reads its prompts side by side, as others do (`runtime/hf/states.py`),
but for a number of sequences that never changes, and from tensors and tables of fixed addresses. The states of a pass's
prompts are copied to the first of as many places before it, and back after it. A place without a prompt has no tokens,
and one more place has the tokens that the pass is padded with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvconvert.kernels.convolution import CHUNK, SideBySide, chunks_of, ends_of, owners_of
from kvconvert.runtime.cache.prompt_pass import TableCapacity
from kvconvert.runtime.hf.layer import StateLayer

# Numbers by which a table is moved, so that kernels have aligned addresses.
_ALIGNED = 16


class _Places(SideBySide):
    """Sequences whose tables are given."""

    def __init__(self, lengths: Sequence[int], tables: Sequence[Tensor]):
        super().__init__(lengths, tables[0].device)
        self.ends, self.owners, self.chunks = tables


class PromptPlaces:
    """Places for the states of one pass's prompts, and tables of where their tokens are.

    Args:
        like: the cache of a prompt that has been read.
        most: what the largest pass has room for.

    Attributes:
        layers: the places of the present pass by the layers' numbers, each with the states [S, ...] of all.
        sequences: its tokens; other tensors in each run of the model, since flash-linear-attention keeps what it
            derives from one.
    """

    def __init__(self, like: Any, most: TableCapacity):
        count, self._like = most.sequences + 1, like.state_layers()
        self._states = {
            index: {name: tensor.new_zeros(count, *tensor.shape[1:]) for name, tensor in layer.tensors().items()}
            for index, layer in self._like.items()
        }
        device = next(tensor for states in self._states.values() for tensor in states.values()).device
        self._table = torch.zeros(sum(map(_room, _sizes(count, most.tokens))), dtype=torch.int32, device=device)
        self._layers: dict[int, dict[int, StateLayer]] = {}
        self.layers: dict[int, StateLayer] = {}
        self._caches: Sequence[Any] = ()
        self._lengths: np.ndarray = np.zeros(0, dtype=np.int32)

    def put(self, caches: Sequence[Any], lengths: Sequence[int], rows: int, capacity: TableCapacity) -> None:
        """Begin a pass: copy the states of its prompts here, and write the tables.

        Args:
            caches: the prompts' caches, at most `capacity.sequences`.
            lengths: the number of new tokens of each prompt.
            rows: the number of decoding rows, whose tokens come before the prompts'.
            capacity: the capacity of the pass.
        """
        count, tokens = capacity.sequences + 1, capacity.tokens - rows
        self._caches, self._lengths = caches, np.zeros(count, dtype=np.int32)
        self._lengths[: len(lengths)] = lengths
        self._lengths[-1] = tokens - sum(lengths)
        if count not in self._layers:
            self._layers[count] = {index: self._layer(index, count) for index in self._states}
        self.layers = self._layers[count]
        for place, cache in enumerate(caches):
            for here, there in _pairs(self.layers, cache, place):
                torch._foreach_copy_(here, there)
        fresh = [place for place, cache in enumerate(caches) if not _has_states(cache)]
        torch._foreach_zero_([t[place] for place in (*fresh, -1) for t in _tensors(self.layers)])
        sizes = _sizes(count, tokens)
        host = np.zeros(sum(map(_room, sizes)), dtype=np.int32)
        tables = ends_of(self._lengths), owners_of(self._lengths), chunks_of(self._lengths, sizes[-1] // 2)
        for own, table in zip(_divided(host, sizes), tables, strict=True):
            own[:] = table.ravel()
        pinned = torch.from_numpy(host)
        if self._table.is_cuda:
            pinned = pinned.pin_memory()
        self._table[: len(host)].copy_(pinned, non_blocking=True)
        self.begin_run()

    def begin_run(self) -> None:
        """Before each run of the model in the pass."""
        ends, owners, chunks = _divided(self._table, _sizes(len(self._lengths), int(self._lengths.sum())))
        self.sequences = _Places(self._lengths.tolist(), (ends, owners, chunks.view(-1, 2)))

    def take(self) -> None:
        """End the pass: copy the states after it to the prompts' caches."""
        for place, cache in enumerate(self._caches):
            if not _has_states(cache):
                for index, layer in cache.state_layers().items():
                    layer.hold({name: torch.empty_like(t[:1]) for name, t in self.layers[index].tensors().items()})
            for here, there in _pairs(self.layers, cache, place):
                torch._foreach_copy_(there, here)
        self._caches = ()

    def _layer(self, index: int, count: int) -> StateLayer:
        """The first places of a layer."""
        like = self._like[index]
        layer = StateLayer(like.number_of_states, like.recurrent_states.bits)
        layer.hold({name: tensor[:count] for name, tensor in self._states[index].items()})
        return layer


def _tensors(layers: dict[int, StateLayer]) -> list[Tensor]:
    return [tensor for layer in layers.values() for tensor in layer.tensors().values()]


def _has_states(cache: Any) -> bool:
    return all(layer.tensors() for layer in cache.state_layers().values())


def _pairs(layers: dict[int, StateLayer], cache: Any, place: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """A place's states and those of a prompt's cache, those of a dtype together, which are copied at once."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for index, layer in cache.state_layers().items():
        places = layers[index].tensors()
        for name, tensor in layer.tensors().items():
            here, there = pairs.setdefault(tensor.dtype, ([], []))
            here.append(places[name][place])
            there.append(tensor[0])
    return list(pairs.values())


def _sizes(count: int, tokens: int) -> tuple[int, int, int]:
    """Numbers in the tables of where sequences end, of tokens' owners, and of chunks."""
    return count + 1, tokens, 2 * (tokens // CHUNK + count)


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _divided(table: Any, sizes: Sequence[int]) -> list[Any]:
    """The tables of these sizes in a line of numbers."""
    found, begin = [], 0
    for size in sizes:
        found.append(table[begin : begin + size])
        begin += _room(size)
    return found
