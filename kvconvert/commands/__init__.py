"""The commands, one module each; they import what they need when they run, so that --help answers at once."""

from __future__ import annotations

import ctypes
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from kvconvert.errors import UsageError, did_you_mean

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")


def check_device(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """--device, refused before torch is imported where it is neither a CPU nor a GPU of CUDA."""
    if value is not None and value.partition(":")[0] not in DEVICES:
        raise UsageError(f"There is no device {value}; --device may be cpu or cuda.")
    if value is not None and value.startswith("cuda") and not has_driver():
        raise UsageError(f"There is no GPU driver here for the device {value}; leave --device out.")
    return value


def has_driver() -> bool:
    """Whether there is what torch asks for GPUs: NVIDIA's library, or the device of AMD's driver, "cuda" to ROCm."""
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return Path("/dev/kfd").exists()


def check_dtype(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """--dtype, likewise."""
    if value is not None and value not in DTYPES:
        raise UsageError(f"--dtype is {value}; {did_you_mean(value, DTYPES)}")
    return value


def check_seed(ctx: click.Context, parameter: click.Parameter, value: int | None) -> int | None:
    """--seed, which every generator of random numbers takes."""
    if value is not None and not 0 <= value < 2**63:
        raise UsageError(f"--seed is {value!s:.40}; give a whole number from 0 to 2^63 - 1.")
    return value


def as_argument(path: Path) -> str:
    """A path as it is typed in a shell: quoted where that is needed, and not taken for an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


Option = Callable[[Callable[..., Any]], Callable[..., Any]]


class Place(click.Path):
    """A path; empty text, as of a shell's unset variable, is none, nor is what begins with a home directory's ~."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, readable=False, **options)  # whoever reads it says what is wrong

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if value == "":
            self.fail("it is empty; give a path.", param, ctx)
        if str(value).split("/")[0] == "~" and not Path("~").exists():  # after --output= a shell leaves it there
            self.fail(f"no shell has replaced the ~; write $HOME{str(value)[1:]!s:.200}.", param, ctx)
        return super().convert(value, param, ctx)


class AnyWhole(click.types.IntParamType):
    """A whole number, called so where text is none; what it may be is checked elsewhere."""

    name = "whole number"


class Whole(click.IntRange):
    """A whole number within bounds, which --help shows."""

    name = "whole number"


class Number(click.types.FloatParamType):
    """A number, called so where text is none."""

    name = "number"


def count_option(*names: str, least: int = 1, **attributes: Any) -> Option:
    """An option whose value is a whole number of at least `least`; the attributes are those of `click.option`."""
    values: dict[str, Any] = {"metavar": "N", "type": Whole(min=least)}
    return click.option(*names, **values | attributes)


def device_option(help: str = "cpu or cuda; a GPU by default if there is one.", **attributes: Any) -> Option:
    """--device."""
    return click.option("--device", callback=check_device, metavar="D", help=help, **attributes)


def dtype_option(default: str) -> Option:
    """--dtype, whose help says what holds without it."""
    help = f"float32, bfloat16 or float16; by default {default}."
    return click.option("--dtype", callback=check_dtype, metavar="T", help=help)


def head_option() -> Option:
    """--head-bits."""
    help = "8 rounds the embedding and the head, which bundles have in 16 bits, as they are loaded."
    return click.option("--head-bits", type=click.Choice([8]), metavar="8", help=help)


def seed_option(**attributes: Any) -> Option:
    """--seed."""
    return click.option("--seed", callback=check_seed, metavar="S", **{"type": AnyWhole()} | attributes)


_UNITS = {"B": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in (("", 10**3), ("B", 10**3), ("IB", 2**10))
}


class ByteSize(click.ParamType):
    """A number of bytes with a unit: 24GB or 24G, 80GiB, 500MB.

    Args:
        bare: also without a unit, for bytes.
        least: bytes below which a size is taken for one whose unit is missing.
    """

    name = "SIZE"

    def __init__(self, bare: bool = False, least: int = 1) -> None:
        self.bare, self.least = bare, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes; what is not a size is a usage error."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
        unit = "" if found is None else found[2].upper() or ("B" if self.bare else "")
        size = float(found[1]) * _UNITS.get(unit, 0) if found else 0.0
        what = "bytes, or a number with its unit" if self.bare else "a number with its unit"
        if not 0.5 < size < 2**63:
            self.fail(f"{value!r} is not a size; write {what}, as in 24GB or 80GiB.", param, ctx)
        if size < self.least:
            self.fail(f"{value!r} is less than {self.least:,} bytes; write {what}, as in 24GB or 80GiB.", param, ctx)
        return round(size)


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
