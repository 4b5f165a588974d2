"""Triton functions whose launches can be recorded, and the compilation of what was recorded."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.runtime.jit import JITCallable
from triton.tools.tensor_descriptor import TensorDescriptor

from kvconvert.kernels.launches.notes import Launch, Pointer, notes

# What stands for an integer, by whether it is divisible by 16, and whether it takes more than 32 bits.
INTEGERS = {(True, False): 16, (False, False): 3, (True, True): 1 << 40, (False, True): (1 << 40) + 1}


class Kernel:
    """A function that is launched as `kernel[grid](...)`; made by `kernel`.

    Attributes:
        function: what `triton.jit` made.
        arg_names: the names of its arguments, constants included.
    """

    def __init__(self, function: Any, unspecialized: Sequence[str]):
        self.function, self.arg_names = function, list(function.arg_names)
        self._unspecialized = frozenset(unspecialized)
        parameters = inspect.signature(function.fn).parameters
        self._constants = frozenset(name for name, p in parameters.items() if "constexpr" in str(p.annotation))
        self._has_key = not isinstance(function, JITCallable)

    @property
    def key(self) -> str:
        """What Triton's cache knows the source by."""
        key, self._has_key = _source_key(self.function), True
        # Triton compares globals with what they were before every launch; those of kernels are constants.
        self.function.used_global_vals = {}
        return key

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        if not self._has_key:
            _ = self.key
        launch = self.function[grid]
        return launch if notes() is None else functools.partial(self._note, launch)

    def _note(self, launch: Callable[..., Any], *positional: Any, **keywords: Any) -> None:
        here, fn = notes(), self.function.fn
        assert here is not None
        given = dict(zip(self.arg_names, positional, strict=False)) | keywords
        arguments = tuple((name, self._described(name, given.pop(name))) for name in self.arg_names)
        # In their order: Triton knows a kernel that it has loaded by it.
        here.launches[Launch(fn.__module__, fn.__name__, arguments, tuple(given.items()))] = None
        if here.makes:
            launch(*positional, **keywords)

    def _described(self, name: str, value: Any) -> Any:
        """An argument without what makes no difference to the compiled kernel."""
        specialized = name not in self._unspecialized
        if name in self._constants or value is None or isinstance(value, bool):
            return value
        if isinstance(value, TensorDescriptor):
            return Pointer(value.base.dtype, True, tuple(value.block_shape))
        if isinstance(value, torch.Tensor):
            return Pointer(value.dtype, not specialized or value.data_ptr() % 16 == 0)
        if isinstance(value, float):
            return 0.5
        if value == 1 and specialized:
            return 1
        return INTEGERS[specialized and value % 16 == 0, not -(2**31) <= value < 2**31]


def kernel(function: Callable | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """`triton.jit` for a function that is launched, not called by others, so that its launches can be recorded."""
    if function is None:
        return functools.partial(kernel, do_not_specialize=do_not_specialize)
    return Kernel(triton.jit(function, do_not_specialize=list(do_not_specialize)), do_not_specialize)


def _source_key(function: JITCallable) -> str:
    """Triton's hash of a function and all that it calls.

    Triton 3.6 takes a callee's global constants as they are known before it hashes the callee, so that the
    result depends on what was hashed before, and its cache misses in a process that launches kernels in another order.
    Hence callees come first.
    """
    if function.hash is None:
        for name in function.fn.__code__.co_names:
            called = function.fn.__globals__.get(name)
            # A name may be that of an attribute, too, and then the function's own.
            if isinstance(called, JITCallable) and called is not function:
                _source_key(called)
    return function.cache_key


def kernel_of(launch: Launch) -> Kernel:
    """The kernel that a launch is of."""
    return getattr(importlib.import_module(launch.module), launch.name)


def compiled(launch: Launch) -> Any:
    """Triton's compiled kernel for the active driver's GPU, from Triton's cache or new; nothing is launched."""
    arguments = [_stand_in(value) for _, value in launch.arguments]
    kernel = kernel_of(launch)
    _ = kernel.key
    return kernel.function.run(*arguments, grid=(1,), warmup=True, **dict(launch.options))


def _stand_in(value: Any) -> Any:
    """An argument that is specialized on like the one recorded; a tensor without memory."""
    if not isinstance(value, Pointer):
        return value
    if value.block is None:
        return torch.empty(2, dtype=value.dtype, device="meta")[0 if value.aligned else 1 :]
    base = torch.empty(value.block, dtype=value.dtype, device="meta")
    return TensorDescriptor(base, list(base.shape), list(base.stride()), list(value.block))
