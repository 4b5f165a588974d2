"""Modules that keep states (linear attention, state-space models, short convolutions) in packed passes.

transformers' modules of this kind read a batch of sequences, each from its state on. In a packed pass
(`runtime/hf/packed.py`) the tokens of several caches lie side by side instead. Decoding rows are such a batch. Prompts
are read by one run of the module over all their tokens (`_SideBySide`): what treats each token by itself is as it was,
and the convolution and the function that begins from a state are given each sequence's own. A trial shows whether a
module can be read so; else it runs once for each prompt. And some modules pass over a stored state where they are given
more than one token (Jamba's in transformers 5.24), which another trial shows: they read what follows their first tokens
one by one.
"""

from __future__ import annotations

import copy
import dis
import inspect
import logging
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvconvert.errors import CacheError
from kvconvert.kernels import device as devices
from kvconvert.kernels.convolution import SideBySide, convolve
from kvconvert.kernels.launches import skips_launches
from kvconvert.methods import KVScheme
from kvconvert.runtime.hf.fused_modules import ATTENTION
from kvconvert.runtime.hf.layer import StateLayer, read_each, write_each
from kvconvert.runtime.hf.packed import PackedCache, Segment
from kvconvert.runtime.hf.state_steps import (
    ACTIVATIONS,
    RULES,
    StoredStates,
    mamba2_scan,
    replaced,
    takes_kernels,
    with_kernels,
)

logger = logging.getLogger(__name__)

# What these modules call of a cache, and how they name it.
_UPDATES = {"update_conv_state", "update_recurrent_state"}
_CACHES = ("cache", "cache_params", "past_key_values")
# The function that convolves, and the arguments of functions that begin from a state.
_CONVOLUTION = "causal_conv1d_fn"
_INITIAL = ("initial_state", "initial_states")
# What flash-linear-attention's functions take of sequences side by side: where they end, and their chunks.
_ENDS, _CHUNKS = "cu_seqlens", "chunk_indices"
# Tokens and the relative difference of a trial. A module that passes over a state is wrong by about 1. No trial is made
# while kernels are only listed (`kernels/launches`), for nothing is computed then.
_TRIAL, _TOLERANCE = 3, 0.1
_MOST_STATES = 8  # of a kind in one module


