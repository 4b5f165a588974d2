"""Triton's interpreter without work that its results do not depend on, most of what it spends on small kernels."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Interpret launches in about half the time.

    - triton.language stays patched between launches, and what replaces one of its functions is made once.
    - Two blocks of one shape are not compared to be given one shape.
    - Sums and products of integers are not computed a second time in 64 bits: the interpreter compares them with what
      32 bits hold and, without its debug option, does nothing with the answer.
    - The table of NumPy's types is made once.
    - Shapes are checked and wrapped once, not for every tensor and every type of a block.

    Another version of Triton may have none of these places; it is left as it is.
    """
    import triton.language as tl
    from triton._utils import validate_block_shape
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope") or interpreter.interpreter_builder.options.debug:
        yield
        return
    patch_lang, numpy_type = interpreter._patch_lang, functools.cache(interpreter._get_np_dtype)
    semantic, broadcast = interpreter.interpreter_semantic, interpreter.TritonSemantic.broadcast_impl_value
    patched: dict[object, interpreter._LangPatchScope] = {}

    @functools.cache
    def interpreted(member: Callable[..., object]) -> Callable[..., object]:
        function = inspect.unwrap(member)

        def call(*args: object, **kwargs: object) -> object:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    @functools.cache
    def builtins_of(package: object) -> list[tuple[str, Callable[..., object]]]:
        members = inspect.getmembers(package)
        return [(name, interpreted(member)) for name, member in members if tl.core.is_builtin(member)]

    def patch_builtins(package: object, builder: object, scope: interpreter._LangPatchScope) -> None:
        for name, call in builtins_of(package):
            scope.set_attr(package, name, call)

    def patch_once(function: object) -> interpreter._LangPatchScope:
        if function not in patched:
            patched[function] = patch_lang(function)
        return interpreter._LangPatchScope()

    def broadcast_others(self: object, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        left, right = (side.type.shape if side.type.is_block() else None for side in (lhs, rhs))
        return (lhs, rhs) if left is right else broadcast(self, lhs, rhs)

    def numpy_type_of(kind: tl.dtype) -> object:
        return numpy_type(tl.uint64 if kind.scalar.is_ptr() else kind.scalar)

    @functools.cache
    def checked_shape(sizes: tuple[int, ...]) -> tuple[object, int]:
        return tl.core.tuple(sizes), validate_block_shape(sizes)

    @functools.cache
    def wrapped_shape(sizes: tuple[int, ...]) -> tuple[object, object]:
        return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def new_block_type(self: tl.block_type, element_ty: tl.dtype, shape: object) -> None:
        self.element_ty = element_ty
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.shape, self.numel = checked_shape(sizes)

    def new_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped_shape(tuple(type.shape.values) if type.is_block() else ())

    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins_of(package)
    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_patch_builtin", patch_builtins)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type_of)
        patch.setattr(interpreter.TritonSemantic, "broadcast_impl_value", broadcast_others)
        patch.setattr(tl.block_type, "__init__", new_block_type)
        patch.setattr(tl.block_type, "name", property(lambda self: f"<{self.shape}, {self.element_ty}>"), raising=False)
        patch.setattr(tl.tensor, "__init__", new_tensor)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
        for scope in reversed(patched.values()):
            scope.restore()
