"""What lies between a model's matrix products: norms, gates, rotary positions; each as one launch on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.kernels import device as devices
from kvconvert.kernels.elementwise.reference import Activation, Gate, gated_reference

__all__ = ["Activation", "Gate", "gated", "gated_reference", "unsupported"]

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported(*tensors: Tensor) -> str | None:
    """Why the Triton kernels cannot take these tensors; None if they can."""
    first = tensors[0]
    reason = devices.unsupported(first.device)
    if reason is not None:
        return reason
    if first.dtype not in KERNEL_DTYPES:
        return f"the elementwise kernels do not take {first.dtype}"
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in tensors):
        return "the elementwise kernels take tensors of one dtype and device"
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in tensors):
        return "the elementwise kernels need channels side by side"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "the elementwise kernels record no gradients"
    return None


def gated(gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
    """activation(gate) (up + offset), as a gated MLP joins its projections.

    Args:
        gate, up: [..., columns] of one shape, dtype and device.
        kind: what is computed.

    Returns:
        the same shape and dtype.
    """
    if unsupported(gate, up) is not None:
        return gated_reference(gate, up, kind)
    from kvconvert.kernels.elementwise.triton import gated as launch

    return launch.gated(gate, up, kind)
