"""Where a model computes, and in which dtype, as arguments name them."""

from __future__ import annotations

from typing import Annotated

import torch

from kvconvert.errors import UsageError

DTYPES = ("float32", "bfloat16", "float16")
Device = Annotated[str | torch.device, "'cpu' or 'cuda'"]
Dtype = Annotated[str, DTYPES]


def choose_device(name: Device | None, argument: str = "device") -> torch.device:
    """The device that `argument` names; None takes a GPU if there is one (UsageError)."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"There is no device {name}; `{argument}` may be cpu or cuda.") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise UsageError(f"`{argument}` is {name}; it may be cpu or cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"torch finds no GPU for the device {name}; `{argument}` has to be cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"`{argument}` is {name}, and torch finds {torch.cuda.device_count()} GPUs, from cuda:0 on.")
    return device


def compute_dtype(name: Dtype | None, device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """The dtype that `dtype` names; None takes the model's own on a GPU and float32 on a CPU.

    Few processors have products of 16-bit numbers, and the others take several times as long for them.

    Args:
        name: the name of a dtype, or None.
        device: where the model computes.
        stored: the dtype in the model's config.

    Raises:
        UsageError: another dtype.
    """
    if name is not None and name not in DTYPES:
        raise UsageError(f"`dtype` is {name}; it may be {', '.join(DTYPES)}.")
    if name is not None:
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" or stored is None else stored
