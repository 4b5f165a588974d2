"""Modules that keep states (linear attention, state-space models, short convolutions) in packed passes.

There (`runtime/hf/packed.py`) the tokens of several caches lie side by side, and a module of this kind would mix them.
`split_by_cache` lets it run once for each of the caches, on the tokens and states of that cache.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvconvert.errors import CacheError
from kvconvert.runtime.hf.packed import PackedCache, Segment

# What transformers' modules call of a cache that keeps states, and what attention modules look up.
_UPDATES = {"update_conv_state", "update_recurrent_state"}
_ATTENTION = "ALL_ATTENTION_FUNCTIONS"


def state_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that read and update states."""
    return [module for module in model.modules() if _names(module) & _UPDATES]


def not_split(model: nn.Module) -> str | None:
    """Why the modules with states cannot run cache by cache, or None."""
    for module in state_modules(model):
        if _ATTENTION in _names(module):
            return f"{type(module).__name__} computes attention and updates states in one module"
    return None


def _names(module: nn.Module) -> set[str]:
    """What the forward of a module's class refers to."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set(code.co_names) if code else set()


def split_by_cache(model: nn.Module) -> None:
    """Let all modules with states run cache by cache in packed passes; in others nothing changes."""
    for module in state_modules(model):
        if "forward" not in module.__dict__:
            module.forward = types.MethodType(_forward, module)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = type(self).forward
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, PackedCache)), None)
    if cache is None:
        return own(self, *args, **kwargs)
    states = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    output = torch.zeros_like(states)
    for segment in cache.segments:
        if segment.error is None:
            try:
                take = _part(segment, states.shape[1])
                found = own(self, *map(take, args), **{name: take(value) for name, value in kwargs.items()})
                output[0, segment.tokens] = found.flatten(0, 1)
            except Exception as error:
                cache.fail(segment, error)
    return output


def _part(segment: Segment, tokens: int) -> Callable[[Any], Any]:
    """What an argument of a packed pass over so many tokens is for one of its caches."""

    def take(value: Any) -> Any:
        if isinstance(value, PackedCache):
            return segment.cache
        if isinstance(value, tuple):
            return tuple(map(take, value))
        if isinstance(value, Tensor) and value.shape[:2] == (1, tokens):
            return value[0, segment.tokens].unflatten(0, (segment.rows, segment.length))
        if isinstance(value, Tensor):
            raise CacheError(f"A module with states was given a tensor of shape {list(value.shape)} in a packed pass.")
        return value

    return take
