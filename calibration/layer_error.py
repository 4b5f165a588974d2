"""The error that quantized weights cause in a whole decoder layer's output, on some of the calibration sequences.

Searches for weights look at parts of a layer: scales at the modules that read a norm, clips at groups of weights. What
all of it together, rounded as it will be stored, makes of the layer's output is measured here, as the next layer reads
it. That is through a norm N, for which the layer's own first one stands (its weights undone by no scale):

    sum over tokens t of || N(y_t) - N(y*_t) ||^2 / sum over tokens t of || N(y*_t) ||^2      (y* without any rounding)

Without the norm it would be the error of the attention sink, whose output is up to 1,000 times as large as that of
other tokens, or of a few large channels that norms make small again: benchmarks/WEIGHTS.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvconvert.calibration.activations import same_argument_chunks
from kvconvert.calibration.awq_scaling import (
    Scaling,
    Widths,
    scaled_modules,
    scaled_parameters,
    while_computing,
    width_of,
)
from kvconvert.calibration.protocol import LayerWork
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.models.structure import LayerStructure

SAMPLE_TOKENS = 1024
_CHUNK_WEIGHTS = 2**22  # rounded at once


@dataclass(frozen=True)
class LayerSample:
    """Whole sequences that went through a layer.

    Attributes:
        inputs: float32 [n, T, hidden]; outputs: the same, N of the unquantized layer's.
        arguments: the layer's others, for each sequence, as a batch of one.
        norm: N.
    """

    inputs: Tensor
    outputs: Tensor
    arguments: Sequence[dict[str, Any]]
    norm: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def error(self, layer: nn.Module) -> float:
        """The error, as above, of the layer's output with the parameters that it has now."""
        errors = []
        for some in same_argument_chunks(self.arguments, len(self.inputs)):
            output = self.norm(_tensor(layer(self.inputs[some], **self.arguments[some.start])))
            errors.append((output - self.outputs[some]).square_().sum(dtype=torch.float64))
        return float(torch.stack(errors).sum() / self.outputs.square().sum(dtype=torch.float64))


class LayerSampler:
    """Takes a `LayerSample` of at most `SAMPLE_TOKENS` tokens, or one sequence, while calibration data runs.

    The sequences are evenly spaced, and lie between those on which `ActivationRecorder` compares scales of attention.

    Args:
        work: the layer.
    """

    def __init__(self, work: LayerWork) -> None:
        count = min(work.num_samples, max(1, SAMPLE_TOKENS // work.seq_len))
        self._wanted = {(4 * i + 1) * work.num_samples // (4 * count) for i in range(count)}
        self._seen, self._ranks, self._norm = work.first_sample, work.ranks, _first_norm(work)
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._arguments: list[dict[str, Any]] = []

    @contextmanager
    def attached(self, layer: nn.Module) -> Iterator[None]:
        """A hook on the layer, removed on exit; then every rank has the sample of all."""
        with ExitStack() as hooks:
            hooks.callback(layer.register_forward_hook(self._hook, with_kwargs=True).remove)
            yield
        self._inputs, self._outputs = (self._ranks.gather_list(tensors) for tensors in (self._inputs, self._outputs))
        self._arguments = self._ranks.gather_list(self._arguments)

    def _hook(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        keep = [i for i in range(hidden.shape[0]) if self._seen + i in self._wanted]
        self._seen += hidden.shape[0]
        self._inputs.append(hidden[keep].detach().float())
        self._outputs.append(self._norm(_tensor(output)[keep].detach().float()))
        self._arguments += [kwargs] * len(keep)

    def result(self) -> LayerSample:
        """The sample."""
        return LayerSample(torch.cat(self._inputs), torch.cat(self._outputs), self._arguments, self._norm)


def _first_norm(work: LayerWork) -> Callable[[Tensor], Tensor]:
    """A copy of the norm that the layer's input goes through, or one without weights where there is none."""
    for group in work.structure.norm_groups:
        if group.norm is not None and work.structure.attention in group.inspected:
            return copy.deepcopy(work.layer.get_submodule(group.norm))
    return lambda hidden: nn.functional.rms_norm(hidden, hidden.shape[-1:])


@contextmanager
def quantized(
    layer: nn.Module,
    structure: LayerStructure,
    scalings: Sequence[Scaling],
    clips: Mapping[str, Tensor],
    bits: Widths,
    group_size: int,
    dtype: torch.dtype,
) -> Iterator[None]:
    """Within the block a layer computes with the parameters that would be stored; it keeps its own.

    Args:
        layer: decoder layer in float32.
        structure: its names.
        scalings: by which it is scaled first.
        clips: bounds to which scaled weights are clamped then, by Linear.
        bits, group_size: to which they are rounded in the end.
        dtype: in which everything else is stored.

    Raises:
        GroupRangeError: weights leave the range of fp16; where a Linear computes.
    """

    def stored(name: str) -> dict[str, Tensor]:
        found = scaled_parameters(layer, structure, name, scalings, dtype)
        quantized = {}
        if name in structure.linears:
            weight = found.pop("weight")
            quantized["weight"] = _rounded(weight, clips.get(name), width_of(bits, name), group_size)
        return quantized | {kind: tensor.to(dtype).float() for kind, tensor in found.items()}

    with ExitStack() as stack:
        for name in dict.fromkeys((*structure.linears, *scaled_modules(scalings))):
            while_computing(stack, layer.get_submodule(name), lambda name=name: stored(name))
        yield


def _rounded(weight: Tensor, clip: Tensor | None, bits: int, group_size: int) -> Tensor:
    """`fake_quantize_weight`, some rows at a time."""
    found, size = torch.empty_like(weight), max(1, _CHUNK_WEIGHTS // weight.shape[1])
    for start in range(0, len(weight), size):
        rows = slice(start, start + size)
        found[rows] = fake_quantize_weight(weight[rows], bits, group_size, None if clip is None else clip[rows])
    return found


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
