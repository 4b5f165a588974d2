"""Linears with the weights of a candidate scale: all at once, or those of experts each while it computes.

The experts of a layer are most of its weights. With their hooks a second copy of them all is never there, and an expert
that no token is routed to is not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
                _round_while_computing(stack, reader, scale, group_size)
            else:
                stack.callback(setattr, reader.linear.weight, "data", reader.linear.weight.data)
                reader.linear.weight.data = _candidate(reader, scale, group_size)
        yield


def _round_while_computing(stack: ExitStack, reader: Reader, scale: Tensor, group_size: int) -> None:
    weight, original = reader.linear.weight, reader.linear.weight.data

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        weight.data = _candidate(reader, scale, group_size)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        weight.data = original

    stack.callback(after, reader.linear, (), None)
    stack.callback(reader.linear.register_forward_pre_hook(before).remove)
    stack.callback(reader.linear.register_forward_hook(after).remove)


def _candidate(reader: Reader, scale: Tensor, group_size: int) -> Tensor:
    return fake_quantize_weight(reader.linear.weight.data * scale, reader.bits, group_size).div_(scale)
