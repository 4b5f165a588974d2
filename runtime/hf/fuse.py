"""Fewer and larger launches for a model on a GPU: `fuse` rearranges what a loaded model consists of, and no class.

Linears are found by the names that modules declare; norms, gated MLPs and rotary positions by what they compute
(kvconvert.runtime.hf.fused_modules).

`fuse_residuals` makes the residual additions of decoder layers part of the norm that follows, this layer's or the next
one's, in layers of the usual form: h + attention(norm(h)), then h + mlp(norm(h)). Whether a layer has it is found by
running its own forward, with a stand-in for attention, beside the replaced one.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvconvert.kernels.elementwise import add_rms_norm, unsupported
from kvconvert.kernels.linear import share_input
from kvconvert.models import CACHE
from kvconvert.runtime.hf.fused_modules import (
    fuse_gated_mlp,
    fuse_gated_norm,
    fuse_norm,
    fuse_rotary,
    norm_ahead,
    norm_kind,
    packed_linears,
)

# Names of Linears beside each other that read one input: attention, a gated MLP, latent attention.
SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)


def fuse(model: nn.Module) -> dict[str, int]:
    """Fuse what a model's decode steps compute between the kernels of attention, in place and for good.

    Worth it on a GPU only, once the weights are there; equal to the model as it was up to rounding, on any device.
    Decode steps should run under `torch.no_grad`: in inference mode Linears do not share products, see `SharedInput`.

    Args:
        model: loaded, in evaluation mode.

    Returns:
        how many places of each kind were fused, such as `{"q_proj+k_proj+v_proj": 32, "norms": 65}`; nothing the second
        time.
    """
    fused = share_inputs(model)
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
    with torch.no_grad():
        for module in [] if dtype is None else list(model.modules()):
            fused["norms"] += fuse_norm(module, dtype)
            fused["gated norms"] += fuse_gated_norm(module, dtype)
            fused["gated MLPs"] += fuse_gated_mlp(module, dtype)
            fused["rotary positions"] += fuse_rotary(module)
        for module in [] if dtype is None else list(model.modules()):
            if isinstance(layers := getattr(module, "layers", None), nn.ModuleList) and len(layers):
                fused["residuals"] += fuse_residuals(list(layers), getattr(module, "norm", None), dtype)
    return {place: count for place, count in fused.items() if count}


class FusedOnGPUs:
    """Mixed into the class of a bundle's model, which is fused as soon as it is on a GPU."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        moved = super()._apply(*args, **kwargs)
        if self.device.type == "cuda":
            fuse(self)
        return moved


def fuse_on_gpus(model: nn.Module) -> None:
    """Fuse a loaded model if it is on a GPU, or else when it gets there (`to`, `cuda`)."""
    base = type(model)
    model.__class__ = type(base.__name__, (FusedOnGPUs, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    if model.device.type == "cuda":
        fuse(model)


def share_inputs(model: nn.Module) -> Counter[str]:
    """Give quantized Linears that read the same tensor one product; see `kvconvert.kernels.linear.share_input`."""
    fused: Counter[str] = Counter()
    packed = {id(linear) for linear in packed_linears(model)}
    for module in model.modules():
        for names in SHARED_INPUTS:
            linears = {name: getattr(module, name, None) for name in names}
            linears = {name: linear for name, linear in linears.items() if id(linear) in packed}
            if len(linears) > 1 and share_input(list(linears.values())) is None:
                fused["+".join(linears)] += 1
    return fused


PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def fuse_residuals(layers: Sequence[nn.Module], last: nn.Module | None, dtype: torch.dtype) -> int:
    """Replace the forward of those decoder layers that have the usual form and fused norms; how many these are.

    Args:
        layers: in the order in which they run.
        last: the norm that follows the last one, if any.
        dtype: of the model.
    """
    followers = [getattr(layer, "input_layernorm", None) for layer in layers[1:]] + [last]
    return sum(_fuse(layer, norm, dtype) for layer, norm in zip(layers, followers, strict=True))


def _fuse(layer: nn.Module, follower: nn.Module | None, dtype: torch.dtype) -> bool:
    if "forward" in layer.__dict__ or not all(isinstance(getattr(layer, name, None), nn.Module) for name in PARTS):
        return False
    if norm_kind(layer.input_layernorm) is None or norm_kind(layer.post_attention_layernorm) is None:
        return False
    # In a tuple, so that it does not become a module of the layer.
    layer.follower = (follower if norm_kind(follower) is not None else None,)
    layer.forward = types.MethodType(_forward, layer)
    if not _agrees(layer, dtype):
        del layer.forward, layer.follower
        return False
    return True


def _forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or self.training or unsupported(hidden_states) is not None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    return _usual_form(self, hidden_states, **kwargs)


def _usual_form(self: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    output, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    norm = self.post_attention_layernorm
    normed, residual = add_rms_norm(output, hidden_states, norm.weight, norm_kind(norm))
    output = self.mlp(normed)
    (follower,) = self.follower
    if follower is None or output.is_inference():
        return residual + output
    normed, total = add_rms_norm(output, residual, follower.weight, norm_kind(follower))
    norm_ahead(follower, total, normed)
    return total


class _NoAttention(nn.Module):
    """Stands in for attention, and keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        self.arguments.append({name: value for name, value in arguments.items() if value is not None})
        return hidden_states.flip(-1) * 0.5, None


def _agrees(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the layer's own forward has the usual form, and hands its arguments to attention as they are."""
    if list(inspect.signature(inspect.unwrap(type(layer).forward)).parameters)[1] != "hidden_states":
        return False
    attention, weight = layer.self_attn, layer.input_layernorm.weight
    x = torch.randn(1, 2, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device, dtype)
    arguments = {name: object() for name in ("attention_mask", "position_ids", CACHE)}
    arguments |= {"use_cache": True, "position_embeddings": (object(), object())}
    stand_in = layer._modules["self_attn"] = _NoAttention()
    follower, layer.follower = layer.follower, (None,)
    try:
        expected, found = type(layer).forward(layer, x, **arguments), _usual_form(layer, x, **arguments)
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        same = found.shape == expected.shape and found.dtype == expected.dtype
        return same and stand_in.arguments[0] == stand_in.arguments[1] and float(error) < TOLERANCE[dtype]
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return False
    finally:
        layer._modules["self_attn"], layer.follower = attention, follower
