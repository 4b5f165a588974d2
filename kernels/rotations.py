"""What a cache rotates at run time; no torch."""

from __future__ import annotations

from typing import NamedTuple


class Rotations(NamedTuple):
    """What is rotated at run time: queries with keys, and values with attention outputs."""

    keys: bool = False
    values: bool = False


NO_ROTATION = Rotations()
