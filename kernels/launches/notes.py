"""Specializations of kernels, and where they are noted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Pointer:
    """A tensor as a kernel's specialization knows it.

    Attributes:
        dtype: the dtype of its elements.
        aligned: whether it begins at a multiple of 16 bytes.
        block: the shape of a tensor descriptor's tiles; None for a tensor.
    """

    dtype: torch.dtype
    aligned: bool
    block: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Launch:
    """A specialization of a kernel.

    Attributes:
        module, name: the kernel's module and name.
        arguments: by name; a `Pointer` for a tensor, and for a number one that is specialized on alike.
        options: options of the launch, such as num_warps.
    """

    module: str
    name: str
    arguments: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Notes:
    """What `noted` collects.

    Attributes:
        launches: each once, in the order of the first ones.
        makes: whether they are made, too.
    """

    launches: dict[Launch, None]
    makes: bool


_notes: Notes | None = None


def notes() -> Notes | None:
    """Where launches are to be noted; None outside of `noted`."""
    return _notes


def skips_launches() -> bool:
    """Whether launches are noted and not made."""
    return _notes is not None and not _notes.makes


@contextmanager
def noted(makes: bool = False) -> Iterator[dict[Launch, None]]:
    """Within the context launches are noted: the keys of what it gives.

    Unless `makes`, they are not made, and what they would have written keeps the values that it had.
    """
    global _notes
    before, _notes = _notes, Notes({}, makes)
    try:
        yield _notes.launches
    finally:
        _notes = before
