"""AWQ's scales and clips as data, and what they make of a layer's modules; `awq_scales` finds the scales.

A search rounds a `Reader` for as long as it needs it, or each only while it computes. In the latter case a second copy
of all weights is never there, and an expert that no token is routed to is not rounded.

Clips are found here: each group of weights is clamped where rounding loses least. Each group of each output channel of
every Linear but the query and key projections is clamped to +- max |w| (1 - i/20), i = 0..9, taking the i with the
least squared error of that group's share of the output. The error needs no activations, only the group's second moment
E[x x^T], so all calibration tokens count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvconvert.calibration.activations import ActivationStatistics, point_of
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.methods.awq import KEPT_BITS
from kvconvert.models.structure import LayerStructure, Projection


class ScaledReader(NamedTuple):
    """A Linear that reads what is scaled.

    Attributes:
        linear: in float32.
        bits: the number of bits of its weight.
        routed: it belongs to an expert.
    """

    linear: nn.Module
    bits: int
    routed: bool


@contextmanager
def rounded(readers: Sequence[ScaledReader], scale: Tensor, group_size: int) -> Iterator[None]:
    """Within the block the Linears compute with Q(W s) / s, where Q rounds to nearest.

    Args:
        readers: which.
        scale: s, [in].
        group_size: the group size of Q.

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


def _weight(reader: ScaledReader, scale: Tensor, group_size: int) -> dict[str, Tensor]:
    return {"weight": fake_quantize_weight(reader.linear.weight.data * scale, reader.bits, group_size).div_(scale)}


@dataclass(frozen=True)
class Scaling:
    """One chosen scale: the producer's output channels are divided, the readers' input channels multiplied.

    Attributes:
        producer: a norm, or a projection; readers: Linears.
        producer_scale: float32 [producer's outputs]; reader_scale: float32 [readers' inputs].
        ratio: the exponent r.
        loss_before, loss_after: mean squared error of the inspected output at r = 0 and at `ratio`; with compensation
            the number of readers, and the sum of what is left of each one's error.
    """

    producer: str | Projection
    readers: tuple[str, ...]
    producer_scale: Tensor
    reader_scale: Tensor
    ratio: float
    loss_before: float
    loss_after: float

    @property
    def label(self) -> str:
        """Producer and readers, readable."""
        return scaling_label(self.producer, self.readers)


def scaling_label(producer: str | Projection | None, readers: tuple[str, ...]) -> str:
    """Producer and readers of a scale, readable."""
    name = producer.linear if isinstance(producer, Projection) else producer or "(no norm)"
    return f"{name} -> {', '.join(readers)}"


def reader_scales(scalings: Sequence[Scaling]) -> dict[str, Tensor]:
    """Scales of each reader's input channels."""
    return {reader: scaling.reader_scale for scaling in scalings for reader in scaling.readers}