def state_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that read and update states."""
    return [module for module in model.modules() if names_in(module) & _UPDATES]


def not_split(model: nn.Module) -> str | None:
    """Why modules with states cannot run cache by cache, or None."""
    for module in state_modules(model):
        if ATTENTION in names_in(module):
            return f"{type(module).__name__} computes attention and updates states in one module"
    for kind in {type(module): None for module in model.modules()}:
        if own := _states_in(kind):
            return f"{kind.__name__} keeps its {own} in itself instead of in the cache"
    return None


@lru_cache
def _states_in(kind: type[nn.Module]) -> str | None:
    """The attribute in which a class of modules keeps states between passes (RecurrentGemma's); None without one."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    stored = [] if code is None else [i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"]
    return next((name for name in stored if name.endswith(("_state", "_states"))), None)


def read_by_sequence(model: nn.Module) -> None:
    """Let all modules with states run cache by cache, and from the stored state on whatever they are given."""
    for module in state_modules(model):
        if "forward" not in module.__dict__ and ATTENTION not in names_in(module):
            module.forward = types.MethodType(_forward, module)


def state_bits(model: nn.Module, schemes: Sequence[KVScheme | None]) -> int:
    """Width of the states of a model whose modules `read_by_sequence` has changed, see `StateBits`."""
    widths = (scheme.state_bits for scheme in schemes if scheme is not None)
    return 16 if not_split(model) else min(widths, default=16)


@torch.no_grad()
def bytes_of_states(model: nn.Module, bits: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Bytes of the states of one sequence, whatever its length: modules read a token, and what they store is counted.

    Args:
        model: on any device; modules without weights are given zeros.
        bits: see `state_bits`.
        dtype, device: in which modules compute, and where.

    Returns:
        None where a module that keeps states attends as well, and needs more than hidden states.
    """
    if not_split(model) is not None:
        return None
    found: dict[Any, int] = {}
    total = 0
    for module in state_modules(model):
        kind = type(module), tuple(parameter.shape for parameter in module.parameters())
        if kind not in found:
            weights = [*module.parameters(), *module.buffers()]
            own = module
            if any(tensor.is_meta for tensor in weights):
                own = copy.deepcopy(module).to(dtype).to_empty(device=device)
                for tensor in [*own.parameters(), *own.buffers()]:
                    tensor.zero_()
            cache = Cache(layers=[StateLayer(_MOST_STATES, bits) for _ in range(own.layer_idx + 1)])
            token = torch.zeros(1, 1, model.config.get_text_config().hidden_size, dtype=dtype, device=device)
            type(own).forward(own, token, **{_cache_name(own): cache})
            found[kind] = sum(tensor.nbytes for tensor in cache.layers[own.layer_idx].tensors().values())
        total += found[kind]
    return total


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
    if cache.placed is not None:
        return _read_placed(self, cache, states, args, kwargs)
    found: list[tuple[slice, Any]] = []
    for part in _parts(self, cache, states):
        try:
            if len(part) > 1 or _is_prompt(self, part[0], states):
                tokens = slice(part[0].tokens.start, part[-1].tokens.stop)
                layers = [segment.cache.layers[self.layer_idx] for segment in part]
                sequences = cache.sequences([segment.length for segment in part], states.device)
                found.append(_read_side_by_side(self, layers, sequences, tokens, states, args, kwargs))
                continue
        except Exception as error:
            # Nothing was stored, and whichever fails by itself is left out.
            logger.warning("%s did not read prompts side by side (%s); each is read alone.", type(self).__name__, error)
        for segment in part:
            try:
                take = Part(segment.cache, segment.tokens, segment.rows, states.shape[1])
                found.append((segment.tokens, _read(self, segment.cache, take(states), *take.all(args, kwargs))))
            except Exception as error:
                cache.fail(segment, error)
    return _placed(found, states)


def _placed(found: Sequence[tuple[slice, Any]], states: Tensor) -> Any:
    """Outputs [1, T, ...] of a pass, made of those of some of its tokens [B, T / B, ...]; a tuple where these are."""
    first = found[0][1] if found else states
    if len(found) == 1 and found[0][0] == slice(0, states.shape[1]) and isinstance(first, Tensor):
        return first.flatten(0, 1)[None]
    if isinstance(first, tuple):
        return tuple(_placed([(tokens, own[i]) for tokens, own in found], states) for i in range(len(first)))
    if sum(tokens.stop - tokens.start for tokens, _ in found) == states.shape[1]:
        return torch.cat([own.flatten(0, 1) for _, own in found])[None]
    output = first.new_zeros(1, states.shape[1], *first.shape[2:])
    for tokens, own in found:
        output[0, tokens] = own.flatten(0, 1)
    return output


def _joined(outputs: Sequence[Any]) -> Any:
    """Outputs [B, T, ...] of tokens that follow one another, or tuples of such."""
    if isinstance(outputs[0], tuple):
        return tuple(map(_joined, zip(*outputs, strict=True)))
    return torch.cat(list(outputs), 1)


def _parts(module: nn.Module, cache: PackedCache, states: Tensor) -> list[list[Segment]]:
    """The segments of a pass, those together that are read by one run of the module."""
    parts: list[list[Segment]] = []
    for segment in (segment for segment in cache.segments if segment.error is None):
        before = parts[-1][-1] if parts else None
        alone = before is None or max(before.rows, segment.rows) > 1 or before.tokens.stop != segment.tokens.start
        if alone or not _keeps_apart(module, segment.cache.layers[module.layer_idx], states):
            parts.append([segment])
        else:
            parts[-1].append(segment)
    return parts


def _is_prompt(module: nn.Module, segment: Segment, states: Tensor) -> bool:
    """Whether a segment alone is read as prompts side by side are, for their convolution has a kernel."""
    if segment.rows > 1 or segment.length == 1 or devices.unsupported(states.device) is not None:
        return False
    return _keeps_apart(module, segment.cache.layers[module.layer_idx], states)


def _read_side_by_side(
    module: nn.Module,
    layers: Sequence[StateLayer],
    sequences: SideBySide,
    tokens: slice,
    states: Tensor,
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[slice, Any]:
    """Tokens of a pass that are those of prompts, and the module's output of them."""
    stand_in = _SideBySide(layers, sequences)
    own = Part(stand_in, tokens, 1, states.shape[1]).all(args, kwargs)
    return tokens, stand_in.read(module, *own)


def _read_placed(module: nn.Module, cache: PackedCache, states: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The module's output in a pass that can be recorded: decoding rows, then what `PromptPlaces` has."""
    rows, placed = cache.segments[0], cache.placed
    take = Part(rows.cache, rows.tokens, rows.rows, states.shape[1])
    layers, prompts = [placed.layers[module.layer_idx]], slice(rows.tokens.stop, states.shape[1])
    found = [
        (rows.tokens, _read(module, rows.cache, take(states), *take.all(args, kwargs))),
        _read_side_by_side(module, layers, placed.sequences, prompts, states, args, kwargs),
    ]
    return _placed(found, states)


def reads_places(model: nn.Module, device: torch.device) -> bool:
    """Whether all modules with states, which have read prompts side by side before, do so without asking the host how
    these are divided.
    """
    return all(
        module.__dict__.get("keeps_apart") and _follows_tables(module, device) for module in state_modules(model)
    )


def _follows_tables(module: nn.Module, device: torch.device) -> bool:
    scans = [_taken(function, device) for function in _scans(inspect.unwrap(type(module).forward)).values()]
    return all(_ENDS in taken for taken in scans) and (not scans or any(_CHUNKS in taken for taken in scans))


class Part:
    """What an argument of a packed pass is for some of its tokens.

    Args:
        cache: the cache of these tokens.
        tokens: which of the pass they are.
        rows: sequences that they are divided among.
        count: number of tokens of the pass.
    """

    def __init__(self, cache: Any, tokens: slice, rows: int, count: int):
        self.cache, self.tokens, self.rows, self.count = cache, tokens, rows, count

    def __call__(self, value: Any) -> Any:
        """The value for the cache; CacheError for a tensor that is not the pass's."""
        if isinstance(value, PackedCache):
            return self.cache
        if isinstance(value, tuple):
            return tuple(map(self, value))
        if not isinstance(value, Tensor):
            return value
        # Positions of several kinds, such as those of images, have them all in front.
        axis = next((i for i in range(value.ndim - 1) if value.shape[i : i + 2] == (1, self.count)), None)
        if axis is None:
            raise CacheError(f"A module with states was given a tensor of shape {list(value.shape)} in a packed pass.")
        own = value.select(axis, 0)[(slice(None),) * axis + (self.tokens,)]
        return own.unflatten(axis, (self.rows, -1))

    def all(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The same of all arguments of a call."""
        return tuple(map(self, args)), {name: self(value) for name, value in kwargs.items()}


class _SideBySide:
    """The states of one layer in the place of a cache, while its module reads sequences that lie side by side.

    The module's forward is run as it is, but for the functions that tokens of other sequences must not reach: the
    convolution, and those that begin from a state. States are stored when it has ended.

    Args:
        layers: the layer in each sequence's cache.
        sequences: where each lies.
    """

    def __init__(self, layers: Sequence[StateLayer], sequences: SideBySide):
        self.layers, self.sequences = layers, sequences
        self._kernel_size: dict[int, int] = {}
        self._number = 0
        self._after: dict[tuple[str, int], Tensor] = {}

    def read(self, module: nn.Module, *given: Any) -> Any:
        """What the module gives for arguments and named arguments, [1, N, C] or a tuple of such."""
        own = inspect.unwrap(type(module).forward)
        scans = {name: self._scan(function) for name, function in _scans(own).items()}
        output = replaced(own, scans | {_CONVOLUTION: self._convolve})(module, *given[0], **given[1])
        for (kind, number), states in self._after.items():
            for layer in self.layers:
                if not getattr(layer, f"is_{kind}_states_initialized")[number]:
                    size = {"conv_kernel_size": self._kernel_size[number]} if kind == "conv" else {}
                    layer.lazy_initialization(**{f"{kind}_states": states[:1]}, state_idx=number, **size)
                layer.has_previous_state[number] = True
            if kind == "conv":
                own = [layer.conv_states[number] for layer in self.layers]
                torch._foreach_copy_(own, list(states.split([len(state) for state in own])))
            else:
                write_each([layer.recurrent_states for layer in self.layers], number, states)
        return output

    def _stacked(self, kind: str, number: int, like: Tensor | None = None) -> Tensor | None:
        """States [S, ...], zeros where a sequence has none yet; None if none has, and nothing says of what shape."""
        own = [getattr(layer, f"{kind}_states") for layer in self.layers]
        if kind == "recurrent":
            return read_each(own, number)
        own = [states[number] for states in own]
        known = next((state for state in own if state is not None), like)
        return None if known is None else torch.cat([torch.zeros_like(known) if s is None else s for s in own])

    # What modules call of a cache.

    def is_recording_past(self, layer_idx: int) -> bool:
        """No sequence is taken back."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Whether any sequence has one."""
        return any(layer.has_previous_state[state_idx] for layer in self.layers)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: the convolution finds them itself."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[S, ...], to begin from."""
        return self._stacked("recurrent", state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """The new tokens [1, C, N] alone; the convolution, which comes next, knows what is before them."""
        if conv_kernel_size is None:
            raise CacheError("A module does not say how many tokens its convolution keeps.")
        self._number, self._kernel_size[state_idx] = state_idx, conv_kernel_size
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> None:
        """Keep the states [S, ...] after these tokens."""
        self._after["recurrent", state_idx] = recurrent_states

    # What their forward calls instead of functions for a batch.

    def _convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
    ) -> Tensor:
        if activation not in ACTIVATIONS:
            raise CacheError(f"A convolution followed by {activation} is not computed side by side.")
        kept = x.new_zeros(1, x.shape[1], self._kernel_size[self._number])
        states = self._stacked("conv", self._number, kept)
        tokens = x[0].T if x.stride(1) == 1 else x[0].T.contiguous()
        y, after = convolve(tokens, weight, bias, states, self.sequences, activation is not None)
        self._after["conv", self._number] = after
        return y.T[None]

    def _scan(self, function: Callable) -> Callable:
        initial, lengths = _initial(function), self.sequences.lengths
        whole = (1, sum(lengths))

        def scan(*args: Any, **kwargs: Any) -> Any:
            if takes_kernels(function, args[0].device):
                return mamba2_scan(self.sequences.ends)(*args, **kwargs)
            taken = _taken(function, args[0].device)
            if _ENDS in taken:
                more = {_CHUNKS: self.sequences.chunks} if _CHUNKS in taken else {}
                return function(*args, **kwargs | {_ENDS: self.sequences.ends} | more)

            def divided(value: Any) -> list[Any]:
                is_whole = isinstance(value, Tensor) and value.shape[:2] == whole
                return list(value.split(lengths, 1)) if is_whole else [value] * len(lengths)

            states = kwargs.pop(initial)
            own = [None] * len(lengths) if states is None else states.split(1)
            lines = zip(
                lengths, zip(*map(divided, args), strict=True), *map(divided, kwargs.values()), own, strict=True
            )
            found = [
                function(*given, **dict(zip(kwargs, named, strict=True)), **{initial: state})
                if length
                else (given[-1], state)
                for length, given, *named, state in lines
            ]
            outputs, finals = zip(*found, strict=True)
            return torch.cat(outputs, 1), torch.cat(finals)

        return scan


@lru_cache(maxsize=1024)
def _initial(function: Callable) -> str | None:
    """The argument by which a function begins from a state, if it has one."""
    return next((name for name in inspect.signature(function).parameters if name in _INITIAL), None)


def _scans(forward: types.FunctionType) -> dict[str, Callable]:
    """The functions by their names that a module's forward calls and that begin from a state."""
    names = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    return {name: value for name, value in names.items() if inspect.isfunction(value) and _initial(value)}


@lru_cache(maxsize=1024)
def _taken(function: Callable, device: torch.device) -> frozenset[str]:
    """What transformers calls takes of sequences side by side, if it is flash-linear-attention's kernels."""
    own = inspect.getclosurevars(function).nonlocals.get("implementation") if function.__closure__ else None
    if device.type != "cuda" or own is None:
        return frozenset()
    return frozenset({_ENDS, _CHUNKS} & {*inspect.signature(own).parameters})


@torch.no_grad()
def _keeps_apart(module: nn.Module, layer: StateLayer, like: Tensor) -> bool:
    """Whether a module reads sequences side by side as if each were alone, found by a trial with random states.

    Args:
        module: a module with states.
        layer: its layer in a cache.
        like: its input, hidden states [B, T, C].
    """
    without = "reads the prompts of a pass one by one"
    return _passes(module, "keeps_apart", 2 * _TRIAL + 1, like, lambda *own: _apart(module, layer, *own), without)


def _passes(
    module: nn.Module,
    name: str,
    tokens: int,
    like: Tensor,
    trial: Callable[[Tensor, torch.Generator], bool],
    without: str,
    hooked: bool = False,
) -> bool:
    """Whether a module passes a trial, which is made once and kept as an attribute of the module.

    Args:
        module: a module with states.
        name: the attribute's name.
        tokens: how many random tokens the trial takes, [1, tokens, C].
        like: the module's input, hidden states [B, T, C].
        trial: given the tokens and a generator, whether the outputs are as they should be.
        without: what is logged of a module that does not pass.
        hooked: whether modules that are moved between devices are tried, too.
    """
    if skips_launches():
        return True
    if name not in module.__dict__:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, tokens, like.shape[2], generator=generator).to(like)
        passed, reason = False, "a trial gave other outputs"
        try:
            passed = (hooked or not hasattr(module, "_hf_hook")) and trial(x, generator)
        except Exception as error:  # code of any model, which may do what the stand-in for a cache does not
            reason = f"a trial failed: {error}"
        setattr(module, name, passed)
        if not passed:
            logger.warning("%s %s (%s).", type(module).__name__, without, reason)
    return getattr(module, name)


def _apart(module: nn.Module, layer: StateLayer, x: Tensor, generator: torch.Generator) -> bool:
    """Whether tokens x [1, N, C] of two sequences, after one that each had, give the same side by side and apart."""
    name, lengths = _cache_name(module), [_TRIAL + 1, _TRIAL]
    found, states = [], []
    for together in (True, False):
        seeds = map(generator.manual_seed, range(len(lengths)))  # so that one's states are not the other's
        caches = [_trial_cache(module, layer, x[:, :1], own) for own in seeds]
        layers = [cache.layers[module.layer_idx] for cache in caches]
        if together:
            stand_in = _SideBySide(layers, SideBySide(lengths, x.device))
            found.append(stand_in.read(module, (x,), {name: stand_in}))
        else:
            parts = zip(x.split(lengths, 1), caches, strict=True)
            found.append(_joined([_read(module, cache, part, (part,), {name: cache}) for part, cache in parts]))
        states.append([state for layer in layers for state in _kept(layer)])
    return _close(*found) and all(map(_close, *states))


def _read(module: nn.Module, cache: Cache | None, states: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """The module's own forward of hidden states [B, T, C], which are among its arguments."""
    layer = None if cache is None else cache.layers[module.layer_idx]
    if not isinstance(layer, StateLayer):
        return type(module).forward(module, *args, **kwargs)
    stored = any(layer.has_previous_state.values())
    if states.shape[1] > 1 and stored and not _continues(module, layer, states):
        return _one_by_one(lambda *args, **kwargs: _run(module, layer, cache, args, kwargs), states, args, kwargs)
    takes_step = stored and states.shape[1] == 1 and devices.unsupported(states.device) is None
    return _run(module, layer, cache, args, kwargs, takes_step and _steps_equal(module, layer, states))


def _run(
    module: nn.Module, layer: StateLayer, cache: Cache, args: Any, kwargs: dict[str, Any], steps: bool = False
) -> Any:
    """The module's own forward; with `steps`, of one token per sequence and with this project's kernels."""
    if not steps and layer.recurrent_states.bits == 16:
        return type(module).forward(module, *args, **kwargs)
    stand_in = StoredStates(cache, layer, steps and bool(names_in(module) & RULES))

    def given(value: Any) -> Any:
        return stand_in if value is cache else value

    forward = with_kernels(type(module)) if steps else type(module).forward
    output = forward(module, *map(given, args), **{name: given(value) for name, value in kwargs.items()})
    stand_in.store()
    return output


@torch.no_grad()
def _steps_equal(module: nn.Module, layer: StateLayer, like: Tensor) -> bool:
    """Whether a module reads a token with this project's kernels as it does by itself, found by a trial.

    Args:
        module: a module with states.
        layer: its layer in a cache.
        like: its input, hidden states [B, T, C].
    """
    without = "decodes with transformers' functions"
    return _passes(module, "steps_equal", 2, like, lambda *own: _step_equals(module, layer, *own), without)


def _step_equals(module: nn.Module, layer: StateLayer, x: Tensor, generator: torch.Generator) -> bool:
    """Whether the second of two tokens x [1, 2, C] gives the same with kernels and without them."""
    found, states, name = [], [], _cache_name(module)
    for steps in (True, False):
        cache = _trial_cache(module, layer, x[:, :1], generator.manual_seed(0))
        own = cache.layers[module.layer_idx]
        found.append(_run(module, own, cache, (x[:, 1:],), {name: cache}, steps))
        states.append(_kept(own))
    return _close(*found) and all(map(_close, *states))


def _one_by_one(own: Callable, states: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
    def at(token: int, value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.shape[:2] == states.shape[:2]
        return value[:, token : token + 1] if whole else value

    found = []
    for token in range(states.shape[1]):
        found.append(own(*(at(token, x) for x in args), **{name: at(token, x) for name, x in kwargs.items()}))
    return _joined(found)


@torch.no_grad()
def _continues(module: nn.Module, layer: StateLayer, like: Tensor) -> bool:
    """Whether a module reads several tokens from a stored state on, found by a trial; arguments as above."""
    without = (
        "passes over its stored state where it is given several tokens, so these are read one by one; that is slow for "
        "prompts which are read in chunks"
    )
    return _passes(module, "continues", 1 + _TRIAL, like, lambda *own: _goes_on(module, layer, *own), without, True)


def _goes_on(module: nn.Module, layer: StateLayer, x: Tensor, generator: torch.Generator) -> bool:
    """Whether all but the first of tokens x [1, 1 + T, C] give the same together as one by one."""
    found, name = [], _cache_name(module)
    for size in (_TRIAL, 1):
        cache = _trial_cache(module, layer, x[:, :1], generator.manual_seed(0))
        own = cache.layers[module.layer_idx]
        found.append(_joined([_run(module, own, cache, (part,), {name: cache}) for part in x[:, 1:].split(size, 1)]))
    return _close(*found)


def _cache_name(module: nn.Module) -> str:
    """How a module names the cache among its arguments."""
    return next(name for name in inspect.signature(inspect.unwrap(type(module).forward)).parameters if name in _CACHES)


def _trial_cache(module: nn.Module, like: StateLayer, first: Tensor, generator: torch.Generator) -> Cache:
    """A cache in which a module has read one token, [1, 1, C], and random states took the place of its own."""
    own = like.number_of_states, like.recurrent_states.bits
    cache = Cache(layers=[StateLayer(*own) for _ in range(module.layer_idx + 1)])
    type(module).forward(module, first, **{_cache_name(module): cache})
    layer = cache.layers[module.layer_idx]
    for states in (layer.conv_states, layer.recurrent_states):
        for number in [number for number, state in states.items() if state is not None]:
            state = states[number]
            random = torch.randn(state.shape, generator=generator).to(state)
            layer.recurrent_states.write(number, random) if states is layer.recurrent_states else state.copy_(random)
    return cache


def _kept(layer: StateLayer) -> list[Tensor]:
    """All states of a layer that exist, unpacked."""
    kept = [*layer.conv_states.values(), *map(layer.recurrent_states.__getitem__, layer.recurrent_states)]
    return [state for state in kept if state is not None]


def _close(found: Any, expected: Any) -> bool:
    if isinstance(found, tuple):
        return all(map(_close, found, expected))
    return bool((found - expected).float().norm() <= _TOLERANCE * expected.float().norm())
