"""The commands, one module each; they import what they need when they run, so that --help answers at once."""

from __future__ import annotations

import click

from kvconvert.errors import UsageError, did_you_mean

DTYPES = ("float32", "bfloat16", "float16")


def check_device(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """--device, refused before torch is imported where it is neither a CPU nor a GPU of CUDA."""
    if value is not None and value.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"There is no device {value}; --device may be cpu or cuda.")
    return value


def check_dtype(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """--dtype, likewise."""
    if value is not None and value not in DTYPES:
        raise UsageError(f"--dtype is {value}; {did_you_mean(value, DTYPES)}")
    return value


def check_seed(ctx: click.Context, parameter: click.Parameter, value: int | None) -> int | None:
    """--seed, which every generator of random numbers takes."""
    if value is not None and not -(2**63) <= value < 2**63:
        raise UsageError(f"--seed is {value!s:.40}, and no integer of 64 bits.")
    return value


def quiet() -> None:
    """Keep transformers' loading bars out of generated text."""
    from transformers.utils import logging

    logging.disable_progress_bar()
