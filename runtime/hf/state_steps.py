"""What functions of modules with states are replaced by: those of one token per sequence, with states unpacked or with
kernels, and scans of state-space layers over sequences side by side, with flash-linear-attention's kernels.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from kvconvert.errors import CacheError
from kvconvert.kernels.convolution import convolve_step
from kvconvert.kernels.states import SelectiveToken, gated_delta_step, is_packed, selective_step, unpack
from kvconvert.runtime.hf.layer import StateLayer

ACTIVATIONS = (None, "silu", "swish")
# transformers' functions of one token: the convolution, the gated delta rule and Kimi Delta Attention, Mamba 2.
_CONVOLUTION_STEP, _MAMBA = "causal_conv1d_update", "mamba2_selective_state_update"
_DELTA_RULES = "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"
RULES = {*_DELTA_RULES, _MAMBA}


class StoredStates:
    """A cache, while one of its layers' modules runs: it unpacks states for the module and stores them after it.

    Some modules say which states follow, and others write into those that they were given.

    Args:
        cache: the cache of all layers.
        layer: the module's layer in it.
        packed: whether the module is given states as they are stored, for a kernel that changes them there.
    """

    def __init__(self, cache: Cache, layer: StateLayer, packed: bool):
        self._cache, self._layer, self._packed = cache, layer, packed
        self._unpacked: dict[int, Tensor] = {}
        self._changed: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """States [B, ...] to begin from."""
        stored = self._layer.recurrent_states.get(state_idx)
        if not is_packed(stored) or not self._layer.has_previous_state[state_idx]:
            return self._cache.get_recurrent_state(layer_idx, state_idx)
        if self._packed:
            self._changed.add(state_idx)
            return stored
        return self._unpacked.setdefault(state_idx, unpack(stored))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store the states [B, ...] after these tokens, unless a kernel has changed them where they are."""
        if state_idx in self._changed:
            return recurrent_states
        self._unpacked.pop(state_idx, None)
        return self._cache.update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def store(self) -> None:
        """Store what the module may have changed and did not say."""
        for number, states in self._unpacked.items():
            self._layer.recurrent_states.write(number, states)


@lru_cache(maxsize=256)
def with_kernels(kind: type) -> Callable:
    """The forward of a class of modules with this project's kernels in the place of transformers' functions."""
    own = inspect.unwrap(kind.forward)
    wrappers = {_CONVOLUTION_STEP: _convolution_step, _MAMBA: _selective_rule} | dict.fromkeys(
        _DELTA_RULES, _delta_rule
    )
    functions = {name: wrap(own.__globals__[name]) for name, wrap in wrappers.items() if name in own.__code__.co_names}
    return replaced(own, functions)


def replaced(own: types.FunctionType, functions: dict[str, Callable]) -> Callable:
    """A function that calls others in the place of some of its globals."""
    made = types.FunctionType(
        own.__code__, {**own.__globals__, **functions}, own.__name__, own.__defaults__, own.__closure__
    )
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def _convolution_step(function: Callable) -> Callable:
    """transformers' convolution of one token [B, C, 1], which changes its state."""

    def step(
        x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Any:
        if activation not in ACTIVATIONS or x.shape[2] != 1 or not state.is_contiguous():
            return function(x, state, weight, bias, activation)
        return convolve_step(x[..., 0], weight, bias, state, activation is not None)[..., None]

    return step


def _delta_rule(function: Callable) -> Callable:
    """transformers' delta rule for one token, where it begins from packed states."""

    def step(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if not is_packed(initial_state):
            return function(query, key, value, g=g, beta=beta, initial_state=initial_state, **kwargs)
        if not kwargs.get("use_qk_l2norm_in_kernel"):
            raise CacheError("Keys that are not normalized are not read with packed states.")
        return gated_delta_step(query, key, value, g, beta, initial_state), initial_state

    return step


def _selective_rule(function: Callable) -> Callable:
    """transformers' update of Mamba 2 for one token, where it begins from packed states, which it changes.

    It takes what belongs to a head once for each of its numbers.
    """

    def step(
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not is_packed(state):
            return function(state, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **kwargs)
        per_head = [value for value in (dt, D, dt_bias) if value is not None]
        if not dt_softplus or any(value.stride(-1) for value in per_head) or any(A.stride()[1:]):
            raise CacheError("An update whose steps differ between the channels of a head does not take packed states.")
        d, bias = (None if value is None else value[..., 0] for value in (D, dt_bias))
        return selective_step(SelectiveToken(x, dt[..., 0], A[:, 0, 0], B, C, d, bias, z), state)

    return step


# transformers' scan of Mamba 2.
MAMBA_SCAN = "mamba2_chunk_scan"


@lru_cache(maxsize=1)
def has_kernels() -> bool:
    """Whether flash-linear-attention is installed."""
    return find_spec("fla") is not None


def mamba2_scan(ends: Tensor, scan: Callable | None = None) -> Callable:
    """transformers' scan of Mamba 2, of sequences side by side that end at `ends`, int32 [S + 1].

    It is linear attention with a decay for each head (arXiv 2405.21060, eq. 2): C is the query, B the key, and dt x the
    value.

    Args:
        ends: see above.
        scan: flash-linear-attention's function of such attention; None to import it.
    """
    if scan is None:
        from fla.ops.simple_gla import chunk_simple_gla as scan

    def scanned(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        heads = x.shape[2]
        step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        step = (functional.softplus(step) if dt_softplus else step).clamp(*dt_limit)
        key, query = (part.repeat_interleave(heads // part.shape[2], 2) for part in (B, C))
        value = (x * step[..., None]).to(x.dtype)
        output, states = scan(
            query, key, value, g=step * A.float(), scale=1.0, initial_state=initial_states, output_final_state=True,
            state_v_first=True, cu_seqlens=ends,
        )  # fmt: skip
        return (output if D is None else output + D[:, None] * x).to(x.dtype), states

    return scanned


def takes_kernels(function: Callable, device: torch.device) -> bool:
    """Whether `mamba2_scan` stands in for a function on a device."""
    return function.__name__ == MAMBA_SCAN and device.type == "cuda" and has_kernels()
