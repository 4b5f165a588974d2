"""Rotations of a cache at run time, and the names of their matrices; no torch."""

from __future__ import annotations

from typing import NamedTuple

from kvconvert.errors import UsageError


class Rotations(NamedTuple):
    """What is rotated at run time: queries with keys, and values with attention outputs."""

    keys: bool = False
    values: bool = False


NO_ROTATION = Rotations()
_PALEY_ORDERS = (12, 20, 28)


def hadamard_kind(d: int) -> str:
    """How `hadamard_matrix(d)` is built, as the manifest says it.

    For instance "sylvester(64)", "paley(12) x sylvester(4)" or "block_diagonal(8) x 9".
    "a x b" is the Kronecker product of a and b; "block_diagonal(b) x n" stands for n Sylvester blocks of order b.
    """
    power = power_of_two_in(d)
    if d == power:
        return f"sylvester({d})"
    order = paley_order(d)
    if order:
        return f"paley({order}) x sylvester({d // order})"
    if power == 1:
        raise UsageError(f"A head size of {d} is odd, so no rotation mixes its channels; set rotations to none.")
    return f"block_diagonal({power}) x {d // power}"


def power_of_two_in(d: int) -> int:
    """The largest power of two that divides a size."""
    if d < 1:
        raise UsageError(f"A Hadamard rotation of size {d} does not exist; sizes start at 1.")
    return d & -d


def paley_order(d: int) -> int | None:
    """12, 20 or 28 where a size is that times a power of two, else None."""
    for order in _PALEY_ORDERS:
        if d % order == 0 and d // order == power_of_two_in(d // order):
            return order
    return None