@torch.no_grad()
def scaled_parameters(
    layer: nn.Module, structure: LayerStructure, name: str, scalings: Sequence[Scaling], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Weight and bias of a module of the layer as scales make them; its own tensors where no scale concerns it.

    Weights of norms become exact in `dtype`; their biases are rounded to it.
    """
    module = layer.get_submodule(name)
    found = {kind: getattr(module, kind).data for kind in ("weight", "bias") if getattr(module, kind, None) is not None}
    for scaling in scalings:
        if scaling.producer == name:
            offset = float(next(group.unit_offset for group in structure.norm_groups if group.norm == name))
            weight, scale = found["weight"], scaling.producer_scale
            rescaled = ((weight + offset) / scale - offset).to(dtype)
            # Where the scale is 1 the weight stays as it is, even if it was finer than `dtype`.
            found["weight"] = torch.where(scale == 1, weight, rescaled.float())
            if "bias" in found:
                found["bias"] = (found["bias"] / scale).to(dtype).float()
        elif isinstance(scaling.producer, Projection) and scaling.producer.linear == name:
            found = {kind: _divided(tensor, scaling.producer, scaling.producer_scale) for kind, tensor in found.items()}
        if name in scaling.readers:
            found["weight"] = found["weight"] * scaling.reader_scale
    return found


def _divided(tensor: Tensor, part: Projection, scale: Tensor) -> Tensor:
    """A weight or bias with a projection's outputs divided by a scale."""
    divided = part.rows(tensor) / scale.view(-1, *[1] * (tensor.dim() - 1))
    if part.is_whole:
        return divided
    tensor = tensor.clone()
    part.write(tensor, divided)
    return tensor


def scaled_modules(scalings: Sequence[Scaling]) -> tuple[str, ...]:
    """Every module whose parameters the scales change."""
    producers = [s.producer.linear if isinstance(s.producer, Projection) else s.producer for s in scalings]
    return tuple(dict.fromkeys([*producers, *(reader for s in scalings for reader in s.readers)]))


@torch.no_grad()
def apply_scales(layer: nn.Module, structure: LayerStructure, scalings: Sequence[Scaling], dtype: torch.dtype) -> None:
    """Scale the layer's parameters in place; its function stays the same up to float32 rounding.

    Norm weights become exact in `dtype`; norm biases are rounded to it.
    """
    for name in scaled_modules(scalings):
        module = layer.get_submodule(name)
        for kind, value in scaled_parameters(layer, structure, name, scalings, dtype).items():
            getattr(module, kind).copy_(value)


CLIP_STEPS = 10
# Bits of all Linears' weights, or of each one's by name.
Widths = int | Mapping[str, int]
_CHUNK_WEIGHTS = 2**22  # bounds the search's memory


def width_of(bits: Widths, name: str) -> int:
    """Bits of one Linear's weights."""
    return bits if isinstance(bits, int) else bits[name]


@torch.no_grad()
def search_clips(
    layer: nn.Module,
    structure: LayerStructure,
    statistics: ActivationStatistics,
    scalings: Sequence[Scaling],
    bits: Widths,
    group_size: int,
    ranks: Ranks = ALONE,
) -> dict[str, tuple[Tensor, float, float]]:
    """Search how far to clamp each group of each Linear but query and key. The layer is unchanged afterwards.

    Args:
        statistics: the statistics of the activations. Linears whose input has no second moment are not clipped.
        scalings: by which the layer is going to be scaled.
        bits: the width of the weights, one for all Linears or one for each by name.
        ranks: each searches some of the Linears.

    Returns:
        by Linear: the bound [out, in / group_size] for |w|, and the mean squared error of the output, summed over
        groups as if they were independent, without and with it. Where query or key are part of a fused Linear, their
        rows keep their largest weight and do not count.
    """

    scales = reader_scales(scalings)

    def search(name: str) -> tuple[Tensor, float, float] | None:
        part, point, width = _clipped_part(structure, name), point_of(structure, name), width_of(bits, name)
        moment = statistics.second_moment.get(point)
        if part is None or moment is None or width == KEPT_BITS:
            return None
        scale = scales.get(name)
        if scale is not None:
            scale = scale.unflatten(0, (-1, group_size))
            moment = moment / (scale.unsqueeze(2) * scale.unsqueeze(1))
        weight = scaled_parameters(layer, structure, name, scalings, torch.float32)["weight"]
        bound, before, after = _search_clip(part.rows(weight), moment, width, group_size)
        if not part.is_whole:
            everything = weight.unflatten(-1, (-1, group_size)).abs().amax(-1)
            part.write(everything, bound)
            bound = everything
        return bound, before, after

    clips = zip(structure.linears, ranks.share(search, structure.linears), strict=True)
    return {name: clip for name, clip in clips if clip is not None}


@torch.no_grad()
def apply_clips(layer: nn.Module, clips: dict[str, tuple[Tensor, float, float]], group_size: int) -> None:
    """Clamp the layer's weights to the bounds that `search_clips` found, in place."""
    for name, (bound, _, _) in clips.items():
        groups = layer.get_submodule(name).weight.unflatten(-1, (-1, group_size))
        groups.copy_(groups.clamp(min=-bound.unsqueeze(-1), max=bound.unsqueeze(-1)))


def _clipped_part(structure: LayerStructure, name: str) -> Projection | None:
    """The part of a Linear to clip: all of it, all but its query and key, or none."""
    inside = [part for part in (structure.query, structure.key) if part is not None and part.linear == name]
    if not inside:
        return Projection(name)
    value = structure.value
    return value if value is not None and value.linear == name and not value.is_whole else None


def _search_clip(weight: Tensor, moment: Tensor, bits: int, group_size: int) -> tuple[Tensor, float, float]:
    bounds, before, after = [], 0.0, 0.0
    for rows in weight.split(max(1, _CHUNK_WEIGHTS // weight.shape[1])):
        largest = rows.unflatten(-1, (-1, group_size)).abs().amax(-1)
        best_error, best_bound = None, largest
        for step in range(CLIP_STEPS):
            bound = largest * (1 - step / (2 * CLIP_STEPS))
            delta = fake_quantize_weight(rows, bits, group_size, bound) - rows
            delta = delta.unflatten(-1, (-1, group_size))  # [rows, groups, group_size]
            by_group = delta.transpose(0, 1)
            error = ((by_group @ moment) * by_group).sum(-1).T
            if best_error is None:
                best_error = error
                before += float(error.double().sum())
            else:
                better = error < best_error
                best_error = torch.where(better, error, best_error)
                best_bound = torch.where(better, bound, best_bound)
        bounds.append(best_bound)
        after += float(best_error.double().sum())
    return torch.cat(bounds), before / weight.shape[0], after / weight.shape[0]
