"""Taking fused experts apart, so that calibration and export treat each expert's projections as ordinary Linears.

Of a decoder layer with transformers' fused experts, `separate_experts` makes one with the same function and a Linear
per projection and expert. Checkpoints store either form, whatever the library in use makes of it: `split_fused`
brings the fused one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kvconvert.errors import CheckpointError
from kvconvert.runtime.hf.experts import ExpertRoles, FusedLayout, SeparateExperts, is_fused


def separate_experts(layer: nn.Module, roles: ExpertRoles) -> nn.Module:
    """Replace a layer's fused experts by Linears, in place; their weights are taken over.

    Args:
        layer: a decoder layer, on any device; without fused experts it stays as it is.
        roles: names of each expert's Linears, as the bundle will have them.

    Returns:
        `layer`.

    Raises:
        UnsupportedModelError: experts of a kind that cannot be taken apart.
    """
    for name, fused in [(name, module) for name, module in layer.named_modules() if is_fused(module)]:
        with torch.device("meta"):
            separate = SeparateExperts(fused, roles, lambda i, o, bias: nn.Linear(i, o, bias))
        weights = {f"{name}.{kind}": parameter for kind, parameter in fused.named_parameters(recurse=False)}
        layer.set_submodule(name, separate)
        split = split_fused(layer, weights, type(layer).__name__)
        separate.load_state_dict({key.removeprefix(f"{name}."): value for key, value in split.items()}, assign=True)
        separate.train(fused.training)
    return layer


def expert_modules(layer: nn.Module) -> tuple[str, ...]:
    """Name prefixes of a layer's experts that were taken apart ("mlp.experts.")."""
    return tuple(f"{name}." for name, module in layer.named_modules() if isinstance(module, SeparateExperts))


def split_fused(layer: nn.Module, tensors: Mapping[str, Tensor], layer_name: str) -> dict[str, Tensor]:
    """Tensors of a layer with those of fused experts cut into one per expert and projection (views).

    Args:
        layer: with separate experts.
        tensors: by name within the layer; experts fused as in transformers, or apart already.
        layer_name: for messages.

    Raises:
        CheckpointError: a fused tensor whose shape does not fit the layer's experts.
    """
    result = dict(tensors)
    for name, module in layer.named_modules():
        if isinstance(module, SeparateExperts):
            for kind, shape in _fused_shapes(module.layout).items():
                tensor = result.pop(f"{name}.{kind}", None)
                if tensor is None:
                    continue
                if tensor.ndim == 3 and tuple(tensor.transpose(1, 2).shape) == shape != tuple(tensor.shape):
                    tensor = tensor.transpose(1, 2)  # as Qwen3-VL's published mixtures have them
                if tuple(tensor.shape) != shape:
                    raise CheckpointError(
                        f"{layer_name}.{name}.{kind} has shape {list(tensor.shape)} where config.json asks for "
                        f"{list(shape)}."
                    )
                result |= {f"{name}.{part}": value for part, value in _split(module, kind, tensor).items()}
    return result


def _fused_shapes(layout: FusedLayout) -> dict[str, tuple[int, ...]]:
    experts, hidden, intermediate = layout.num_experts, layout.hidden, layout.intermediate
    up, down = (2 * intermediate, hidden), (hidden, intermediate)
    shapes = {"gate_up_proj": (experts, *up), "down_proj": (experts, *down)}
    if layout.transposed:
        shapes = {"gate_up_proj": (experts, *up[::-1]), "down_proj": (experts, *down[::-1])}
    if layout.bias:
        shapes |= {"gate_up_proj_bias": (experts, up[0]), "down_proj_bias": (experts, down[0])}
    return shapes


def _split(module: SeparateExperts, kind: str, tensor: Tensor) -> dict[str, Tensor]:
    """A fused tensor's parts, by name within the module of experts."""
    layout, roles = module.layout, module.roles
    part = "bias" if kind.endswith("_bias") else "weight"
    if part == "weight" and layout.transposed:
        tensor = tensor.transpose(1, 2)
    if kind.startswith("down_proj"):
        cut = {roles.down: tensor}
    elif layout.interleaved:
        cut = {roles.gate: tensor[:, ::2], roles.up: tensor[:, 1::2]}
    else:
        cut = dict(zip((roles.gate, roles.up), tensor.chunk(2, dim=1), strict=True))
    return {f"{expert}.{role}.{part}": values[expert] for role, values in cut.items() for expert in range(len(values))}
