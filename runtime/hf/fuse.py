"""Fewer and larger launches for a model on a GPU: `fuse` rearranges what a loaded model consists of, and no class.

Linears are found by the names that modules declare; norms, gated MLPs and rotary positions by what they compute
(kvconvert.runtime.hf.fused_modules).
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from kvconvert.kernels.linear import QuantizedLinear, share_input
from kvconvert.runtime.hf.fused_layers import fuse_residuals
from kvconvert.runtime.hf.fused_modules import fuse_gated_mlp, fuse_norm, fuse_rotary
from kvconvert.runtime.hf.packed_experts import PackedExperts

# Names of Linears beside each other that read one input: attention, a gated MLP, latent attention.
SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


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
            fused["gated MLPs"] += fuse_gated_mlp(module, dtype)
            fused["rotary positions"] += fuse_rotary(module)
        for module in [] if dtype is None else list(model.modules()):
            if isinstance(layers := getattr(module, "layers", None), nn.ModuleList) and len(layers):
                fused["residuals"] += fuse_residuals(list(layers), getattr(module, "norm", None), dtype)
    return {place: count for place, count in fused.items() if count}


def share_inputs(model: nn.Module) -> Counter[str]:
    """Give quantized Linears that read the same tensor one product; see `kvconvert.kernels.linear.share_input`."""
    fused: Counter[str] = Counter()
    # These have a product of their own for all experts.
    packed = {
        id(part) for experts in model.modules() if isinstance(experts, PackedExperts) for part in experts.modules()
    }
    for module in model.modules():
        if id(module) in packed:
            continue
        for names in SHARED_INPUTS:
            linears = {name: getattr(module, name, None) for name in names}
            linears = {name: linear for name, linear in linears.items() if isinstance(linear, QuantizedLinear)}
            if len(linears) > 1 and share_input(list(linears.values())) is None:
                fused["+".join(linears)] += 1
    return fused
