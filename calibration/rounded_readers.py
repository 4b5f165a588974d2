"""Modules with the parameters of a candidate: for as long as a search needs them, or each while it computes.

Where each has them only while it computes, a second copy of all weights is never there, and an expert that no token is
routed to is not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from kvconvert.kernels.linear.awq_format import fake_quantize_weight


class Reader(NamedTuple):
    """A Linear that reads what is scaled.

    Attributes:
        linear: in float32.
        bits: of its weight.
        routed: it belongs to an expert.
    """

    linear: nn.Module
    bits: int
    routed: bool


@contextmanager
def rounded(readers: Sequence[Reader], scale: Tensor, group_size: int) -> Iterator[None]:
    """Within the block the Linears compute with Q(W s) / s, where Q rounds to nearest.

    Args:
        readers: which.
        scale: s, [in].
        group_size: of Q.

    Raises:
        GroupRangeError: a scaled weight leaves the range of fp16; on entry, or where an expert computes.
    """
    with ExitStack() as stack:
        for reader in readers:
            if reader.routed:
                while_computing(stack, reader.linear, partial(_weight, reader, scale, group_size))
            else:
                stack.callback(setattr, reader.linear.weight, "data", reader.linear.weight.data)
                reader.linear.weight.data = _weight(reader, scale, group_size)["weight"]
        yield


def while_computing(stack: ExitStack, module: nn.Module, make: Callable[[], Mapping[str, Tensor]]) -> None:
    """Let a module compute with other parameters, made whenever it is called, until the stack is closed.

    Args:
        stack: gives the module its own parameters back.
        module: with parameters of these names.
        make: the others.
    """
    own = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        for name, value in make().items():
            getattr(module, name).data = value

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for name, value in own.items():
            getattr(module, name).data = value

    stack.callback(after, module, (), None)
    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _weight(reader: Reader, scale: Tensor, group_size: int) -> dict[str, Tensor]:
    return {"weight": fake_quantize_weight(reader.linear.weight.data * scale, reader.bits, group_size).div_(scale)}
