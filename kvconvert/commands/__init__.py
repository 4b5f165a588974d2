"""The commands, one module each; they import what they need when they run, so that --help answers at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def count_option(*names: str, least: int = 1, **attributes: Any) -> Option:
    """An option whose value is a whole number of at least `least`; the attributes are those of `click.option`."""
    values: dict[str, Any] = {"metavar": "N", "type": click.IntRange(min=least)}
    return click.option(*names, **values | attributes)


def device_option(help: str = "cpu or cuda; a GPU by default if there is one.", **attributes: Any) -> Option:
    """--device."""
    return click.option("--device", callback=check_device, metavar="D", help=help, **attributes)


def dtype_option(default: str) -> Option:
    """--dtype, whose help says what holds without it."""
    help = f"float32, bfloat16 or float16; by default {default}."
    return click.option("--dtype", callback=check_dtype, metavar="T", help=help)


def seed_option(**attributes: Any) -> Option:
    """--seed."""
    return click.option("--seed", callback=check_seed, metavar="S", **{"type": int} | attributes)


def with_options(*options: Option) -> Option:
    """Several options as one decorator, in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def quiet() -> None:
    """Keep transformers' loading bars out of generated text."""
    from transformers.utils import logging

    logging.disable_progress_bar()
