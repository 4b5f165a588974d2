"""Modules that keep states (linear attention, state-space models, short convolutions), sequence by sequence.

transformers' modules of this kind read a batch of sequences, each from its state on. In a packed pass
(`runtime/hf/packed.py`) the tokens of several caches lie side by side instead, so that a module runs once for each of
the caches. And some of them pass over a stored state where they are given more than one token (Jamba's in transformers
5.24): whether a module does so is found by running it, and it then reads what follows its first tokens one by one.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvconvert.errors import CacheError
from kvconvert.runtime.hf.layer import StateLayer
from kvconvert.runtime.hf.packed import PackedCache, Segment

logger = logging.getLogger(__name__)

# What these modules call of a cache, how they name it, and what attention modules look up.
_UPDATES = {"update_conv_state", "update_recurrent_state"}
_CACHES = ("cache", "cache_params", "past_key_values")
ATTENTION = "ALL_ATTENTION_FUNCTIONS"
# Tokens and the relative difference of a trial. A module that passes over a state is wrong by about 1.
_TRIAL, _TOLERANCE = 3, 0.1


def state_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that read and update states."""
    return [module for module in model.modules() if names_in(module) & _UPDATES]


def not_split(model: nn.Module) -> str | None:
    """Why modules with states cannot run cache by cache, or None."""
    for module in state_modules(model):
        if ATTENTION in names_in(module):
            return f"{type(module).__name__} computes attention and updates states in one module"
    return None


def read_by_sequence(model: nn.Module) -> None:
    """Let all modules with states run cache by cache, and from the stored state on whatever they are given."""
    for module in state_modules(model):
        if "forward" not in module.__dict__ and ATTENTION not in names_in(module):
            module.forward = types.MethodType(_forward, module)


def names_in(module: nn.Module) -> set[str]:
    """What the forward of a module's class refers to."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set(code.co_names) if code else set()


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    every = (*args, *kwargs.values())
    cache = next((value for value in every if isinstance(value, Cache)), None)
    states = next(value for value in every if isinstance(value, Tensor))
    if not isinstance(cache, PackedCache):
        return _read(self, cache, states, args, kwargs)
    output = torch.zeros_like(states)
    for segment in cache.segments:
        if segment.error is None:
            take = Part(segment, states.shape[1])
            try:
                own = tuple(map(take, args)), {name: take(value) for name, value in kwargs.items()}
                found = _read(self, segment.cache, take(states), *own)
                output[0, segment.tokens] = found.flatten(0, 1)
            except Exception as error:
                cache.fail(segment, error)
    return output


class Part:
    """What an argument of a packed pass is for one of its caches.

    Args:
        segment: of the cache.
        tokens: of the pass.
    """

    def __init__(self, segment: Segment, tokens: int):
        self.segment, self.tokens = segment, tokens

    def __call__(self, value: Any) -> Any:
        """The value for the cache; CacheError for a tensor that is not the pass's."""
        if isinstance(value, PackedCache):
            return self.segment.cache
        if isinstance(value, tuple):
            return tuple(map(self, value))
        if not isinstance(value, Tensor):
            return value
        if value.shape[:2] != (1, self.tokens):
            raise CacheError(f"A module with states was given a tensor of shape {list(value.shape)} in a packed pass.")
        return value[0, self.segment.tokens].unflatten(0, (self.segment.rows, self.segment.length))


def _read(module: nn.Module, cache: Cache | None, states: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """The module's own forward of hidden states [B, T, C], which are among its arguments."""
    own = type(module).forward
    layer = None if cache is None else cache.layers[module.layer_idx]
    stored = isinstance(layer, StateLayer) and any(layer.has_previous_state.values())
    if states.shape[1] == 1 or not stored or _continues(module, layer, states):
        return own(module, *args, **kwargs)
    return _one_by_one(lambda *args, **kwargs: own(module, *args, **kwargs), states, args, kwargs)


def _one_by_one(own: Callable, states: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    def at(token: int, value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.shape[:2] == states.shape[:2]
        return value[:, token : token + 1] if whole else value

    found = []
    for token in range(states.shape[1]):
        found.append(own(*(at(token, x) for x in args), **{name: at(token, x) for name, x in kwargs.items()}))
    return torch.cat(found, 1)


@torch.no_grad()
def _continues(module: nn.Module, layer: StateLayer, like: Tensor) -> bool:
    """Whether a module reads several tokens from a stored state on, found by a trial with a random state.

    Args:
        layer: of a cache.
        like: hidden states [B, T, C] that it is given.
    """
    if "continues" not in module.__dict__:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 1 + _TRIAL, like.shape[2], generator=generator).to(like)
        module.continues = _agree(module, layer.number_of_states, x, generator)
        if not module.continues:
            logger.warning(
                "%s passes over its stored state where it is given several tokens, so these are read one by one; that "
                "is slow for prompts which are read in chunks.",
                type(module).__name__,
            )
    return module.continues


def _agree(module: nn.Module, number_of_states: int, x: Tensor, generator: torch.Generator) -> bool:
    """Whether tokens x [1, 1 + T, C] give the same at once and one by one, after the first one and random states."""
    own = type(module).forward
    name = next(name for name in inspect.signature(inspect.unwrap(own)).parameters if name in _CACHES)
    states: dict[str, Tensor] = {}
    found = []
    for size in (_TRIAL, 1):
        cache = Cache(layers=[StateLayer(number_of_states=number_of_states) for _ in range(module.layer_idx + 1)])
        own(module, x[:, :1], **{name: cache})
        for kind, tensor in cache.layers[module.layer_idx].tensors().items():
            tensor.copy_(states.setdefault(kind, torch.randn(tensor.shape, generator=generator).to(tensor)))
        found.append(torch.cat([own(module, part, **{name: cache}) for part in x[:, 1:].split(size, 1)], 1))
    return bool((found[0] - found[1]).float().norm() <= _TOLERANCE * found[1].float().norm())
