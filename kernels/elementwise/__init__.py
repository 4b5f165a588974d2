"""What lies between a model's matrix products: norms, gates, rotary positions; each as one launch on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconvert.kernels import device as devices
from kvconvert.kernels.elementwise.reference import (
    Gate,
    Norm,
    gated_reference,
    gated_rms_norm_reference,
    rms_norm_reference,
    rotary_reference,
)

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Channels of a row that one program holds.
WIDEST_ROW = 16384


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
    from kvconvert.kernels.elementwise import triton as launch

    return launch.gated(gate, up, kind)


def rms_norm(x: Tensor, weight: Tensor | None, kind: Norm) -> Tensor:
    """RMSNorm over the last dimension, rounded as transformers does.

    Args:
        x: [..., channels], any strides but for the last dimension's.
        weight: [channels] in the dtype of `x`, or None.
        kind: which RMSNorm.

    Returns:
        the same shape and dtype.
    """
    if _unsupported_norm(x, weight) is not None:
        return rms_norm_reference(x, weight, kind)
    from kvconvert.kernels.elementwise import triton as launch

    return launch.rms_norm(x, weight, kind)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, kind: Norm) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and that sum, both in the dtype of `x`; see `rms_norm`. All tensors of one shape."""
    if _unsupported_norm(x, weight, residual) is not None or x.shape != residual.shape:
        total = residual + x
        return rms_norm_reference(total, weight, kind), total
    from kvconvert.kernels.elementwise import triton as launch

    return launch.rms_norm(x, weight, kind, residual)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor | None, kind: Norm) -> Tensor:
    """RMSNorm of x times silu(gate), as linear attention ends with; see `rms_norm`. Both tensors of one shape."""
    if _unsupported_norm(x, weight, gate) is not None or x.shape != gate.shape:
        return gated_rms_norm_reference(x, gate, weight, kind)
    from kvconvert.kernels.elementwise import triton as launch

    return launch.rms_norm(x, weight, kind, gate=gate)[0]


def _unsupported_norm(x: Tensor, weight: Tensor | None, *others: Tensor) -> str | None:
    if x.shape[-1] > WIDEST_ROW:
        return f"the norm's kernel takes up to {WIDEST_ROW} channels, not {x.shape[-1]}"
    return unsupported(x, *others) if weight is None else unsupported(x, weight, *others)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions of queries and keys by halves; see `rotary_reference` for shapes and channels.

    Returns:
        queries and keys of the same shapes and dtype.
    """
    if unsupported(q, k, cos, sin) is not None:
        return rotary_reference(q, k, cos, sin)
    from kvconvert.kernels.elementwise import triton as launch

    return launch.rotary(q, k, cos, sin)
